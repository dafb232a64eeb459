"""Replace linear layers by quantised ones, and quantise their weights."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_ops.weights.tensors import child_table
from accel_ops.weights.tied import find_tied_parameters
from accel_quant.bnb.exact import keep_exact
from accel_quant.bnb.saved import STATE_8BIT, check_4bit, check_8bit
from accel_state.available import is_bnb_available, require

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from accel_quant.bnb.config import BnbQuantizationConfig

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
    """Name what is better not quantised: the output head, and modules whose weights are tied.

    Example:
        >>> default_skipped(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        ['1']
    """
    tied = [name.rpartition(".")[0] for group in find_tied_parameters(model) for name in group]
    return list(dict.fromkeys([*tied, *_head(model)]))


def is_listed(name: str, listed: Iterable[str]) -> bool:
    """Return whether a module is in a list of names, itself, below, or by a part of its dotted name.

    Example:
        >>> is_listed("model.layers.0.mlp", ["layers.0"]), is_listed("layers.01", ["layers.0"])
        (True, False)
    """
    return any(f".{entry}." in f".{name}." for entry in listed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantizer:
    """Makes quantised layers and weights as a configuration says."""

    config: BnbQuantizationConfig
    bnb: Any

    def replace_linears(self, model: nn.Module, keep: Iterable[str]) -> dict[str, nn.Linear]:
        """Put quantised layers, still without weights, where linear layers are; return those by name."""
        excluded = list(keep)
        replaced: dict[str, nn.Linear] = {}
        for name, module in list(model.named_modules()):
            prefix = f"{name}." if name else ""
            for leaf, child in list(child_table(module).items()):
                if type(child) is nn.Linear and not is_listed(prefix + leaf, excluded):
                    replaced[prefix + leaf] = child
                    setattr(module, leaf, self._layer(child))
        return replaced

    def quantize(self, weight: Tensor, device: torch.device, layer: nn.Module) -> nn.Parameter:
        """Quantise a weight on a device, wherever it is."""
        config = self.config
        value = weight.detach()
        if config.load_in_8bit:
            # `Int8Params.to` quantises what is on the CPU alone. The kernels take float16 alone.
            value = value.to(device, torch.float16).contiguous()
            data, scales, _ = self.bnb.functional.int8_vectorwise_quant(value)
            return self.bnb.nn.Int8Params(
                data, requires_grad=False, has_fp16_weights=False, CB=data, SCB=scales
            )
        options = {
            "requires_grad": False,
            "compress_statistics": config.bnb_4bit_use_double_quant,
            "quant_type": config.bnb_4bit_quant_type,
            "module": layer,
        }
        if device.type != "cpu":
            return self.bnb.nn.Params4bit(value.contiguous(), **options).to(device)
        packed, state = self._packed_on_cpu(value)
        made = self.bnb.nn.Params4bit(packed, quant_state=state, bnb_quantized=True, **options)
        owner: Any = layer
        owner.quant_state = state
        return made

    def restore(
        self,
        weight: Tensor,
        statistics: Mapping[str, Tensor],
        device: torch.device,
        layer: nn.Linear,
        *,
        where: str,
    ) -> nn.Parameter:
        """Restore a weight of packed numbers; messages say `where` it is from.

        The statistics are what was saved beside it: `SCB` for 8 bits, the parts of the state for 4.
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

        The blocks of 64 are independent of each other, and double quantisation works on all scales at the
        end, so that the result is that of one call, bit for bit.
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
                keep_exact(new)
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
