"""Documented dataclasses of options of single axes of parallelism."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from accel_plugins.kwargs.base import expect, expect_flags, is_count, resolve_fields
from accel_state.errors import SettingsError, UnsupportedError
from accel_state.settings.sections.parallelism import ParallelismSettings

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accel_state.settings.model import Settings

_ROTATIONS = ("allgather", "alltoall")
_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3")


@dataclass
class TorchContextParallelConfig:
    """Options of torch's context parallelism.

    Args:
        cp_comm_strategy: Rotation of keys and values: `"allgather"` all at once; `"alltoall"` from rank to
            rank, overlapped with computation. The default is `PARALLELISM_CONFIG_CP_COMM_STRATEGY` of the
            environment, else `"allgather"`.

    Raises:
        SettingsError: The strategy is unknown.

    Example:
        >>> TorchContextParallelConfig("alltoall").cp_comm_strategy
        'alltoall'
    """

    cp_comm_strategy: str | None = None

    def __post_init__(self) -> None:
        resolve_fields(self, "parallelism", {"cp_comm_strategy": "allgather"})
        expect(self, "cp_comm_strategy", f"one of {[*_ROTATIONS]}", lambda value: value in _ROTATIONS)


@dataclass
class DeepSpeedSequenceParallelConfig:
    """Options of DeepSpeed's Ulysses sequence parallelism.

    Args:
        sp_seq_length: Length of all sequences, in tokens; not together with `sp_seq_length_is_variable`. The
            default is `PARALLELISM_CONFIG_SP_SEQ_LENGTH` of the environment.
        sp_seq_length_is_variable: Whether the length may differ between batches; by default, whether
            `sp_seq_length` is absent.
        sp_attn_implementation: Attention implementation of transformers: `"sdpa"` (the default),
            `"flash_attention_2"` or `"flash_attention_3"`.

    Raises:
        SettingsError: The value of a field is invalid.
    """

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None

    def __post_init__(self) -> None:
        resolve_fields(self, "parallelism", {"sp_attn_implementation": "sdpa"})
        if self.sp_seq_length_is_variable is None:
            self.sp_seq_length_is_variable = self.sp_seq_length is None
        expect_flags(self)
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
                "DeepSpeedSequenceParallelConfig(sp_attn_implementation='eager'): eager attention needs the "
                "mask of full sequences, and each rank has a shard; use 'sdpa'."
            )
        expect(
            self, "sp_attn_implementation", f"one of {[*_ATTENTION[1:]]}", lambda value: value in _ATTENTION
        )


@dataclass
class TorchTensorParallelConfig:
    """Options of torch's tensor parallelism.

    Args:
        enable_async_tp: Whether communication overlaps with matrix products, which needs `torch.compile` and
            NVIDIA devices with peer-to-peer memory access.

    Raises:
        UnsupportedError: `enable_async_tp` is true, which this version of accel does not support.
    """

    enable_async_tp: bool = False

    def __post_init__(self) -> None:
        expect_flags(self)
        if self.enable_async_tp:
            raise UnsupportedError(
                "TorchTensorParallelConfig(enable_async_tp=True) is not available in this version; leave it "
                "out."
            )


@dataclass
class TorchTensorParallelPlugin:
    """Tensor parallelism; equal to `ParallelismConfig(tp_size=…)`, which can be combined with other axes.

    Args:
        tp_size: Tensor-parallel size, at least 2.
        torch_device_mesh: A mesh with an axis `"tp"`; built from `tp_size` if `None`.

    Raises:
        SettingsError: The value of a field is invalid.
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
                    f"TorchTensorParallelPlugin(tp_size={self.tp_size!r}, torch_device_mesh={mesh!r}): the "
                    f"axis 'tp' of the mesh has {size} ranks; leave tp_size out."
                )
            self.tp_size = size
        expect(self, "tp_size", "a whole number of 2 or more", lambda value: is_count(value, least=2))

    def to_settings(self, settings: Settings) -> Settings:
        """Return the settings with the tensor-parallel size."""
        known: Any = settings.parallelism
        if known is not None and known.tp_size not in {None, 1, self.tp_size}:
            raise SettingsError(
                f"torch_tp_plugin has tp_size={self.tp_size!r}, but the parallelism settings have "
                f"{known.tp_size!r}; give one of the two."
            )
        return replace(settings, parallelism=replace(known or ParallelismSettings(), tp_size=self.tp_size))
