"""Check that DeepSpeed supports a configuration on the run's device, before an engine is built."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_plugins.deepspeed.library import ds_module
from accel_state.errors import MissingDependencyError, UnsupportedError

if TYPE_CHECKING:
    from accel_plugins.deepspeed.hf_config import HfDeepSpeedConfig

_PRECISIONS = ("fp16", "bf16")


def check_device_support(config: HfDeepSpeedConfig) -> None:
    """Check the precision and the offload devices of a configuration.

    Args:
        config: The configuration of the active plugin.

    Raises:
        UnsupportedError: DeepSpeed does not support the precision on the device.
        MissingDependencyError: Offloading to disk needs a library that is not installed.
    """
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
