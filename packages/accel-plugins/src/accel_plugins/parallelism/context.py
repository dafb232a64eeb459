"""Context parallelism: every rank has a part of each sequence, and attention sees all of it."""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import _attention as ring
from torch.distributed.tensor.experimental._attention import context_parallel, set_rotate_method
from torch.nn import functional

from accel_state import hang_monitor
from accel_state.errors import SettingsError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

_SEQUENCE = 2  # the dim of sequences in queries, keys and values
_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

_lock = threading.Lock()
_inside: list[int] = []  # threads that are in a context


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParallel:
    """Divides sequences along a mesh.

    Args:
        mesh: Of one axis.
        rotation: `"allgather"` or `"alltoall"`.
    """

    mesh: DeviceMesh
    rotation: str

    @contextmanager
    def __call__(
        self,
        buffers: list[Tensor],
        buffer_seq_dims: list[int],
        no_restore_buffers: set[Tensor],
    ) -> Generator[None]:
        """A context in which tensors are cut to this rank's part, for forward and backward pass.

        torch replaces `torch.nn.functional.scaled_dot_product_attention` for the whole process meanwhile. In
        other threads it stays what it was; only one thread at a time may be in such a context. Attention that
        was imported by its name before (`from torch.nn.functional import ...`) is not replaced.

        Args:
            buffers: Tensors with a sequence dim; whole again afterwards.
            buffer_seq_dims: The sequence dim of each.
            no_restore_buffers: Those that stay cut.

        Raises:
            SettingsError: The lists do not fit together, a sequence cannot be divided, or a tensor is a
                parameter.
            UnsupportedError: Another thread is in such a context.
        """
        self._check(buffers, buffer_seq_dims, no_restore_buffers)
        # Each rank gets a piece of the beginning and one of the end, where there are so many.
        num_chunks = buffers[0].shape[buffer_seq_dims[0]] // self.mesh.size()
        with (
            _one_thread() as plain,
            _ring(self.rotation, balance=num_chunks % 2 == 0),
            hang_monitor.transport_errors_explained("maybe_context_parallel"),
            context_parallel(
                self.mesh,
                buffers=buffers,
                buffer_seq_dims=buffer_seq_dims,
                no_restore_buffers=no_restore_buffers,
            ),
            _in_this_thread(plain),
        ):
            yield

    def prepare(self, model: nn.Module) -> None:
        """Let the attention of transformers compute causally, without a mask of whole sequences."""
        for name, module in model.named_modules():
            if name.endswith("self_attn"):
                module.register_forward_pre_hook(_without_mask, with_kwargs=True)

    def validate(self, model: nn.Module) -> None:
        """Accept every model."""

    def _check(self, buffers: list[Tensor], dims: list[int], kept: set[Tensor]) -> None:
        ranks = self.mesh.size()
        if not buffers or len(buffers) != len(dims):
            raise SettingsError(
                f"maybe_context_parallel() got {len(buffers)} buffers and {len(dims)} buffer_seq_dims; "
                "give every "
                "tensor that has a sequence dim (inputs, labels, positions), and for each which dim that is."
            )
        for buffer, dim in zip(buffers, dims, strict=True):
            if buffer.requires_grad:
                raise SettingsError(
                    f"maybe_context_parallel() got a tensor of shape {tuple(buffer.shape)} that requires "
                    "grad; it "
                    "cuts tensors in place. Give the inputs of the model instead."
                )
            if buffer.shape[dim] != buffers[0].shape[dims[0]]:
                raise SettingsError(
                    f"maybe_context_parallel() got sequences of {buffers[0].shape[dims[0]]} and of "
                    f"{buffer.shape[dim]} (dim {dim} of a tensor of shape {tuple(buffer.shape)}); give "
                    "tensors of one length, and for each which dim the sequence is."
                )
            if buffer.shape[dim] % ranks:
                raise SettingsError(
                    f"maybe_context_parallel() got a tensor of shape {tuple(buffer.shape)}, whose dim "
                    f"{dim} cannot "
                    f"be divided among cp_size={ranks} processes; pad the sequences."
                )
        if any(not any(one is buffer for buffer in buffers) for one in kept):
            raise SettingsError(
                "maybe_context_parallel() got no_restore_buffers that are not among its buffers."
            )


@contextmanager
def _one_thread() -> Generator[Callable[..., Any]]:
    """A block in which this thread alone may be: torch's replacement and options are those of the process.

    Gives attention as it was before.
    """
    mine = threading.get_ident()
    with _lock:
        if any(thread != mine for thread in _inside):
            raise UnsupportedError(
                "maybe_context_parallel() was entered while another thread is inside; it changes attention "
                "for the whole process. Let one thread train with context parallelism."
            )
        _inside.append(mine)
    try:
        yield functional.scaled_dot_product_attention
    finally:
        _inside.remove(mine)


@contextmanager
def _ring(rotation: str, *, balance: bool) -> Generator[None]:
    """A block in which torch's ring attention is set up."""
    set_rotate_method(rotation)
    learn_attention()
    with nullcontext() if balance else _without_balance():
        yield


@contextmanager
def _in_this_thread(plain: Callable[..., Any]) -> Generator[None]:
    """A block in which attention is distributed in this thread and in backward passes, and plain elsewhere.

    It refuses masks; torch would take them for parts of what they are not.

    Args:
        plain: The attention of other threads.
    """
    attention, owner = functional.scaled_dot_product_attention, threading.get_ident()

    def unmasked(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *args: Any, **more: Any
    ) -> Any:
        # A backward pass that recomputes runs in a thread of autograd on an accelerator.
        if threading.get_ident() != owner and torch._C._current_graph_task_id() == -1:  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue] - as torch.utils.checkpoint asks
            return plain(query, key, value, attn_mask, *args, **more)
        if attn_mask is not None:
            raise UnsupportedError(
                "scaled_dot_product_attention(attn_mask=…) within maybe_context_parallel(): a mask is of "
                "whole sequences, which no process has; use is_causal=True, or no mask."
            )
        return attention(query, key, value, None, *args, **more)

    functional.scaled_dot_product_attention = unmasked
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = attention


def learn_attention() -> None:
    """Let torch's ring attention also compute on the CPU and without causality, for which it has no rules."""
    rules = cast("dict[Any, Any]", _dispatching().custom_ops)
    rules.setdefault(_CPU, _forward)
    rules.setdefault(_CPU_BACKWARD, _backward)
    for op, rule in [*rules.items()]:
        if not isinstance(rule, _EitherWay):
            rules[op] = _EitherWay(rule)


@contextmanager
def _without_balance() -> Generator[None]:
    """A block in which every rank has consecutive tokens, or it makes no difference which it has."""
    options = _dispatching()._cp_options
    before, options.enable_load_balance = options.enable_load_balance, False
    try:
        yield
    finally:
        options.enable_load_balance = before


class _EitherWay:
    """A rule that computes with and without causality.

    So that all ranks have as much to do under a causal mask, torch gives each a part of the beginning and one
    of the end of a sequence, and refuses to compute without a mask then. Without a mask it does not matter in
    which order keys and values come.

    Args:
        rule: Of torch.
    """

    def __init__(self, rule: Callable[..., Any]) -> None:
        self._rule = rule

    def __call__(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = [argument.name for argument in op._schema.arguments]
        if (dict(zip(names, args, strict=False)) | kwargs).get("is_causal"):
            return self._rule(op, args, kwargs)
        with _without_balance():
            return self._rule(op, args, kwargs)


def _dispatching() -> Any:
    # The module in which torch looks its rules up; newer versions have moved it.
    return sys.modules[ring._templated_ring_attention.__module__]  # pyright: ignore[reportPrivateUsage] - no public way


def _forward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    query, key, value, *rest = args
    dropout, causal = [*rest, *(0.0, False)[len(rest) :]][:2]
    group = _group(query)

    def attention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, **more: Any) -> Any:
        return op(q, k, v, dropout, is_causal, **more)

    out, logsumexp = ring._templated_ring_attention(  # pyright: ignore[reportPrivateUsage]
        group,
        _SEQUENCE,
        cast("Any", attention),
        query.to_local(),
        key.to_local(),
        value.to_local(),
        is_causal=bool(causal),
        scale=kwargs.get("scale"),
    )
    return _shard_like(out, query), _shard_like(logsumexp, query)


def _backward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad, query, key, value, out, logsumexp, dropout, causal = args

    def attention(**given: Any) -> Any:
        return op(
            *(given.pop(name) for name in ("grad_out", "query", "key", "value", "out", "logsumexp")),
            dropout,
            given.pop("is_causal"),
            **given,
        )

    gradients = _dispatching()._templated_ring_attention_backward(
        _group(query),
        _SEQUENCE,
        attention,
        grad_out=grad.to_local(),
        grad_out_name="grad_out",
        query=query.to_local(),
        key=key.to_local(),
        value=value.to_local(),
        out=out.to_local(),
        logsumexp=logsumexp.to_local(),
        is_causal=causal,
        scale=kwargs.get("scale"),
    )
    return tuple(_shard_like(gradient, query) for gradient in gradients[:3])


def _group(query: DTensor) -> Any:
    return query.device_mesh.get_group()


def _shard_like(part: Tensor, like: DTensor) -> DTensor:
    return DTensor.from_local(part, like.device_mesh, [Shard(_SEQUENCE)], run_check=False)


def _without_mask(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs.get("attention_mask") is not None:
        if not getattr(module, "is_causal", True):
            raise UnsupportedError(
                f"{type(module).__name__} within maybe_context_parallel(): without causality there is a mask "
                "for padding only, and a mask is of whole sequences, which no process has; leave "
                "attention_mask and padding out."
            )
        kwargs = {**kwargs, "attention_mask": None}
    return args, kwargs
