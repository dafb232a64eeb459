"""Run the user's script as a rank of `accel check`, on fake tensors."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist

from accel_inspect.check.outputs import keep_outputs
from accel_inspect.check.patches import install
from accel_inspect.check.record import RankRecord
from accel_inspect.check.recorder import CollectiveRecorder
from accel_inspect.estimate.memory import Estimate, ModelSizes, TrainingSetup, estimate
from accel_inspect.estimate.meta_model import sizes_of
from accel_inspect.trial import RankTask, run_script
from accel_state.torch_private import FakeStore


def main(task: RankTask) -> RankRecord:
    """Run as a rank, and return its record."""
    dist.init_process_group("fake", rank=task.rank, world_size=task.world, store=FakeStore())
    recorder = CollectiveRecorder(task.batches)
    install(recorder, task)
    keep_outputs(task)
    with recorder.on_fake_tensors():
        stopped = run_script(task)
    return RankRecord(
        rank=task.rank,
        memory=_memory_of(recorder, task.world),
        events=tuple(recorder.events),
        files=tuple(recorder.files),
        loaders=tuple(recorder.loaders.values()),
        stopped=stopped,
    )


def _memory_of(recorder: CollectiveRecorder, world: int) -> Estimate | None:
    tracker = recorder.tracker
    if not recorder.models or not (recorder.is_sharded or recorder.counted_as):
        return None
    if recorder.is_sharded:
        parts = tracker.parts
        on_device = {"working": parts["working"]} if recorder.is_offloaded else parts
        host = sum(parts.values()) - sum(on_device.values())
        return Estimate(strategy=recorder.strategy, parts=on_device, host=host + tracker.host)
    models = [sizes_of(model) for model in recorder.models]
    sizes = ModelSizes(
        parameters=sum(sizes.parameters for sizes in models),
        trainable=sum(sizes.trainable for sizes in models),
        blocks=tuple(block for sizes in models for block in sizes.blocks),
        largest=max(sizes.largest for sizes in models),
        buffers=sum(sizes.buffers for sizes in models),
    )
    setup = TrainingSetup(sizes=sizes, devices=world, moments=tracker.moments, **recorder.setup)
    estimated = estimate(recorder.counted_as, setup)
    return replace(estimated, host=estimated.host + tracker.host)
