"""A strategy whose engine owns forward and backward: each rank trains one stage of a pipeline."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from accel_plugins.strategy import BatchSharding, Feature, Strategy, StrategySpec
from accel_plugins.unsharded import ReplicatedPersister, TorchStepper, move_to_device
from accel_state.errors import SettingsError

MICRO_BATCHES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Trains models with an attribute `layers` (a `Sequential`) and `loss(outputs, targets)`."""

    device: torch.device
    rank: int
    world_size: int
    events: list[str] = field(default_factory=list)

    def check(self, bundle):
        for model in bundle.models:
            if len(getattr(model, "layers", ())) < self.world_size:
                raise SettingsError(f"{type(model).__name__} has no `layers` for {self.world_size} stages.")

    def wrap(self, bundle, *, evaluation=False):
        return replace(bundle, models=move_to_device(bundle, self.device))

    def unwrap(self, model):
        return model

    def bounds(self, model, rank):
        count = len(model.layers)
        return count * rank // self.world_size, count * (rank + 1) // self.world_size

    def train_step(self, model, forward, args, kwargs, *, accumulation, sync):
        """Run the schedule over the micro-batches of this batch; the mean loss is the same on every rank."""
        inputs, targets = args
        first, last = self.bounds(model, self.rank)
        stage = PipelineStage(model.layers[first:last], self.rank, self.world_size, self.device)
        parts = MICRO_BATCHES * accumulation  # torch's own scaling would divide earlier gradients again
        schedule = ScheduleGPipe(
            stage,
            MICRO_BATCHES,
            loss_fn=lambda outputs, wanted: model.loss(outputs, wanted) / parts,
            scale_grads=False,
        )
        losses = []
        if self.rank == self.world_size - 1:
            schedule.step(*([inputs] if self.world_size == 1 else []), target=targets, losses=losses)
            loss = accumulation * torch.stack(losses).sum().detach()
        else:
            schedule.step(*([inputs] if self.rank == 0 else []))
            loss = torch.zeros((), dtype=inputs.dtype, device=self.device)
        dist.broadcast(loss, src=self.world_size - 1)
        self.events.append("train_step")
        return loss

    def full_state_dict(self, model, *, keep=True):
        """Let every rank have what the rank of each stage has trained."""
        for rank in range(self.world_size):
            first, last = self.bounds(model, rank)
            for parameter in model.layers[first:last].parameters():
                dist.broadcast(parameter.data, src=rank)
        return model.state_dict()


@dataclass(frozen=True, slots=True, kw_only=True)
class Persister(ReplicatedPersister):
    engine: Engine

    def full_state_dict(self, model, *, keep=True):
        return self.engine.full_state_dict(model)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepper(TorchStepper):
    def no_sync(self, model):
        return nullcontext()


def build(settings, runtime, precision, handlers):
    topology = runtime.topology
    engine = Engine(device=runtime.device, rank=topology.rank, world_size=topology.world_size)
    return Strategy(
        name="example_pipeline",
        wrapper=engine,
        stepper=Stepper(precision=precision),
        persister=Persister(engine=engine),
        sharding=BatchSharding(num_shards=1, shard_index=0, repeats=topology.rank > 0),
        features=frozenset({Feature.NO_SYNC, Feature.MODEL_WITHOUT_OPTIMIZER}),
        train_step=engine.train_step,
        after_micro_batch=lambda: engine.events.append("after_micro_batch"),
        after_step=lambda: engine.events.append("after_step"),
    )


SPEC = StrategySpec(name="example_pipeline", applies=lambda *_: False, build=build)
