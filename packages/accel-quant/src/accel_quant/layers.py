"""bitsandbytes layers: replace linear layers, validate and save their state, offload them.

The kernels of bitsandbytes take addresses, a shape and a block size, and check nothing: a missing scale, or a
shape that is too large, causes reads outside of the tensor.

On a processor with AVX512-BF16, bitsandbytes repacks a 4-bit layer at its first forward without gradients. It
permutes the weights, which it undoes on saving. It also rounds their scales to bfloat16 and transposes them,
which it does not undo: a layer saved or run after that has wrong scales. The packed form has no backward, and
supports only some shapes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accel_bigmodel.hooks import OffloadedTensor, slot_of
from accel_bigmodel.placement import owner_of
from accel_ops.weights.tensors import find_tied_parameters
from accel_state.errors import CheckpointError, first_line, some_of
from accel_state.frozen import frozen
from accel_state.libraries import is_bnb_available, require

if TYPE_CHECKING:
    from accel_quant.config import BnbQuantizationConfig

    StateDict = dict[str, Any]
    Expected = list[tuple[str, Tensor, torch.dtype, int]]

STATE_8BIT = "SCB"

_CODE, _NESTED_CODE = 16, 256  # values of 4 bits, and of 8 bits for double-quantised scales


def check_4bit(where: str, weight: Tensor, statistics: Mapping[str, Tensor], shape: tuple[int, int]) -> None:
    """Raise if a saved 4-bit weight does not match its layer.

    Raises:
        CheckpointError: The state cannot be read, or a tensor has another dtype or size.
    """
    count = math.prod(shape)
    try:
        state = bitsandbytes().functional.QuantState.from_dict(dict(statistics), device=torch.device("cpu"))
        nested = state.state2
        blocks = -(-count // state.blocksize)
        expected = [
            ("weight", weight, torch.uint8, -(-count // 2)),
            ("quant_map", state.code, torch.float32, _CODE),
            ("absmax", state.absmax, torch.uint8 if nested else torch.float32, blocks),
        ]
        if nested:
            nested_blocks = -(-blocks // nested.blocksize)
            expected += [
                ("nested_quant_map", nested.code, torch.float32, _NESTED_CODE),
                ("nested_absmax", nested.absmax, torch.float32, nested_blocks),
            ]
        if tuple(state.shape) != shape or not all(
            isinstance(part.dtype, torch.dtype) for part in (state, nested) if part
        ):
            raise ValueError(f"it declares the shape {[*state.shape]}, and the layer has {[*shape]}")
    except (  # all that the library's reader meets
        ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
    ) as error:  # fmt: skip
        raise CheckpointError(
            f"{where} has a damaged quantisation state: {some_of([first_line(error)], width=200)}"
        ) from error
    _check_tensors(where, expected)


def check_8bit(where: str, weight: Tensor, statistics: Mapping[str, Tensor], shape: tuple[int, int]) -> None:
    """Reject a saved 8-bit weight that does not fit its layer; arguments as for `check_4bit`."""
    scales = statistics.get(STATE_8BIT)
    if scales is None:
        raise CheckpointError(f"{where} has no {STATE_8BIT!r}, the scales of an 8-bit weight.")
    _check_tensors(
        where,
        [("weight", weight, torch.int8, math.prod(shape)), (STATE_8BIT, scales, torch.float32, shape[0])],
    )
    check_shape(where, weight, shape)


def check_shape(where: str, weight: Tensor, shape: tuple[int, int]) -> None:
    """Reject a weight whose shape differs from its layer's; arguments as for `check_4bit`."""
    if tuple(weight.shape) != shape:
        raise CheckpointError(
            f"{where} has the shape {list(weight.shape)}, but its layer needs {list(shape)}."
        )


def _check_tensors(where: str, expected: Expected) -> None:
    for name, tensor, dtype, count in expected:
        if tensor.dtype is not dtype or tensor.numel() != count or tensor.layout is not torch.strided:
            raise CheckpointError(
                f"{where}: {name} is {tensor.dtype} of shape {list(tensor.shape)}, but its layer needs "
                f"{count} elements of {dtype}."
            )


_ROWS, _COLUMNS = 32, 64
"""The packed form needs multiples of these: rows per panel of its kernel, weights per scale."""
_SCALES = ("absmax", "offset", "state2", "nested", "dtype")


def preserve_exact_state(layer: Any) -> None:
    """Make the state dict of a 4-bit layer independent of whether the layer has run, and loadable.

    While a layer is packed it keeps its exact scales, a sixteenth of a byte per weight, but no second copy
    of the weights.
    """
    layer.register_load_state_dict_pre_hook(_load_scales)
    if not getattr(layer, "support_avx512bf16_for_cpu", False):
        return
    if layer.out_features % _ROWS or layer.in_features % _COLUMNS:
        layer.support_avx512bf16_for_cpu = False
        return
    layer.register_state_dict_post_hook(_restore_scales)
    layer.register_forward_pre_hook(_before_forward, with_kwargs=True)


def never_pack(layer: Any) -> None:
    """Undo the packing of a 4-bit layer and prevent further packing."""
    if _is_packed(_quant_state(layer)):
        _unpack(layer)
    layer.support_avx512bf16_for_cpu = False


def _quant_state(layer: Any) -> Any:
    # An offloaded weight is a meta tensor without a state.
    return getattr(layer.weight, "quant_state", None)


def _is_packed(state: Any) -> bool:
    return getattr(state, "packing_format_for_cpu", False)


def _unpack(layer: nn.Module) -> None:
    # The library unpacks the weights on saving, and `_restore_scales` does the rest.
    layer.state_dict()


def _before_forward(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x = args[0] if args else kwargs["x"]
    state = _quant_state(layer)
    packs = (
        layer.support_avx512bf16_for_cpu
        and x.device.type == "cpu"
        and not layer.training
        and not x.requires_grad
    )
    if _is_packed(state):
        if not packs:
            _unpack(layer)
    elif packs and state is not None:
        state.exact = {name: getattr(state, name) for name in _SCALES}


def _restore_scales(layer: Any, state_dict: StateDict, prefix: str, _metadata: object) -> None:
    state = _quant_state(layer)
    if not hasattr(state, "exact"):
        return
    vars(state).update(vars(state).pop("exact"))
    state.to(layer.weight.device)
    state_dict.update(
        {f"{prefix}weight.{name}": part.detach() for name, part in state.as_dict(packed=True).items()}
    )


def _load_scales(layer: Any, state_dict: StateDict, prefix: str, *_: object) -> None:
    prefix = f"{prefix}weight."
    parts = {
        name.removeprefix(prefix): state_dict.pop(name)
        for name in list(state_dict)
        if name.startswith(prefix)
    }
    state = _quant_state(layer)
    if not parts or state is None:
        return
    where = f"The state dict's quantised weight {prefix.removesuffix('.')!r}"
    weight = state_dict.get(prefix.removesuffix("."), layer.weight)
    check_4bit(where, weight, parts, (layer.out_features, layer.in_features))
    parts = {name: part.contiguous() for name, part in parts.items()}
    if _is_packed(state):
        _unpack(layer)
    layer.quant_state = layer.weight.quant_state = type(state).from_dict(parts, device=layer.weight.device)


WEIGHT_FORMAT = "weight_format"

_CHUNK = 1 << 20
_BLOCK, _NESTED_BLOCK = 64, 256
"""The library's own block sizes, of weights and of their scales."""


def bitsandbytes() -> Any:
    """Import the library."""
    require("bnb", "quantised weights", install="accel-quant[bnb]")
    return import_module("bitsandbytes")


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Return whether any layer of a model has 4-bit weights.

    Example:
        >>> has_4bit_bnb_layers(nn.Linear(2, 2))
        False
    """
    if not is_bnb_available():
        return False
    return any(isinstance(module, bitsandbytes().nn.Linear4bit) for module in model.modules())


def default_skipped(model: nn.Module) -> list[str]:
    """Return the names of modules to keep unquantised: the output head, and modules with tied weights.

    Example:
        >>> default_skipped(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        ['1']
    """
    tied = [name.rpartition(".")[0] for group in find_tied_parameters(model) for name in group]
    return list(dict.fromkeys([*tied, *_head(model)]))


def is_listed(name: str, listed: Iterable[str]) -> bool:
    """Return whether a list of names contains a module, an ancestor, or a part of its dotted name.

    Example:
        >>> is_listed("model.layers.0.mlp", ["layers.0"]), is_listed("layers.01", ["layers.0"])
        (True, False)
    """
    return any(f".{entry}." in f".{name}." for entry in listed)


@frozen
class Quantizer:
    """Creates quantised layers and weights from a configuration."""

    config: BnbQuantizationConfig
    bnb: Any

    def replace_linears(self, model: nn.Module, keep: Iterable[str]) -> dict[str, nn.Linear]:
        """Replace linear layers by quantised layers on the meta device; return the linear layers by name."""
        excluded = list(keep)
        replaced: dict[str, nn.Linear] = {}
        made: dict[nn.Linear, nn.Module] = {}  # a shared layer stays shared
        for name, module in list(model.named_modules()):
            prefix = f"{name}." if name else ""
            for leaf, child in list(module._modules.items()):
                if type(child) is nn.Linear and not is_listed(prefix + leaf, excluded):
                    replaced[prefix + leaf] = child
                    if child not in made:
                        made[child] = self._layer(child)
                    setattr(module, leaf, made[child])
        return replaced

    def quantize(self, weight: Tensor, device: torch.device, layer: nn.Module) -> nn.Parameter:
        """Quantise a weight, from any device, on a device."""
        config = self.config
        value = weight.detach()
        if config.load_in_8bit:
            # `Int8Params.to` only quantises CPU tensors. The kernels only support float16.
            value = value.to(device, torch.float16).contiguous()
            data, scales, _ = self.bnb.functional.int8_vectorwise_quant(value)
            return self.bnb.nn.Int8Params(
                data, requires_grad=False, has_fp16_weights=False, CB=data, SCB=scales
            )
        if device.type != "cpu":
            parameter: Any = self.unquantized(value.contiguous(), layer)
            return parameter.to(device)
        packed, state = self._packed_on_cpu(value)
        options = self._options_of_4bit(layer)
        made = self.bnb.nn.Params4bit(packed, quant_state=state, bnb_quantized=True, **options)
        owner: Any = layer
        owner.quant_state = state
        return made

    def unquantized(self, weight: Tensor, layer: nn.Module) -> nn.Parameter:
        """Create a parameter from a weight that bitsandbytes quantises when it is moved to a device."""
        value = weight.detach()
        if self.config.load_in_8bit:
            return self.bnb.nn.Int8Params(value, requires_grad=False, has_fp16_weights=False)
        return self.bnb.nn.Params4bit(value, **self._options_of_4bit(layer))

    def _options_of_4bit(self, layer: nn.Module) -> dict[str, Any]:
        return {
            "requires_grad": False,
            "compress_statistics": self.config.bnb_4bit_use_double_quant,
            "quant_type": self.config.bnb_4bit_quant_type,
            "module": layer,
        }

    def restore(
        self,
        weight: Tensor,
        statistics: Mapping[str, Tensor],
        device: torch.device,
        layer: nn.Linear,
        *,
        where: str,
    ) -> nn.Parameter:
        """Restore a weight from packed numbers; `where` is its origin, for messages.

        The statistics are the tensors saved with it: `SCB` for 8 bits, the parts of the state for 4 bits.
        """
        check = check_8bit if self.config.load_in_8bit else check_4bit
        check(where, weight, statistics, (layer.out_features, layer.in_features))
        weight = weight.contiguous()
        statistics = {name: part.contiguous() for name, part in statistics.items()}
        if self.config.load_in_8bit:
            data = weight.to(device)
            return self.bnb.nn.Int8Params(
                data,
                requires_grad=False,
                has_fp16_weights=False,
                CB=data,
                SCB=statistics[STATE_8BIT].to(device),
            )
        return self.bnb.nn.Params4bit.from_prequantized(
            data=weight, quantized_stats=dict(statistics), requires_grad=False, device=device, module=layer
        )

    def _packed_on_cpu(self, value: Tensor) -> tuple[Tensor, Any]:
        """Quantise in chunks: the CPU kernel's temporaries take sixteen times its input.

        The blocks of 64 are independent of each other, and double quantisation uses all scales at the end,
        so that the result is bitwise equal to that of one call.
        """
        config, functional = self.config, self.bnb.functional
        packed: list[Tensor] = []
        scales: list[Tensor] = []
        state: Any = None
        for chunk in value.contiguous().view(-1).split(_CHUNK):
            out, state = functional.quantize_4bit(
                chunk, blocksize=_BLOCK, compress_statistics=False, quant_type=config.bnb_4bit_quant_type
            )
            packed.append(out)
            scales.append(state.absmax)
        absmax, offset, nested = torch.cat(scales), None, None
        if config.bnb_4bit_use_double_quant:
            offset = absmax.mean()
            absmax, nested = functional.quantize_blockwise(absmax - offset, blocksize=_NESTED_BLOCK)
        return torch.cat(packed), functional.QuantState(
            absmax=absmax,
            shape=value.shape,
            dtype=value.dtype,
            blocksize=_BLOCK,
            code=state.code,
            quant_type=config.bnb_4bit_quant_type,
            offset=offset,
            state2=nested,
        )

    def _layer(self, linear: nn.Linear) -> nn.Module:
        config, bias = self.config, linear.bias is not None
        with torch.device("meta"):
            if config.load_in_8bit:
                new = self.bnb.nn.Linear8bitLt(
                    linear.in_features,
                    linear.out_features,
                    bias,
                    has_fp16_weights=False,
                    threshold=config.llm_int8_threshold,
                )
            else:
                new = self.bnb.nn.Linear4bit(
                    linear.in_features,
                    linear.out_features,
                    bias,
                    compute_dtype=config.bnb_4bit_compute_dtype,
                    compress_statistics=config.bnb_4bit_use_double_quant,
                    quant_type=config.bnb_4bit_quant_type,
                )
                preserve_exact_state(new)
        new.weight.requires_grad = False
        if bias:
            new.bias = linear.bias
        return new.train(linear.training)


def _head(model: nn.Module) -> list[str]:
    base = getattr(model, "base_model_prefix", None)
    if base is not None and not hasattr(model, base):
        return []
    output = getattr(model, "get_output_embeddings", None)
    head = output() if callable(output) else None
    if head is not None:
        return [name for name, module in model.named_modules() if module is head]
    children = [name for name, _ in model.named_children()]
    return children[-1:]


@functools.cache
def register_slots() -> None:
    """Register with offloading hooks how quantised parameters are flattened."""
    bnb = bitsandbytes()
    slot_of.register(bnb.nn.Int8Params, lambda tensor, module, name: Int8Slot(module, name, tensor))
    slot_of.register(bnb.nn.Params4bit, _4bit_slot)


class QuantizedSlot(OffloadedTensor):
    """The slot of a quantised weight."""

    def __init__(self, module: nn.Module, name: str, tensor: Tensor) -> None:
        self.name = name
        self._owner, self._leaf = owner_of(module, name)
        self._table = self._owner._parameters
        self._class: Any = type(tensor)
        self._attributes: dict[str, Any] = dict(vars(tensor))
        self._meta: Any = self._class(tensor.data.to("meta"), requires_grad=False, **self._attributes)

    def enter(self, value: Tensor, *, keep: bool = False) -> None:  # noqa: ARG002 - the protocol's signature
        """Set the weight from its numbers and its scales."""
        self._table[self._leaf] = self._class(value, requires_grad=False, **self._statistics(value))

    def leave(self) -> None:
        """Set the weight to a meta tensor with the scales, which state dicts contain as well."""
        self._table[self._leaf] = self._meta

    def _statistics(self, value: Tensor) -> dict[str, Any]:
        state = self._attributes["quant_state"]
        state.to(value.device)
        return self._attributes


class Int8Slot(QuantizedSlot):
    """The slot of an 8-bit weight, whose layer keeps numbers and scales in a separate state."""

    def __init__(self, module: nn.Module, name: str, tensor: Tensor) -> None:
        super().__init__(module, name, tensor)
        owner: Any = self._owner
        scales = self._attributes.get("SCB")
        self._scales: Tensor = owner.state.SCB if scales is None else scales
        self._meta.CB, self._meta.SCB = None, self._scales

    def leave(self) -> None:
        """Set the weight to a meta tensor, and drop the numbers from the layer's state."""
        owner: Any = self._owner
        owner.state.CB = owner.state.SCB = None
        super().leave()

    def _statistics(self, value: Tensor) -> dict[str, Any]:
        self._scales = self._meta.SCB = self._scales.to(value.device)
        return {"has_fp16_weights": False, "CB": value, "SCB": self._scales}


def _4bit_slot(tensor: Tensor, module: nn.Module, name: str) -> QuantizedSlot:
    # Weights are unpacked at each load.
    never_pack(owner_of(module, name)[0])
    return QuantizedSlot(module, name, tensor)
