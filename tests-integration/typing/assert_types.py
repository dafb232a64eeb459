"""What type checkers make of a training script; never run.

Pyright checks this file as it checks the packages, mypy in `test_types.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, assert_type

import torch
from torch import Tensor, nn

from accel_ops.collectives import broadcast, gather, reduce
from accel_ops.modules import extract_model_from_parallel
from accel_ops.pad import pad_across_processes
from accel_ops.tree import send_to_device
from accel_plugins.optimizer import AcceleratedOptimizer, AcceleratedScheduler
from accel_state.memory import find_executable_batch_size
from accel_train.data.adapter import PreparedLoader

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import DataLoader

    from accel_state.partial_state import PartialState
    from accel_train.accelerator import Accelerator

Batch = dict[str, Tensor]


class Model(nn.Module):
    """A model with a method of its own."""

    def generate(self, prompt: Tensor) -> Tensor:
        """Return more."""
        return prompt


def prepared(
    accelerator: Accelerator,
    model: Model,
    optimizer: Optimizer,
    loader: DataLoader[Batch],
    schedule: LRScheduler,
) -> None:
    """What is prepared is typed as what it is."""
    assert_type(accelerator.prepare(model), Model)
    assert_type(accelerator.prepare(optimizer), AcceleratedOptimizer)
    assert_type(accelerator.prepare(loader), PreparedLoader)
    assert_type(accelerator.prepare(schedule), AcceleratedScheduler)
    assert_type(accelerator.prepare(model, optimizer), tuple[Model, AcceleratedOptimizer])
    assert_type(
        accelerator.prepare(model, optimizer, loader), tuple[Model, AcceleratedOptimizer, PreparedLoader]
    )
    assert_type(
        accelerator.prepare(model, optimizer, loader, loader, schedule),
        tuple[Model, AcceleratedOptimizer, PreparedLoader, PreparedLoader, AcceleratedScheduler],
    )
    assert_type(accelerator.prepare(model, model), tuple[Model, Model])
    net, steps, batches = accelerator.prepare(model, optimizer, loader)
    batches.set_epoch(1)
    assert_type(batches.total_batch_size, int)
    assert_type(steps.step_was_skipped, bool)
    assert_type(accelerator.unwrap_model(net), Model)
    assert_type(accelerator.unwrap_model(net).generate(torch.ones(1)), Tensor)
    assert_type(accelerator.prepare_model(model), Model)
    assert_type(accelerator.prepare_optimizer(optimizer), AcceleratedOptimizer)
    assert_type(accelerator.prepare_data_loader(loader), PreparedLoader)
    assert_type(accelerator.prepare_scheduler(schedule), AcceleratedScheduler)
    assert_type(extract_model_from_parallel(model), Model)


def collected(accelerator: Accelerator, tensor: Tensor, batch: Batch, pair: tuple[Tensor, Tensor]) -> None:
    """Collectives and moves give the type that they were given."""
    assert_type(accelerator.gather(tensor), Tensor)
    assert_type(accelerator.gather_for_metrics(batch), Batch)
    assert_type(accelerator.gather_for_metrics(pair), tuple[Tensor, Tensor])
    assert_type(accelerator.reduce(batch, "mean"), Batch)
    assert_type(accelerator.pad_across_processes(tensor, dim=1), Tensor)
    assert_type(gather(batch), Batch)
    assert_type(reduce(tensor), Tensor)
    assert_type(broadcast(pair), tuple[Tensor, Tensor])
    assert_type(pad_across_processes(batch), Batch)
    assert_type(send_to_device(batch, "cpu"), Batch)


def decorated(accelerator: Accelerator, state: PartialState, work: Callable[[int, str], float]) -> None:
    """Decorators keep what comes in and goes out."""
    assert_type(accelerator.on_main_process(work), Callable[[int, str], float | None])
    assert_type(accelerator.on_last_process(work), Callable[[int, str], float | None])
    assert_type(accelerator.on_process(work, process_index=1), Callable[[int, str], float | None])
    assert_type(state.on_local_process(work, local_process_index=1), Callable[[int, str], float | None])
    assert_type(find_executable_batch_size(work), Callable[[str], float])
    arguments: Any = accelerator.on_main_process()
    del arguments
