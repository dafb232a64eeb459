"""Facets of `Accelerator`: rank and device, mesh, directories, profiling."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_plugins.deepspeed.library import ds_module
from accel_plugins.kwargs import ProfileKwargs, ProjectConfiguration
from accel_state.accelerator_state import AcceleratorState
from accel_state.errors import SettingsError
from accel_state.html_table import html_table
from accel_state.labels import DistributedType, FP8BackendType
from accel_state.partial_state import PartialState, RankMethods
from accel_train.data.adapter import PreparedLoader
from accel_train.profiling import profiling
from accel_train.step import is_lomo

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.profiler import profile

    from accel_plugins.deepspeed.engine import DeepSpeedEngineWrapper
    from accel_plugins.deepspeed.plugin import DeepSpeedPlugin
    from accel_plugins.parallelism.config import ParallelismConfig
    from accel_train.accelerator.build import Parts


class Facet(ABC):
    """Base of the facets of `Accelerator`; all their state is in `_parts`."""

    __slots__ = ("_parts",)
    _parts: Parts

    def _handler(self, kind: type[Any]) -> Any:
        return self._parts.handlers.get(kind)

    def _assign(self, **parts: Any) -> None:
        """Replace parts, for attributes that scripts assign; objects prepared later use them."""
        self._parts = replace(self._parts, **parts)

    if not TYPE_CHECKING:  # type checkers shall report unknown attributes

        def __getattr__(self, name: str) -> Any:
            """Compute an attribute of Hugging Face's `Accelerator`, unless a program has assigned it."""
            if name not in COMPUTED:
                message = f"{type(self).__name__!r} object has no attribute {name!r}"
                raise AttributeError(message, name=name, obj=self)
            return COMPUTED[name](self._parts)


COMPUTED: Mapping[str, Callable[[Parts], Any]] = {
    "delayed_fp8_autocast": lambda _: False,
    "has_fp8_handler": lambda parts: any("Recipe" in kind.__name__ for kind in parts.handlers),
    "has_lomo_optimizer": lambda parts: any(
        is_lomo(optimizer.optimizer) for optimizer in parts.prepared.optimizers
    ),
}
"""Attributes of Accelerate's `Accelerator` that nothing here depends on, as it computes them."""


def attribute_of(part: str, name: str) -> Any:
    """Return a property that reads and writes an attribute of a part, under its name in Accelerate."""

    def write(self: Any, value: Any) -> None:
        setattr(getattr(self._parts, part), name, value)

    return property(lambda self: getattr(getattr(self._parts, part), name), write)


class ProcessFacet(Facet, RankMethods):
    """Rank, world size and device of this process."""

    __slots__ = ()

    @property
    def _process(self) -> PartialState:
        return self._parts.process

    @property
    def state(self) -> AcceleratorState:
        """The process-wide state."""
        return self._parts.state

    @state.setter
    def state(self, state: AcceleratorState) -> None:
        self._assign(state=state)

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self._parts.process.device

    @property
    def distributed_type(self) -> DistributedType:
        """The documented label of the strategy and device."""
        return self._parts.state.distributed_type

    @property
    def fp8_backend(self) -> FP8BackendType:
        """The library of FP8 matrix multiplication; `FP8BackendType.NO` without FP8.

        Example:
            >>> from accel_train import Accelerator
            >>> Accelerator(cpu=True).fp8_backend.value
            'NO'
        """
        return FP8BackendType(self._parts.fp8_backend)

    @property
    def fp8_enabled(self) -> bool:
        """Whether FP8 matrix multiplication is used; a change applies to models prepared later."""
        return self.fp8_backend is not FP8BackendType.NO

    @fp8_enabled.setter
    def fp8_enabled(self, fp8_enabled: bool) -> None:
        if fp8_enabled and not self.fp8_enabled:
            raise SettingsError("accelerator.fp8_enabled = True: pass Accelerator(mixed_precision='fp8').")
        if not fp8_enabled:
            self._assign(converter=None)

    @property
    def num_processes(self) -> int:
        """Number of processes of the run."""
        return self._parts.process.num_processes

    @property
    def process_index(self) -> int:
        """The rank of this process among all."""
        return self._parts.process.process_index

    @property
    def local_process_index(self) -> int:
        """The local rank of this process."""
        return self._parts.process.local_process_index

    @property
    def multi_device(self) -> bool:
        """Whether there are several processes, each with its own accelerator."""
        process = self._parts.process
        return process.num_processes > 1 and process.device.type != "cpu"

    def set_trigger(self) -> None:
        """Set a flag on this rank, which `check_trigger` returns on all ranks.

        Example:
            >>> from accel_train import Accelerator
            >>> accelerator = Accelerator(cpu=True)
            >>> accelerator.set_trigger()
            >>> accelerator.check_trigger(), accelerator.check_trigger()
            (True, False)
        """
        self._parts.trigger.set()

    def check_trigger(self) -> bool:
        """Return whether any rank has called `set_trigger` since the last check; call it on every rank."""
        return self._parts.trigger.check()

    @property
    def flag_tensor(self) -> torch.Tensor | None:
        """The flag of `set_trigger` on this rank, as Accelerate keeps it; `None` before the first call."""
        return self._parts.trigger.flag

    @flag_tensor.setter
    def flag_tensor(self, flag: torch.Tensor | None) -> None:
        self._parts.trigger.flag = flag


class ParallelFacet(Facet):
    """The device mesh, and the coordinates of this rank on it."""

    __slots__ = ()

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """The sizes of the mesh axes."""
        return self._parts.state.parallelism_config

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The active DeepSpeed plugin; `None` if DeepSpeed is not used."""
        return self._parts.state.deepspeed_plugin

    @property
    def deepspeed_engine_wrapped(self) -> DeepSpeedEngineWrapper | None:
        """The wrapper of the first model's DeepSpeed engine; `None` without one."""
        models = self._parts.prepared.models
        owner_of = getattr(self._parts.strategy.stepper, "owner_of", None)
        return owner_of(models[0]) if owner_of is not None and models else None

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """The device mesh of this run; `None` where models are replicated on all ranks."""
        return self._parts.strategy.mesh

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded by `fully_shard`."""
        return self._parts.state.is_fsdp2

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether parameters are `DTensor`s, which allows combining several kinds of parallelism."""
        return self._parts.strategy.mesh is not None

    @property
    def tensor_parallel_rank(self) -> int:
        """The tensor-parallel rank; 0 without tensor parallelism."""
        return self._rank_along("tp")

    @property
    def context_parallel_rank(self) -> int:
        """The context-parallel rank; 0 without context parallelism."""
        return self._rank_along("cp")

    @property
    def data_parallel_rank(self) -> int:
        """The data-parallel rank among the replicas; 0 with one replica."""
        parts = self._parts
        if parts.strategy.mesh is None:
            return parts.strategy.sharding.shard_index
        return self._rank_along("dp_replicate")

    @property
    def data_parallel_shard_rank(self) -> int:
        """The data-parallel rank among the shards of a replica."""
        return self._rank_along("dp_shard")

    @property
    def pipeline_parallel_rank(self) -> int:
        """The pipeline-parallel rank; 0 without pipelines."""
        return self._rank_along("pp")

    @property
    def should_save_model(self) -> bool:
        """Whether this rank belongs to the first replica, which is the one that is saved."""
        parts = self._parts
        if parts.strategy.mesh is None:
            return parts.process.is_main_process
        return self._rank_along("dp_replicate") == 0

    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """Shard sequences within the block under context parallelism; otherwise do nothing.

        Scaled-dot-product attention within it sees full sequences although every rank has a shard of them.

        Args:
            buffers: Tensors with a sequence dim, such as the inputs, labels and positions of a batch. They
                are cut to this rank's shard in place.
            buffer_seq_dims: The sequence dim of each.
            no_restore_buffers: Buffers that are not needed afterwards; the others are restored to full
                sequences.

        Example:
            >>> import torch
            >>> from accel_train import Accelerator
            >>> tokens = torch.arange(8).reshape(1, 8)
            >>> with Accelerator(cpu=True).maybe_context_parallel([tokens], [1], {tokens}):
            ...     tokens.shape
            torch.Size([1, 8])
        """
        split = self._parts.strategy.split_sequences
        if own := vars(self).get("_cp_context"):  # A program's own `_prepare_cp` sets it.
            return own(
                buffers=buffers, buffer_seq_dims=buffer_seq_dims, no_restore_buffers=no_restore_buffers
            )
        if split is None:
            return nullcontext()
        return split(buffers or [], buffer_seq_dims or [], no_restore_buffers or set())

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: nn.Module) -> Any:
        """Make a loader shard the sequences of its batches under Ulysses.

        `prepare` does so for loaders that are passed together with the model.

        Args:
            dl: A prepared loader, which is changed and returned. Under DeepSpeed, also any other iterable of
                dictionaries of tensors, different on every process, which DeepSpeed's
                `UlyssesSPDataLoaderAdapter` reads: the batches of the sequence-parallel ranks are used one
                after the other.
            model: The prepared model.

        Returns:
            A loader of this rank's shards; `dl` itself in other runs.

        Raises:
            SettingsError: The model is not prepared, or without DeepSpeed the loader.
        """
        parts = self._parts
        shard_sequences = parts.strategy.shard_sequences
        if shard_sequences is None:
            return dl
        if model not in parts.prepared:
            raise SettingsError(
                f"deepspeed_ulysses_dl_adapter(): {type(model).__name__} is not prepared. Pass the "
                "result of prepare()."
            )
        if isinstance(dl, PreparedLoader):
            dl.shard_sequences = shard_sequences
            return dl
        if parts.strategy.name != "deepspeed":
            raise SettingsError(
                f"deepspeed_ulysses_dl_adapter(): {type(dl).__name__} is not prepared, and adapting it "
                "needs DeepSpeed. Pass it to prepare() first."
            )
        mesh: Any = parts.strategy.mesh
        sequences = mesh["sp"]
        adapter = ds_module("runtime.sequence_parallel.ulysses_sp").UlyssesSPDataLoaderAdapter
        return adapter(
            dl,
            sp_rank=sequences.get_local_rank(),
            sp_group=sequences.get_group(),
            sp_world_size=sequences.size(),
            device=parts.process.device,
        )

    def _rank_along(self, axis: str) -> int:
        mesh = self._parts.strategy.mesh
        if mesh is None or axis not in (mesh.mesh_dim_names or ()):
            return 0
        return mesh.get_local_rank(axis)


class ObserveFacet(Facet):
    """Project directories, profiling, and the `repr` of an `Accelerator`."""

    __slots__ = ()

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """Directories, and how checkpoints are named and kept."""
        return self._parts.project

    @project_configuration.setter
    def project_configuration(self, project: ProjectConfiguration) -> None:
        self._assign(project=project)
        self._parts.checkpoints.project = project

    @property
    def project_dir(self) -> str | Path | None:
        """Directory of the project's files."""
        return self._parts.project.project_dir

    @property
    def logging_dir(self) -> str | Path | None:
        """Directory of the trackers' files."""
        return self._parts.project.logging_dir

    def __repr__(self) -> str:
        return f"Accelerator({', '.join(f'{name}={value!r}' for name, value in self._facts().items())})"

    def _repr_html_(self) -> str:
        rows = [(name.replace("_", " "), value) for name, value in self._facts().items()]
        return html_table(rows, title="Accelerator")

    def _facts(self) -> dict[str, str | int]:
        if not hasattr(
            getattr(self, "_parts", None), "gradient_state"
        ):  # the constructor failed, and a traceback shows the object
            return {}
        state, process = self._parts.state, self._parts.process
        return {
            "device": str(process.device),
            "process_index": process.process_index,
            "num_processes": process.num_processes,
            "distributed_type": state.distributed_type.value,
            "mixed_precision": state.mixed_precision,
            "gradient_accumulation_steps": self._parts.synchronizer.state.num_steps,
        }

    @property
    def profile_handler(self) -> ProfileKwargs | None:
        """The `ProfileKwargs` of the accelerator."""
        return self._handler(ProfileKwargs)

    @profile_handler.setter
    def profile_handler(self, handler: ProfileKwargs | None) -> None:
        self._parts.handlers[ProfileKwargs] = handler

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[profile]:
        """Record the block with `torch.profiler`.

        With `output_trace_dir`, every process writes a Chrome trace `profile_<rank>.json` there, and one
        `profile_<rank>_<n>.json` for every further cycle of `schedule_option`. With `flame_graph` there is an
        HTML page of each, which opens offline.

        Args:
            profile_handler: The options; the accelerator's `ProfileKwargs` if `None`.

        Raises:
            SettingsError: The profiler cannot be built with the handler's options.
            MissingDependencyError: A flame graph needs plotly, which is not installed.

        Example:
            >>> import torch
            >>> from accel_train import Accelerator
            >>> with Accelerator(cpu=True).profile() as profiler:
            ...     _ = torch.ones(2) + 1
            >>> any("add" in event.key for event in profiler.key_averages())
            True
        """
        handler = profile_handler or self.profile_handler or ProfileKwargs()
        return profiling(handler, self._parts.process.runtime)
