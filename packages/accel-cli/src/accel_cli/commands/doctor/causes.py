"""The diagnoses of `accel doctor` by name, each with its likely cause and a page of the documentation."""

from __future__ import annotations

from collections.abc import Mapping

from accel_state.frozen import frozen


@frozen
class Cause:
    """The likely cause of a diagnosis.

    Args:
        advice: What to look for, and what to do.
        page: The page of the documentation.
        differs: Whether the run is another one; otherwise it is a note.
    """

    advice: str
    page: str
    differs: bool = True


CAUSES: Mapping[str, Cause] = {
    "rank-stopped": Cause(
        advice="The script fails on ranks; `accel check` finds collectives that a rank would miss.",
        page="tutorials/troubleshooting",
    ),
    "one-process-stopped": Cause(
        advice="Numbers are not compared: the script needs several processes, or more memory than one has.",
        page="guides/commands",
        differs=False,
    ),
    "resume-stopped": Cause(
        advice="The checkpoint of save_state cannot be loaded in a new process.", page="guides/checkpoints"
    ),
    "loader-not-prepared": Cause(
        advice="The loader was not given to prepare(), so every rank trains on the same samples.",
        page="tutorials/add-to-your-code",
    ),
    "sharded-twice": Cause(
        advice="The sampler gives each rank other indices, and prepare() shards these again:"
        " DataLoaderConfiguration(already_sharded=True), or leave the sampler out.",
        page="guides/data-loading",
    ),
    "other-samples-per-rank": Cause(
        advice="Ranks have drawn another order or split: seed what is drawn alike on all of them.",
        page="concepts/reproducibility",
    ),
    "samples-twice": Cause(
        advice="A sampler or data set gives ranks the same samples.", page="guides/data-loading"
    ),
    "order-differs": Cause(
        advice="Ranks read other global batches than one process with a batch of that size would.",
        page="guides/data-loading",
    ),
    "uneven-batches": Cause(
        advice="A rank with fewer batches leaves the others waiting: drop_last, a filter or a break that is"
        " not the same on all ranks.",
        page="tutorials/troubleshooting",
    ),
    "stream-read-in-full": Cause(
        advice="Every rank reads the full stream: remove already_sharded, or make the stream split itself.",
        page="guides/data-loading",
    ),
    "epoch-not-set": Cause(
        advice="Call set_epoch of the sampler in each epoch, or prepare the loader, which then does it.",
        page="guides/data-loading",
    ),
    "generator-in-workers": Cause(
        advice="All workers, and all ranks, draw the same numbers from a generator that is copied to them:"
        " draw from torch's default generator, which each worker seeds.",
        page="concepts/reproducibility",
    ),
    "metric-on-padding": Cause(
        advice="The last batch is padded with the first samples: gather_for_metrics() leaves them out.",
        page="guides/evaluation",
    ),
    "gathered-rows-differ": Cause(
        advice="Results are gathered with other rows than the batch has, or outside of the loader's loop.",
        page="guides/evaluation",
    ),
    "gradients-not-synchronised": Cause(
        advice="The model was not prepared, is called past its wrapper (model.module), or the backward pass"
        " before the step runs in no_sync().",
        page="concepts/gradient-synchronization",
    ),
    "mean-of-means": Cause(
        advice="Each rank divides by its own number of tokens: sum the loss, and give backward(num_items=…).",
        page="guides/gradient-accumulation",
    ),
    "mask-dropped": Cause(
        advice="The loss depends on how far a batch is padded: a mask is not used, or padding is counted.",
        page="tutorials/troubleshooting",
    ),
    "gradients-scaled": Cause(
        advice="All gradients differ by one factor: the loss is multiplied by the number of processes, or"
        " num_items counts all ranks already.",
        page="guides/gradient-accumulation",
    ),
    "gradients-differ": Cause(
        advice="The loss of a rank depends on samples of other ranks, or the ranks compute something else.",
        page="concepts/gradient-synchronization",
    ),
    "losses-differ": Cause(
        advice="The loss of a rank depends on samples of other ranks, or the ranks compute something else.",
        page="concepts/gradient-synchronization",
    ),
    "windows-differ": Cause(
        advice="Micro-batches are counted by the script; use accelerator.accumulate().",
        page="guides/gradient-accumulation",
    ),
    "weights-differ": Cause(
        advice="Weights are changed outside of the optimizer, or by another learning rate.",
        page="guides/fsdp",
    ),
    "weights-untied": Cause(
        advice="Tied weights became two parameters: tie them before prepare(), on all ranks.",
        page="guides/fsdp",
    ),
    "unused-parameters": Cause(
        advice="A branch of the model is not used in every step:"
        " DistributedDataParallelKwargs(find_unused_parameters=True).",
        page="concepts/gradient-synchronization",
    ),
    "batchnorm-per-rank": Cause(
        advice="BatchNorm sees the batch of its rank only, which is small:"
        " torch.nn.SyncBatchNorm.convert_sync_batchnorm, or a larger batch per rank.",
        page="concepts/gradient-synchronization",
    ),
    "batchnorm-of-each-rank": Cause(
        advice="That is how data parallelism works; the comparison normalises the rows of each rank alike.",
        page="concepts/gradient-synchronization",
        differs=False,
    ),
    "loss-in-low-precision": Cause(
        advice="The loss is computed under autocast: the outputs of a prepared model are float32 already.",
        page="guides/mixed-precision",
    ),
    "numbers-not-compared": Cause(
        advice="They are others by design, or belong to other batches.", page="guides/commands", differs=False
    ),
    "optimizer-not-prepared": Cause(
        advice="It steps in every micro-batch, ignores loss scaling, and is not saved: give it to prepare().",
        page="tutorials/add-to-your-code",
    ),
    "scheduler-not-prepared": Cause(
        advice="The schedule was not given to prepare(), and advances once per call on any number of ranks.",
        page="tutorials/add-to-your-code",
    ),
    "schedule-per-process": Cause(
        advice="A prepared schedule advances one step for each process, as its length counts the batches of"
        " one process: compute it before prepare(), or Accelerator(step_scheduler_per='update').",
        page="guides/configuring",
    ),
    "steps-differ": Cause(
        advice="The number of steps depends on the rank, or on the number of processes.",
        page="tutorials/troubleshooting",
    ),
    "clip-before-unscale": Cause(
        advice="Gradients still carry the loss scale: accelerator.clip_grad_norm_ divides by it first.",
        page="guides/mixed-precision",
    ),
    "clip-within-window": Cause(
        advice="Gradients that are not complete are clipped: do it if accelerator.sync_gradients.",
        page="guides/gradient-accumulation",
    ),
    "rank-slower": Cause(
        advice="The others wait for it in every step: unequal work, or a busy machine.",
        page="guides/profiling",
        differs=False,
    ),
    "reduced-too-often": Cause(
        advice="The script counts micro-batches itself: in accelerator.accumulate() only the last one of a"
        " step communicates.",
        page="concepts/gradient-synchronization",
        differs=False,
    ),
    "host-waits": Cause(
        advice="The device idles meanwhile, and the value is that of this rank: sum the tensors, and gather"
        " them once in a while.",
        page="concepts/performance",
        differs=False,
    ),
    "resume-other-samples": Cause(
        advice="The position in the epoch is not restored: DataLoaderConfiguration(resume_mid_epoch=True), or"
        " skip_first_batches.",
        page="guides/checkpoints",
    ),
    "resume-other-rate": Cause(
        advice="The schedule is not saved: give it to prepare() or register_for_checkpointing.",
        page="guides/checkpoints",
    ),
    "resume-other-numbers": Cause(
        advice="Something that trains is not saved: give it to prepare() or register_for_checkpointing.",
        page="guides/checkpoints",
    ),
}
"""Every diagnosis by its name."""


@frozen
class Diagnosis:
    """What a comparison has found.

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
        """Whether the run on the ranks is another one than that of one process."""
        return bool(self.name) and CAUSES[self.name].differs

    def __str__(self) -> str:
        where = f" at {self.where}" if self.where else ""
        if not self.name:
            return f"equal: {self.check}: {self.text}"
        cause = CAUSES[self.name]
        kind = "differs" if cause.differs else "note"
        return f"{kind}: {self.check}: {self.name}{where}: {self.text}. {cause.advice} ({cause.page})"
