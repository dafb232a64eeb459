"""Protocol of sharded states: a rank's shards of models and optimizers, by name."""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from torch import Tensor, nn
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
    from torch.optim import Optimizer

    from accel_plugins.roles import StateDict

StateAllocator: TypeAlias = "Callable[[str, torch.Size, torch.dtype], Tensor]"


class StateForm(Enum):
    """The form in which `save_state` writes models and optimizers."""

    FULL = auto()
    """Rank 0 writes the full state dict: `model.safetensors`, `optimizer.bin`."""
    SHARDED = auto()
    """Every rank writes its shards, to a folder that PyTorch Distributed Checkpoint reads."""
    NATIVE = auto()
    """The strategy writes its own files, through its `NativeFiles`."""


class ShardedStates(Protocol):
    """State dicts of models and optimizers, by fully qualified name.

    A sharded tensor is a `DTensor`; any other tensor is replicated. Names have no prefixes of wrappers, so
    that one strategy loads what another has saved.
    """

    def form(self) -> StateForm:
        """Return the form that `save_state` writes."""
        ...

    def model_tensors(self, model: nn.Module) -> StateDict:
        """Return the sharded state dict of a prepared model.

        Its tensors may be read until the model changes, and written before `load_model`.
        """
        ...

    def load_model(self, model: nn.Module, state: StateDict, **options: Any) -> None:
        """Load a state dict of the layout of `model_tensors`."""
        ...

    def optimizer_tensors(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> StateDict:
        """Return the sharded state dict of an optimizer, with parameters by name.

        Args:
            optimizer: Prepared, without the wrapper `AcceleratedOptimizer`.
            models: All prepared models, some of which own its parameters.

        Returns:
            `{"state": {name: {key: value}}, "param_groups": [{…, "params": [name, …]}]}`.
        """
        ...

    def state_allocator(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> StateAllocator:
        """Return an allocator for the destination tensors of an optimizer load.

        Returns:
            A function of a parameter's name and of the shape and dtype of the full saved tensor.
        """
        ...

    def load_optimizer(self, optimizer: Optimizer, models: Sequence[nn.Module], state: StateDict) -> None:
        """Load a state dict of the layout of `optimizer_tensors`.

        Raises:
            CheckpointError: Its parameters are not those of the optimizer.
        """
        ...


class RankPlanners(Protocol):
    """Plans of what one rank writes to a DCP folder and reads from it, for tensors of some kind."""

    def plan_save(self, state: Mapping[str, Any], rank: int) -> tuple[SavePlanner, SavePlan]:
        """Plan what this rank writes.

        Returns:
            A planner whose `resolve_data` gives the values, and the items of this rank alone: all ranks
            together write every value once. The data of the plan maps keys to paths in `state`.
        """
        ...

    def plan_load(
        self, state: dict[str, Any], index: Metadata, *, strict: bool, flat: bool
    ) -> tuple[LoadPlanner, LoadPlan]:
        """Plan what this rank reads: return a planner that takes what is read, and the items.

        Arguments are those of `read_into`.
        """
        ...
