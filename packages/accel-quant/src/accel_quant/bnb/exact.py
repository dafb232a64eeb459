"""4-bit layers whose state dict is exact, whether they ran or not, and can be loaded again.

On a processor with AVX512-BF16, bitsandbytes repacks a 4-bit layer at its first forward without gradients. It
permutes the weights, which it undoes on saving. It also rounds their scales to bfloat16 and transposes them,
which it does not undo: what is saved or run after that has wrong scales. The packed form has no backward, and
takes only some shapes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_quant.bnb.saved import check_4bit

if TYPE_CHECKING:
    from torch import nn

    StateDict = dict[str, Any]

_ROWS, _COLUMNS = 32, 64
"""The packed form wants multiples of these: rows per panel of its kernel, weights per scale."""
_SCALES = ("absmax", "offset", "state2", "nested", "dtype")


def keep_exact(layer: Any) -> None:
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
    """Undo the packing of a 4-bit layer and let it never be packed again."""
    if _is_packed(_state_of(layer)):
        _unpack(layer)
    layer.support_avx512bf16_for_cpu = False


def _state_of(layer: Any) -> Any:
    # An offloaded weight is a meta tensor without a state.
    return getattr(layer.weight, "quant_state", None)


def _is_packed(state: Any) -> bool:
    return getattr(state, "packing_format_for_cpu", False)


def _unpack(layer: nn.Module) -> None:
    # The library unpacks the weights on saving, and `_restore_scales` does the rest.
    layer.state_dict()


def _before_forward(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x = args[0] if args else kwargs["x"]
    state = _state_of(layer)
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
    state = _state_of(layer)
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
    state = _state_of(layer)
    if not parts or state is None:
        return
    where = f"The state dict's quantised weight {prefix.removesuffix('.')!r}"
    weight = state_dict.get(prefix.removesuffix("."), layer.weight)
    check_4bit(where, weight, parts, (layer.out_features, layer.in_features))
    parts = {name: part.contiguous() for name, part in parts.items()}
    if _is_packed(state):
        _unpack(layer)
    layer.quant_state = layer.weight.quant_state = type(state).from_dict(parts, device=layer.weight.device)
