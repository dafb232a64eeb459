"""Sequence parallelism (Ulysses) with torch only: sharded sequences, full sequences in attention."""

from __future__ import annotations

import copy
import importlib
import inspect
import math
import sys
from collections.abc import Callable, Generator, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel_plugins.parallelism.attention import check_layers, text_config
from accel_plugins.parallelism.exchange import all_to_all
from accel_state import hang_monitor
from accel_state.accelerator_state import GradientState
from accel_state.errors import SettingsError, UnsupportedError
from accel_state.frozen import frozen

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_IGNORED = -100
"""The label that losses of torch and transformers ignore."""
_KEY = "input_ids"
_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens", "cu_seqlens")
"""Keys of batches for the boundaries of packed samples: [0, end of the first, …, length]."""


# Batches


@frozen
class SequenceShard:
    """Shard the sequences of batches.

    Args:
        length: Length of all sequences; `None` for any.

    Example:
        >>> batch = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "labels": torch.tensor([[5, 6, 7, 8]])}
        >>> {name: value.tolist() for name, value in SequenceShard(size=2, rank=1)(batch).items()}
        {'input_ids': [[7, 8]], 'position_ids': [[2, 3]], 'shift_labels': [[8, -100]]}
    """

    size: int
    rank: int
    length: int | None = None

    def __call__(self, batch: Any) -> Any:
        """Return this rank's shard of a batch.

        Args:
            batch: A dictionary with `input_ids`, shape [rows, length]. Tensors of two and more dims are
                sharded along dim 1. `labels` become `shift_labels`, the labels of the next tokens, since a
                shard lacks the first token of the following one. `position_ids` are added if absent; they
                restart at the sample boundaries in `cu_seq_lens_q`.

        Returns:
            A dictionary of the same type.

        Raises:
            SettingsError: The batch is not such a dictionary, or its lengths cannot be sharded.
        """
        if not isinstance(batch, MutableMapping) or not isinstance(batch.get(_KEY), Tensor):
            keys = f" with {sorted(map(str, batch))}" if isinstance(batch, MutableMapping) else ""
            raise SettingsError(
                f"sp_size={self.size}: a batch is a {type(batch).__name__}{keys}; batches to shard must be "
                f"dictionaries with a tensor {_KEY!r} of shape [rows, length]."
            )
        shard = cast("MutableMapping[str, Any]", copy.copy(batch))
        tokens: Tensor = shard[_KEY]
        shape, labels = tokens.shape, shard.pop("labels", None)
        length = shape[-1]
        problem = None
        if len(shape) < 2:
            problem = "expected [rows, length]"
        elif length % self.size:
            problem = (
                f"the length {length} is not a multiple of {self.size}; pad (pad_to_multiple_of={self.size})"
            )
        elif self.length not in (None, length):
            problem = f"DeepSpeedSequenceParallelConfig(sp_seq_length={self.length}) wants another length"
        elif labels is not None and labels.shape != shape:
            problem = f"'labels' {tuple(labels.shape)}; expected a label for each token"
        for name, value in shard.items():
            if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] != shape[-1]:
                problem = problem or f"{name!r} {tuple(value.shape)}; dim 1 must be the sequence in both"
        if problem is not None:
            raise SettingsError(
                f"sp_size={self.size}: {_KEY!r} of a batch has the shape {tuple(shape)}: {problem}."
            )
        if "position_ids" not in shard:
            shard["position_ids"] = _positions(shard, length, tokens.device).expand(shape[0], length)
        if labels is not None:
            labels = torch.nn.functional.pad(labels, (0, 1), value=_IGNORED)
            shard.setdefault("shift_labels", labels[..., 1:])
        begin = length // self.size * self.rank
        for name, value in [*shard.items()]:
            if isinstance(value, Tensor) and value.dim() > 1:
                shard[name] = value[:, begin : begin + length // self.size].contiguous()
        return shard


def _positions(batch: MutableMapping[str, Any], length: int, device: torch.device) -> Tensor:
    """Return positions of shape [length], which restart with each sample if boundaries are given."""
    positions = torch.arange(length, device=device)
    boundaries = next((batch[name] for name in _BOUNDARIES if batch.get(name) is not None), None)
    if boundaries is None:
        return positions
    starts = torch.as_tensor(boundaries, device=device).flatten().long()
    return positions - starts[torch.searchsorted(starts, positions, right=True) - 1]


# Attention


class Ulysses:
    """Sequence parallelism over a mesh: every rank has a shard of each sequence, and all heads.

    Around attention, an all-to-all gives each rank the full sequences of some of the heads.

    Attributes:
        is_sharded (bool): Whether the last forward pass of a model had shards of sequences.

    Args:
        mesh: A mesh with one axis.
        tensor_size: Tensor-parallel size, over whose ranks heads are sharded already.
        in_stages: Whether a rank has stages of models, perhaps without attention. The pipeline then averages
            losses in training.
        averages_losses: Whether the loss of a model is the mean over all shards, also of batches that the
            loader has sharded; else scripts weight those themselves.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        tensor_size: int = 1,
        *,
        in_stages: bool = False,
        averages_losses: bool = True,
    ) -> None:
        self.size: int = mesh.size()
        self.group = mesh.get_group()
        self.shard = SequenceShard(size=self.size, rank=mesh.get_local_rank())
        self.is_sharded = False
        self._setting = f"ParallelismConfig(sp_size={self.size})"
        self._tensor_size = tensor_size
        self._in_stages = in_stages
        self._averages_losses = averages_losses
        self._has_attended = False
        self._is_inside = False  # whether the forward pass of a prepared model is running
        self._counts = False  # whether the loss of a model is divided by our number of tokens
        self._models: WeakSet[nn.Module] = WeakSet()
        self.configs: dict[int, Any] = {}  # by id, since configurations are compared by value

    def __deepcopy__(self, memo: object) -> Ulysses:
        """Return itself: the hooks of a copied model use the same object."""
        return self

    def attend(
        self, attention: Callable[[Tensor, Tensor, Tensor], Tensor], heads: tuple[Tensor, ...], sequence: int
    ) -> Tensor:
        """Compute attention over full sequences.

        Args:
            attention: Called with queries, keys and values, shapes [rows, heads / size, length, head_dim].
            heads: Queries, keys and values of this shard, shapes [rows, heads, length / size, head_dim].
                Heads of keys and values may be fewer; they are repeated until the size divides them.
            sequence: The dim of the sequence in the result of `attention`, 1 or 2; the other is the heads.

        Returns:
            The result for this shard, with the dims of the result of `attention`.

        Raises:
            SettingsError: The size does not divide the number of heads of the queries.
        """
        self._has_attended = True
        query, key, value = heads
        if query.shape[1] % self.size:
            raise SettingsError(
                f"{self._setting}: attention got queries of shape {tuple(query.shape)}, whose "
                f"{query.shape[1]} heads (dim 1) are not a multiple of {self.size}."
            )
        repeats = self.size // math.gcd(key.shape[1], self.size)
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        parts = [tensor.unflatten(1, (self.size, -1)).movedim(1, 0) for tensor in (query, key, value)]
        if query.shape[-1] == value.shape[-1]:  # in one collective
            exchanged = self._exchange(torch.cat(parts, dim=2), 2)
            query, key, value = exchanged.split([part.shape[2] for part in parts], dim=1)
        else:
            query, key, value = (self._exchange(part, 2) for part in parts)
        result = attention(query, key, value)
        return self._exchange(result.unflatten(sequence, (self.size, -1)).movedim(sequence, 0), 3 - sequence)

    def _exchange(self, parts: Tensor, dim: int) -> Tensor:
        """Send one part, along dim 0, to each rank, and join the received parts along another dim."""
        received = all_to_all(parts, self.group, "attention")
        return received.movedim(0, dim).flatten(dim, dim + 1)

    def gather(self, shard: Tensor, dim: int) -> Tensor:
        """Return a full tensor from its shards, such as positions or a padding mask, without gradients."""
        parts = [torch.empty_like(shard) for _ in range(self.size)]
        with hang_monitor.collective_scope("all_gather of masks"):
            dist.all_gather(parts, shard.detach().contiguous(), group=self.group)
        return torch.cat(parts, dim=dim)

    @property
    def computes(self) -> bool:
        """Whether a prepared model is running, or recomputing in a backward pass."""
        return self._is_inside or torch._C._current_graph_task_id() != -1

    def mean_loss(self, loss: Tensor, num_items: Tensor | int) -> Tensor:
        """Return the mean over the items of all shards, the same on all ranks of a sequence.

        Args:
            loss: Sum over the items of this shard, 0-d.
            num_items: Number of items of this shard.
        """
        total = self._items(torch.as_tensor(num_items, device=loss.device))
        return cast("Tensor", _Mean.apply(loss / total, self.group, self.size))

    def _items(self, num_items: Tensor) -> Tensor:
        """Return the mean number of items of a shard."""
        total = num_items.detach().clone()
        with hang_monitor.collective_scope("all_reduce of a number of tokens"):
            dist.all_reduce(total, group=self.group)
        return total.clamp(min=1) / self.size

    # Models

    def validate(self, model: nn.Module) -> None:
        """Check that a model's attention is correct with full sequences of some of the heads."""
        check_layers(model, self._setting, limited=frozenset({"sliding_attention", "chunked_attention"}))
        config = text_config(model)
        if config is None or not hasattr(config, "_attn_implementation"):
            return  # its own attention; see `_after`
        inner = next(module for module in model.modules() if hasattr(module, "config"))
        heads, divisor = getattr(config, "num_attention_heads", None), self.size * self._tensor_size
        sinks = [name[: -len(".sinks")] for name, _ in model.named_parameters() if name.endswith(".sinks")]
        ropes = {*_rope_types(getattr(config, "rope_parameters", None))} & {"dynamic", "longrope"}
        problem = None
        if not getattr(inner, "_supports_attention_backend", False):
            problem = "transformers' AttentionInterface does not replace its attention; use cp_size"
        elif getattr(config, "is_encoder_decoder", False):
            problem = "it has an encoder and a decoder, whose sequences differ in length"
        elif isinstance(heads, int) and heads % divisor:
            tensor = f" x tp_size={self._tensor_size}" if self._tensor_size > 1 else ""
            problem = f"it has {heads} attention heads, not a multiple of sp_size={self.size}{tensor}"
        elif sinks:
            problem = f"layer {sinks[0]!r} has sinks of attention for each head, and ranks compute some heads"
        elif ropes:
            kind = min(ropes)
            problem = f"rope_type={kind!r}, which depends on the longest position of a batch; use 'yarn'"
        if problem is not None:
            raise SettingsError(
                f"{self._setting}: {type(model).__name__} cannot train on shards of sequences: {problem}."
            )

    def prepare(self, model: nn.Module) -> None:
        """Make a model compute attention over full sequences whenever its batches are sharded."""
        _current[:] = [self]
        if model in self._models:
            return
        self._models.add(model)
        for module in model.modules():
            config: Any = getattr(module, "config", None)
            if hasattr(config, "_attn_implementation"):
                self.configs[id(config)] = config
                _patch(_source_of(module), config._attn_implementation)
                _attending[module] = self
        takes = frozenset(inspect.signature(model.forward).parameters)
        forwards = [inspect.unwrap(type(module).forward) for module in model.modules()]
        codes = [getattr(forward, "__code__", None) for forward in forwards]
        computes_loss = any("loss_function" in code.co_names for code in codes if code is not None)
        model.register_forward_pre_hook(partial(self._before, takes, computes_loss), with_kwargs=True)
        model.register_forward_hook(self._after, with_kwargs=True)
        model.register_forward_hook(self._leave, always_call=True)

    def release(self) -> None:
        """Release the models; undo the patches of transformers unless models of another run need them."""
        for module in [module for module, ulysses in _attending.items() if ulysses is self]:
            del _attending[module]
        self._models.clear()
        self.configs.clear()
        if _current == [self]:
            _current.clear()
        if not _attending:
            _undo.close()
            _routed_names.clear()

    def _before(
        self,
        takes: frozenset[str],
        computes_loss: bool,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Check whether the batch is sharded, or shard it; complete the inputs of a model of transformers."""
        self._is_inside = True
        self._has_attended = self._counts = False
        loader = GradientState().active_dataloader
        self.is_sharded = loader is None or getattr(loader, "shard_sequences", None) is not None
        averages = self._averages_losses
        if not model.training and (loader is None or kwargs.get("use_cache")):
            self.is_sharded = False  # generation sees full sequences
        if model.training and not self.is_sharded:
            if args or text_config(model) is None:
                raise SettingsError(
                    "A model with sp_size got batches of a loader that does not shard their sequences: pass "
                    "both to one call of prepare(), or call a model of transformers as model(**batch)."
                )
            arguments = {name: value for name, value in kwargs.items() if value is not None}
            kwargs, self.is_sharded, averages = self.shard(arguments), True, True
        if not self.is_sharded or text_config(model) is None:
            return None
        problem = None
        if "position_ids" not in kwargs:
            problem = "without position_ids the model would count each shard from 0"
        elif kwargs.get("labels") is not None and kwargs.get("shift_labels") is None:
            problem = "labels without shift_labels, which must be found before sequences are sharded"
        if problem is not None:
            raise SettingsError(
                f"{type(model).__name__} with {self._setting}: {problem}. Batches of a loader that is "
                "prepared with the model have both; pass all of a batch, as in model(**batch)."
            )
        if "use_cache" in takes and kwargs.get("use_cache") is None:
            kwargs["use_cache"] = False
        labels = kwargs.get("shift_labels")
        if labels is not None and computes_loss and averages:
            kwargs["labels"] = labels
            self._counts = kwargs.get("num_items_in_batch") is None
            if self._counts:
                kwargs["num_items_in_batch"] = self._items((labels != _IGNORED).sum())
        return args, kwargs

    def _leave(self, *_: Any) -> None:
        self._is_inside = False

    def _after(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Refuse a model that has attended to shards, and make its loss the mean over all shards."""
        del args, kwargs
        if not self.is_sharded or (self._in_stages and model.training):
            return output
        if not (self._has_attended or self._in_stages):
            raise UnsupportedError(
                f"{type(model).__name__} with {self._setting}: no attention saw full sequences. "
                "Wrap its attention, as in attention = sequence_parallel_attention("
                "torch.nn.functional.scaled_dot_product_attention)."
            )
        if not self._counts:
            return output
        if isinstance(output, tuple):
            return (_Mean.apply(output[0], self.group, self.size), *output[1:])
        output["loss"] = _Mean.apply(output["loss"], self.group, self.size)
        return output


_current: list[Ulysses] = []
"""The run's `Ulysses`, once it has prepared a model; for custom attention and losses."""
_attending: WeakKeyDictionary[nn.Module, Ulysses] = WeakKeyDictionary()
"""The modules of prepared models whose attention is that of transformers."""


@contextmanager
def without_exchange() -> Generator[None]:
    """Disable the exchange within the block, for copies of prepared models: attention sees shards only."""
    sharded = [ulysses for ulysses in _current if ulysses.is_sharded]
    for ulysses in sharded:
        ulysses.is_sharded = False
    try:
        yield
    finally:
        for ulysses in sharded:
            ulysses.is_sharded = True


def sequence_parallel_attention(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make an attention function see full sequences under sequence parallelism.

    Args:
        attention: Called with queries, keys and values of the shape [rows, heads, length, head_dim], and
            other arguments; returns a tensor of this shape. Heads of keys and values may be fewer.

    Returns:
        A function with the same arguments. If batches have shards of sequences, its tensors are this rank's
        shards, and `attention` is called with full sequences of some of the heads. Other arguments are passed
        unchanged: a mask must be of full sequences (see `gather_sequence`), and the same for all heads.
        Otherwise it equals `attention`.

    Raises:
        SettingsError: The number of heads of queries is not a multiple of `sp_size`.

    Example:
        >>> attention = sequence_parallel_attention(torch.nn.functional.scaled_dot_product_attention)
        >>> heads = torch.randn(1, 4, 8, 2)
        >>> attention(heads, heads, heads, is_causal=True).shape
        torch.Size([1, 4, 8, 2])
    """

    @wraps(attention)
    def attend(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        ulysses = _with_shards()
        if ulysses is None or not ulysses.computes:
            return attention(query, key, value, *args, **kwargs)
        return ulysses.attend(lambda *heads: attention(*heads, *args, **kwargs), (query, key, value), 2)

    return attend


def gather_sequence(shard: Tensor, dim: int = 1) -> Tensor:
    """Return the full tensor of a shard of sequences, such as positions or a padding mask.

    A collective over the ranks of a sequence; without sequence parallelism, or with full sequences, it
    returns its argument. Gradients do not pass through it.

    Args:
        shard: The same shape and dtype on every rank.
        dim: The dim of the sequence.

    Example:
        >>> gather_sequence(torch.ones(2, 3)).shape
        torch.Size([2, 3])
    """
    ulysses = _with_shards()
    return shard if ulysses is None or not ulysses.computes else ulysses.gather(shard, dim)


def sequence_parallel_loss(loss: Tensor, num_items: Tensor | int) -> Tensor:
    """Return the mean loss of full sequences, from each rank's sum over its shard.

    Models of transformers that get `shift_labels` compute it by themselves.

    Args:
        loss: 0-d, the sum over the tokens of this rank's shard.
        num_items: Number of these tokens, such as `(shift_labels != -100).sum()`.

    Returns:
        0-d, the same on all ranks of a sequence; its gradients are those of one process. Without sequence
        parallelism `loss / num_items`.

    Example:
        >>> sequence_parallel_loss(torch.tensor(6.0), 3)
        tensor(2.)
    """
    ulysses = _with_shards()
    return loss / num_items if ulysses is None else ulysses.mean_loss(loss, num_items)


def _with_shards() -> Ulysses | None:
    """Return the sequence parallelism of the run, if the last forward pass had shards of sequences."""
    return next((ulysses for ulysses in _current if ulysses.is_sharded), None)


# transformers


_undo = ExitStack()
"""Undoes the patches of transformers."""
_routed_names: set[tuple[int, str]] = set()
"""The attention that is patched: the id of the table, and the name."""


def _patch(source: ModuleType, implementation: str) -> None:
    """Patch attention and masks in a source file, in effect only for prepared models."""
    functions = vars(source).get("ALL_ATTENTION_FUNCTIONS")
    if functions is not None and (id(functions), implementation) not in _routed_names:
        local = functions._local_mapping
        if implementation in local:
            _undo.callback(local.__setitem__, implementation, local[implementation])
        else:
            _undo.callback(local.__delitem__, implementation)
        _routed_names.add((id(functions), implementation))
        functions[implementation] = _routed(implementation, functions.get(implementation))
    masks = importlib.import_module("transformers.masking_utils")
    for name, create in [*vars(source).items()]:
        if name.startswith("create_") and vars(masks).get(name) is create and source is not masks:
            _undo.callback(setattr, source, name, create)
            setattr(source, name, _with_full_sequences(create))


def _routed(implementation: str, core: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return an attention function of transformers that sees full sequences in modules of prepared models.

    `core` is the original; `None` for eager attention, which each source file of transformers defines.
    """

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        function = core or vars(_source_of(module))["eager_attention_forward"]
        ulysses = _attending.get(module)
        if ulysses is None or not ulysses.is_sharded:
            return function(module, query, key, value, mask, *args, **kwargs)
        # Flash attention finds packed samples by them; others have masks.
        if implementation.startswith("flash") and kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = ulysses.gather(kwargs["position_ids"], -1)

        def attend(*heads: Tensor) -> Tensor:
            if not hasattr(module, "num_key_value_groups"):
                return function(module, *heads, mask, *args, **kwargs)[0]
            owner: Any = module
            before = owner.num_key_value_groups  # repeated heads change it
            owner.num_key_value_groups = heads[0].shape[1] // heads[1].shape[1]
            try:
                return function(module, *heads, mask, *args, **kwargs)[0]
            finally:
                owner.num_key_value_groups = before

        return ulysses.attend(attend, (query, key, value), 1), None

    return attention


def _with_full_sequences(create: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a mask function of transformers to create masks of full sequences where batches are sharded."""
    signature = inspect.signature(create)

    @wraps(create)
    def create_full(*args: Any, **kwargs: Any) -> Any:
        values = signature.bind(*args, **kwargs).arguments
        ulysses, config = _with_shards(), values.get("config")
        if ulysses is None or id(config) not in ulysses.configs:
            return create(*args, **kwargs)
        for name in ("or_mask_function", "and_mask_function"):
            if _has_tensors(values.get(name)):
                raise UnsupportedError(
                    f"{type(config).__name__} with sp_size={ulysses.size}: a mask is computed from tensors "
                    f"of a shard ({name}); train this model without sharding its sequences."
                )
        embedded: Tensor = values["inputs_embeds"]
        rows, length, *sizes = embedded.shape
        values["inputs_embeds"] = embedded.new_empty(1).expand(rows, length * ulysses.size, *sizes)
        for name in ("attention_mask", "position_ids", "block_sequence_ids"):
            value = values.get(name)
            if isinstance(value, Tensor) and value.shape[-1] == length and value.dim() < 4:
                values[name] = ulysses.gather(value, -1)
        return create(**values)

    return create_full


def _has_tensors(function: Any) -> bool:
    """Return whether a function, or one that it calls, has tensors in its closure."""
    values = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    return any(isinstance(value, Tensor) or _has_tensors(value) for value in values)


def _source_of(module: nn.Module) -> ModuleType:
    """Return the source file that defines the forward of a module."""
    return sys.modules[inspect.unwrap(type(module).forward).__module__]


def _rope_types(parameters: Any) -> Iterator[str]:
    """Yield the types in `rope_parameters`, which may be a dictionary for each type of layer."""
    if isinstance(parameters, dict):
        values = cast("dict[str, Any]", parameters)
        if isinstance(values.get("rope_type"), str):
            yield values["rope_type"]
        for value in values.values():
            yield from _rope_types(value)


# Collectives


class _Mean(torch.autograd.Function):
    """The mean of a loss over ranks, whose gradients are the mean over ranks, too."""

    @staticmethod
    def forward(_: Any, loss: Tensor, group: dist.ProcessGroup, size: int) -> Tensor:
        mean = loss.detach().clone()
        with hang_monitor.collective_scope("all_reduce of a loss"):
            dist.all_reduce(mean, group=group)
        return mean / size

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient, None, None
