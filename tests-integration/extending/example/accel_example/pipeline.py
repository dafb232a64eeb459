"""A strategy whose engine owns forward and backward: each rank trains one stage of a pipeline."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from accel_plugins.strategy import BatchSharding, Feature, Strategy, StrategySpec
from accel_plugins.unsharded import States
from accel_state.errors import SettingsError

MICRO_BATCHES = 2


class PipelineStrategy(Strategy):
    """Trains models with an attribute `layers` (a `Sequential`) and `loss(outputs, targets)`."""

    name = "example_pipeline"
    features = frozenset({Feature.NO_SYNC, Feature.MODEL_WITHOUT_OPTIMIZER})
    owns_forward = True

    def __init__(self, settings, runtime, precision, handlers):
        super().__init__(settings, runtime, precision, handlers)
        self.rank, self.world_size = runtime.topology.rank, runtime.topology.world_size
        self.sharding = BatchSharding(num_shards=1, shard_index=0, repeats=self.rank > 0)
        self.states = StagesOnEveryRank(self)
        self.events = []
        self.after_micro_batch = lambda: self.events.append("after_micro_batch")
        self.after_step = lambda: self.events.append("after_step")

    def check(self, bundle):
        for model in bundle.models:
            if len(getattr(model, "layers", ())) < self.world_size:
                raise SettingsError(f"{type(model).__name__} has no `layers` for {self.world_size} stages.")

    def bounds(self, model, rank):
        count = len(model.layers)
        return count * rank // self.world_size, count * (rank + 1) // self.world_size

    def train_step(self, model, forward, args, kwargs, *, accumulation, sync):
        """Run the schedule over the micro-batches of this batch; the mean loss is the same on every rank."""
        inputs, targets = args
        first, last = self.bounds(model, self.rank)
        stage = PipelineStage(model.layers[first:last], self.rank, self.world_size, self.runtime.device)
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
            loss = torch.zeros((), dtype=inputs.dtype, device=self.runtime.device)
        dist.broadcast(loss, src=self.world_size - 1)
        self.events.append("train_step")
        return loss

    def no_sync(self, model):
        return nullcontext()


class StagesOnEveryRank(States):
    """Full states, for which every rank gets what the rank of each stage has trained."""

    def __init__(self, strategy):
        self.strategy = strategy

    def full_state_dict(self, model, *, keep=True):
        for rank in range(self.strategy.world_size):
            first, last = self.strategy.bounds(model, rank)
            for parameter in model.layers[first:last].parameters():
                dist.broadcast(parameter.data, src=rank)
        return super().full_state_dict(model, keep=keep)


SPEC = StrategySpec(name="example_pipeline", applies=lambda *_: False, build=PipelineStrategy)
