"""The mesh axes of a run."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from accel_plugins.deepspeed.library import ds_module
from accel_state.errors import SettingsError, UnsupportedError
from accel_train.accelerator.facet import Facet
from accel_train.data.prepared import PreparedLoader

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from accel_plugins.deepspeed.plugin import DeepSpeedPlugin
    from accel_plugins.parallelism.config import ParallelismConfig


class ParallelFacet(Facet):
    """The device mesh, and the coordinates of this rank on it."""

    __slots__ = ()

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """The sizes of the mesh axes."""
        return self._parts.state.parallelism_config

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The active DeepSpeed plugin; `None` where DeepSpeed is not used."""
        return self._parts.state.deepspeed_plugin

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """The device mesh of this run; `None` where models are replicated on all ranks."""
        return self._parts.strategy.mesh

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded by `fully_shard`."""
        return self._parts.strategy.fsdp_version == 2

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether parameters are `DTensor`s, so that several kinds of parallelism combine."""
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
        """The rank along the axis of replicas; 0 with one replica."""
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
        """The pipeline-parallel rank.

        Raises:
            UnsupportedError: Always: pipelines are not trained.
        """
        raise UnsupportedError("pipeline_parallel_rank: models are not trained in pipeline stages.")

    @property
    def should_save_model(self) -> bool:
        """Whether this rank belongs to the replica that is saved: the first one."""
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
        """Shard sequences within the block under context parallelism; do nothing without.

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
        if split is None:
            return nullcontext()
        return split(buffers or [], buffer_seq_dims or [], no_restore_buffers or set())

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: nn.Module) -> Any:
        """Let a loader shard the sequences of its batches under DeepSpeed's Ulysses.

        `prepare` does so for loaders that are passed together with the model.

        Args:
            dl: A prepared loader, which is changed and returned. Any other iterable of dictionaries of
                tensors, of which every process has its own, is read through DeepSpeed's
                `UlyssesSPDataLoaderAdapter`: the batches of sequence-parallel ranks are used one after the
                other.
            model: The prepared model.

        Returns:
            A loader of this rank's shards; `dl` itself in other runs.

        Raises:
            SettingsError: The model is not prepared.
        """
        parts = self._parts
        shard_sequences = parts.strategy.shard_sequences
        if shard_sequences is None:
            return dl
        if model not in parts.prepared:
            raise SettingsError(
                f"deepspeed_ulysses_dl_adapter(): {type(model).__name__} is not prepared; pass what "
                "prepare() has returned."
            )
        if isinstance(dl, PreparedLoader):
            dl.shard_sequences = shard_sequences
            return dl
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
