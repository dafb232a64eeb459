"""Placeholders for the optimizer and the scheduler of a DeepSpeed configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor


class DummyOptim:
    """Placeholder for the optimizer that the DeepSpeed configuration describes.

    Args:
        params: Parameters, or groups of parameters, as for any optimizer.
        lr: Learning rate, used if the configuration's is `"auto"`.
        weight_decay: Weight decay, used if the configuration's is `"auto"`.
        **kwargs: Other hyperparameters, such as `betas`, used if the configuration's are `"auto"`.

    Example:
        >>> import torch
        >>> DummyOptim(torch.nn.Linear(1, 1).parameters(), lr=0.01).lr
        0.01
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 0.001,
        weight_decay: float = 0,
        **kwargs: Any,
    ) -> None:
        # An iterator would be exhausted when the model is prepared.
        self.params: list[Any] = [*params]
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs

    def tensors(self) -> list[Tensor]:
        """Return the parameters of all groups."""
        found: list[Tensor] = []
        for one in self.params:
            found += one["params"] if isinstance(one, dict) else [one]
        return found


class DummyScheduler:
    """Placeholder for the learning rate scheduler that the DeepSpeed configuration describes.

    Args:
        optimizer: The optimizer, or its `DummyOptim`.
        total_num_steps: Steps of the schedule, in batches of one rank.
        warmup_num_steps: Steps of the warm-up, in batches of one rank.
        lr_scheduler_callable: Builds a scheduler from the optimizer, instead of the configuration's.
        **kwargs: Stored in the attribute `kwargs`.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs
