"""Registry of root FSDP1 modules, by the wrapped module or by a parameter."""

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


class FsdpRoots:
    """Weak set of the root FSDP1 modules."""

    def __init__(self) -> None:
        self._roots: WeakSet[FullyShardedDataParallel] = WeakSet()

    def add(self, root: FullyShardedDataParallel) -> None:
        """Add a root module."""
        self._roots.add(root)

    def of_model(self, model: nn.Module) -> FullyShardedDataParallel | None:
        """Return the root module of a model; `None` if it was not wrapped.

        Args:
            model: The root module, a compiled one, or the wrapped module.
        """
        outer = without_compiler(model)
        if isinstance(outer, FullyShardedDataParallel):
            return outer
        core = extract_model_from_parallel(model, keep_torch_compile=False)
        return next((root for root in self._roots if root.module is core), None)

    def of_parameters(self, parameters: Iterable[Tensor]) -> FullyShardedDataParallel | None:
        """Return the first root module that has one of the parameters."""
        ids = {id(one) for one in parameters}
        return next((root for root in self._roots if any(id(one) in ids for one in root.parameters())), None)

    def parameters(self) -> Iterator[Tensor]:
        """Iterate over the parameters of all root modules."""
        for root in [*self._roots]:
            yield from root.parameters()

    def of_optimizer(
        self, optimizer: Optimizer, models: Sequence[nn.Module]
    ) -> FullyShardedDataParallel | None:
        """Return the root module of the model that an optimizer trains."""
        owned = {id(one) for group in optimizer.param_groups for one in group["params"]}
        for model in models:
            root = self.of_model(model)
            if root is not None and any(id(one) in owned for one in root.parameters()):
                return root
        return None


@contextmanager
def sharded_states(root: FullyShardedDataParallel) -> Generator[None]:
    """Within the block, state dicts of a model and its optimizer are sharded, as DTensors."""
    with (
        suppress_fsdp1_warnings(),
        FullyShardedDataParallel.state_dict_type(
            root,
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(offload_to_cpu=False),
            ShardedOptimStateDictConfig(offload_to_cpu=False),
        ),
    ):
        yield


@contextmanager
def suppress_fsdp1_warnings() -> Generator[None]:
    """Suppress FSDP1's deprecation warnings, and those about calls that torch makes itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings(
            "ignore", message=".*(NO_SHARD|_get_pg_default_device|Multiple backends are registered)"
        )
        yield
