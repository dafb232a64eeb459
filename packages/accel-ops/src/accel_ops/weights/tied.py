"""Tied weights: one tensor that a model knows under several names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_ops.weights.tensors import buffer_table, parameter_table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """Find the parameters that a model holds under more than one name.

    Args:
        model: The model, on any device, the meta device too.
        **kwargs: Nothing is accepted; the documented signature has it.

    Raises:
        TypeError: A keyword argument was given.

    Example:
        >>> from torch import nn
        >>> model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        >>> model.b.weight = model.a.weight
        >>> find_tied_parameters(model)
        [['a.weight', 'b.weight']]
    """
    if kwargs:
        raise TypeError(f"find_tied_parameters takes the model alone, not {', '.join(sorted(kwargs))}")
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return sorted(sorted(group) for group in names.values() if len(group) > 1)


def retie_parameters(model: nn.Module, tied_params: Iterable[Iterable[str]]) -> None:
    """Assign one tensor to every name of a group again.

    The tensor that wins is the first of the group that holds values, whatever its place: a name that is still
    on the meta device never replaces one that was loaded.

    Example:
        >>> from torch import nn
        >>> model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        >>> retie_parameters(model, [["a.weight", "b.weight"]])
        >>> model.a.weight is model.b.weight
        True
    """
    for group in tied_params:
        owners = [_owner(model, name) for name in group]
        held = [_read(module, leaf) for module, leaf in owners]
        chosen = next((tensor for tensor in held if tensor is not None and not tensor.is_meta), None)
        if chosen is None:
            continue
        for module, leaf in owners:
            table = parameter_table(module)
            (table if leaf in table else buffer_table(module))[leaf] = chosen  # pyright: ignore[reportArgumentType] - a parameter stays one


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Return whether the model's configuration asks for input and output embeddings that are tied.

    Args:
        model: Any module; without a transformers-like `config` the answer is False.

    Example:
        >>> from torch import nn
        >>> check_tied_parameters_in_config(nn.Linear(2, 2))
        False
    """
    config = getattr(model, "config", None)
    inner = getattr(config, "decoder", config) if getattr(config, "is_encoder_decoder", False) else config
    output = getattr(model, "get_output_embeddings", None)
    asked = getattr(config, "tie_word_embeddings", False) or getattr(inner, "tie_word_embeddings", False)
    return bool(asked and callable(output) and output() is not None)


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    prefix, _, leaf = name.rpartition(".")
    return model.get_submodule(prefix), leaf


def _read(module: nn.Module, leaf: str) -> Tensor | None:
    return parameter_table(module).get(leaf, buffer_table(module).get(leaf))
