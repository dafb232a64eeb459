"""Run the user's script as a rank of `accel check`, on fake tensors."""

from __future__ import annotations

import torch.distributed as dist

from accel_inspect.check.outputs import keep_outputs
from accel_inspect.check.patches import install
from accel_inspect.check.record import RankRecord
from accel_inspect.check.recorder import CollectiveRecorder
from accel_inspect.estimate.memory import ModelSizes
from accel_inspect.estimate.meta_model import sizes_of
from accel_inspect.trial import RankTask, run_script
from accel_state.torch_private import FakeStore


def main(task: RankTask) -> RankRecord:
    """Run as a rank, and return its record."""
    dist.init_process_group("fake", rank=task.rank, world_size=task.world, store=FakeStore())
    recorder = CollectiveRecorder()
    install(recorder, task)
    keep_outputs(task)
    with recorder.on_fake_tensors():
        stopped = run_script(task)
    tracker = recorder.tracker
    return RankRecord(
        rank=task.rank,
        strategy=recorder.strategy,
        fp8=recorder.fp8,
        buckets=recorder.buckets,
        on_rank=recorder.on_rank,
        sizes=_sizes(recorder),
        moments=() if tracker is None else tracker.moments,
        parts={} if tracker is None or not recorder.is_sharded else tracker.parts,
        host=recorder.host,
        events=tuple(recorder.events),
        files=tuple(recorder.files),
        loaders=tuple(recorder.loaders.values()),
        stopped=stopped,
    )


def _sizes(recorder: CollectiveRecorder) -> ModelSizes | None:
    if not recorder.models:
        return None
    models = [sizes_of(model) for model in recorder.models]
    return ModelSizes(
        parameters=sum(sizes.parameters for sizes in models),
        trainable=sum(sizes.trainable for sizes in models),
        blocks=tuple(block for sizes in models for block in sizes.blocks),
        largest=max(sizes.largest for sizes in models),
        buffers=sum(sizes.buffers for sizes in models),
    )
