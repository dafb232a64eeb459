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
from accel_state.logging import tqdm
from accel_state.memory import find_executable_batch_size
from accel_trackers.general import GeneralTracker
from accel_train.accelerator import Accelerator
from accel_train.data.adapter import PreparedLoader

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import DataLoader

    from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
    from accel_plugins.parallelism.config import ParallelismConfig
    from accel_state.partial_state import PartialState

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
    """`prepare` returns the types of its arguments; the methods for one object, those of the results."""
    assert_type(accelerator.prepare(model), Model)
    assert_type(accelerator.prepare(optimizer), Optimizer)
    assert_type(accelerator.prepare(loader), DataLoader[Batch])
    assert_type(accelerator.prepare(model, optimizer), tuple[Model, Optimizer])
    assert_type(
        accelerator.prepare(model, optimizer, loader, loader, schedule),
        tuple[Model, Optimizer, DataLoader[Batch], DataLoader[Batch], LRScheduler],
    )
    assert_type(accelerator.prepare(model, model), tuple[Model, Model])
    net = accelerator.prepare(model)
    batches, steps = accelerator.prepare_data_loader(loader), accelerator.prepare_optimizer(optimizer)
    batches.set_epoch(1)
    for batch in batches:
        assert_type(batch, Batch)
    for batch in tqdm(batches, desc="training"):
        assert_type(batch, Batch)
    for batch in accelerator.skip_first_batches(batches, 2):
        assert_type(batch, Batch)
    assert_type(batches.total_batch_size, int)
    assert_type(steps.step_was_skipped, bool)
    assert_type(accelerator.unwrap_model(net), Model)
    assert_type(accelerator.unwrap_model(net).generate(torch.ones(1)), Tensor)
    assert_type(accelerator.prepare_model(model), Model)
    assert_type(accelerator.prepare_optimizer(optimizer), AcceleratedOptimizer)
    assert_type(accelerator.prepare_data_loader(loader), PreparedLoader[Batch])
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


def constructed(
    plugin: FullyShardedDataParallelPlugin, axes: ParallelismConfig, tracker: GeneralTracker
) -> None:
    """Arguments have types: what is wrong is an error, without which the comment would be one."""
    Accelerator(mixed_precision="bf16", fsdp_plugin=plugin, parallelism_config=axes, log_with="wandb")
    Accelerator(log_with=["tensorboard", tracker], deepspeed_plugin=None)
    Accelerator(fsdp_plugin="hello")  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
    Accelerator(log_with=3)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
    Accelerator(parallelism_config={"tp_size": 2})  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
    Accelerator(mixed_precision="bf17")  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]


def divided(accelerator: Accelerator, state: PartialState, prompts: list[str], pair: tuple[int, ...]) -> None:
    """A shard has the type of what is divided, and a tracker is one unless it is unwrapped."""
    with accelerator.split_between_processes(prompts) as shard:
        assert_type(shard, list[str])
    with state.split_between_processes(pair, apply_padding=True) as numbers:
        assert_type(numbers, tuple[int, ...])
    for prompt in tqdm(prompts):
        assert_type(prompt, str)
    assert_type(accelerator.get_tracker("wandb"), GeneralTracker)
    assert_type(accelerator.log_with, list[str | GeneralTracker])
    with tqdm(total=3) as bar:
        bar.update()
        bar.set_description("loading")
