"""Ulysses sequence parallelism of DeepSpeed: sequences of batches are sharded, attention is patched."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor, nn

from accel_plugins.deepspeed.library import ds_module
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.parallelism.attention import check_layers, has_padding_before_tokens, packs_samples
from accel_plugins.parallelism.config import (
    DeepSpeedSequenceParallelConfig,
    ParallelismConfig,
    TorchTensorParallelPlugin,
)
from accel_plugins.parallelism.sequence import SequenceShard
from accel_state.accelerator_state import GradientState
from accel_state.errors import SettingsError, UnsupportedError
from accel_state.frozen import frozen
from accel_state.runtime import Runtime

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@frozen
class MaskCheck:
    """Refuse batches that need masks, which DeepSpeed's attention over sharded sequences lacks.

    Args:
        size: Sequence-parallel size, for messages.
        by_position: Whether attention separates packed samples by their position ids.
    """

    size: int
    by_position: bool = False

    def __call__(self, batch: MutableMapping[str, Any]) -> None:
        """Check a full batch, with `position_ids`."""
        mask, positions = batch.get("attention_mask"), batch["position_ids"]
        if isinstance(mask, Tensor) and mask.dim() == 2 and bool(has_padding_before_tokens(mask)):
            raise UnsupportedError(
                f"sp_size={self.size}: the attention_mask of a batch has padding before tokens, but "
                "attention over sharded sequences has no masks. Pad on the right, which causal "
                "attention ignores."
            )
        if not self.by_position and bool(packs_samples(positions)):
            raise UnsupportedError(
                f"sp_size={self.size}: the position_ids of a batch restart in the middle of a sequence: it "
                "packs several samples, which 'sdpa' attention over sharded sequences cannot separate; use "
                "DeepSpeedSequenceParallelConfig(sp_attn_implementation='flash_attention_2')."
            )


_patched: dict[str, tuple[Callable[..., Any], WeakKeyDictionary[nn.Module, Any]]] = {}
"""Each patched attention function of transformers: the original, and Ulysses' attention by module."""


@frozen
class SequenceParallel:
    """Shard sequences over a mesh, with DeepSpeed's attention for models of transformers."""

    full_mesh: DeviceMesh
    mesh: DeviceMesh
    handler: DeepSpeedSequenceParallelConfig
    seen: WeakKeyDictionary[nn.Module, Any] = field(default_factory=WeakKeyDictionary["nn.Module", Any])

    @property
    def size(self) -> int:
        """Sequence-parallel size."""
        return self.mesh.size()

    @property
    def shard(self) -> SequenceShard:
        """Sharding of batches to this rank."""
        fixed = not self.handler.sp_seq_length_is_variable
        return SequenceShard(
            size=self.size,
            rank=self.mesh.get_local_rank(),
            length=self.handler.sp_seq_length if fixed else None,
            check=MaskCheck(size=self.size, by_position=self.attention.startswith("flash")),
        )

    @property
    def attention(self) -> str:
        """Name of the attention implementation that computes on full sequences."""
        return self.handler.sp_attn_implementation or "sdpa"

    def as_mpu(self) -> SimpleNamespace:
        """Return DeepSpeed's "mpu": the process groups of a sequence, and of ZeRO's shards."""
        group, world = self.mesh.get_group(), dist.group.WORLD
        # DeepSpeed looks for the first method; its own mpu has the same group for model parallelism.
        methods: dict[str, Any] = {"initialize_sequence_parallel": lambda *_, **__: None}
        groups = {"sequence_parallel": group, "model_parallel": group, "sequence_data_parallel": world}
        for name, each in groups.items():
            methods |= {
                f"get_{name}_group": lambda each=each: each,
                f"get_{name}_world_size": lambda each=each: dist.get_world_size(each),
                f"get_{name}_rank": lambda each=each: dist.get_rank(each),
            }
        return SimpleNamespace(**methods)

    def validate(self, model: nn.Module) -> None:
        """Check that Ulysses supports a model's attention."""
        # Each call of attention compares the length of its window with that of the sequences.
        check_layers(
            model, f"ParallelismConfig(sp_size={self.size})", limited=frozenset({"sliding_attention"})
        )
        config: Any = getattr(model, "config", None)
        used = getattr(config, "_attn_implementation", None)
        if used is None or not getattr(model, "_supports_attention_backend", False):
            raise SettingsError(
                f"ParallelismConfig(sp_size={self.size}): {type(model).__name__} is not a transformers "
                "model with replaceable attention, which DeepSpeed's Ulysses needs. Use context "
                "parallelism (cp_size), which supports any model."
            )
        if used != self.attention:
            raise SettingsError(
                f"DeepSpeedSequenceParallelConfig(sp_attn_implementation={self.attention!r}): "
                f"{type(model).__name__} computes attention with {used!r}; build it with "
                f"attn_implementation={self.attention!r}, or set sp_attn_implementation={used!r}."
            )
        heads, shared = _heads(config.get_text_config())
        if heads % self.size:
            raise SettingsError(
                f"ParallelismConfig(sp_size={self.size}): {type(model).__name__} has {heads} attention "
                f"heads, which is not a multiple of {self.size}. Choose an sp_size that divides it."
            )
        if shared % self.size and self.size % shared:
            raise SettingsError(
                f"ParallelismConfig(sp_size={self.size}): {type(model).__name__} has {shared} heads of keys "
                f"and values, of which {self.size} is neither a multiple nor a divisor. Choose another "
                "sp_size."
            )

    def register(self, model: nn.Module) -> None:
        """Replace a model's attention by Ulysses' attention."""
        config: Any = model.config
        text = config.get_text_config()
        heads, shared = _heads(text)
        length = self.shard.length
        core, modules = _patch_attention(self.attention)
        ulysses = ds_module("runtime.sequence_parallel.ulysses_sp").UlyssesSPAttentionHF(
            attn=core,
            batch_size=1,  # The first batch changes it.
            attn_head_count=heads,
            attn_head_size=getattr(text, "head_dim", None) or text.hidden_size // heads,
            kv_head_count=shared,
            num_hidden_layers=text.num_hidden_layers,
            process_group=self.mesh.get_group(),
            seq_length_is_variable=length is None,
            local_seq_length=None if length is None else length // self.size,
            global_seq_length=length,
        )
        ulysses.core_attn_implementation = self.attention
        for module in model.modules():
            modules[module] = self.seen[module] = ulysses

    def release(self) -> None:
        """Restore the original attention of all models."""
        for name, (core, modules) in [*_patched.items()]:
            for module in [*self.seen]:
                modules.pop(module, None)
            if not modules:
                _functions()[name] = core
                del _patched[name]
        self.seen.clear()
        ds_module("utils.groups").mpu = None


def sequences_of(runtime: Runtime, handlers: Mapping[type, Any]) -> SequenceParallel | None:
    """Return the sequence parallelism of a DeepSpeed run, if used."""
    for kind, name in (
        (FullyShardedDataParallelPlugin, "fsdp_plugin"),
        (TorchTensorParallelPlugin, "torch_tp_plugin"),
    ):
        if kind in handlers:
            raise SettingsError(
                f"Accelerator({name}={handlers[kind]!r}) cannot be combined with a DeepSpeedPlugin; "
                "remove one of the two."
            )
    config: ParallelismConfig | None = handlers.get(ParallelismConfig)
    if config is None:
        return None
    for axis, instead in (("tp", "FSDP2"), ("cp", "sp_size, or FSDP2"), ("ep", "FSDP2")):
        size: int = getattr(config, f"{axis}_size")
        if size > 1:
            raise SettingsError(
                f"ParallelismConfig({axis}_size={size}) cannot be combined with a "
                f"DeepSpeedPlugin; use {instead}."
            )
    if config.sp_enabled and config.sp_backend == "torch":
        raise SettingsError(
            f"ParallelismConfig(sp_size={config.sp_size}, sp_backend='torch') cannot be combined with a "
            "DeepSpeedPlugin. Remove sp_backend to use DeepSpeed's Ulysses, or train with FSDP2."
        )
    config.check_world(runtime.topology.world_size)
    full_mesh = config.get_device_mesh(runtime.device.type) if config.sp_enabled else None
    if full_mesh is None or config.sp_handler is None:
        return None
    return SequenceParallel(full_mesh=full_mesh, mesh=full_mesh["sp"], handler=config.sp_handler)


def _patch_attention(name: str) -> tuple[Callable[..., Any], WeakKeyDictionary[nn.Module, Any]]:
    """Patch an attention function of transformers; modules without Ulysses still get the original."""
    if name in _patched:
        return _patched[name]
    functions = _functions()
    core, modules = _patched[name] = functions[name], WeakKeyDictionary()

    def attend(
        module: nn.Module, query: Any, key: Any, value: Any, mask: Any, *args: Any, **more: Any
    ) -> Any:
        ulysses = modules.get(module)
        if ulysses is None or _sees_full_sequences(module):
            return core(module, query, key, value, mask, *args, **more)
        return _attend_sharded(ulysses, name, module, (query, key, value), args, more)

    functions[name] = attend
    return core, modules


def _attend_sharded(
    ulysses: Any, name: str, module: Any, heads: tuple[Any, Any, Any], args: Any, more: dict[str, Any]
) -> Any:
    if "position_ids" not in more:
        raise UnsupportedError(
            f"{type(module).__name__} passes no position_ids to attention, from which Ulysses derives the "
            "order of the shards of a sequence; this model cannot be trained with sp_size."
        )
    window = more.get("sliding_window")
    rows, length = heads[0].shape[0], heads[0].shape[2] * ulysses.world_size
    if name == "sdpa" and window is not None and window < length:
        raise UnsupportedError(
            f"{type(module).__name__} has a sliding window of {window}, but sequences are of {length}: "
            "'sdpa' attention over sharded sequences has no masks, and would see all of it; use "
            "DeepSpeedSequenceParallelConfig(sp_attn_implementation='flash_attention_2')."
        )
    if ulysses.batch_size != rows:
        _resize(ulysses, rows)
    groups = getattr(module, "num_key_value_groups", None)
    try:
        return ulysses(module, *heads, None, *args, **more)
    finally:
        if groups is not None:  # Ulysses has set it for this rank's heads.
            module.num_key_value_groups = groups


def _resize(ulysses: Any, rows: int) -> None:
    """Change the number of rows of a batch, which DeepSpeed assumes to be fixed."""
    ulysses.batch_size = rows
    for name in ("required_query_shape", "required_key_value_shape", "required_context_shape"):
        length, _, *sizes = getattr(ulysses, name)
        setattr(ulysses, name, type(getattr(ulysses, name))([length, rows, *sizes]))


def _sees_full_sequences(module: nn.Module) -> bool:
    """Return whether the active loader is a prepared one that does not shard sequences."""
    loader = GradientState().active_dataloader
    if loader is None or getattr(loader, "shard_sequences", None) is not None:
        return False
    if module.training:
        raise SettingsError(
            "A model with sp_size is trained with batches of a prepared loader that does not shard their "
            "sequences: pass the loader to the call of prepare() that gets the model, or to "
            "accelerator.deepspeed_ulysses_dl_adapter(loader, model)."
        )
    return True


def _heads(config: Any) -> tuple[int, int]:
    """Return the number of heads of queries, and of keys and values."""
    heads = config.num_attention_heads
    return heads, getattr(config, "num_key_value_heads", None) or heads


def _functions() -> Any:
    return importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
