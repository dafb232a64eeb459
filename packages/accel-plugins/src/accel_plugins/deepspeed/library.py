"""Import DeepSpeed (the only module that does) and check that it has the names used by this package."""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from accel_ops.modules import replaced_attributes
from accel_state import environ, process_group
from accel_state.errors import MissingDependencyError
from accel_state.libraries import compare_versions, require

if TYPE_CHECKING:
    from accel_state.runtime import Runtime

_MINIMUM = "0.19.8"  # Earlier versions lack names that this package uses.
_EXTRA = "accel-plugins[deepspeed]"


def load_library(what: str) -> ModuleType:
    """Import DeepSpeed."""
    require("deepspeed", what, install=_EXTRA)
    if compare_versions("deepspeed", "<", _MINIMUM):
        raise MissingDependencyError(
            f"{what} needs deepspeed {_MINIMUM} or newer, but {version('deepspeed')} is installed: "
            f"run `pip install '{_EXTRA}'`"
        )
    with warnings.catch_warnings():
        # Its users cannot change the deprecated calls that it makes.
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        return importlib.import_module("deepspeed")


def ds_module(name: str) -> Any:
    """Import a submodule of DeepSpeed, named without the prefix `deepspeed.`."""
    return importlib.import_module(f"deepspeed.{name}")


def start(runtime: Runtime) -> ModuleType:
    """Import DeepSpeed and initialise it with the device and the process group of this run.

    A single process gets a process group of one rank, which DeepSpeed needs.
    """
    if "LOCAL_RANK" not in environ.read():  # DeepSpeed derives its device from it.
        environ.publish({"LOCAL_RANK": str(runtime.topology.local_rank)})
    environment = environ.read()
    device = {} if "DS_ACCELERATOR" in environment else {"ds_accelerator": runtime.device.type}
    with environ.patch_environment(**device):  # DeepSpeed chooses its device when it is imported.
        deepspeed = load_library("the strategy 'deepspeed'")
        process_group.join_single(runtime.kind.backend, runtime.device)
        if not deepspeed.comm.is_initialized():
            # Its inference op for CPUs would compile for minutes; training does not use it.
            skipped = {"create_op_builder": lambda _: None} if runtime.device.type == "cpu" else {}
            with replaced_attributes(deepspeed.accelerator.get_accelerator(), skipped):
                deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
    return deepspeed


# Common arguments keep their names; only these are added.
_VERSIONS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "AdamW": ("ops.adam", "DeepSpeedCPUAdam", {"adamw_mode": True}),
    "Adam": ("ops.adam", "DeepSpeedCPUAdam", {"adamw_mode": False}),
    "Adagrad": ("ops.adagrad", "DeepSpeedCPUAdagrad", {}),
    "Lion": ("ops.lion", "DeepSpeedCPULion", {}),
}


def map_pytorch_optim_to_deepspeed(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Build DeepSpeed's CPU version of an optimizer, for offloading.

    Args:
        optimizer: Adam, AdamW, Adagrad, Lion, or a subclass; any other is returned unchanged.

    Returns:
        An optimizer of the same parameter groups, without state.

    Raises:
        MissingDependencyError: DeepSpeed is not installed.
    """
    names = [kind.__name__ for kind in type(optimizer).__mro__]
    row = next((_VERSIONS[name] for name in names if name in _VERSIONS), None)
    if row is None or any(kind.__module__.startswith("deepspeed.") for kind in type(optimizer).__mro__):
        return optimizer
    load_library("map_pytorch_optim_to_deepspeed()")
    module, name, more = row
    version = getattr(ds_module(module), name)
    accepted = inspect.signature(version).parameters
    known = {key: value for key, value in optimizer.defaults.items() if key in accepted and key not in more}
    return version(optimizer.param_groups, **known, **more)


def is_sharded(parameter: torch.Tensor) -> bool:
    """Return whether stage 3 has sharded a parameter."""
    return "ds_id" in vars(parameter)


def is_flattened(optimizer: Any) -> bool:
    """Return whether an engine has flattened and sharded the parameters of its optimizer."""
    return isinstance(optimizer, ds_module("runtime.base_optimizer").ZeROOptimizer)


def plain_masters(
    optimizer: Any, groups: Sequence[Sequence[torch.Tensor]]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield 16-bit parameters of stage 0 with their float32 master weights."""
    inner = None if is_flattened(optimizer) else getattr(optimizer, "optimizer", None)
    rows: Any = getattr(inner, "param_groups", ())
    for tensors, group in zip(groups, rows, strict=False):
        trained = [tensor for tensor in tensors if tensor.requires_grad and tensor.numel()]
        masters = [master.detach() for master in group["params"]]
        if len(masters) != len(trained):  # They are one flat tensor.
            masters = masters[0].split([tensor.numel() for tensor in trained])
        for tensor, master in zip(trained, masters, strict=True):
            yield tensor, master.view(tensor.shape)


@contextmanager
def GatheredParameters(  # noqa: N802 - the documented name
    params: torch.Tensor | Iterable[torch.Tensor],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Generator[None]:
    """Gather parameters that DeepSpeed's stage 3 has sharded, within the block. A collective over all ranks.

    Parameters that are not sharded are unchanged.

    Args:
        params: One or several parameters.
        modifier_rank: The rank whose changes are broadcast at the end; `None` if nothing is changed.
        fwd_module: The module that uses another module's parameters in its forward pass.
        enabled: Whether to gather; if false, nothing happens.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> with GatheredParameters(weight, modifier_rank=0):
        ...     weight.data += 1
        >>> weight.tolist()
        [1.0, 1.0]
    """
    parameters = [params] if isinstance(params, torch.Tensor) else params
    sharded = [parameter for parameter in parameters if is_sharded(parameter)]
    if not enabled or not sharded:
        yield
        return
    gather = ds_module("runtime.zero").GatheredParameters
    with gather(sharded, modifier_rank=modifier_rank, fwd_module=fwd_module):
        yield
