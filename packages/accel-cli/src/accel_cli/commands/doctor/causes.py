"""The diagnoses of `accel doctor` by name, each with its likely cause and a page of the documentation."""

from __future__ import annotations

from collections.abc import Mapping

from accel_state.frozen import frozen


@frozen
class Cause:
    """The likely cause of a diagnosis.

    Args:
        advice: What to check, and how to fix it.
        page: The page of the documentation.
        differs: Whether the run differs; otherwise the diagnosis is a note.
    """

    advice: str
    page: str
    differs: bool = True


CAUSES: Mapping[str, Cause] = {
    "rank-stopped": Cause(
        advice="The script fails on several ranks. Run `accel check` to find collectives that a rank misses.",
        page="tutorials/troubleshooting",
    ),
    "one-process-stopped": Cause(
        advice="Numbers are not compared: the script needs several processes, or more memory than one "
        "process has.",
        page="guides/commands",
        differs=False,
    ),
    "resume-stopped": Cause(
        advice="The checkpoint of save_state cannot be loaded in a new process.", page="guides/checkpoints"
    ),
    "loader-not-prepared": Cause(
        advice="The loader was not passed to prepare(), so every rank trains on the same samples.",
        page="tutorials/add-to-your-code",
    ),
    "sharded-twice": Cause(
        advice="The sampler already shards the indices, and prepare() shards them again. Pass "
        "DataLoaderConfiguration(already_sharded=True), or remove the sampler.",
        page="guides/data-loading",
    ),
    "other-samples-per-rank": Cause(
        advice="Ranks drew different orders or splits. Use the same seed for them on all ranks.",
        page="concepts/reproducibility",
    ),
    "samples-twice": Cause(
        advice="A sampler or dataset gives several ranks the same samples.", page="guides/data-loading"
    ),
    "order-differs": Cause(
        advice="The global batches of the ranks differ from those of one process with that batch size.",
        page="guides/data-loading",
    ),
    "uneven-batches": Cause(
        advice="A rank with fewer batches makes the others wait. Check drop_last, filters and breaks "
        "that differ between ranks.",
        page="tutorials/troubleshooting",
    ),
    "stream-read-in-full": Cause(
        advice="Every rank reads the full stream. Remove already_sharded, or shard the stream in the "
        "dataset.",
        page="guides/data-loading",
    ),
    "epoch-not-set": Cause(
        advice="Call the sampler's set_epoch in each epoch, or pass the loader to prepare(), which then "
        "calls it.",
        page="guides/data-loading",
    ),
    "generator-in-workers": Cause(
        advice="All workers and ranks draw the same numbers from copies of one generator. Use torch's "
        "default generator, which each worker seeds.",
        page="concepts/reproducibility",
    ),
    "metric-on-padding": Cause(
        advice="The last batch is padded with the first samples. gather_for_metrics() removes them.",
        page="guides/evaluation",
    ),
    "gathered-rows-differ": Cause(
        advice="The gathered results have a different number of rows than the batch, or are gathered "
        "outside the loader's loop.",
        page="guides/evaluation",
    ),
    "gradients-not-synchronised": Cause(
        advice="The model was not prepared, is called without its wrapper (model.module), or the last "
        "backward pass before the step runs in no_sync().",
        page="concepts/gradient-synchronization",
    ),
    "mean-of-means": Cause(
        advice="Each rank divides by its own number of tokens. Sum the loss and pass backward(num_items=…).",
        page="guides/gradient-accumulation",
    ),
    "mask-dropped": Cause(
        advice="The loss depends on the padding of a batch: a mask is missing, or padding is counted.",
        page="tutorials/troubleshooting",
    ),
    "gradients-scaled": Cause(
        advice="All gradients differ by one factor: the loss is multiplied by the number of processes, "
        "or num_items already counts all ranks.",
        page="guides/gradient-accumulation",
    ),
    "gradients-differ": Cause(
        advice="The loss of a rank depends on samples of other ranks, or the ranks run different "
        "computations.",
        page="concepts/gradient-synchronization",
    ),
    "losses-differ": Cause(
        advice="The loss of a rank depends on samples of other ranks, or the ranks run different "
        "computations.",
        page="concepts/gradient-synchronization",
    ),
    "windows-differ": Cause(
        advice="The script counts micro-batches itself. Use accelerator.accumulate().",
        page="guides/gradient-accumulation",
    ),
    "weights-differ": Cause(
        advice="Weights are changed outside the optimizer, or with a different learning rate.",
        page="guides/fsdp",
    ),
    "weights-untied": Cause(
        advice="Tied weights became two parameters. Tie them before prepare(), on all ranks.",
        page="guides/fsdp",
    ),
    "unused-parameters": Cause(
        advice="A branch of the model is not used in every step. Pass "
        "DistributedDataParallelKwargs(find_unused_parameters=True).",
        page="concepts/gradient-synchronization",
    ),
    "batchnorm-per-rank": Cause(
        advice="BatchNorm uses only the small batch of its rank. Use "
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm, or a larger batch per rank.",
        page="concepts/gradient-synchronization",
    ),
    "batchnorm-of-each-rank": Cause(
        advice="This is normal for data parallelism. The comparison normalises the rows of each rank "
        "separately.",
        page="concepts/gradient-synchronization",
        differs=False,
    ),
    "loss-in-low-precision": Cause(
        advice="The loss is computed under autocast. Compute it outside: the outputs of a prepared "
        "model are already float32.",
        page="guides/mixed-precision",
    ),
    "numbers-not-compared": Cause(
        advice="They differ by design, or belong to different batches.", page="guides/commands", differs=False
    ),
    "optimizer-not-prepared": Cause(
        advice="It steps in every micro-batch, ignores loss scaling, and is not saved. Pass it to prepare().",
        page="tutorials/add-to-your-code",
    ),
    "scheduler-not-prepared": Cause(
        advice="The schedule was not passed to prepare(), and advances once per call on any number of ranks.",
        page="tutorials/add-to-your-code",
    ),
    "schedule-per-process": Cause(
        advice="A prepared schedule advances once per process, since its length counts the batches of "
        "one process. Compute the length before prepare(), or pass "
        "Accelerator(step_scheduler_per='update').",
        page="guides/configuring",
    ),
    "steps-differ": Cause(
        advice="The number of steps depends on the rank, or on the number of processes.",
        page="tutorials/troubleshooting",
    ),
    "clip-before-unscale": Cause(
        advice="Gradients are still multiplied by the loss scale. Use accelerator.clip_grad_norm_, "
        "which divides by it first.",
        page="guides/mixed-precision",
    ),
    "clip-within-window": Cause(
        advice="Incomplete gradients are clipped. Clip only if accelerator.sync_gradients is true.",
        page="guides/gradient-accumulation",
    ),
    "rank-slower": Cause(
        advice="The other ranks wait for it in every step. Its work is unequal, or its machine is busy.",
        page="guides/profiling",
        differs=False,
    ),
    "reduced-too-often": Cause(
        advice="The script counts micro-batches itself. With accelerator.accumulate(), only the last "
        "one of a step communicates.",
        page="concepts/gradient-synchronization",
        differs=False,
    ),
    "host-waits": Cause(
        advice="The device idles meanwhile, and the value covers only this rank. Sum the tensors, and "
        "gather them occasionally.",
        page="concepts/performance",
        differs=False,
    ),
    "resume-other-samples": Cause(
        advice="The position in the epoch is not restored. Pass "
        "DataLoaderConfiguration(resume_mid_epoch=True), or call skip_first_batches.",
        page="guides/checkpoints",
    ),
    "resume-other-rate": Cause(
        advice="The schedule is not saved. Pass it to prepare() or register_for_checkpointing.",
        page="guides/checkpoints",
    ),
    "resume-other-numbers": Cause(
        advice="Part of the training state is not saved. Pass it to prepare() or register_for_checkpointing.",
        page="guides/checkpoints",
    ),
}
"""Every diagnosis by its name."""


@frozen
class Diagnosis:
    """The result of a comparison.

    Args:
        check: What was compared, as `"data"`.
        name: Its name, a key of `CAUSES`; empty if all is equal.
        text: Where, and by how much.
        where: File and line of the script, if known.
    """

    check: str
    name: str
    text: str
    where: str = ""

    @property
    def differs(self) -> bool:
        """Whether the run on the ranks differs from the run in one process."""
        return bool(self.name) and CAUSES[self.name].differs

    def __str__(self) -> str:
        where = f" at {self.where}" if self.where else ""
        if not self.name:
            return f"equal: {self.check}: {self.text}"
        cause = CAUSES[self.name]
        kind = "differs" if cause.differs else "note"
        return f"{kind}: {self.check}: {self.name}{where}: {self.text}. {cause.advice} ({cause.page})"
