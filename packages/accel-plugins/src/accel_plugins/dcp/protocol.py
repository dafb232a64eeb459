"""The role that gives what a rank holds of models and optimizers, and takes it back."""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from accel_plugins.roles import StateDict

StateAllocator: TypeAlias = "Callable[[str, torch.Size, torch.dtype], Tensor]"


class StateForm(Enum):
    """In which form `save_state` writes models and optimizers."""

    WHOLE = auto()
    """One rank writes everything: `model.safetensors`, `optimizer.bin`."""
    SHARDED = auto()
    """Every rank writes what it holds: folders that PyTorch Distributed Checkpoint reads."""
    OWN = auto()
    """The strategy writes files of its own, through its `Persister`."""


class ShardedStates(Protocol):
    """Gives models and optimizers as tensors by fully qualified name, and takes them back.

    A tensor of which every rank holds a part is a `DTensor`; any other one is whole on every rank. Names are
    those of the model itself, so that what one strategy has given another can take.
    """

    def form(self) -> StateForm:
        """What `save_state` writes now."""
        ...

    def model_tensors(self, model: nn.Module) -> StateDict:
        """The state dict of a prepared model, by name.

        Tensors may be read from until the model changes, and written to before `load_model`.
        """
        ...

    def load_model(self, model: nn.Module, state: StateDict, **options: Any) -> None:
        """Take back what `model_tensors` gave, with other contents.

        Args:
            model: The prepared model.
            state: By name.
            **options: As for `Module.load_state_dict`.
        """
        ...

    def optimizer_tensors(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> StateDict:
        """The state dict of an optimizer, where names stand for parameters.

        Args:
            optimizer: Prepared, without any wrapper of ours.
            models: All prepared models, some of which own its parameters.

        Returns:
            `{"state": {name: {key: value}}, "param_groups": [{…, "params": [name, …]}]}`.
        """
        ...

    def state_allocator(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> StateAllocator:
        """Make a function that makes the tensors into which the optimizer's saved state is read.

        Args:
            optimizer: As above.
            models: As above.

        Returns:
            Called with the name of a parameter, and the shape and the dtype of a whole saved tensor.
        """
        ...

    def load_optimizer(self, optimizer: Optimizer, models: Sequence[nn.Module], state: StateDict) -> None:
        """Take back what `optimizer_tensors` gave.

        Raises:
            CheckpointError: It is of other parameters.
        """
        ...
