"""The diagnoses of `accel doctor` by name, each with its likely cause."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

CAUSES: Mapping[str, str] = {
    "rank-stopped": "The script fails on several ranks. Run `accel check` to find collectives that a rank "
    "misses.",
    "one-process-stopped": "Numbers are not compared: the script needs several processes, or more memory "
    "than one process has.",
    "resume-stopped": "The checkpoint of save_state cannot be loaded in a new process.",
    "loader-not-prepared": "The loader was not passed to prepare(), so every rank trains on the same "
    "samples.",
    "sharded-twice": "The sampler already shards the indices, and prepare() shards them again. Pass "
    "DataLoaderConfiguration(already_sharded=True), or remove the sampler.",
    "other-samples-per-rank": "Ranks drew different orders or splits, or the same samples. Use the same seed "
    "on all ranks.",
    "order-differs": "The global batches of the ranks differ from those of one process with that batch size.",
    "uneven-batches": "A rank with fewer batches makes the others wait. Check drop_last, filters and breaks "
    "that differ between ranks.",
    "stream-read-in-full": "Every rank reads the full stream. Remove already_sharded, or shard the stream in "
    "the dataset.",
    "epoch-not-set": "Call the sampler's set_epoch in each epoch, or pass the loader to prepare(), which "
    "then calls it.",
    "generator-in-workers": "All workers and ranks draw the same numbers from copies of one generator. Use "
    "torch's default generator, which each worker seeds.",
    "metric-on-padding": "The last batch is padded with the first samples. gather_for_metrics() removes "
    "them.",
    "gradients-not-synchronised": "The model was not prepared, is called without its wrapper (model.module), "
    "or the last backward pass before the step runs in no_sync().",
    "mean-of-means": "Each rank divides by its own number of tokens. Sum the loss and pass "
    "backward(num_items=…).",
    "mask-dropped": "The loss depends on the padding of a batch: a mask is missing, or padding is counted.",
    "gradients-scaled": "All gradients differ by one factor: the loss is multiplied by the number of "
    "processes, or num_items already counts all ranks.",
    "gradients-differ": "The loss of a rank depends on samples of other ranks, or the ranks run different "
    "computations.",
    "windows-differ": "The script counts micro-batches itself. Use accelerator.accumulate().",
    "weights-differ": "Weights are changed outside the optimizer, or with a different learning rate.",
    "weights-untied": "Tied weights became two parameters. Tie them before prepare(), on all ranks.",
    "unused-parameters": "A branch of the model is not used in every step. Pass "
    "DistributedDataParallelKwargs(find_unused_parameters=True).",
    "batchnorm-per-rank": "BatchNorm uses only the small batch of its rank. Use "
    "torch.nn.SyncBatchNorm.convert_sync_batchnorm, or a larger batch per rank.",
    "loss-in-low-precision": "The loss is computed under autocast. Compute it outside: the outputs of a "
    "prepared model are already float32.",
    "numbers-not-compared": "They differ by design, or belong to different batches.",
    "optimizer-not-prepared": "It steps in every micro-batch, ignores loss scaling, and is not saved. Pass "
    "it to prepare().",
    "scheduler-not-prepared": "The schedule was not passed to prepare(), and advances once per call on any "
    "number of ranks.",
    "schedule-per-process": "A prepared schedule advances once per process, since its length counts the "
    "batches of one process. Compute the length before prepare(), or pass "
    "Accelerator(step_scheduler_per='update').",
    "clip-before-unscale": "Gradients are still multiplied by the loss scale. Use "
    "accelerator.clip_grad_norm_, which divides by it first.",
    "clip-within-window": "Incomplete gradients are clipped. Clip only if accelerator.sync_gradients is "
    "true.",
    "resume-other-samples": "The position in the epoch is not restored. Pass "
    "DataLoaderConfiguration(resume_mid_epoch=True), or call skip_first_batches.",
    "resume-other-rate": "The schedule is not saved. Pass it to prepare() or register_for_checkpointing.",
    "resume-other-numbers": "Part of the training state is not saved. Pass it to prepare() or "
    "register_for_checkpointing.",
}
"""Every diagnosis by its name; `accel-suite/docs/guides/commands.md` has a page for each."""

NOTES = frozenset(("one-process-stopped", "numbers-not-compared"))
"""The diagnoses that are no difference between the ranks and one process."""


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
        return bool(self.name) and self.name not in NOTES

    def __str__(self) -> str:
        if not self.name:
            return f"equal: {self.check}: {self.text}"
        kind, where = "differs" if self.differs else "note", f" at {self.where}" if self.where else ""
        return f"{kind}: {self.check}: {self.name}{where}: {self.text}. {CAUSES[self.name]}"
