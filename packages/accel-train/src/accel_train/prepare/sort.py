"""The arguments of `prepare`, sorted by kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from accel_plugins.bundle import Bundle
from accel_plugins.deepspeed.dummy import DummyOptim, DummyScheduler
from accel_plugins.megatron.dummy import MegatronLMDummyDataLoader, MegatronLMDummyScheduler
from accel_state.logging import get_logger
from accel_train.data.adapter import DataLoaderAdapter
from accel_train.optimizer import AcceleratedOptimizer
from accel_train.scheduler import AcceleratedScheduler

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

logger = get_logger(__name__)

# The first row whose types fit says what kind an argument is; what fits no row is passed through.
_KINDS: tuple[tuple[str, tuple[type, ...]], ...] = (
    ("models", (nn.Module,)),
    ("optimizers", (Optimizer, DummyOptim)),
    ("schedulers", (LRScheduler, AcceleratedScheduler, DummyScheduler, MegatronLMDummyScheduler)),
    ("dataloaders", (DataLoader, DataLoaderAdapter, MegatronLMDummyDataLoader)),
)
_OTHERS = "others"


def kind_of(argument: object) -> str:
    """Name the field of `Bundle` that an argument of `prepare` belongs to.

    Example:
        >>> kind_of(nn.Linear(1, 1)), kind_of("neither")
        ('models', 'others')
    """
    return next((kind for kind, types in _KINDS if isinstance(argument, types)), _OTHERS)


def sort_arguments(
    arguments: Sequence[Any],
    *,
    device_placement: Sequence[bool | None] | None,
    default: bool,
    prepared: Container[object] = (),
) -> tuple[Bundle, dict[str, list[bool]]]:
    """Sort the arguments of `prepare` by kind; pass through what is in `prepared`.

    Returns:
        The sorted arguments, and by kind whether each of them may be moved to the device.

    Example:
        >>> bundle, placements = sort_arguments(
        ...     [nn.Linear(1, 1), "other"], device_placement=None, default=True
        ... )
        >>> bundle.order, placements["models"]
        ((('models', 0), ('others', 0)), [True])
    """
    wishes = _wishes(arguments, device_placement)
    _warn_unprepared(arguments)
    found: dict[str, list[Any]] = {kind: [] for kind in (*(kind for kind, _ in _KINDS), _OTHERS)}
    placed: dict[str, list[bool]] = {kind: [] for kind in found}
    order: list[tuple[str, int]] = []
    for argument, wish in zip(arguments, wishes, strict=True):
        again = argument in prepared
        kind = _OTHERS if again else kind_of(argument)
        order.append((kind, len(found[kind])))
        found[kind].append(argument if again else _without_wrapper(argument))
        placed[kind].append(default if wish is None else wish)
    sorted_ = {kind: tuple(values) for kind, values in found.items()}
    return Bundle(**sorted_, order=tuple(order), placements=placed["models"]), placed


def sort_one(kind: str, argument: Any, *, move: bool) -> tuple[Bundle, dict[str, list[bool]]]:
    """Sort one argument whose kind is known."""
    types = dict(_KINDS)[kind]
    if kind != "schedulers" and not isinstance(argument, types):
        names = " or ".join(f"{one.__module__}.{one.__qualname__}" for one in types)
        raise TypeError(f"{argument!r} cannot be prepared as one of the {kind}: it is no {names}.")
    fields: dict[str, Any] = {kind: (_without_wrapper(argument),), "order": ((kind, 0),)}
    placed = {one: [move] if one == kind else [] for one, _ in _KINDS}
    return Bundle(**fields, placements=placed["models"]), placed


def _warn_unprepared(arguments: Sequence[Any]) -> None:
    """Warn about arguments that are passed through although they look like models or optimizers."""
    for argument in arguments:
        inside: Any = argument if isinstance(argument, list | tuple) else ()
        first = next((one for one in inside if kind_of(one) != _OTHERS), None)
        if first is not None:
            logger.warning(
                "prepare() got a %s with a %s in it, and returns it as it is: pass each "
                "object by itself, as in prepare(*objects).",
                type(argument).__name__,
                type(first).__qualname__,
            )
        elif isinstance(argument, type) and issubclass(argument, tuple(t for _, ts in _KINDS for t in ts)):
            logger.warning(
                "prepare() got the class %s, and returns it as it is: pass an object of it.",
                argument.__qualname__,
            )


def _without_wrapper(argument: Any) -> Any:
    # What another Accelerator has prepared steps through the strategy of that one.
    if isinstance(argument, AcceleratedOptimizer):
        return argument.optimizer
    return argument.scheduler if isinstance(argument, AcceleratedScheduler) else argument


def _wishes(
    arguments: Sequence[Any], device_placement: Sequence[bool | None] | None
) -> Sequence[bool | None]:
    if device_placement is None:
        return [None] * len(arguments)
    if len(device_placement) != len(arguments):
        raise ValueError(
            f"device_placement={device_placement!r} has {len(device_placement)} entries for the "
            f"{len(arguments)} arguments of prepare(); give one for each, None for the default."
        )
    return device_placement
