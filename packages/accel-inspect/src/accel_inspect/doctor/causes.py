"""The diagnoses of `accel doctor` by name, each with its likely cause and a page of the documentation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Cause(NamedTuple):
    """The likely cause of a diagnosis, and a page of the documentation; a note if nothing `differs`."""

    advice: str
    page: str
    differs: bool = True


CAUSES: Mapping[str, Cause] = {
    "rank-stopped": Cause(
        "The script fails on several ranks. Run `accel check` to find collectives that a rank misses.",
        "tutorials/troubleshooting",
    ),
    "one-process-stopped": Cause(
        "Numbers are not compared: the script needs several processes, or more memory than one process has.",
        "guides/commands",
        differs=False,
    ),
    "resume-stopped": Cause(
        "The checkpoint of save_state cannot be loaded in a new process.", "guides/checkpoints"
    ),
    "loader-not-prepared": Cause(
        "The loader was not passed to prepare(), so every rank trains on the same samples.",
        "tutorials/add-to-your-code",
    ),
    "sharded-twice": Cause(
        "The sampler already shards the indices, and prepare() shards them again. Pass "
        "DataLoaderConfiguration(already_sharded=True), or remove the sampler.",
        "guides/data-loading",
    ),
    "other-samples-per-rank": Cause(
        "Ranks drew different orders or splits, or the same samples. Use the same seed on all ranks.",
        "concepts/reproducibility",
    ),
    "order-differs": Cause(
        "The global batches of the ranks differ from those of one process with that batch size.",
        "guides/data-loading",
    ),
    "uneven-batches": Cause(
        "A rank with fewer batches makes the others wait. Check drop_last, filters and breaks "
        "that differ between ranks.",
        "tutorials/troubleshooting",
    ),
    "stream-read-in-full": Cause(
        "Every rank reads the full stream. Remove already_sharded, or shard the stream in the dataset.",
        "guides/data-loading",
    ),
    "epoch-not-set": Cause(
        "Call the sampler's set_epoch in each epoch, or pass the loader to prepare(), which then calls it.",
        "guides/data-loading",
    ),
    "generator-in-workers": Cause(
        "All workers and ranks draw the same numbers from copies of one generator. Use torch's "
        "default generator, which each worker seeds.",
        "concepts/reproducibility",
    ),
    "metric-on-padding": Cause(
        "The last batch is padded with the first samples. gather_for_metrics() removes them.",
        "guides/evaluation",
    ),
    "gradients-not-synchronised": Cause(
        "The model was not prepared, is called without its wrapper (model.module), or the last "
        "backward pass before the step runs in no_sync().",
        "concepts/gradient-synchronization",
    ),
    "mean-of-means": Cause(
        "Each rank divides by its own number of tokens. Sum the loss and pass backward(num_items=…).",
        "guides/gradient-accumulation",
    ),
    "mask-dropped": Cause(
        "The loss depends on the padding of a batch: a mask is missing, or padding is counted.",
        "tutorials/troubleshooting",
    ),
    "gradients-scaled": Cause(
        "All gradients differ by one factor: the loss is multiplied by the number of processes, "
        "or num_items already counts all ranks.",
        "guides/gradient-accumulation",
    ),
    "gradients-differ": Cause(
        "The loss of a rank depends on samples of other ranks, or the ranks run different computations.",
        "concepts/gradient-synchronization",
    ),
    "windows-differ": Cause(
        "The script counts micro-batches itself. Use accelerator.accumulate().",
        "guides/gradient-accumulation",
    ),
    "weights-differ": Cause(
        "Weights are changed outside the optimizer, or with a different learning rate.", "guides/fsdp"
    ),
    "weights-untied": Cause(
        "Tied weights became two parameters. Tie them before prepare(), on all ranks.", "guides/fsdp"
    ),
    "unused-parameters": Cause(
        "A branch of the model is not used in every step. Pass "
        "DistributedDataParallelKwargs(find_unused_parameters=True).",
        "concepts/gradient-synchronization",
    ),
    "batchnorm-per-rank": Cause(
        "BatchNorm uses only the small batch of its rank. Use "
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm, or a larger batch per rank.",
        "concepts/gradient-synchronization",
    ),
    "loss-in-low-precision": Cause(
        "The loss is computed under autocast. Compute it outside: the outputs of a prepared "
        "model are already float32.",
        "guides/mixed-precision",
    ),
    "numbers-not-compared": Cause(
        "They differ by design, or belong to different batches.", "guides/commands", differs=False
    ),
    "optimizer-not-prepared": Cause(
        "It steps in every micro-batch, ignores loss scaling, and is not saved. Pass it to prepare().",
        "tutorials/add-to-your-code",
    ),
    "scheduler-not-prepared": Cause(
        "The schedule was not passed to prepare(), and advances once per call on any number of ranks.",
        "tutorials/add-to-your-code",
    ),
    "schedule-per-process": Cause(
        "A prepared schedule advances once per process, since its length counts the batches of one process. "
        "Compute the length before prepare(), or pass Accelerator(step_scheduler_per='update').",
        "guides/configuring",
    ),
    "clip-before-unscale": Cause(
        "Gradients are still multiplied by the loss scale. Use accelerator.clip_grad_norm_, "
        "which divides by it first.",
        "guides/mixed-precision",
    ),
    "clip-within-window": Cause(
        "Incomplete gradients are clipped. Clip only if accelerator.sync_gradients is true.",
        "guides/gradient-accumulation",
    ),
    "rank-slower": Cause(
        "The other ranks wait for it in every step. Its work is unequal, or its machine is busy.",
        "guides/profiling",
        differs=False,
    ),
    "reduced-too-often": Cause(
        "The script counts micro-batches itself. With accelerator.accumulate(), only the last "
        "one of a step communicates.",
        "concepts/gradient-synchronization",
        differs=False,
    ),
    "host-waits": Cause(
        "The device idles meanwhile, and the value covers only this rank. Sum the tensors, and "
        "gather them occasionally.",
        "concepts/performance",
        differs=False,
    ),
    "resume-other-samples": Cause(
        "The position in the epoch is not restored. Pass "
        "DataLoaderConfiguration(resume_mid_epoch=True), or call skip_first_batches.",
        "guides/checkpoints",
    ),
    "resume-other-rate": Cause(
        "The schedule is not saved. Pass it to prepare() or register_for_checkpointing.", "guides/checkpoints"
    ),
    "resume-other-numbers": Cause(
        "Part of the training state is not saved. Pass it to prepare() or register_for_checkpointing.",
        "guides/checkpoints",
    ),
}
"""Every diagnosis by its name."""


class Diagnosis(NamedTuple):
    """The result of a comparison.

    Args:
        name: Its name, a key of `CAUSES`; empty if all is equal.
        text: Where, and by how much.
        where: File and line of the script, if known.
        check: What was compared, as `"data"`.
    """

    name: str
    text: str
    where: str = ""
    check: str = ""

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
