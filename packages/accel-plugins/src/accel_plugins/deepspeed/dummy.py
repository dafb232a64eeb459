"""What stands for an optimizer and a schedule that the DeepSpeed configuration describes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor


class DummyOptim:
    """Stands for the optimizer of the DeepSpeed configuration, so that a script keeps its usual form.

    Args:
        params: Parameters, or groups of parameters, as for any optimizer.
        lr: The learning rate, where the configuration says `"auto"`.
        weight_decay: The same for weight decay.
        **kwargs: The same for other parameters of the optimizer, such as `betas`.

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
        # An iterator would be empty when the model is prepared.
        self.params: list[Any] = [*params]
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs

    def tensors(self) -> list[Tensor]:
        """The parameters, out of their groups."""
        found: list[Tensor] = []
        for one in self.params:
            found += one["params"] if isinstance(one, dict) else [one]
        return found


class DummyScheduler:
    """Stands for the learning rate schedule of the DeepSpeed configuration.

    Args:
        optimizer: The optimizer, or what stands for it.
        total_num_steps: Steps of the whole schedule, in batches of one process.
        warmup_num_steps: Steps of the warm-up, in the same unit.
        lr_scheduler_callable: Makes a schedule from the optimizer, instead of the configuration.
        **kwargs: More about it; kept.
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
