"""What DeepSpeed cannot do on the device of a run, said before an engine is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_plugins.deepspeed.library import part
from accel_state.errors import MissingDependencyError, UnsupportedError

if TYPE_CHECKING:
    from accel_plugins.deepspeed.hf_config import HfDeepSpeedConfig

_PRECISIONS = ("fp16", "bf16")


def check_device_support(config: HfDeepSpeedConfig) -> None:
    """Refuse what a configuration asks for and the device, or the machine, does not offer.

    Args:
        config: Of the active plugin.

    Raises:
        UnsupportedError: The device does not compute in the precision.
        MissingDependencyError: Offloading to a disk needs a library that is not installed.
    """
    device: Any = part("accelerator").get_accelerator()
    for name in _PRECISIONS:
        if config.get_value(f"{name}.enabled") is True and not getattr(device, f"is_{name}_supported")():
            raise UnsupportedError(
                f"{name}.enabled=True (or mixed_precision={name!r}): DeepSpeed does not train in {name} on "
                f"{device.device_name()!r} devices like this one; use "
                f"{'bf16' if name == 'fp16' else 'fp16'!r} or 'no'."
            )
    for what in ("optimizer", "param"):
        if config.get_value(f"zero_optimization.offload_{what}.device") == "nvme":
            _require_disk_operation(device, what)


def _require_disk_operation(device: Any, what: str) -> None:
    builder = device.create_op_builder("AsyncIOBuilder")
    if builder is None or not builder.is_compatible(verbose=False):
        raise MissingDependencyError(
            f"offload_{what}_device='nvme' needs DeepSpeed's operation async_io, which cannot be built here: "
            "a C++ compiler and libaio with its headers are required (the package libaio-dev of Debian and "
            "Ubuntu, libaio-devel of others; CFLAGS and LDFLAGS say where they are, if elsewhere). Or use "
            f"offload_{what}_device='cpu'."
        )
