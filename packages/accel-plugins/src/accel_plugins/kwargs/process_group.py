"""Options of the process group."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from accel_plugins.kwargs.base import KwargsHandler, expect

# PyTorch's own (torch.distributed.constants), repeated since nccl's is unset in builds without nccl.
_TIMEOUTS = {"nccl": timedelta(minutes=10)}
_TIMEOUT = timedelta(minutes=30)


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Options of `torch.distributed.init_process_group`.

    Args:
        backend: Name of the backend; the default `"nccl"` means the backend of the run's device.
        init_method: URL of the rendezvous; the launcher's variables if `None`.
        timeout: How long a collective may take before every rank raises an error. If `None`, it is set to
            10 minutes for nccl, 30 minutes for others.

    Raises:
        SettingsError: A field has another type, or the timeout is not positive.

    Example:
        >>> InitProcessGroupKwargs(timeout=timedelta(seconds=90)).to_kwargs()
        {'timeout': datetime.timedelta(seconds=90)}
    """

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        text = "a text or None"
        expect(self, "backend", text, lambda value: value is None or isinstance(value, str))
        expect(self, "init_method", text, lambda value: value is None or isinstance(value, str))
        self._has_timeout = self.timeout is not None
        if self.timeout is None:
            self.timeout = _TIMEOUTS.get(self.backend or "", _TIMEOUT)
        expect(
            self,
            "timeout",
            "a positive time, such as datetime.timedelta(seconds=600)",
            lambda value: isinstance(value, timedelta) and value > timedelta(0),
        )

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields that were set, also a timeout that equals another backend's default."""
        timeout = {"timeout": self.timeout} if self._has_timeout else {}
        return super().to_kwargs() | timeout
