"""The models that FSDP1 has wrapped, found by the module inside or by a parameter."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakSet

from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

from accel_ops.modules import extract_model_from_parallel, without_compiler

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer


class Roots:
    """Every model that was wrapped, as long as it lives."""

    def __init__(self) -> None:
        self._roots: WeakSet[FullyShardedDataParallel] = WeakSet()

    def add(self, root: FullyShardedDataParallel) -> None:
        """Remember a model."""
        self._roots.add(root)

    def of_model(self, model: nn.Module) -> FullyShardedDataParallel | None:
        """The wrapper of a model; `None` if it has none.

        Args:
            model: Wrapped, compiled, or the module inside.
        """
        outer = without_compiler(model)
        if isinstance(outer, FullyShardedDataParallel):
            return outer
        core = extract_model_from_parallel(model, keep_torch_compile=False)
        return next((root for root in self._roots if root.module is core), None)

    def of_parameters(self, parameters: Iterable[Tensor]) -> FullyShardedDataParallel | None:
        """The first wrapper that has one of these parameters."""
        ids = {id(one) for one in parameters}
        return next((root for root in self._roots if any(id(one) in ids for one in root.parameters())), None)

    def parameters(self) -> Iterator[Tensor]:
        """The parameters of all wrappers."""
        for root in [*self._roots]:
            yield from root.parameters()

    def of_optimizer(
        self, optimizer: Optimizer, models: Sequence[nn.Module]
    ) -> FullyShardedDataParallel | None:
        """The wrapper of the model that an optimizer trains."""
        owned = {id(one) for group in optimizer.param_groups for one in group["params"]}
        for model in models:
            root = self.of_model(model)
            if root is not None and any(id(one) in owned for one in root.parameters()):
                return root
        return None


@contextmanager
def sharded_states(root: FullyShardedDataParallel) -> Generator[None]:
    """Within it, state dicts of a model and its optimizer consist of DTensors."""
    with (
        quiet(),
        FullyShardedDataParallel.state_dict_type(
            root,
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(offload_to_cpu=False),
            ShardedOptimStateDictConfig(offload_to_cpu=False),
        ),
    ):
        yield


@contextmanager
def quiet() -> Generator[None]:
    """Within it, torch does not say that FSDP1 is not the latest, nor what it does itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings(
            "ignore", message=".*(NO_SHARD|_get_pg_default_device|Multiple backends are registered)"
        )
        yield
