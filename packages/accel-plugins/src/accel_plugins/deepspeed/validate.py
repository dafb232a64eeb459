"""Preflight checks of prepare: they run before the first collective, so every rank raises and none hangs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim import Adagrad, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from accel_plugins.deepspeed.dummy import DummyOptim, DummyScheduler
from accel_plugins.deepspeed.fill import refuse_misspelt
from accel_plugins.deepspeed.library import ds_module
from accel_state.errors import MissingDependencyError, SettingsError, UnsupportedError
from accel_state.logging import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn

    from accel_plugins.bundle import Bundle
    from accel_plugins.deepspeed.hf_config import HfDeepSpeedConfig

logger = get_logger(__name__)

# Keys that DeepSpeed's constants lack.
_MORE_NAMES = frozenset(
    {
        "amp",
        "aio",
        "tensorboard",
        "wandb",
        "csv_monitor",
        "comet",
        "flops_profiler",
        "activation_checkpointing",
        "autotuning",
        "elasticity",
        "compression_training",
        "weight_quantization",
        "hybrid_engine",
        "tensor_parallel",
        "compile",
        "timers",
        "nebula",
        "sequence_parallel_size",
        "data_parallel_size",
        "inference",
        "pipeline",
    }
)
_NAMES_IN = ("runtime.constants", "runtime.config", "runtime.zero.config", "monitor.config", "comm.config")


def check_request(config: HfDeepSpeedConfig, bundle: Bundle, *, trains: bool) -> None:
    """Check that an engine can be built from the prepared objects."""
    models, optimizers = (
        bundle.models,
        [one for one in bundle.optimizers if isinstance(one, (Optimizer, DummyOptim))],
    )
    if optimizers and not models:
        raise SettingsError(
            "DeepSpeed needs the model and its optimizer together: pass both to one call of "
            "accelerator.prepare()."
        )
    if optimizers and (trains or len(models) > 1 or len(optimizers) > 1):
        raise UnsupportedError(
            f"prepare() got {len(models)} model(s) and {len(optimizers)} optimizer(s)"
            f"{', after a model to train was prepared' if trains else ''}: with DeepSpeed, an Accelerator "
            "trains one model with one optimizer. Create another Accelerator for each further one, with "
            "its own plugin (deepspeed_plugins={name: plugin}), or call free_memory() to release the "
            "first one."
        )
    schedules = [one for one in bundle.schedulers if isinstance(one, DummyScheduler)]
    if schedules and not optimizers:
        raise SettingsError(
            "DummyScheduler is a placeholder for the scheduler of DeepSpeed's engine: pass it to the call of "
            "accelerator.prepare() that gets the model and its optimizer."
        )
    if optimizers:
        _check_optimizer(config, optimizers[0], models[0])
        _check_schedule(
            config, [one for one in bundle.schedulers if isinstance(one, (LRScheduler, DummyScheduler))]
        )


def config_names() -> frozenset[str]:
    """Return the top-level keys that the installed version of DeepSpeed knows."""
    names = set(_MORE_NAMES)
    for module in _NAMES_IN:
        names |= {
            value
            for key, value in vars(ds_module(module)).items()
            if key.isupper() and isinstance(value, str)
        }
    return frozenset(names)


def parsed(config: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Validate a filled configuration with DeepSpeed's own parser."""
    unknown = refuse_misspelt(config, names)
    if unknown:
        logger.warning(
            "The DeepSpeed configuration has %s, which the installed version does not know: no effect.",
            ", ".join(map(repr, unknown)),
        )
    try:
        ds_module("runtime.zero.config").get_zero_config(config)
    except ValueError as error:  # pydantic's, which lists all fields at once
        raise SettingsError(
            f"DeepSpeed cannot use zero_optimization={config['zero_optimization']!r}: {error}"
        ) from None
    return config


def _check_optimizer(config: HfDeepSpeedConfig, optimizer: Any, model: nn.Module) -> None:
    described = config.get_value("optimizer")
    if isinstance(optimizer, DummyOptim):
        if described is None:
            raise SettingsError(
                "DummyOptim is a placeholder for the optimizer of the DeepSpeed configuration, which has "
                'none: add "optimizer" to the configuration, or pass an optimizer of PyTorch.'
            )
        tensors = optimizer.tensors()
    else:
        if described is not None:
            raise SettingsError(
                f"The DeepSpeed configuration has optimizer={described!r}, but prepare() got "
                f'{type(optimizer).__name__}: remove "optimizer" from the configuration, or pass a '
                "DummyOptim."
            )
        groups, stage = optimizer.param_groups, config.get_value("zero_optimization.stage")
        if isinstance(optimizer, Adagrad) and len(groups) > 1 and stage in {1, 2}:
            raise SettingsError(
                f"Adagrad with {len(groups)} parameter groups: stage {stage} of DeepSpeed keeps only the "
                "first. Use zero_stage=0 or 3, or a single group."
            )
        tensors = [tensor for group in groups for tensor in group["params"]]
    _check_owner(tensors, optimizer, model)


def _check_owner(tensors: Iterable[Tensor], optimizer: Any, model: nn.Module) -> None:
    model_parameters = {id(one) for one in model.parameters()}
    own = [*tensors]
    foreign = [one for one in own if id(one) not in model_parameters]
    if foreign or not own:
        raise SettingsError(
            f"{len(foreign)} of the {len(own)} parameter(s) of {type(optimizer).__name__} do not belong to "
            f"the {type(model).__name__} that is prepared with it: create the optimizer from the parameters "
            "of that model (not of a copy, and after its parameters were replaced)."
        )


def _check_schedule(config: HfDeepSpeedConfig, schedules: list[Any]) -> None:
    described = config.get_value("scheduler")
    for one in schedules:
        is_placeholder = isinstance(one, DummyScheduler)
        if is_placeholder and described is None and one.lr_scheduler_callable is None:
            raise SettingsError(
                "DummyScheduler is a placeholder for the scheduler of the DeepSpeed configuration, which has "
                'none: add "scheduler" to the configuration, give an lr_scheduler_callable, or pass a '
                "scheduler of PyTorch."
            )
        if described is not None and (not is_placeholder or one.lr_scheduler_callable is not None):
            raise SettingsError(
                f"The DeepSpeed configuration has scheduler={described!r}, but prepare() got another one: "
                'remove "scheduler" from the configuration, or pass a DummyScheduler without '
                "lr_scheduler_callable."
            )


_PRECISIONS = ("fp16", "bf16")


def check_device_support(config: HfDeepSpeedConfig) -> None:
    """Check the precision and the offload devices of a configuration."""
    device: Any = ds_module("accelerator").get_accelerator()
    for name in _PRECISIONS:
        if config.get_value(f"{name}.enabled") is True and not getattr(device, f"is_{name}_supported")():
            raise UnsupportedError(
                f"{name}.enabled=True (or mixed_precision={name!r}): DeepSpeed does not support {name} on "
                f"{device.device_name()!r} devices; use "
                f"{'bf16' if name == 'fp16' else 'fp16'!r} or 'no'."
            )
    for what in ("optimizer", "param"):
        if config.get_value(f"zero_optimization.offload_{what}.device") == "nvme":
            _require_disk_operation(device, what)


def _require_disk_operation(device: Any, what: str) -> None:
    builder = device.create_op_builder("AsyncIOBuilder")
    if builder is None or not builder.is_compatible(verbose=False):
        raise MissingDependencyError(
            f"offload_{what}_device='nvme' needs DeepSpeed's operation async_io, which cannot be built on "
            "this host: install a C++ compiler and libaio with its headers (package libaio-dev on Debian "
            "and Ubuntu, libaio-devel on others; set CFLAGS and LDFLAGS for other paths), or use "
            f"offload_{what}_device='cpu'."
        )
