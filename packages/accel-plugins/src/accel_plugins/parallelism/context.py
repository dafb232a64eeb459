"""Context parallelism: shard sequences over ranks, with ring attention over the full sequence."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from accel_plugins.parallelism.attention import (
    check_layers,
    has_padding_before_tokens,
    packs_samples,
    partial_layers,
    text_config,
)
from accel_state import hang_monitor
from accel_state.errors import SettingsError, UnsupportedError
from accel_state.frozen import frozen
from accel_state.torch_private import ring_attention_module

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_SEQUENCE = 2  # the dim of sequences in queries, keys and values
_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

_inside: list[_Block] = []


@frozen
class _Block:
    """The full sequences in a block of `maybe_context_parallel`.

    Args:
        length: Number of tokens of each sequence.
        padded: By a buffer's id, whether it has padding before tokens, if it is a mask.
        packed: By a buffer's id, whether its sequences have several samples, if they are positions.
    """

    length: int
    padded: dict[int, Tensor]
    packed: dict[int, Tensor]


@frozen
class ContextParallel:
    """Shard sequences over a mesh; keys and values rotate by `"allgather"` or `"alltoall"`."""

    mesh: DeviceMesh
    rotation: str

    @contextmanager
    def __call__(
        self, buffers: list[Tensor], buffer_seq_dims: list[int], no_restore_buffers: set[Tensor]
    ) -> Generator[None]:
        """Shard tensors in place within the block, for the forward and backward pass.

        Within it, torch replaces `torch.nn.functional.scaled_dot_product_attention` in the process. Attention
        that was imported by name before (`from torch.nn.functional import ...`) is not replaced.

        Args:
            buffers: Tensors with a sequence dim, which are restored afterwards.
            buffer_seq_dims: The sequence dim of each.
            no_restore_buffers: The buffers that stay sharded.

        Raises:
            SettingsError: The lists are empty or differ in length, lengths of sequences differ or are not a
                multiple of the context-parallel size, or a tensor requires grad.
        """
        if not buffers or len(buffers) != len(buffer_seq_dims):
            raise SettingsError(
                f"maybe_context_parallel() got {len(buffers)} buffers and {len(buffer_seq_dims)} "
                "buffer_seq_dims. Pass every tensor with a sequence dim (inputs, labels, positions), and the "
                "dim of each."
            )
        length, ranks = buffers[0].shape[buffer_seq_dims[0]], self.mesh.size()
        for buffer, dim in zip(buffers, buffer_seq_dims, strict=True):
            problem = None
            if buffer.requires_grad:
                problem = "requires grad, but is sharded in place. Pass the inputs of the model"
            elif buffer.shape[dim] != length:
                problem = f"has sequences of {buffer.shape[dim]} (dim {dim}), and another of {length}"
            elif length % ranks:
                problem = f"has a dim {dim} that is not a multiple of cp_size={ranks}. Pad the sequences"
            if problem is not None:
                raise SettingsError(
                    f"maybe_context_parallel(): a tensor of shape {tuple(buffer.shape)} {problem}."
                )
        ring = ring_attention_module()
        ring.set_rotate_method(self.rotation)
        # Ring attention has no dispatch rules for the CPU, nor for non-causal attention.
        rules = ring.custom_ops
        rules.setdefault(_CPU, _forward)
        rules.setdefault(_CPU_BACKWARD, _backward)
        for op, rule in [*rules.items()]:
            if not isinstance(rule, _BidirectionalRule):
                rules[op] = _BidirectionalRule(rule)
        rows = [
            buffer
            for buffer, dim in zip(buffers, buffer_seq_dims, strict=True)
            if buffer.dim() == 2 and dim in {1, -1}
        ]
        block = _Block(
            length=length,
            padded={id(buffer): has_padding_before_tokens(buffer) for buffer in rows},
            packed={id(buffer): packs_samples(buffer) for buffer in rows},
        )
        # Load balancing gives each rank a chunk of the beginning and one of the end: it needs two per rank.
        num_chunks = length // ranks
        with (
            nullcontext() if num_chunks % 2 == 0 else _without_balance(),
            hang_monitor.transport_errors_explained("maybe_context_parallel"),
            ring.context_parallel(
                self.mesh,
                buffers=buffers,
                buffer_seq_dims=buffer_seq_dims,
                no_restore_buffers=no_restore_buffers,
            ),
            _without_masks(block),
        ):
            yield

    def validate(self, model: nn.Module) -> None:
        """Check that each layer of a model computes the same with sharded sequences."""
        setting = f"ParallelismConfig(cp_size={self.mesh.size()})"
        check_layers(model, setting)
        used = getattr(text_config(model), "_attn_implementation", None)
        if used not in {None, "sdpa"}:
            raise SettingsError(
                f"{setting}: {type(model).__name__} computes attention with {used!r}, which would see one "
                "shard of each sequence; build it with attn_implementation='sdpa'."
            )

    def prepare(self, model: nn.Module) -> None:
        """Make transformers' self-attention causal without a mask of the full sequence."""
        windows = [layer.span for layer in partial_layers(model) if layer.span is not None]
        with_positions = (
            module
            for module in model.modules()
            if "position_ids" in inspect.signature(module.forward).parameters
        )
        next(with_positions, model).register_forward_pre_hook(
            partial(_check_inputs, min(windows, default=None)), with_kwargs=True
        )
        attach_mask_hooks(model)


@contextmanager
def _without_masks(block: _Block) -> Generator[None]:
    """Refuse masks of attention within the block: torch would apply a full mask to shards."""
    attention = functional.scaled_dot_product_attention

    def unmasked(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *args: Any, **more: Any
    ) -> Any:
        if attn_mask is not None:
            raise UnsupportedError(
                "scaled_dot_product_attention(attn_mask=…) within maybe_context_parallel(): a mask "
                "covers full sequences, but each rank has a shard. Use is_causal=True, or no mask."
            )
        return attention(query, key, value, None, *args, **more)

    functional.scaled_dot_product_attention = unmasked
    _inside.append(block)
    try:
        yield
    finally:
        _inside.remove(block)
        functional.scaled_dot_product_attention = attention


@contextmanager
def _without_balance() -> Generator[None]:
    """Switch torch's load balancing off within the block: every rank has consecutive tokens."""
    options = ring_attention_module()._cp_options
    before, options.enable_load_balance = options.enable_load_balance, False
    try:
        yield
    finally:
        options.enable_load_balance = before


class _BidirectionalRule:
    """A dispatch rule of attention with and without causality.

    To balance the load under a causal mask, torch gives each rank a chunk of the beginning and one of the end
    of a sequence, and then refuses attention without a mask, for which the order of keys does not matter.
    """

    def __init__(self, rule: Callable[..., Any]) -> None:
        self._rule = rule

    def __call__(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = [argument.name for argument in op._schema.arguments]
        if (dict(zip(names, args, strict=False)) | kwargs).get("is_causal"):
            return self._rule(op, args, kwargs)
        with _without_balance():
            return self._rule(op, args, kwargs)


def _forward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    heads: Any = args[:3]
    dropout, causal = (*args[3:], *(0.0, False)[len(args) - 3 :])

    def attention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, **more: Any) -> Any:
        return op(q, k, v, dropout, is_causal, **more)

    results = ring_attention_module()._templated_ring_attention(
        heads[0].device_mesh.get_group(),
        _SEQUENCE,
        cast("Any", attention),
        *(part.to_local() for part in heads),
        is_causal=bool(causal),
        scale=kwargs.get("scale"),
    )
    return tuple(_shard_like(result, heads[0]) for result in results[:2])


def _backward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("grad_out", "query", "key", "value", "out", "logsumexp")
    *tensors, dropout, causal = args

    def attention(**options: Any) -> Any:
        return op(*(options.pop(name) for name in names), dropout, options.pop("is_causal"), **options)

    parts: dict[str, Any] = {name: tensor.to_local() for name, tensor in zip(names, tensors, strict=True)}
    gradients = ring_attention_module()._templated_ring_attention_backward(
        tensors[1].device_mesh.get_group(),
        _SEQUENCE,
        attention,
        grad_out_name="grad_out",
        is_causal=causal,
        scale=kwargs.get("scale"),
        **parts,
    )
    return tuple(_shard_like(gradient, tensors[1]) for gradient in gradients[:3])


def _shard_like(part: Tensor, like: DTensor) -> DTensor:
    return DTensor.from_local(part, like.device_mesh, [Shard(_SEQUENCE)], run_check=False)


def _check_inputs(
    window: int | None, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Refuse inputs of a model that need a mask, or positions, of full sequences."""
    if not _inside:
        return
    block, problem = _inside[-1], None
    where = f"{type(module).__name__} within maybe_context_parallel()"
    signature = inspect.signature(module.forward)
    inputs = {**signature.bind_partial(*args, **kwargs).arguments, **kwargs}
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    if window is not None and window < block.length:
        problem = f"it has a window of {window} tokens, but sequences are of {block.length}; shorten them"
    elif mask is not None and (not isinstance(mask, torch.Tensor) or mask.dim() != 2):
        problem = "the attention_mask is not of the shape [rows, length]; leave it out"
    elif mask is not None and bool(block.padded.get(id(mask), has_padding_before_tokens(mask))):
        problem = "the attention_mask has padding before tokens. Pad on the right"
    elif id(positions) in block.packed and bool(block.packed[id(positions)]):
        problem = (
            "the position_ids start again in the middle of a sequence: it packs several samples; give each "
            "a sequence of its own"
        )
    if problem is not None:
        raise UnsupportedError(f"{where}: {problem}. Attention over sharded sequences has no masks.")
    if positions is None and "position_ids" in signature.parameters and "input_ids" in inputs:
        raise SettingsError(
            f"{where}: without position_ids the model would count each shard from 0; pass those of full "
            "sequences, and put them into buffers."
        )


def attach_mask_hooks(model: nn.Module) -> None:
    """Make the self-attention of a model of transformers causal, without a mask, on sharded sequences."""
    for name, module in model.named_modules():
        if name.endswith("self_attn") or getattr(module, "is_causal", False):
            module.register_forward_pre_hook(_without_mask, with_kwargs=True)


def _without_mask(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs.get("attention_mask") is not None and _inside:
        if not getattr(module, "is_causal", True):
            raise UnsupportedError(
                f"{type(module).__name__} within maybe_context_parallel(): attention that is not causal has "
                "a padding mask of full sequences, but each rank has a shard. Remove attention_mask."
            )
        kwargs = {**kwargs, "attention_mask": None}
    return args, kwargs
