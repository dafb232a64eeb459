"""`ParallelismConfig`: the sizes of all axes, their arithmetic, and the mesh that they make."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from accel_plugins.kwargs.base import is_count
from accel_plugins.parallelism.handlers import (
    DeepSpeedSequenceParallelConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
    from_outside,
)
from accel_plugins.parallelism.mesh import mesh_of
from accel_state.errors import SettingsError
from accel_state.settings.engines import ParallelismSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.device_mesh import DeviceMesh

    from accel_state.settings.model import Settings

AXES: tuple[str, ...] = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
"""Every axis, the one whose neighbours are farthest apart first."""

_BACKENDS = {"cp_backend": "torch", "sp_backend": "deepspeed"}
_HANDLERS: dict[str, type[Any]] = {
    "tp": TorchTensorParallelConfig,
    "cp": TorchContextParallelConfig,
    "sp": DeepSpeedSequenceParallelConfig,
}


@dataclass
class ParallelismConfig:
    """Along which axes processes divide the work. What is left out is `PARALLELISM_CONFIG_*`, else 1.

    The product of all sizes is the number of processes.

    Args:
        dp_replicate_size: How many groups of processes hold a whole copy of the model, each with batches of
            its own.
        dp_shard_size: Among how many processes the parameters of a copy are sharded (FSDP2), each with
            batches of its own.
        tp_size: Among how many processes each layer is divided; they have the same batches.
        cp_size: Among how many processes each sequence is divided; parameters are sharded among them, too.
        cp_backend: What does that: `"torch"`.
        sp_size: Among how many processes each sequence is divided by DeepSpeed's Ulysses.
        sp_backend: What does that: `"deepspeed"`.
        tp_handler: Options of tensor parallelism.
        cp_handler: Options of context parallelism.
        sp_handler: Options of sequence parallelism.

    Raises:
        SettingsError: A size is no number of processes, axes do not go together, or options are given for an
            axis that is not used.

    Example:
        >>> config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=4, tp_size=2)
        >>> config.total_size, config.active_mesh_dims
        (16, ['dp_replicate', 'dp_shard', 'tp'])
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: str | None = None
    sp_size: int | None = None
    sp_backend: str | None = None
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: TorchContextParallelConfig | None = None
    sp_handler: DeepSpeedSequenceParallelConfig | None = None
    device_mesh: DeviceMesh | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        outside = from_outside()
        for name in (f"{axis}_size" for axis in AXES):
            if getattr(self, name) is None:
                setattr(self, name, getattr(outside, name) or 1)
            if not is_count(getattr(self, name), least=1):
                raise SettingsError(
                    f"ParallelismConfig({name}={getattr(self, name)!r}): expected a whole number of 1 or "
                    "more."
                )
        for name, only in _BACKENDS.items():
            if getattr(self, name) is None:
                setattr(self, name, getattr(outside, name) or only)
            if getattr(self, name) != only:
                raise SettingsError(
                    f"ParallelismConfig({name}={getattr(self, name)!r}): there is {only!r} only."
                )
        for axis, kind in _HANDLERS.items():
            self._resolve_handler(axis, kind)
        if self.cp_enabled and self.sp_enabled:
            raise SettingsError(
                f"ParallelismConfig(cp_size={self.cp_size!r}, sp_size={self.sp_size!r}): a sequence is "
                "divided "
                "by context parallelism or by sequence parallelism, not by both."
            )

    def _resolve_handler(self, axis: str, kind: type[Any]) -> None:
        name = f"{axis}_handler"
        handler = getattr(self, name)
        if handler is None:
            if self.sizes[axis] > 1:
                setattr(self, name, kind())
            return
        if not isinstance(handler, kind):
            raise SettingsError(f"ParallelismConfig({name}={handler!r}): expected a {kind.__name__}.")
        if self.sizes[axis] == 1:
            raise SettingsError(
                f"ParallelismConfig({name}={handler!r}): has no effect with {axis}_size=1; leave it out."
            )

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis}_size={size}" for axis, size in self.sizes.items())
        return f"ParallelismConfig({sizes})"

    @property
    def sizes(self) -> dict[str, int]:
        """Axis to size, in the order of `AXES`."""
        return {axis: getattr(self, f"{axis}_size") for axis in AXES}

    @property
    def total_size(self) -> int:
        """How many processes there have to be."""
        return math.prod(self.sizes.values())

    @property
    def data_parallel_size(self) -> int:
        """How many groups of processes have batches of their own."""
        return self.sizes["dp_replicate"] * self.sizes["dp_shard"]

    @property
    def non_data_parallel_size(self) -> int:
        """How many processes share the batches of one group."""
        return self.total_size // self.data_parallel_size

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether there are several copies of the model."""
        return self.sizes["dp_replicate"] > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether parameters are sharded."""
        return self.sizes["dp_shard"] > 1

    @property
    def tp_enabled(self) -> bool:
        """Whether layers are divided."""
        return self.sizes["tp"] > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether sequences are divided by context parallelism."""
        return self.sizes["cp"] > 1

    @property
    def sp_enabled(self) -> bool:
        """Whether sequences are divided by sequence parallelism."""
        return self.sizes["sp"] > 1

    @property
    def dp_dim_names(self) -> list[str]:
        """The axes along which batches are divided."""
        return self._active("dp_replicate", "dp_shard")

    @property
    def non_dp_dim_names(self) -> list[str]:
        """The other axes."""
        return self._active("tp", "cp", "sp")

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """The axes along which parameters are sharded."""
        return self._active("dp_shard", "cp")

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """The axes along which losses are averaged."""
        return self._active("dp_replicate", "dp_shard", "cp")

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The axes of the mesh that `fully_shard` gets: one for copies, where there are, one for shards."""
        return [*self._active("dp_replicate"), "dp_shard_cp"]

    @property
    def active_mesh_dims(self) -> list[str]:
        """The axes of more than one process, in the order of the mesh."""
        return self._active(*AXES)

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Make the mesh of all axes, and those of axes taken together. Call it on every process.

        Args:
            device_type: Such as `"cuda"`.

        Returns:
            The mesh; `None` if no axis has more than one process.

        Raises:
            SettingsError: There are more or fewer processes than the product of the sizes.
        """
        world = dist.get_world_size() if dist.is_initialized() else 1
        self.check_world(world)
        names = self._mesh_dims()
        if not names:
            return None
        mesh = mesh_of(device_type, {name: self.sizes[name] for name in names})
        for whole, parts in (
            ("dp", self.dp_dim_names),
            ("dp_shard_cp", [name for name in names if name in {"dp_shard", "cp"}]),
            ("dp_cp", self.dp_cp_dim_names),
        ):
            if len(parts) > 1:
                mesh[tuple(parts)]._flatten(whole)  # pyright: ignore[reportPrivateUsage] - the documented way
        self.device_mesh = mesh
        return mesh

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """The mesh that was built, or that is built now.

        Args:
            device_type: Such as `"cuda"`; may be left out once there is a mesh.

        Raises:
            SettingsError: There is none yet, and no type to make it for; or it is for another type.
        """
        if self.device_mesh is None:
            if device_type is None:
                raise SettingsError("get_device_mesh() needs a device_type, as there is no mesh yet.")
            return self.build_device_mesh(device_type)
        if device_type not in {None, self.device_mesh.device_type}:
            raise SettingsError(
                f"get_device_mesh({device_type!r}): there is a mesh for {self.device_mesh.device_type!r} "
                "already."
            )
        return self.device_mesh

    def check_world(self, world_size: int) -> None:
        """Refuse another number of processes than that of all axes together.

        Raises:
            SettingsError: It is another.
        """
        if self.total_size != world_size:
            product = (
                " x ".join(f"{axis}_size={size}" for axis, size in self.sizes.items() if size > 1) or "1"
            )
            raise SettingsError(
                f"ParallelismConfig: {product} makes {self.total_size} processes, and there are "
                f"{world_size}; "
                "the product of all sizes must be the number of processes."
            )

    def to_json(self) -> dict[str, Any]:
        """All fields as plain data; the mesh is left out."""
        found: dict[str, Any] = {}
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name != "device_mesh":
                found[one.name] = vars(value).copy() if one.name.endswith("_handler") and value else value
        return found

    def to_settings(self, settings: Settings) -> Settings:
        """The settings with the sizes of the axes."""
        section = replace(
            settings.parallelism or ParallelismSettings(),
            **{f"{axis}_size": size for axis, size in self.sizes.items()},
        )
        return replace(settings, parallelism=section)

    def _mesh_dims(self) -> list[str]:
        # `fully_shard` wants an axis of shards beside one of copies, be it of one process.
        lone = self.dp_replicate_enabled and not self.dp_shard_cp_dim_names and self.tp_enabled
        return [axis for axis in AXES if self.sizes[axis] > 1 or (lone and axis == "dp_shard")]

    def _active(self, *axes: str) -> list[str]:
        return [axis for axis in axes if self.sizes[axis] > 1]


def check_axes(handlers: Mapping[type, Any], world_size: int) -> None:
    """Refuse a `ParallelismConfig` for another number of processes, where nothing is divided along its axes.

    Args:
        handlers: It may be among them.
        world_size: How many processes there are.

    Raises:
        SettingsError: It is for another number.
    """
    config: ParallelismConfig | None = handlers.get(ParallelismConfig)
    if config is not None:
        config.check_world(world_size)
