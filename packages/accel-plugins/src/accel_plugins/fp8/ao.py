"""FP8 with torchao: linear layers are converted in place before models are wrapped or sharded."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from accel_ops.modules import without_compiler
from accel_plugins.fp8.recipe import (
    AORecipeKwargs,
    Recipe,
    is_ao_config,
    is_divisible,
    save_plain_weights,
    tied_layers,
)
from accel_state.errors import SettingsError, UnsupportedError
from accel_state.libraries import require
from accel_state.logging import get_logger
from accel_state.runtime import Runtime

P = ParamSpec("P")
R = TypeVar("R")

logger = get_logger(__name__)


def torchao_required(func: Callable[P, R]) -> Callable[P, R]:
    """Make a function raise `ImportError` when it is called without torchao.

    Args:
        func: The function.
    """

    @functools.wraps(func)
    def check_and_call(*args: P.args, **kwargs: P.kwargs) -> R:
        require("torchao", f"`{func.__name__}`", install="accel-plugins[torchao]")
        return func(*args, **kwargs)

    return check_and_call


def find_first_last_linear_layers(model: nn.Module) -> tuple[str | None, str | None]:
    """Return the names of the first and the last linear layer of a model, `None` twice if it has none.

    Args:
        model: The model.

    Example:
        >>> find_first_last_linear_layers(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
        ('0', '2')
    """
    names = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(module: nn.Module, fqn: str, layers_to_filter: Sequence[str]) -> bool:
    """Return whether a layer may be converted: it is not excluded, and its sizes are divisible by 16.

    Args:
        module: The layer; layers that are not linear pass.
        fqn: Its fully qualified name.
        layers_to_filter: The names of excluded layers.

    Example:
        >>> [filter_linear_layers(nn.Linear(16, 16), name, ["head"]) for name in ("head", "body")]
        [False, True]
    """
    return fqn not in layers_to_filter and (not isinstance(module, nn.Linear) or is_divisible(module))


def filter_first_and_last_linear_layers(module: nn.Module, fqn: str) -> bool:
    """Return whether a layer may be converted: sizes divisible by 16, and neither the first nor the last.

    Args:
        module: A layer, or a model in which `fqn` names a layer.
        fqn: The name of the layer.

    Example:
        >>> model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 16))
        >>> [filter_first_and_last_linear_layers(model, name) for name in "012"]
        [False, True, False]
        >>> filter_first_and_last_linear_layers(nn.Linear(16, 10), "head")
        False
    """
    if fqn in find_first_last_linear_layers(module):
        return False
    return filter_linear_layers(dict(module.named_modules()).get(fqn, module), fqn, ())


@torchao_required
def has_ao_layers(model: nn.Module) -> bool:
    """Return whether a model has linear layers of torchao's FP8 training.

    Args:
        model: The model, wrapped or not.
    """
    return any(isinstance(module, _layer_classes()) for module in model.modules())


@torchao_required
def convert_model_to_fp8_ao(
    model: nn.Module, config: Any = None, module_filter_func: Callable[[nn.Module, str], bool] | None = None
) -> None:
    """Convert linear layers of a model to torchao's FP8 training in place; names and parameters stay.

    Args:
        model: The model.
        config: A `torchao.float8.Float8LinearConfig`; torchao's default if `None`.
        module_filter_func: As in `AORecipeKwargs`.

    Raises:
        SettingsError: `config` is something else.

    Example:
        >>> model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 16))
        >>> convert_model_to_fp8_ao(model)  # doctest: +SKIP
        >>> has_ao_layers(model)  # doctest: +SKIP
        True
    """
    config = _float8().Float8LinearConfig() if config is None else config
    if not is_ao_config(config):
        raise SettingsError(
            f"convert_model_to_fp8_ao(config={config!r}): expected a Float8LinearConfig of torchao; "
            "Float8LinearConfig.from_recipe_name(name) makes that of a named recipe."
        )
    _convert(model, config, module_filter_func)


_convert_model_to_fp8_ao = convert_model_to_fp8_ao  # keeps the original if a program replaces the function


BLOCK = 32
"""Number of values that share a scale in MXFP8; torchao accepts matrices whose sizes this divides."""


class BlockScaledLinear(nn.Linear):
    """A linear layer whose weight is of torchao's MXFP8 type, which does not apply the bias.

    With `pads_rows`, rows of zeros are added up to a multiple of `BLOCK`: gradients of the weight are sums
    over rows.
    """

    pads_rows: bool = True

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as in torch
        """Compute like torch's layer; inputs are cast to the weight's dtype outside of autocast."""
        flat = input.to(self.weight.dtype).reshape(-1, self.in_features)
        rows = len(flat)
        if self.pads_rows and rows % BLOCK:
            flat = nn.functional.pad(flat, (0, 0, 0, -rows % BLOCK))
        output = nn.functional.linear(flat, self.weight)[:rows]
        if self.bias is not None:
            output = output + self.bias
        output = output.reshape(*input.shape[:-1], self.out_features)
        kind = output.device.type
        return output.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else output


def _converted_layers(model: nn.Module) -> set[str]:
    return {name for name, layer in model.named_modules() if isinstance(layer, _layer_classes())}


def _convert_models(
    handler: AORecipeKwargs, config: Any, device: torch.device, models: Sequence[nn.Module]
) -> Mapping[Tensor, Tensor]:
    """Convert models in place; return a map from replaced parameters to their replacements."""

    def autocast_inputs(layer: nn.Linear, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        kind = layer.weight.device.type  # torchao supports only CUDA's autocast
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return tuple(tensor.to(dtype) for tensor in inputs)

    replaced: dict[Tensor, Tensor] = {}
    for model in map(without_compiler, models):
        before, chosen = dict(model.named_parameters()), handler.module_filter_func
        if convert_model_to_fp8_ao is _convert_model_to_fp8_ao:
            names = _convert(model, config, chosen, pad=bool(handler.pad_inner_dim))
        else:  # a program has replaced the documented function
            known = _converted_layers(model)
            convert_model_to_fp8_ao(model, config=config, module_filter_func=chosen)
            names = _converted_layers(model) - known
        for layer in map(model.get_submodule, names if device.type != "cuda" else ()):
            if not isinstance(layer, BlockScaledLinear):
                layer.register_forward_pre_hook(autocast_inputs)
        if not names:
            logger.warning(
                "mixed_precision='fp8' converts no layer of %s: by default, those with sizes divisible by 16 "
                "(MXFP8: 32), but the first and the last; AORecipeKwargs(module_filter_func=…) chooses.",
                type(model).__name__,
            )
        now = dict(model.named_parameters())
        replaced |= {old: now[name] for name, old in before.items() if now[name] is not old}
    return replaced


def _compute_scales(models: Sequence[nn.Module]) -> None:
    """Compute the scales of all weights with one all-reduce instead of one per all-gather."""
    for model in models:
        _float8().precompute_float8_dynamic_scale_for_fsdp(model)


def build(handler: AORecipeKwargs, runtime: Runtime, *, sharded: bool, keeps_types: bool) -> Recipe:
    """Build the recipe: `sharded` by FSDP2 or not, under a strategy that `keeps_types` of weights or not."""
    if handler.config == "mxfp8" and not keeps_types:
        raise UnsupportedError(
            "AORecipeKwargs(config='mxfp8') trains in one process, with DDP and FSDP2, but not with "
            "FSDP1, tensor parallelism or DeepSpeed. Use 'rowwise'."
        )
    config = config_of(handler, runtime.device, sharded=sharded)
    scales = _compute_scales if getattr(config, "enable_fsdp_float8_all_gather", False) else None
    convert = functools.partial(_convert_models, handler, config, runtime.device)
    return Recipe(backend="AO", convert=convert, compute_scales=scales)


def config_of(handler: AORecipeKwargs, device: torch.device, *, sharded: bool) -> Any:
    """Return the configuration of torchao for a handler on a device; only FSDP2 all-gathers in 8 bits."""
    named = "tensorwise" if handler.is_default else handler.config
    if named == "mxfp8":
        training = import_module("torchao.prototype.moe_training.config")
        make, recipes = training.MXFP8TrainingOpConfig.from_recipe, training.MXFP8TrainingRecipe
        if device.type == "cpu":
            return make(recipes.MXFP8_EMULATED_RCEIL)
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < (10, 0):
            raise UnsupportedError(
                "AORecipeKwargs(config='mxfp8'): block scaling needs a GPU of compute capability 10.0 "
                f"or newer (Blackwell), which {device} is not. Use 'rowwise'."
            )
        return make(recipes.MXFP8_RCEIL)
    config: Any = named
    if isinstance(named, str):
        config = replace(
            _float8().Float8LinearConfig.from_recipe_name(named),
            pad_inner_dim=bool(handler.pad_inner_dim),
            enable_fsdp_float8_all_gather=bool(handler.enable_fsdp_float8_all_gather),
            force_recompute_fp8_weight_in_bwd=bool(handler.force_recompute_fp8_weight_in_bwd),
            emulate=device.type == "cpu",
        )
    if getattr(config, "enable_fsdp_float8_all_gather", False) and not sharded:
        return replace(config, enable_fsdp_float8_all_gather=False)
    return config


def _convert(
    model: nn.Module,
    config: Any,
    module_filter_func: Callable[[nn.Module, str], bool] | None,
    *,
    pad: bool = True,
) -> set[str]:
    """Convert layers in place; return their names."""
    is_by_blocks = not hasattr(config, "enable_fsdp_float8_all_gather")  # torchao's other class
    divisor = BLOCK if is_by_blocks else 16
    ends = {*find_first_last_linear_layers(model)}
    chosen: set[str] = set()
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear) or isinstance(layer, _layer_classes()):
            continue  # already converted
        if module_filter_func is not None:
            is_chosen = module_filter_func(layer, name)
        else:  # a subclass may use its weight differently
            is_chosen = type(layer) is nn.Linear and not ends & {name} and is_divisible(layer, divisor)
        if is_chosen:
            chosen.add(name)
    if "" in chosen:
        raise SettingsError(
            f"mixed_precision='fp8': the model is itself a {type(model).__name__} layer, which cannot "
            "be converted in place. Put it into a module."
        )
    if is_by_blocks:
        return _convert_to_blocks(model, config, chosen, pad=pad)
    tied = tied_layers(model) if config.enable_fsdp_float8_all_gather else set()
    without_gather = replace(config, enable_fsdp_float8_all_gather=False)
    for names, options in ((chosen - tied, config), (chosen & tied, without_gather)):
        if names:
            is_in_group = functools.partial(_is_named, names)
            _float8().convert_to_float8_training(model, module_filter_fn=is_in_group, config=options)
    if config.enable_fsdp_float8_all_gather:
        save_plain_weights(model, chosen - tied)
    return chosen


def _convert_to_blocks(model: nn.Module, config: Any, chosen: set[str], *, pad: bool) -> set[str]:
    layers = {name: model.get_submodule(name) for name in chosen}
    for name, layer in layers.items():
        if type(layer) is not nn.Linear:
            raise UnsupportedError(
                f"AORecipeKwargs(config='mxfp8'): {name!r} is a layer of class {type(layer).__name__}, "
                "but only torch.nn.Linear itself is converted. Exclude it with module_filter_func."
            )

    is_chosen = functools.partial(_is_named, chosen)
    import_module("torchao.quantization").quantize_(model, config, filter_fn=is_chosen)
    save_plain_weights(model, chosen)
    for layer in layers.values():
        layer.__class__ = BlockScaledLinear
        layer.pads_rows = pad  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType] - of that class now
    return chosen


def _is_named(names: set[str], _: nn.Module, name: str) -> bool:
    return name in names


def _float8() -> Any:
    return import_module("torchao.float8")


def _layer_classes() -> tuple[type[nn.Module], ...]:
    """Return the classes of converted layers."""
    return import_module("torchao.float8.float8_linear").Float8Linear, BlockScaledLinear
