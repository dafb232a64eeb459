"""An engine with a placeholder for its optimizer and files of its own, which other strategies also read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from accel_plugins.sharding.state import StateForm
from accel_plugins.strategy import (
    PLAIN_FEATURES,
    BatchSharding,
    Feature,
    ForeignFiles,
    FromConfiguration,
    Strategy,
    StrategySpec,
)
from accel_plugins.unsharded import States

FILE = "packed.pt"


class PackedOptim(FromConfiguration):
    """Placeholder for the optimizer of the engine: SGD with momentum."""

    kind = "optimizers"
    feature = Feature.OPTIMIZER_FROM_CONFIGURATION

    def __init__(self, params, lr):
        self.params, self.lr = [*params], lr


class PackedStrategy(Strategy):
    """Averages gradients in one tensor, and saves all weights of a model in one."""

    name = "example_packed"
    features = PLAIN_FEATURES | {Feature.OPTIMIZER_FROM_CONFIGURATION}

    def __init__(self, settings, runtime, precision, handlers):
        super().__init__(settings, runtime, precision, handlers)
        topology = runtime.topology
        self.sharding = BatchSharding(num_shards=topology.world_size, shard_index=topology.rank)
        self.optimizers = {}  # by model
        self.states = PackedStates(self)

    def wrap(self, bundle, *, evaluation=False):
        optimizers = [
            torch.optim.SGD(item.params, lr=item.lr, momentum=0.9) if isinstance(item, PackedOptim) else item
            for item in bundle.optimizers
        ]
        self.optimizers |= dict(zip(bundle.models, optimizers, strict=False))
        return replace(super().wrap(bundle, evaluation=evaluation), optimizers=optimizers)

    def step(self, optimizer, closure=None):
        tensors = [*chain.from_iterable(group["params"] for group in optimizer.param_groups)]
        packed = torch.cat([tensor.grad.flatten() for tensor in tensors])
        dist.all_reduce(packed)
        for tensor, mean in zip(tensors, unpacked(packed / dist.get_world_size(), tensors), strict=True):
            tensor.grad.copy_(mean)
        return super().step(optimizer, closure)

    def release(self):
        self.optimizers.clear()


def unpacked(packed, like):
    parts = packed.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


class PackedStates(States):
    is_sharded = True

    def __init__(self, strategy):
        self.strategy = strategy

    def form(self):
        return StateForm.NATIVE

    def save_native(self, model, directory, index, *, write=torch.save):
        if self.strategy.runtime.topology.is_main:
            weights = model.state_dict()
            state = {
                "packed": torch.cat([value.flatten() for value in weights.values()]),
                "shapes": {name: value.shape for name, value in weights.items()},
                "optimizer": self.strategy.optimizers[model].state_dict(),
            }
            write(state, directory / folder_name(index) / FILE)

    def load_native(self, model, directory, index):
        folder = read(directory / folder_name(index))
        model.load_state_dict(folder.weights())
        self.strategy.optimizers[model].load_state_dict(folder.numbered_optimizer())


def folder_name(index):
    return f"pytorch_model_{index}" if index else "pytorch_model"


@dataclass(frozen=True)
class PackedFolder:
    """What other strategies read."""

    state: dict[str, Any]

    def weights(self):
        shapes = self.state["shapes"]
        like = [torch.empty(shape, device="meta") for shape in shapes.values()]
        return dict(zip(shapes, unpacked(self.state["packed"], like), strict=True))

    def numbered_optimizer(self):
        return self.state["optimizer"]


def find(directory, name, index):
    del index
    folder = directory / name
    return folder if (folder / FILE).is_file() else None


def read(folder: Path) -> PackedFolder:
    return PackedFolder(torch.load(folder / FILE, weights_only=True))


FILES = ForeignFiles(find=find, read=read)
SPEC = StrategySpec(
    name="example_packed",
    applies=lambda *_: False,
    build=PackedStrategy,
    files="accel_example.packed:FILES",
)
