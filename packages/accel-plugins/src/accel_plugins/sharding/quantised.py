"""Shard the frozen weights of bitsandbytes: their packed values like others, their scales on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accel_state.errors import CheckpointMismatchError, SettingsError

if TYPE_CHECKING:
    from accel_state.runtime import Runtime


def is_quantised(parameter: Tensor) -> bool:
    """Return whether a parameter is one of bitsandbytes, without importing the library."""
    return type(parameter).__module__.startswith("bitsandbytes.")


def check_quantised(model: nn.Module, param_dtype: torch.dtype | None) -> None:
    """Refuse quantised weights that FSDP2 cannot shard, or would cast to another dtype.

    Raises:
        SettingsError: A weight is trained, not quantised yet, or stored in a floating dtype that is not that
            of the mixed precision.
    """
    for name, parameter in model.named_parameters():
        weight: Any = parameter
        if not is_quantised(parameter):
            continue
        where = f"{type(model).__name__}: the parameter {name!r} ({type(weight).__name__} of bitsandbytes)"
        if weight.requires_grad or getattr(weight, "has_fp16_weights", False):
            raise SettingsError(
                f"{where} is trained, and FSDP2 shards quantised weights that are frozen only. Call "
                "requires_grad_(False) on it, and train adapters beside it."
            )
        is_8bit = hasattr(weight, "has_fp16_weights")
        if weight.is_meta or not (weight.dtype is torch.int8 if is_8bit else weight.bnb_quantized):
            raise SettingsError(
                f"{where} is not quantised yet. Load it on every rank before prepare(), with "
                "load_and_quantize_model() or by moving the model to its device."
            )
        if getattr(getattr(weight, "quant_state", None), "packing_format_for_cpu", False):
            raise SettingsError(
                f"{where} is packed for inference on the CPU, since the model has run without gradients. "
                "Call model.state_dict(), which undoes it, or prepare the model before it runs."
            )
        if param_dtype is not None and weight.is_floating_point() and weight.dtype is not param_dtype:
            raise SettingsError(
                f"{where} stores its packed values as {weight.dtype}, and the mixed precision would cast "
                f"them to {param_dtype}. Quantise the model with bnb_4bit_quant_storage=torch.uint8 or "
                f"{param_dtype}."
            )


def prepare_quantised(model: nn.Module, runtime: Runtime) -> None:
    """Give every rank the scales of rank 0, and let layers find them beside weights that FSDP2 gathers.

    The parameter that FSDP2 gathers is a plain one. 4-bit layers keep their state themselves, 8-bit ones get
    the gathered values before each forward pass.
    """
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            if not is_quantised(weight):
                continue
            layer: Any = module
            own: Any = weight
            if hasattr(own, "quant_state"):
                own.quant_state.to(runtime.device)
                layer.quant_state = own.quant_state
                layer.support_avx512bf16_for_cpu = (
                    False  # it would repack the gathered weight at each forward
                )
                layer.register_load_state_dict_pre_hook(_load_scales)
                scales = _scales_of(own.quant_state)
            else:
                own.SCB = (layer.state.SCB if own.SCB is None else own.SCB).to(runtime.device)
                own.CB = layer.state.CB = None  # the full weight
                layer.state.SCB = own.SCB
                layer.register_forward_pre_hook(_use_gathered)
                scales = [own.SCB]
            for scale in scales:
                runtime.collectives.broadcast(scale, src=0)


def _scales_of(state: Any) -> list[Tensor]:
    values = [value for part in (state, state.state2) if part for value in vars(part).values()]
    return [value for value in values if isinstance(value, Tensor)]


def _load_scales(layer: Any, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Load the scales of a 4-bit weight; bitsandbytes writes them into state dicts and does not read them."""
    prefix = f"{prefix}weight."
    names = [name for name in state_dict if name.startswith(prefix)]
    if not names:
        return
    own = layer.weight.quant_state
    parts = {name.removeprefix(prefix): state_dict.pop(name) for name in names}
    state = type(own).from_dict(parts, device=own.absmax.device)
    if [(part.shape, part.dtype) for part in _scales_of(state)] != [
        (part.shape, part.dtype) for part in _scales_of(own)
    ] or (state.shape, state.blocksize) != (own.shape, own.blocksize):
        raise CheckpointMismatchError(
            f"The scales of {prefix.removesuffix('.')!r} are those of another 4-bit weight: its shape is "
            f"{[*state.shape]} in blocks of {state.blocksize}, this layer's is {[*own.shape]} in blocks of "
            f"{own.blocksize}. Quantise the model as in the run that was saved."
        )
    layer.quant_state = layer.weight.quant_state = state


def _use_gathered(layer: Any, _: object) -> None:
    layer.weight.CB = None  # what the layer reads first; the gathered parameter is new to the library
    layer.state.CB = layer.weight.detach()
