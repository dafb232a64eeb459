"""The four roles of a strategy, as protocols whose docstrings are the contract.

Every implementation runs the suite in `accel_plugins.testing`. An engine that owns everything may let
one object fill several roles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch import Tensor, nn
    from torch.amp.grad_scaler import GradScaler
    from torch.optim import Optimizer

    from accel_plugins.bundle import Bundle
    from accel_plugins.kwargs.amp import AutocastKwargs

StateDict: TypeAlias = dict[str, Any]
Parameters: TypeAlias = "Tensor | Iterable[Tensor]"
Optimizers: TypeAlias = "Iterable[Optimizer]"


class ModelWrapper(Protocol):
    """Makes a model ready to be trained by several processes, and gives it back as it was."""

    def check(self, bundle: Bundle) -> None:
        """Raise if the bundle cannot be wrapped, on every rank alike; modify nothing.

        Called once per `prepare`, before any collective.

        Raises:
            ValueError: What was found in the bundle cannot be wrapped.
        """
        ...

    def wrap(self, bundle: Bundle, *, evaluation: bool = False) -> Bundle:
        """Return the bundle with its models placed and wrapped, its optimizers pointing at them.

        Called once per `prepare`, on every rank. A model that is wrapped already is left alone. After it
        all ranks have the values that rank 0 had.

        Args:
            bundle: Models that `check` has let pass.
            evaluation: The models will never be trained: place them, and wrap them only if they could
                not run otherwise.
        """
        ...

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Peel off exactly what `wrap` added; any other module is returned as it is."""
        ...


class Stepper(Protocol):
    """Runs backward passes and optimizer steps."""

    def backward(self, loss: Tensor, *, accumulation: int, sync: bool, **kwargs: Any) -> None:
        """Add the gradients of `loss / accumulation` to the parameters.

        Args:
            loss: 0-d tensor, or any shape with `gradient=` in `kwargs`.
            accumulation: Number of micro-batches that make one optimizer step.
            sync: Whether this backward pass completes the accumulation window, for engines that need to know.
                It changes nothing if the forward pass ran within `no_sync`.
            **kwargs: Passed to `Tensor.backward`.
        """
        ...

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Within it, backward passes leave gradients local; the next one outside brings all together."""
        ...

    def join(
        self, joinables: Sequence[Any], *, divide_by_initial_world_size: bool = True
    ) -> AbstractContextManager[None]:
        """Within it, ranks may run out of batches at different times.

        Args:
            joinables: Wrapped models, and optimizers that are `torch.distributed` joinables.
            divide_by_initial_world_size: Average gradients over all ranks, also those that have
                finished; else over those that still have batches.
        """
        ...

    def clip_grad_norm(
        self, parameters: Parameters, max_norm: float, norm_type: float = 2.0, *, optimizers: Optimizers = ()
    ) -> Tensor | None:
        """Scale the gradients down so that their norm over all parameters and ranks is at most `max_norm`.

        Args:
            parameters: Tensors with gradients.
            max_norm: The largest norm allowed.
            norm_type: The p of the norm; `inf` for the largest absolute value.
            optimizers: Where loss scaling may be active, those that could own the parameters.

        Returns:
            The norm before clipping, 0-d, the same on all ranks; `None` where the engine clips later.
        """
        ...

    def clip_grad_value(
        self, parameters: Parameters, clip_value: float, *, optimizers: Optimizers = ()
    ) -> None:
        """Clamp every gradient to `[-clip_value, clip_value]`; `optimizers` as in `clip_grad_norm`."""
        ...

    def step(self, optimizer: Optimizer, closure: Callable[[], float] | None = None) -> bool | Tensor:
        """Step the optimizer; return False if the step was skipped because gradients were not finite.

        Where the device decides, as for fused optimizers, a 0-d tensor on it says whether it stepped.
        """
        ...


class TrainStep(Protocol):
    """Runs forward and backward passes in one call, for engines that own both, as those of pipelines do.

    With it a prepared model that is called in training mode, with gradients enabled, goes through it, and
    `accelerator.backward(loss)` computes nothing: it only accepts a loss that such a call has returned.
    """

    def __call__(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        accumulation: int,
        sync: bool,
    ) -> Any:
        """Add the gradients of `loss / accumulation` of one micro-batch to the parameters.

        Called on every rank.

        Args:
            model: As the strategy's wrapper has returned it.
            forward: Its own `forward`, bound.
            args: With which the model was called.
            kwargs: The same, by name.
            accumulation: Number of micro-batches that make one optimizer step.
            sync: Whether this micro-batch ends the accumulation window.

        Returns:
            What the caller of the model gets: the loss, or a structure with the loss in it, the same on all
            ranks.
        """
        ...


Write: TypeAlias = "Callable[[Any, Path], object]"
"""Writes a state to a file."""


class Persister(Protocol):
    """Reads and loads full state dicts of models and optimizers. Called on every rank."""

    def full_state_dict(self, model: nn.Module, *, keep: bool = True) -> StateDict:
        """Return the full state dict under the unwrapped model's names; on the CPU if models are sharded.

        Args:
            model: Prepared or not.
            keep: Whether this rank needs it. Otherwise it takes part in the collectives, and the result may
                be empty.
        """
        ...

    def iter_full_state_dict(self, model: nn.Module, *, keep: bool = True) -> Iterator[StateDict]:
        """Yield the full state dict in dictionaries that share no memory.

        If models are sharded, each is gathered when it is requested, so that no rank needs memory for the
        full state dict: every rank iterates over all.

        Args:
            model: Prepared or not.
            keep: As in `full_state_dict`.
        """
        ...

    def load_full_state_dict(self, model: nn.Module, state: Mapping[str, Any], **options: Any) -> Any:
        """Load such a state dict, which every rank has, into the wrapped model.

        Args:
            model: Prepared or not.
            state: Name to tensor; tensors may be read from a file when they are needed.
            **options: As of `Module.load_state_dict`, whose result is returned.
        """
        ...

    def full_optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], *, keep: bool = True
    ) -> StateDict:
        """The state dict that the optimizer would have in a run of one process.

        Args:
            optimizer: Prepared, without any wrapper of ours.
            models: All prepared models, of which some own its parameters.
            keep: As in `full_state_dict`.
        """
        ...

    def load_full_optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]
    ) -> None:
        """Load such a state dict, which every rank has."""
        ...


class Generators(Protocol):
    """Random number generators that an engine keeps beside those of PyTorch."""

    def state_dict(self) -> StateDict:
        """Return their states on this rank; empty if there are none."""
        ...

    def load_state_dict(self, state: StateDict) -> str | None:
        """Resume on this rank, once PyTorch's generators have their states.

        Args:
            state: That of a rank of the checkpoint; empty if it has none, as those of other strategies.

        Returns:
            What did not come back, for a warning.
        """
        ...


class NativeFiles(Protocol):
    """Saves and loads a strategy's own files. Called on every rank; complete after the next barrier."""

    def save_model(self, model: nn.Module, directory: Path, index: int, *, write: Write = ...) -> None:
        """Write the model that was prepared as number `index` into an existing directory.

        Args:
            model: Prepared.
            directory: Exists already.
            index: As which it was prepared.
            write: Called as `write(state, path)` for each file. It may write later, while the model stays as
                it is.
        """
        ...

    def load_model(self, model: nn.Module, directory: Path, index: int) -> None:
        """Read it back into the wrapped model."""
        ...

    def save_optimizer(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        directory: Path,
        index: int,
        *,
        write: Write = ...,
    ) -> None:
        """Write the optimizer that was prepared as number `index`; `model` owns its parameters.

        Arguments are those of `save_model`.
        """
        ...

    def load_optimizer(self, optimizer: Optimizer, model: nn.Module, directory: Path, index: int) -> None:
        """Read it back."""
        ...


class PrecisionPolicy(Protocol):
    """Decides in which number formats models compute, and scales losses where the format needs it."""

    @property
    def name(self) -> str:
        """`"no"`, `"fp16"`, `"bf16"` or `"fp8"`."""
        ...

    @property
    def scaler(self) -> GradScaler | None:
        """The loss scaler, where the policy has one."""
        ...

    def autocast(self, kwargs: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """A fresh context in which operations run in the policy's format; `kwargs` replace its own."""
        ...

    def convert(self, bundle: Bundle) -> Bundle:
        """Make the models compute in this format and return float32; names in state dicts do not change.

        Called once per `prepare`, before the strategy wraps. Optimizers in the bundle become known to
        the loss scaler.
        """
        ...

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call `backward` on, of a policy with a loss scaler."""
        ...

    def unscale(self, optimizers: Iterable[Optimizer]) -> None:
        """Divide the gradients of these optimizers by the scale, once per step however often it is called."""
        ...

    def step(self, optimizer: Optimizer, closure: Callable[[], float] | None = None) -> bool | Tensor:
        """Unscale if need be and step; return False if gradients were not finite and nothing was done.

        Where the device decides, as for fused optimizers, a 0-d tensor on it says whether it stepped.
        """
        ...

    def state_dict(self) -> StateDict:
        """What must be saved to resume; empty without a loss scaler."""
        ...

    def load_state_dict(self, state: StateDict) -> None:
        """Resume from a `state_dict`."""
        ...
