"""Options of single axes of parallelism: documented dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from accel_plugins.kwargs.base import expect, expect_flags, is_count
from accel_state import environ
from accel_state.errors import SettingsError, UnsupportedError
from accel_state.settings.engines import ParallelismSettings
from accel_state.settings.environ import from_environ

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accel_state.settings.model import Settings

SWITCH = "ACCELERATE_USE_PARALLELISM_CONFIG"

_ROTATIONS = ("allgather", "alltoall")
_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3")


def from_outside() -> ParallelismSettings:
    """What the environment says about parallelism, also where its switch is off."""
    return from_environ({**environ.read(), SWITCH: "true"}).parallelism or ParallelismSettings()


@dataclass
class TorchContextParallelConfig:
    """How torch's context parallelism sends keys and values around.

    Args:
        cp_comm_strategy: `"allgather"`: everything at once; `"alltoall"`: from rank to rank, while computing.
            Else `PARALLELISM_CONFIG_CP_COMM_STRATEGY`, else `"allgather"`.

    Raises:
        SettingsError: There is no such way.

    Example:
        >>> TorchContextParallelConfig("alltoall").cp_comm_strategy
        'alltoall'
    """

    cp_comm_strategy: str | None = None

    def __post_init__(self) -> None:
        if self.cp_comm_strategy is None:
            self.cp_comm_strategy = from_outside().cp_comm_strategy or "allgather"
        expect(self, "cp_comm_strategy", f"one of {[*_ROTATIONS]}", lambda value: value in _ROTATIONS)


@dataclass
class DeepSpeedSequenceParallelConfig:
    """How DeepSpeed's Ulysses divides sequences.

    Args:
        sp_seq_length: How long sequences are; not together with `sp_seq_length_is_variable`. Else
            `PARALLELISM_CONFIG_SP_SEQ_LENGTH`.
        sp_seq_length_is_variable: Whether every batch may have another length; if nothing is said, whether no
            length is given.
        sp_attn_implementation: Which attention of transformers computes on the parts: `"sdpa"` (the default),
            `"flash_attention_2"` or `"flash_attention_3"`.

    Raises:
        SettingsError: A field cannot be used.
    """

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None

    def __post_init__(self) -> None:
        outside = from_outside()
        if self.sp_seq_length is None:
            self.sp_seq_length = outside.sp_seq_length
        if self.sp_seq_length_is_variable is None:
            self.sp_seq_length_is_variable = outside.sp_seq_length_is_variable
        if self.sp_seq_length_is_variable is None:
            self.sp_seq_length_is_variable = self.sp_seq_length is None
        if self.sp_attn_implementation is None:
            self.sp_attn_implementation = outside.sp_attn_implementation or "sdpa"
        expect_flags(self, "sp_seq_length_is_variable")
        expect(
            self,
            "sp_seq_length",
            "a whole number of 1 or more, or None",
            lambda value: value is None or is_count(value, least=1),
        )
        if not self.sp_seq_length_is_variable and self.sp_seq_length is None:
            raise SettingsError(
                "DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=False): give sp_seq_length."
            )
        if self.sp_attn_implementation == "eager":
            raise SettingsError(
                "DeepSpeedSequenceParallelConfig(sp_attn_implementation='eager'): needs the mask of whole "
                "sequences, which no rank has; use 'sdpa'."
            )
        expect(
            self, "sp_attn_implementation", f"one of {[*_ATTENTION[1:]]}", lambda value: value in _ATTENTION
        )


@dataclass
class TorchTensorParallelConfig:
    """How torch's tensor parallelism communicates.

    Args:
        enable_async_tp: Whether communication overlaps with the matrix products around it. It is a matter of
            `torch.compile` on NVIDIA devices that see each other's memory.

    Raises:
        UnsupportedError: It is asked for; this version of accel does not switch it on.
    """

    enable_async_tp: bool = False

    def __post_init__(self) -> None:
        expect_flags(self, "enable_async_tp")
        if self.enable_async_tp:
            raise UnsupportedError(
                "TorchTensorParallelConfig(enable_async_tp=True) is not available in this version; leave "
                "it out."
            )


@dataclass
class TorchTensorParallelPlugin:
    """Tensor parallelism alone; `ParallelismConfig(tp_size=…)` says the same and combines with other axes.

    Args:
        tp_size: Among how many processes each layer is divided; at least 2.
        torch_device_mesh: The mesh to use, with an axis `"tp"`; made from `tp_size` if `None`.

    Raises:
        SettingsError: A field cannot be used.
    """

    tp_size: int = 1
    torch_device_mesh: DeviceMesh | None = None

    def __post_init__(self) -> None:
        mesh = self.torch_device_mesh
        if mesh is not None:
            size = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False)).get("tp")
            if size is None:
                raise SettingsError(
                    f"TorchTensorParallelPlugin(torch_device_mesh={mesh!r}): it has no axis named 'tp'."
                )
            if self.tp_size not in {1, size}:
                raise SettingsError(
                    f"TorchTensorParallelPlugin(tp_size={self.tp_size!r}, torch_device_mesh={mesh!r}): "
                    "the axis "
                    f"'tp' of the mesh has {size} ranks."
                )
            self.tp_size = size
        expect(self, "tp_size", "a whole number of 2 or more", lambda value: is_count(value, least=2))

    def to_settings(self, settings: Settings) -> Settings:
        """The settings with the size of the axis."""
        known: Any = settings.parallelism
        if known is not None and known.tp_size not in {None, 1, self.tp_size}:
            raise SettingsError(
                f"torch_tp_plugin says tp_size={self.tp_size!r}, and the parallelism settings say "
                f"{known.tp_size!r}; give one of the two."
            )
        return replace(settings, parallelism=replace(known or ParallelismSettings(), tp_size=self.tp_size))
