"""Sizes of the axes of parallelism (`ParallelismConfig`), the options of each, and a run's device mesh."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import device_mesh as torch_mesh
from torch.distributed.device_mesh import DeviceMesh

from accel_plugins.kwargs import expect, expect_counts, expect_flags, resolve_fields
from accel_plugins.strategy import BatchSharding
from accel_state import process_group
from accel_state.collectives import group_timeout, set_group_timeout
from accel_state.errors import SettingsError, UnsupportedError
from accel_state.frozen import frozen
from accel_state.libraries import is_torch_version
from accel_state.settings.engines import ParallelismSettings, find_axes_conflict
from accel_state.settings.model import Settings

if TYPE_CHECKING:
    from accel_state.runtime import Runtime

AXES: tuple[str, ...] = ("pp", "dp_replicate", "dp_shard", "cp", "sp", "tp")
"""The axes, outermost first (neighbours along it have the most distant ranks)."""

_STAGES_PER_RANK = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
}
_LOOPED = ("Interleaved1F1B", "InterleavedZeroBubble")

logger = logging.getLogger(__name__)


_DEFAULTS: Mapping[str, Any] = {
    **{f"{axis}_size": 1 for axis in (*AXES, "ep")},
    "cp_backend": "torch",
    "cp_comm_strategy": "allgather",
    "sp_attn_implementation": "sdpa",
    "pp_schedule": "1F1B",
}
_CHOICES: Mapping[str, tuple[str | None, ...]] = {
    "cp_backend": ("torch",),
    "sp_backend": (None, "deepspeed", "torch"),
    "cp_comm_strategy": ("allgather", "alltoall"),
    # Eager attention would need the mask of full sequences.
    "sp_attn_implementation": ("sdpa", "flash_attention_2", "flash_attention_3"),
}
_OPTIONAL_COUNTS = ("sp_seq_length", "pp_num_microbatches", "pp_stages_per_rank")


def _resolve(options: Any) -> None:
    """Fill fields that are `None` from the environment, else with their defaults, and check them."""
    names = [option.name for option in fields(options)]
    resolve_fields(options, "parallelism", _DEFAULTS)
    expect_flags(options, *names)
    for name in names:
        if name.endswith("_size") or name in _OPTIONAL_COUNTS:
            expect_counts(options, name, optional=name in _OPTIONAL_COUNTS)
        elif name in _CHOICES:
            choices = _CHOICES[name]
            expect(options, name, f"one of {[*filter(None, choices)]}", getattr(options, name) in choices)


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
        _resolve(self)


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
        _resolve(self)
        if self.sp_seq_length_is_variable is None:
            self.sp_seq_length_is_variable = self.sp_seq_length is None
        is_known = self.sp_seq_length_is_variable or self.sp_seq_length is not None
        expect(self, "sp_seq_length_is_variable", "True without sp_seq_length: give that", is_known)


@dataclass
class TorchTensorParallelConfig:
    """Options of torch's tensor parallelism.

    Args:
        enable_async_tp: Whether communication overlaps with matrix products, which needs `torch.compile` and
            NVIDIA devices with peer-to-peer memory access. Has no effect in this version, which warns.
    """

    enable_async_tp: bool = False

    def __post_init__(self) -> None:
        expect_flags(self)
        if self.enable_async_tp:
            logger.warning(
                "TorchTensorParallelConfig(enable_async_tp=True) has no effect in this version: "
                "communication does not overlap with matrix products. Remove it."
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
            wanted = f"an axis named 'tp', which has the size; leave out tp_size={self.tp_size!r}"
            expect(self, "torch_device_mesh", wanted, size is not None and self.tp_size in {1, size})
            self.tp_size = cast("int", size)
        expect_counts(self, "tp_size", least=2)

    def to_settings(self, settings: Settings) -> Settings:
        """Return the settings with the tensor-parallel size."""
        known: Any = settings.parallelism
        if known is not None and known.tp_size not in {None, 1, self.tp_size}:
            raise SettingsError(
                f"torch_tp_plugin has tp_size={self.tp_size!r}, but the parallelism settings have "
                f"{known.tp_size!r}; pass only one of the two."
            )
        return replace(settings, parallelism=replace(known or ParallelismSettings(), tp_size=self.tp_size))


@dataclass
class TorchPipelineParallelConfig:
    """Options of pipeline parallelism; the defaults come from the environment: `PARALLELISM_CONFIG_PP_*`.

    Args:
        pp_schedule: The schedule of torch that orders forward and backward passes: `"GPipe"`, `"1F1B"` (the
            default), `"Interleaved1F1B"`, `"InterleavedZeroBubble"` or `"ZBVZeroBubble"`; case-insensitive.
            The first two have one stage for each rank.
        pp_num_microbatches: Number of micro-batches per batch of a rank; by default, the pipeline-parallel
            size. The batch size must be a multiple of it.
        pp_stages_per_rank: Stages of a rank: 1 for the first two schedules, 2 by default for the others;
            `"ZBVZeroBubble"` always has 2.
        pp_split_points: Names of the modules with which the second and each further stage begin, as a
            sequence or joined by commas. By default stages have about as many parameters each.

    Raises:
        SettingsError: The value of a field is invalid.

    Example:
        >>> TorchPipelineParallelConfig("gpipe", pp_split_points="layers.2,layers.4").pp_split_points
        ['layers.2', 'layers.4']
    """

    pp_schedule: str | None = None
    pp_num_microbatches: int | None = None
    pp_stages_per_rank: int | None = None
    pp_split_points: Sequence[str] | str | None = None

    def __post_init__(self) -> None:
        _resolve(self)
        wanted = str(self.pp_schedule).lower()
        schedule = next((name for name in _STAGES_PER_RANK if name.lower() == wanted), None)
        expect(self, "pp_schedule", f"one of {[*_STAGES_PER_RANK]}", schedule is not None)
        self.pp_schedule, expected = schedule, _STAGES_PER_RANK[str(schedule)]
        self.pp_stages_per_rank = self.pp_stages_per_rank or expected
        wanted = f"{expected} with the schedule {self.pp_schedule!r}; {[*_LOOPED]} take other numbers"
        fits = self.pp_stages_per_rank == expected or self.pp_schedule in _LOOPED
        expect(self, "pp_stages_per_rank", wanted, fits)
        if isinstance(self.pp_split_points, str):
            self.pp_split_points = [name.strip() for name in self.pp_split_points.split(",")]


_HANDLERS: dict[str, type[Any]] = {
    "tp": TorchTensorParallelConfig,
    "cp": TorchContextParallelConfig,
    "sp": DeepSpeedSequenceParallelConfig,
    "pp": TorchPipelineParallelConfig,
}


def _is_used(axis: str, doc: str) -> bool:
    """Return a property of a configuration: whether an axis has more than one rank."""
    return cast("bool", property(lambda config: (getattr(config, f"{axis}_size") or 1) > 1, doc=doc))


def _used_of(*axes: str, doc: str) -> list[str]:
    """Return a property of a configuration: those of some axes that have more than one rank."""
    used = property(lambda config: [axis for axis in axes if config.sizes[axis] > 1], doc=doc)
    return cast("list[str]", used)


@dataclass
class ParallelismConfig:
    """Sizes of the axes of the device mesh. The default is `PARALLELISM_CONFIG_*` of the environment, else 1.

    The product of all sizes is the world size.

    Args:
        dp_replicate_size: Number of model replicas (DDP or HSDP); each reads different batches.
        dp_shard_size: Number of FSDP2 shards of a replica; each rank reads different batches.
        tp_size: Tensor-parallel size; the ranks of a group read the same batches.
        cp_size: Context-parallel size; parameters are sharded over this axis, too.
        cp_backend: Backend of context parallelism: `"torch"`.
        sp_size: Sequence-parallel size (Ulysses); without DeepSpeed, parameters are sharded over this axis,
            too.
        sp_backend: Backend of sequence parallelism: `"deepspeed"` or `"torch"`. By default it becomes
            `"torch"` in runs without DeepSpeed.
        tp_handler: Options of tensor parallelism.
        cp_handler: Options of context parallelism.
        sp_handler: Options of DeepSpeed's sequence parallelism.
        ep_size: Expert-parallel size: number of neighbouring ranks within a replica, and a stage of a
            pipeline, over which the experts of a layer are sharded. It divides the product of
            `dp_shard_size`, `cp_size`, `sp_size` and `tp_size`, and does not change the world size.
        pp_size: Pipeline-parallel size: a rank has some of the layers; the ranks of a group read the same
            batches.
        pp_handler: Options of pipeline parallelism.

    Raises:
        SettingsError: A size is not a positive integer, axes cannot be combined, or options are given for an
            axis of size 1.

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
    ep_size: int | None = None
    pp_size: int | None = None
    pp_handler: TorchPipelineParallelConfig | None = None
    device_mesh: DeviceMesh | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _resolve(self)
        self._is_fully_sharded = False
        self._chosen_backend = self.sp_backend
        self.sp_backend = self.sp_backend or "deepspeed"
        for axis, kind in _HANDLERS.items():
            name = f"{axis}_handler"
            handler = getattr(self, name)
            if handler is None and self.sizes[axis] > 1 and (axis != "sp" or self.sp_backend != "torch"):
                setattr(self, name, kind())
            else:
                expect(self, name, f"a {kind.__name__}", isinstance(handler, kind | None))
        conflict = find_axes_conflict({**self.sizes, "ep": self.ep_size})
        if conflict is not None:
            *axes, reason = conflict
            sizes = ", ".join(f"{axis}_size={getattr(self, f'{axis}_size')!r}" for axis in axes)
            raise SettingsError(f"ParallelismConfig({sizes}): {reason}; set one of the two to 1.")
        inside = self.total_size // self.sizes["dp_replicate"] // self.sizes["pp"]
        wanted = f"a divisor of dp_shard_size x cp_size x sp_size x tp_size = {inside}"
        expect(self, "ep_size", wanted, inside % (self.ep_size or 1) == 0)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis}_size={size}" for axis, size in self.sizes.items())
        if self.ep_enabled:
            sizes += f", ep_size={self.ep_size}"
        return f"ParallelismConfig({sizes})"

    @property
    def sizes(self) -> dict[str, int]:
        """Axis to size, in the order of `AXES`."""
        return {axis: getattr(self, f"{axis}_size") for axis in AXES}

    @property
    def _sizes(self) -> dict[str, int]:
        return self.sizes  # Accelerate's name, which programs read and set

    @_sizes.setter
    def _sizes(self, sizes: Mapping[str, int]) -> None:
        for axis, size in sizes.items():
            self._set_size(axis, size)

    @property
    def total_size(self) -> int:
        """World size that the axes need."""
        return math.prod(self.sizes.values())

    @property
    def data_parallel_size(self) -> int:
        """Data-parallel size: the number of ranks that read different batches."""
        return self.sizes["dp_replicate"] * self.sizes["dp_shard"]

    @property
    def non_data_parallel_size(self) -> int:
        """Number of ranks that read the same batches."""
        return self.total_size // self.data_parallel_size

    dp_replicate_enabled = _is_used("dp_replicate", "Whether the model is replicated.")
    dp_shard_enabled = _is_used("dp_shard", "Whether parameters are sharded.")
    tp_enabled = _is_used("tp", "Whether tensor parallelism is used.")
    cp_enabled = _is_used("cp", "Whether context parallelism is used.")
    sp_enabled = _is_used("sp", "Whether sequence parallelism is used.")
    ep_enabled = _is_used("ep", "Whether expert parallelism is used.")
    pp_enabled = _is_used("pp", "Whether pipeline parallelism is used.")
    dp_dim_names = _used_of("dp_replicate", "dp_shard", doc="Axes of data parallelism.")
    non_dp_dim_names = _used_of(
        "tp", "cp", "sp", "pp", doc="Axes of tensor, context, sequence and pipeline parallelism."
    )
    dp_shard_cp_dim_names = _used_of("dp_shard", "cp", doc="Axes over which parameters are sharded.")
    dp_cp_dim_names = _used_of("dp_replicate", "dp_shard", "cp", doc="Axes over which losses are averaged.")

    @property
    def fsdp_dim_names(self) -> list[str]:
        """Axes of FSDP2's mesh: the replicate axis, if there are replicas, and the shard axis."""
        return ["dp_replicate", "dp_shard_cp"] if self.dp_replicate_enabled else ["dp_shard_cp"]

    @property
    def active_mesh_dims(self) -> list[str]:
        """Axes of more than one rank, data-parallel axes first."""
        return [*self.dp_dim_names, *self.non_dp_dim_names]

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Build the mesh of all axes, and its flattened submeshes. A collective over all ranks.

        Args:
            device_type: Such as `"cuda"`.

        Returns:
            The mesh; `None` if no axis has more than one rank.

        Raises:
            RuntimeError: Torch cannot build it, as for more ranks than the world size.
        """
        names, sizes = self._get_mesh() or ((), ())
        if not names:
            return None
        mesh = mesh_of(device_type, dict(zip(names, sizes, strict=True)))
        for flat_name, axes in (
            ("dp", self.dp_dim_names),
            ("dp_shard_cp", self._shard_axes(names)),
            ("dp_cp", self.dp_cp_dim_names),
        ):
            if axes:
                flatten_mesh(mesh[axes], flat_name)  # pyright: ignore[reportArgumentType] - torch takes lists
        self.device_mesh = mesh
        return mesh

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """Return the device mesh, and build it if there is none.

        Args:
            device_type: Such as `"cuda"`; optional once the mesh is built.

        Raises:
            SettingsError: The mesh is not built and `device_type` is absent, or the mesh has another type.
        """
        if self.device_mesh is None:
            if device_type is None:
                raise SettingsError("get_device_mesh() needs a device_type, since there is no mesh yet.")
            return self.build_device_mesh(device_type)
        if device_type not in {None, self.device_mesh.device_type}:
            raise SettingsError(
                f"get_device_mesh({device_type!r}): there is already a mesh for "
                f"{self.device_mesh.device_type!r}."
            )
        return self.device_mesh

    def use_torch_sequences(self) -> None:
        """Use torch's backend of sequence parallelism, in a run without DeepSpeed.

        Raises:
            SettingsError: DeepSpeed's backend was chosen.
        """
        if self._chosen_backend == "deepspeed":
            raise SettingsError(
                f"ParallelismConfig(sp_size={self.sp_size}, sp_backend='deepspeed'): DeepSpeed is not in "
                "use. Pass a deepspeed_plugin to Accelerator, or remove sp_backend to use FSDP2."
            )
        if self.sp_handler not in (None, DeepSpeedSequenceParallelConfig()):
            logger.warning(
                "ParallelismConfig(sp_handler=%r) has no effect without DeepSpeed: sequences may be of any "
                "length, and a model's own attn_implementation is used.",
                self.sp_handler,
            )
        self.sp_backend, self.sp_handler = "torch", None

    def check_world(self, world_size: int) -> None:
        """Check that the product of all sizes is the world size.

        Raises:
            SettingsError: It is not.
        """
        if self.total_size != world_size:
            sizes = [f"{axis}_size={size}" for axis, size in self.sizes.items() if size > 1]
            raise SettingsError(
                f"ParallelismConfig: {' x '.join(sizes) or 1} makes {self.total_size} processes, but the "
                f"world size is {world_size}; launch {self.total_size} processes, or change the sizes."
            )

    def to_json(self) -> dict[str, Any]:
        """Return all fields but the mesh, as plain data."""
        values = {option.name: getattr(self, option.name) for option in fields(self) if option.init}
        return {
            name: vars(value).copy() if name.endswith("_handler") and value else value
            for name, value in values.items()
        }

    def to_settings(self, settings: Settings) -> Settings:
        """Return the settings with the sizes of the axes."""
        section = replace(
            settings.parallelism or ParallelismSettings(),
            **{f"{axis}_size": size for axis, size in self.sizes.items()},
            sp_backend=self._chosen_backend,
            ep_size=self.ep_size,
        )
        return replace(settings, parallelism=section)

    # As in Accelerate, where libraries call and replace these three.

    def _get_mesh(self) -> tuple[tuple[str, ...], tuple[int, ...]] | tuple[()]:
        """Return the axes of the mesh and their sizes, outermost first; nothing for one rank."""
        # `fully_shard` needs a shard axis, even of size 1, beside the replicate axis and for a stage.
        is_fully_sharded = self._is_fully_sharded or self.dp_replicate_enabled or self.ep_enabled
        is_part = self.pp_enabled or (self.tp_enabled and is_fully_sharded)
        lone = "dp_shard" if is_part and not self.dp_shard_cp_dim_names else None
        in_mesh = {*self.active_mesh_dims, lone}  # libraries replace the properties behind it
        sizes = {axis: size for axis, size in self.sizes.items() if axis in in_mesh}
        return (tuple(sizes), tuple(sizes.values())) if sizes else ()

    def _set_size(self, parallelism: str, size: int) -> None:
        """Set the size of an axis."""
        if parallelism not in AXES:
            raise SettingsError(f"{parallelism!r} is none of the axes {[*AXES]}.")
        setattr(self, f"{parallelism}_size", size)

    def _validate_accelerator(self, accelerator: Any) -> None:
        """Check the sizes against a run; without any, every rank is a replica."""
        if self.total_size == 1:
            self._set_size("dp_replicate", accelerator.num_processes)
        self.check_world(accelerator.num_processes)

    def _shard_axes(self, names: Iterable[str]) -> list[str]:
        """Return the axes of a mesh over which parameters are sharded, also one of size 1."""
        return self.dp_shard_cp_dim_names or [name for name in names if name == "dp_shard"]


_meshes: WeakKeyDictionary[Any, dict[Any, DeviceMesh]] = WeakKeyDictionary()
"""The meshes of a default process group."""


def mesh_of(device_type: str, sizes: Mapping[str, int]) -> DeviceMesh:
    """Return the mesh of all ranks with the given axes, built once. A collective over all ranks."""
    known = _meshes.setdefault(dist.group.WORLD, {}) if dist.is_initialized() else {}
    key = (device_type, *sizes.items())
    if key not in known:
        mesh = torch_mesh.init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        known[key] = mesh
    return _with_default_timeout(known[key])


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Flatten a mesh to one axis with the given name. A collective over all ranks."""
    return _with_default_timeout(mesh._flatten(name))


def _with_default_timeout(mesh: DeviceMesh) -> DeviceMesh:
    """Set the timeout of a mesh's groups, which torch leaves at its default, to the default group's."""
    timeout = group_timeout(torch.device(mesh.device_type))
    for group in mesh.get_all_groups():
        set_group_timeout(timeout, group)
    return mesh


def _mesh_of(axis: str, doc: str) -> DeviceMesh | None:
    """Return a property of `Axes`: the mesh of an axis, if it has more than one rank."""
    mesh = property(lambda axes: axes.mesh[axis] if axes.config.sizes[axis] > 1 else None, doc=doc)
    return cast("DeviceMesh | None", mesh)


@frozen
class Axes:
    """The device mesh of a run."""

    config: ParallelismConfig
    mesh: DeviceMesh
    sharding: BatchSharding

    tensor = _mesh_of("tp", "Mesh of tensor parallelism, if any.")
    pipeline = _mesh_of("pp", "Mesh of pipeline parallelism, if any.")
    context = _mesh_of("cp", "Mesh of context parallelism, if any.")
    sequence = _mesh_of("sp", "Mesh of sequence parallelism, if any.")

    @property
    def losses(self) -> DeviceMesh | None:
        """Flat mesh of the ranks over which the losses of models are averaged, if any.

        It spans data and sequence parallelism; under context parallelism, scripts average losses.
        """
        data = self.config.dp_dim_names
        if self.config.sp_enabled:
            return self._flat([*data, "sp"], "dp_sp")
        return self._flat(data, "dp") if data else None

    def _flat(self, axes: Sequence[str], name: str) -> DeviceMesh:
        """Return the mesh of some axes; of several, flattened to one with the given name."""
        mesh = self.mesh[tuple(axes)]
        return mesh if len(axes) == 1 else flatten_mesh(mesh, name)

    def experts(self, runtime: Runtime) -> DeviceMesh | None:
        """Build the mesh of experts, if they are sharded: axes `"efsdp"` and `"ep"`, after any outer ones.

        They span all ranks of one replica and pipeline stage; the ranks of `"ep"` are neighbours.
        """
        experts = self.config.ep_size or 1
        if experts == 1:
            return None
        outer = {axis: self.config.sizes[axis] for axis in ("pp", "dp_replicate")}
        shards = runtime.topology.world_size // math.prod(outer.values()) // experts
        sizes = {axis: size for axis, size in outer.items() if size > 1}
        return mesh_of(runtime.device.type, {**sizes, "efsdp": shards, "ep": experts})

    def fully_sharded(self, runtime: Runtime) -> DeviceMesh:
        """Return the mesh of FSDP2: a shard axis, after a replicate axis if there are replicas."""
        names: Any = self.mesh.mesh_dim_names
        shards = self.config._shard_axes(names) + [name for name in names if name == "sp"]
        replicas = self.config.sizes["dp_replicate"]
        if not shards:  # replicas only: each is one shard
            return mesh_of(runtime.device.type, {"dp_replicate": replicas, "dp_shard": 1})
        if len(shards) == 1 and replicas > 1:
            return self.mesh[("dp_replicate", *shards)]
        flat = self._flat(shards, "_".join(shards))
        return flat if replicas == 1 else DeviceMesh._concatenate([self.mesh["dp_replicate"], flat])


def axes_of(
    runtime: Runtime, handlers: Mapping[type, Any], *, sharded: bool = False, fully_shard: bool = False
) -> Axes:
    """Build the mesh of a run.

    Args:
        runtime: Devices and ranks of the run.
        handlers: Type to plugin; a `ParallelismConfig` has the sizes.
        sharded: Whether ranks are shards if there is no `ParallelismConfig`; else they are replicas.
        fully_shard: Whether FSDP2 shards the models.
    """
    world = runtime.topology.world_size
    process_group.join_single(runtime.kind.group_backend, runtime.device)  # a mesh needs a group
    config = _config(handlers, world, sharded=sharded)
    config.check_world(world)
    if is_torch_version("<", "2.10") and (config.cp_enabled or config.pp_enabled):
        raise UnsupportedError(
            f"ParallelismConfig({'cp' if config.cp_enabled else 'pp'}_size>1): it needs torch 2.10 or newer, "
            f"and {torch.__version__} is installed."
        )
    if fully_shard:
        config._is_fully_sharded = not config.sp_enabled  # its axis is a shard axis
        if config.device_mesh is not None and config.device_mesh.mesh_dim_names == ("tp",):
            config.device_mesh = None  # to be rebuilt with a shard axis, even of size 1
    mesh = config.get_device_mesh(runtime.device.type)
    if mesh is None:  # one process
        mesh = mesh_of(runtime.device.type, {"dp_shard": 1})
    # The pipeline axis is the outermost: the ranks of each stage are consecutive.
    stage, rank_of_stage = divmod(runtime.topology.rank, world // config.sizes["pp"])
    shared = config.non_data_parallel_size // config.sizes["pp"]
    tensor_rank = runtime.topology.rank % config.sizes["tp"]
    return Axes(
        config=config,
        mesh=mesh,
        sharding=BatchSharding(
            num_shards=config.data_parallel_size,
            shard_index=rank_of_stage // shared,
            repeats=tensor_rank != 0 or stage != 0,
        ),
    )


def _config(handlers: Mapping[type, Any], world: int, *, sharded: bool) -> ParallelismConfig:
    config: ParallelismConfig | None = handlers.get(ParallelismConfig)
    plugin: TorchTensorParallelPlugin | None = handlers.get(TorchTensorParallelPlugin)
    if config is not None:
        if plugin is not None and (plugin.torch_device_mesh or plugin.tp_size != config.sizes["tp"]):
            raise SettingsError(
                f"torch_tp_plugin={plugin!r} contradicts parallelism_config={config!r}; pass only one "
                "of the two."
            )
        return config
    if plugin is not None and plugin.torch_device_mesh is not None:
        mesh = plugin.torch_device_mesh
        names, ranks = [*(mesh.mesh_dim_names or ())], mesh.mesh.flatten().tolist()
        wanted = f"axes named {[*AXES]}, in this order, with the ranks in ascending order"
        is_ordered = names == [axis for axis in AXES if axis in names] and ranks == [*range(len(ranks))]
        expect(plugin, "torch_device_mesh", wanted, is_ordered)
        sizes: dict[str, Any] = dict.fromkeys(AXES, 1) | dict(zip(names, mesh.shape, strict=True))
        config = ParallelismConfig(**{f"{axis}_size": size for axis, size in sizes.items()})
        config.device_mesh = mesh
        return config
    tensor = 1 if plugin is None else plugin.tp_size
    expect(plugin, "tp_size", f"a divisor of the world size {world}", world % tensor == 0)
    copies: dict[str, Any] = {"dp_shard_size" if sharded else "dp_replicate_size": world // tensor}
    return ParallelismConfig(tp_size=tensor, **copies)
