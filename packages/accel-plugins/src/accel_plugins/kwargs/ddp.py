"""Options of `DistributedDataParallel`, gradient compression included."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from accel_plugins import kwargs
from accel_plugins.kwargs.base import KwargsHandler, expect, expect_flags, is_count
from accel_state.errors import SettingsError
from accel_state.labels import DDPCommunicationHookType

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.nn.parallel import DistributedDataParallel

_Hook = DDPCommunicationHookType
_WRAPPERS = (_Hook.NO, _Hook.FP16, _Hook.BF16)
_WITH_STATE = frozenset({_Hook.POWER_SGD, _Hook.BATCHED_POWER_SGD})


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Options of `torch.nn.parallel.DistributedDataParallel`.

    Args:
        dim: Dim along which inputs are split over several devices of one process.
        broadcast_buffers: Whether rank 0 broadcasts its buffers at the start of every forward pass.
        bucket_cap_mb: Size in MiB of the buckets in which gradients are all-reduced.
        find_unused_parameters: Whether parameters that a forward pass did not use are looked for.
        check_reduction: Deprecated by PyTorch; has no effect there.
        gradient_as_bucket_view: Whether gradients are views of the buckets, which saves a copy of them.
        static_graph: Whether the same parameters are used in every pass.
        comm_hook: Communication hook that compresses gradients; a name or a member.
        comm_wrapper: `FP16` or `BF16`: dtype to which the hook's messages are compressed further.
        comm_state_option: Arguments of `PowerSGDState`, for the two PowerSGD hooks.

    Raises:
        SettingsError: A field is unknown, out of its range, or would have no effect.

    Example:
        >>> DistributedDataParallelKwargs(find_unused_parameters=True, comm_hook="fp16").to_kwargs()
        {'find_unused_parameters': True}
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        expect_flags(self)
        expect(self, "dim", "an integer", lambda value: isinstance(value, int))
        expect(self, "bucket_cap_mb", "a whole number above 0", lambda value: is_count(value, least=1))
        self.comm_hook = self._hook("comm_hook", _Hook)
        self.comm_wrapper = self._hook("comm_wrapper", _WRAPPERS)
        if self.comm_state_option and self.comm_hook not in _WITH_STATE:
            raise SettingsError(
                f"{type(self).__name__}(comm_state_option={self.comm_state_option!r}): has no effect with "
                f"comm_hook={self.comm_hook.value!r}; it belongs to 'power_sgd' and 'batched_power_sgd'."
            )

    def to_dict(
        self, ignore_keys: tuple[str, ...] = ("comm_hook", "comm_wrapper", "comm_state_option")
    ) -> dict[str, Any]:
        """Return the fields that are arguments of `DistributedDataParallel`.

        Args:
            ignore_keys: Fields to leave out.
        """
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Register the communication hook of these options, if there is one.

        Args:
            model: A wrapped model that has no hook yet.
        """
        if self.comm_hook is _Hook.NO and self.comm_wrapper is _Hook.NO:
            return
        options = self.comm_state_option if self.comm_hook in _WITH_STATE else None
        kwargs.comm_hooks.register(model, self.comm_hook, self.comm_wrapper, options)

    def _hook(self, name: str, choices: Iterable[DDPCommunicationHookType]) -> DDPCommunicationHookType:
        values = [choice.value for choice in choices]
        expect(self, name, f"one of {values}", lambda value: getattr(value, "value", value) in values)
        return _Hook(getattr(self, name))
