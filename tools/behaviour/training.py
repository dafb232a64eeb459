"""Accumulation, schedules, clipping, precision and states around a small model."""

from __future__ import annotations

from typing import Any

import torch
from cases import cases
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

SCHEDULES: dict[str, Any] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=12),
}

FACTS = (
    "num_processes", "process_index", "local_process_index", "is_main_process", "is_local_main_process",
    "is_last_process", "use_distributed", "mixed_precision", "split_batches", "dispatch_batches",
    "even_batches",
    "use_seedable_sampler", "non_blocking", "use_stateful_dataloader", "project_dir", "logging_dir",
    "save_iteration", "sync_gradients", "device", "distributed_type", "scaler", "step", "rng_types",
    "native_amp",
    "optimizer_step_was_skipped", "gradient_accumulation_steps", "step_scheduler_with_optimizer",
    "fp8_backend",
    "multi_device", "is_fsdp2", "is_composable_parallelism_enabled", "tensor_parallel_rank",
    "data_parallel_rank",
    "should_save_model", "has_lomo_optimizer", "log_with", "trackers", "parallelism_config",
    "torch_device_mesh",
)  # fmt: skip


def data(rows: int = 12, batch_size: int = 2) -> DataLoader[Any]:
    """Rows of two numbers with their targets."""
    inputs = torch.arange(rows * 2, dtype=torch.float32).view(rows, 2) / rows
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=batch_size)


def model(bias: bool = False) -> nn.Module:
    """A linear layer with known weights."""
    layer = nn.Linear(2, 1, bias=bias)
    nn.init.constant_(layer.weight, 0.5)
    return layer


def train(accelerator: Any, prepared: tuple[Any, ...], epochs: int = 1, *, clip: Any = None) -> list[Any]:
    """Train as scripts do; tell at every batch whether it was a step, the rate, and the weights."""
    net, optimizer, loader, schedule = prepared
    found = []
    for _ in range(epochs):
        for inputs, targets in loader:
            with accelerator.accumulate(net):
                loss = nn.functional.mse_loss(net(inputs), targets)
                accelerator.backward(loss)
                norm = clip(net) if clip is not None and accelerator.sync_gradients else None
                optimizer.step()
                if schedule is not None:
                    schedule.step()
                optimizer.zero_grad()
            weights = accelerator.unwrap_model(net).weight
            rates = None if schedule is None else schedule.get_last_lr()
            found.append([accelerator.sync_gradients, weights.clone(), rates, norm])
    return found


@cases(
    "accumulation", worlds=(1, 2), steps=(1, 2, 3), rows=(8, 10), sync_with_dataloader=(False, True),
    sync_each_batch=(False, True),
)  # fmt: skip
def accumulated(lib: Any, *, steps: int, rows: int, sync_with_dataloader: bool, sync_each_batch: bool) -> Any:
    plugin = lib.utils.GradientAccumulationPlugin(
        num_steps=steps, sync_with_dataloader=sync_with_dataloader, sync_each_batch=sync_each_batch
    )
    accelerator = lib.Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    prepared = (*accelerator.prepare(net, optimizer, data(rows)), None)
    return train(accelerator, prepared, 2)


@cases("accumulation", worlds=(1, 2), argument=(1, 2), environment=(None, "3"))
def accumulation_of(lib: Any, *, argument: int, environment: str | None) -> Any:
    import os

    if environment is not None:
        os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = environment
    accelerator = lib.Accelerator(cpu=True, gradient_accumulation_steps=argument)
    before = accelerator.gradient_accumulation_steps
    accelerator.gradient_accumulation_steps = 5
    return [before, accelerator.gradient_accumulation_steps, accelerator.gradient_state.num_steps]


@cases("accumulation", worlds=(1, 2))
def local_gradients(lib: Any) -> Any:
    accelerator = lib.Accelerator(cpu=True)
    net = accelerator.prepare(model())
    rank = accelerator.process_index
    with accelerator.no_sync(net):
        accelerator.backward(net(torch.full((1, 2), 1.0 + rank)).sum())
    grad = accelerator.unwrap_model(net).weight.grad
    found = [grad.clone()]
    accelerator.backward(net(torch.full((1, 2), 1.0 + rank)).sum())
    return [*found, grad.clone()]


@cases(
    "schedules", worlds=(1, 2), schedule=SCHEDULES, steps=(1, 2), with_optimizer=(False, True),
    split=(False, True), adjust=(False, True),
)  # fmt: skip
def scheduled(lib: Any, *, schedule: str, steps: int, with_optimizer: bool, split: bool, adjust: bool) -> Any:
    accelerator = lib.Accelerator(
        cpu=True,
        step_scheduler_with_optimizer=with_optimizer,
        dataloader_config=lib.DataLoaderConfiguration(split_batches=split),
        gradient_accumulation_plugin=lib.utils.GradientAccumulationPlugin(
            num_steps=steps, adjust_scheduler=adjust
        ),
    )
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    prepared = accelerator.prepare(net, optimizer, data(), SCHEDULES[schedule](optimizer))
    return [row[2] for row in train(accelerator, prepared)]


@cases("schedules")
def on_plateau(lib: Any) -> Any:
    accelerator = lib.Accelerator(cpu=True)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    optimizer, plateau = accelerator.prepare(optimizer, plateau)
    found = []
    for loss in (1.0, 1.0, 0.5, 0.6):
        plateau.step(loss)
        found.append(optimizer.param_groups[0]["lr"])
    return [found, type(plateau).__name__]


@cases("schedules", worlds=(1, 2), schedule=SCHEDULES)
def scheduler_state(lib: Any, *, schedule: str) -> Any:
    accelerator = lib.Accelerator(cpu=True)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    prepared = accelerator.prepare(net, optimizer, data(), SCHEDULES[schedule](optimizer))
    train(accelerator, prepared)
    state = prepared[3].state_dict()
    return {name: state[name] for name in sorted(state) if name in {"last_epoch", "_step_count", "_last_lr"}}


@cases("clipping", worlds=(1, 2), norm=(0.1, 100.0), kind=(1.0, 2.0, float("inf")), steps=(1, 2))
def clipped_norm(lib: Any, *, norm: float, kind: float, steps: int) -> Any:
    accelerator = lib.Accelerator(cpu=True, gradient_accumulation_steps=steps)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    prepared = (*accelerator.prepare(net, optimizer, data()), None)
    return train(
        accelerator, prepared, clip=lambda one: accelerator.clip_grad_norm_(one.parameters(), norm, kind)
    )


@cases("clipping", worlds=(1, 2), value=(0.1, 100.0))
def clipped_value(lib: Any, *, value: float) -> Any:
    accelerator = lib.Accelerator(cpu=True)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    prepared = (*accelerator.prepare(net, optimizer, data()), None)
    return train(
        accelerator, prepared, clip=lambda one: accelerator.clip_grad_value_(one.parameters(), value)
    )


@cases("precision", worlds=(1, 2), precision=("no", "bf16"), placement=(None, False))
def precise(lib: Any, *, precision: str, placement: bool | None) -> Any:
    accelerator = lib.Accelerator(cpu=True, mixed_precision=precision)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    argument = None if placement is None else [placement] * 3
    net, optimizer, loader = accelerator.prepare(net, optimizer, data(), device_placement=argument)
    found = train(accelerator, (net, optimizer, loader, None))
    with accelerator.autocast():
        inside = net(torch.ones(1, 2)).dtype
    with accelerator.autocast(lib.utils.AutocastKwargs(enabled=False)):
        off = torch.ones(1, 2) @ torch.ones(2, 1)
    return [found, net(torch.ones(1, 2)).dtype, inside, off.dtype, accelerator.mixed_precision]


@cases("precision", precision=("no", "bf16"), keep=(False, True))
def unwrapped(lib: Any, *, precision: str, keep: bool) -> Any:
    accelerator = lib.Accelerator(cpu=True, mixed_precision=precision)
    argument = model()
    net = accelerator.prepare(argument)
    plain = accelerator.unwrap_model(net, keep_fp32_wrapper=keep)
    return [plain is argument, plain(torch.ones(1, 2)).dtype, type(plain).__name__]


@cases("states", worlds=(1, 2), name=FACTS)
def fact(lib: Any, *, name: str) -> Any:
    return getattr(lib.Accelerator(cpu=True), name)


@cases(
    "states",
    worlds=(1, 2),
    size=(1, 2, 3, 5),
    padding=(False, True),
    kind=("list", "tuple", "dict", "tensor"),
)
def split_between(lib: Any, *, size: int, padding: bool, kind: str) -> Any:
    values: dict[str, Any] = {
        "list": [*range(size)],
        "tuple": (*range(size),),
        "dict": {"a": [*range(size)], "b": [str(index) for index in range(size)]},
        "tensor": torch.arange(size),
    }
    with lib.state.PartialState(cpu=True).split_between_processes(
        values[kind], apply_padding=padding
    ) as part:
        return part


@cases("states", worlds=(1, 2), when=("main", "local_main", "last", "index"))
def only_on(lib: Any, *, when: str) -> Any:
    accelerator = lib.Accelerator(cpu=True)
    decorate = {
        "main": accelerator.on_main_process,
        "local_main": accelerator.on_local_main_process,
        "last": accelerator.on_last_process,
        "index": accelerator.on_process(process_index=0),
    }[when]
    return decorate(lambda number: number + 1)(1)


@cases("states", worlds=(1, 2), argument=(1.0, "tensor of ints", "module", "none"))
def strange_losses(lib: Any, *, argument: Any) -> Any:
    accelerator = lib.Accelerator(cpu=True)
    values: dict[Any, Any] = {
        "tensor of ints": torch.ones(()), "module": model(), "none": None
    }  # fmt: skip
    return accelerator.backward(values.get(argument, argument))


@cases("states", argument=("list", "class", "text", "none", "nothing", "twice", "function"))
def strange_arguments(lib: Any, *, argument: str) -> Any:
    accelerator = lib.Accelerator(cpu=True)
    net = model()
    values: dict[str, tuple[Any, ...]] = {
        "list": ([net, 1],), "class": (nn.Linear,), "text": ("a",), "none": (None, net), "nothing": (),
        "twice": (accelerator.prepare(net),), "function": (len, net),
    }  # fmt: skip
    return accelerator.prepare(*values[argument])


@cases("states", worlds=(1, 2), trigger=(None, 0, 1))
def triggered(lib: Any, *, trigger: int | None) -> Any:
    accelerator = lib.Accelerator(cpu=True)
    if trigger == accelerator.process_index:
        accelerator.set_trigger()
    return [accelerator.check_trigger(), accelerator.check_trigger()]


@cases("states", worlds=(1, 2), kind=("optimizer", "scheduler", "model", "loader"))
def prepared_types(lib: Any, *, kind: str) -> Any:
    accelerator = lib.Accelerator(cpu=True)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    argument = {
        "optimizer": optimizer, "scheduler": SCHEDULES["step"](optimizer), "model": net, "loader": data(),
    }  # fmt: skip
    prepared = accelerator.prepare(*argument.values())
    one = dict(zip(argument, prepared, strict=True))[kind]
    again = accelerator.prepare(one)
    base = nn.parallel.DistributedDataParallel
    name = base.__name__ if isinstance(one, base) else type(one).__name__
    return [name, again is one, getattr(one, "_is_accelerate_prepared", None)]


@cases("states", rows=(4, 6))
def freed(lib: Any, *, rows: int) -> Any:
    accelerator = lib.Accelerator(cpu=True)
    net, loader = accelerator.prepare(model(), data(rows))
    net, loader = accelerator.free_memory(net, loader)
    return [net, loader, len(accelerator._models), len(accelerator._dataloaders)]


@cases("states", worlds=(1, 2), uneven=(3, 5), even=(None, False))
def joined(lib: Any, *, uneven: int, even: bool | None) -> Any:
    accelerator = lib.Accelerator(cpu=True)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    net, optimizer, loader = accelerator.prepare(net, optimizer, data(uneven, 1))
    with accelerator.join_uneven_inputs([net], even_batches=even):
        found = train(accelerator, (net, optimizer, loader, None))
    return [len(found), found[-1][1]]
