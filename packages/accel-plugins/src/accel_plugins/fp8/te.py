"""FP8 with TransformerEngine: its layers replace torch's, and its autocast wraps `forward`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel_ops.modules import replace_forward, without_compiler
from accel_plugins.fp8.recipe import Recipe, TERecipeKwargs, is_divisible
from accel_state.errors import UnsupportedError
from accel_state.libraries import is_installed, require

RECIPE_CLASSES: Mapping[str, str] = {
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}
"""Classes of `transformer_engine.common.recipe`, by the names of `TERecipeKwargs(recipe=…)`."""

_INSTALL = "accel-plugins[transformer-engine]"


def has_transformer_engine_layers(model: nn.Module) -> bool:
    """Return whether a model has linear or layer-norm layers of TransformerEngine; false without the library.

    Args:
        model: The model, wrapped or not.

    Example:
        >>> has_transformer_engine_layers(nn.Linear(2, 2))
        False
    """
    if not is_installed("transformer_engine"):
        return False
    te = _te()
    kinds = (te.LayerNorm, te.Linear, te.TransformerLayer)
    return any(isinstance(module, kinds) for module in model.modules())


def convert_model(
    model: nn.Module,
    to_transformer_engine: bool = True,
    _convert_linear: bool = True,
    _convert_ln: bool = True,
) -> dict[Tensor, Tensor]:
    """Replace linear and layer-norm layers in place: torch's with TransformerEngine's, or the reverse.

    Linear layers whose sizes are not divisible by 16 stay. Modules that share a layer or a parameter with a
    replaced layer, such as an embedding, share the new one.

    Args:
        model: The model; the layers inside are replaced, the model itself is not.
        to_transformer_engine: `False`: restore torch's layers.
        _convert_linear: Whether linear layers are replaced.
        _convert_ln: Whether layer norms are replaced.

    Returns:
        A map from old parameters to new ones, which have the same values.

    Raises:
        MissingDependencyError: TransformerEngine is not installed.
    """
    require("transformer_engine", "`convert_model`", install=_INSTALL)
    te = _te()
    linear, norm = (nn.Linear, nn.LayerNorm) if to_transformer_engine else (te.Linear, te.LayerNorm)
    made: dict[nn.Module, Any] = {}
    for layer in model.modules():
        is_linear = _convert_linear and isinstance(layer, linear) and is_divisible(layer)
        is_norm = (
            _convert_ln and isinstance(layer, norm) and layer.weight is not None and layer.bias is not None
        )
        if layer is not model and (is_linear or is_norm):
            made[layer] = _counterpart(layer, te)
    replaced: dict[Tensor, Tensor] = {}
    for layer, new in made.items():
        _copy(layer, new, replaced)
    for name, layer in [*model.named_modules(remove_duplicate=False)]:
        if layer in made:
            model.set_submodule(name, made[layer])
    for layer in model.modules():
        for name, parameter in [*layer.named_parameters(recurse=False, remove_duplicate=False)]:
            if parameter in replaced:
                setattr(layer, name, replaced[parameter])
    return replaced


def contextual_fp8_autocast(
    model_forward: Callable[..., Any], fp8_recipe: Any, use_during_eval: bool = False
) -> Callable[..., Any]:
    """Wrap a bound `forward` in TransformerEngine's autocast; the result takes the model as first argument.

    Args:
        model_forward: The bound `forward` of a model.
        fp8_recipe: A recipe of TransformerEngine.
        use_during_eval: Whether models in evaluation mode also compute in FP8.

    Returns:
        A function to bind to the model with `types.MethodType`.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with fp8_autocast(fp8_recipe, enabled=use_during_eval or self.training):
            return model_forward(*args, **kwargs)

    forward.__wrapped__ = model_forward  # pyright: ignore[reportFunctionMemberAccess] - by which libraries find the original
    return forward


def apply_fp8_autowrap(model: nn.Module, fp8_recipe_handler: TERecipeKwargs | None) -> nn.Module:
    """Wrap the `forward` of a model in TransformerEngine's autocast, in place.

    Args:
        model: The model.
        fp8_recipe_handler: The options; `None` reads them from the environment.

    Raises:
        MissingDependencyError: TransformerEngine is not installed.
    """
    require("transformer_engine", "`apply_fp8_autowrap`", install=_INSTALL)
    handler = fp8_recipe_handler or TERecipeKwargs()
    wrapped = contextual_fp8_autocast(
        model.forward, make_recipe(handler), bool(handler.use_autocast_during_eval)
    )
    model.forward = MethodType(wrapped, model)
    return model


def fp8_autocast(recipe: Any, *, enabled: bool) -> AbstractContextManager[Any]:
    """Return the autocast of TransformerEngine; absolute maxima are reduced over all ranks.

    Ranks with the same rows of a layer have different data; ranks with other rows use the same scales.
    """
    te = _te()
    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if hasattr(te, "autocast"):
        return te.autocast(enabled=enabled, recipe=recipe, amax_reduction_group=group)
    return te.fp8_autocast(enabled=enabled, fp8_recipe=recipe, fp8_group=group)


def make_recipe(handler: TERecipeKwargs) -> Any:
    """Build TransformerEngine's recipe from a handler."""
    recipes = import_module("transformer_engine.common.recipe")
    name = handler.recipe or "delayed"
    kind = getattr(recipes, RECIPE_CLASSES[name])
    wanted = recipe_options(handler, inspect.signature(kind).parameters)
    if "fp8_format" in wanted:
        wanted["fp8_format"] = getattr(recipes.Format, wanted["fp8_format"])
    return kind(**wanted)


def recipe_options(handler: TERecipeKwargs, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a recipe that differ from its defaults."""
    names = ("margin", "fp8_format", "interval", "override_linear_precision")
    arguments: dict[str, Any] = {}
    for name in (*names, "amax_history_len", "amax_compute_algo"):
        value, is_default = getattr(handler, name), getattr(handler, name) == TERecipeKwargs.DEFAULTS[name]
        chooses_format = name == "fp8_format" and handler.recipe in {"mxfp8", "nvfp4"}
        if name in known and not (chooses_format and is_default):
            arguments[name] = value
        elif name not in known and not is_default:
            raise UnsupportedError(
                f"TERecipeKwargs({name}={value!r}): {RECIPE_CLASSES[handler.recipe or 'delayed']} of the "
                f"installed TransformerEngine does not support {name}. Remove it."
            )
    return arguments


def build(handler: TERecipeKwargs) -> Recipe:
    """Build the recipe."""
    recipe = make_recipe(handler)
    in_eval = bool(handler.use_autocast_during_eval)

    def in_fp8(forward: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with fp8_autocast(recipe, enabled=in_eval or model.training):
            return forward(model, *args, **kwargs)

    def convert(models: Sequence[nn.Module]) -> Mapping[Tensor, Tensor]:
        replaced: dict[Tensor, Tensor] = {}
        for model in map(without_compiler, models):
            if not has_transformer_engine_layers(model):
                replaced |= convert_model(model)
            replace_forward(model, in_fp8)
        return replaced

    return Recipe(backend="TE", convert=convert, reduces_maxima=(handler.recipe or "delayed") == "delayed")


def _te() -> Any:
    return import_module("transformer_engine.pytorch")


def _counterpart(layer: Any, te: Any) -> nn.Module:
    """Build TransformerEngine's layer for a layer of torch, or the reverse."""
    device, dtype = layer.weight.device, layer.weight.dtype
    if isinstance(layer, nn.Linear):
        sizes, has_bias = (layer.in_features, layer.out_features), layer.bias is not None
        return te.Linear(*sizes, bias=has_bias, params_dtype=dtype, device=device)
    if isinstance(layer, nn.LayerNorm):
        return te.LayerNorm(layer.normalized_shape, eps=layer.eps, params_dtype=dtype, device=device)
    if isinstance(layer, te.Linear):
        return nn.Linear(layer.in_features, layer.out_features, layer.use_bias, device=device, dtype=dtype)
    return nn.LayerNorm([*layer.weight.shape], eps=layer.eps, device=device, dtype=dtype)


@torch.no_grad()
def _copy(old: nn.Module, new: nn.Module, replaced: dict[Tensor, Tensor]) -> None:
    """Copy an old layer's values to a new one, or reuse parameters in `replaced`; add new ones there."""
    for name in ("weight", "bias"):
        source, target = getattr(old, name, None), getattr(new, name)
        if source is None or not source.numel():
            continue
        if source in replaced:
            # Not by `setattr`, with which TransformerEngine loses a parameter's initialiser.
            new._parameters[name] = replaced[source]  # pyright: ignore[reportArgumentType]
        else:
            target.copy_(source)
            target.requires_grad_(source.requires_grad)
            replaced[source] = target
    new.train(old.training)
