"""What `prepare` was given, sorted by kind: the one value that every stage and strategy passes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn
    from torch.optim import Optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """The arguments of `prepare`, sorted by kind.

    A stage returns a changed copy (`dataclasses.replace`) and keeps the length and order of every field,
    so that the caller's order can be rebuilt. A strategy whose engine owns everything (DeepSpeed,
    Megatron) finds here all that it needs at once.

    Args:
        models: The modules, as given or as the stages before have changed them.
        optimizers: The optimizers as torch knows them, without any wrapper of ours.
        schedulers: The learning rate schedulers.
        dataloaders: The data loaders.
        others: Everything else; passed through.
        order: One `(field name, index)` per argument of `prepare`, in the caller's order.
        placements: For every model, whether it may be moved to the device. Empty means yes for all.

    Example:
        >>> bundle = Bundle(models=["m"], optimizers=["o"], order=[("optimizers", 0), ("models", 0)])
        >>> bundle.in_order()
        ['o', 'm']
    """

    models: Sequence[nn.Module] = ()
    optimizers: Sequence[Optimizer] = ()
    schedulers: Sequence[Any] = ()
    dataloaders: Sequence[Any] = ()
    others: Sequence[object] = ()
    order: Sequence[tuple[str, int]] = ()
    placements: Sequence[bool] = ()

    def may_move(self, index: int) -> bool:
        """Whether the model at `index` may be moved to the device."""
        return self.placements[index] if self.placements else True

    def in_order(self) -> list[Any]:
        """The contents in the caller's order."""
        return [getattr(self, kind)[index] for kind, index in self.order]
