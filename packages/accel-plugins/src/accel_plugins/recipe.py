"""Precision recipes: what models are converted to before they are sharded, and what follows each step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from accel_plugins.kwargs.fp8 import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from accel_state.errors import SettingsError
from accel_state.registry import Registry
from accel_state.settings.model import BASE_PRECISIONS
from accel_state.settings.parsing import RECIPE_GROUP

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from accel_plugins.bundle import Bundle
    from accel_state.runtime import Runtime
    from accel_state.settings.model import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How models compute in a format that needs more than autocast, for one run.

    Args:
        name: The name under which it is registered.
        convert: Changes the models of a bundle in place, before they are wrapped or sharded, and returns
            every parameter that it has replaced with the one that took its place; called as
            `convert(bundle, runtime, mesh)`, on every rank. What modules shared they share afterwards. What
            must be saved with a model is in its parameters and buffers.
        precision: The mixed precision of everything that is not converted.
        initialize: Called before that with a bundle; returns it with the models and optimizers by which a
            library replaces them.
        after_step: Called after every optimizer step with the prepared models, wrapped as they are.
        after_load: Called with them after a checkpoint was loaded, to compute what follows from weights.
        state_dict: Gives what else must be saved to resume; the same on all ranks.
        load_state_dict: Takes it back.
        backend: The library that computes, as `Accelerator.fp8_backend` says it; `None` if it is no FP8.
    """

    name: str
    convert: Callable[[Bundle, Runtime, DeviceMesh | None], Mapping[Tensor, Tensor]]
    precision: Literal["no", "bf16", "fp16"] = "bf16"
    initialize: Callable[[Bundle], Bundle] | None = None
    after_step: Callable[[Sequence[nn.Module]], None] | None = None
    after_load: Callable[[Sequence[nn.Module]], None] | None = None
    state_dict: Callable[[], dict[str, Any]] | None = None
    load_state_dict: Callable[[Mapping[str, Any]], None] | None = None
    backend: str | None = None


RecipeFactory: TypeAlias = "Callable[[Settings, Runtime, Mapping[type, Any]], Recipe]"
"""`build(settings, runtime, handlers)`; `handlers` maps the type of a kwargs handler to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeSpec:
    """What is known of a recipe before it is built; `Accelerator(mixed_precision=…)` takes its name.

    Args:
        name: The name under which it is registered; none of `"no"`, `"fp16"`, `"bf16"`.
        build: Makes it, or `"module:function"` of what does.
        handlers: The types of kwargs handlers that it reads; `Accelerator(kwargs_handlers=[…])` takes them.

    Example:
        >>> RecipeSpec(name="int8", build="my_package:build").handlers
        ()
    """

    name: str
    build: RecipeFactory | str
    handlers: tuple[type, ...] = ()


FP8 = RecipeSpec(
    name="fp8",
    build="accel_plugins.fp8.build:build",
    handlers=(FP8RecipeKwargs, AORecipeKwargs, TERecipeKwargs, MSAMPRecipeKwargs),
)
"""Matrices multiplied in 8 bits by torchao, TransformerEngine or MS-AMP."""

RECIPES = Registry(group=RECIPE_GROUP, kind=RecipeSpec, noun="precision recipe", built_in={"fp8": FP8})
"""All recipes, those of installed distributions included."""


def build_recipe(
    name: str, settings: Settings, runtime: Runtime, handlers: Mapping[type, Any]
) -> Recipe | None:
    """Make the recipe of a run; `None` for a precision that needs none."""
    spec = None if name in BASE_PRECISIONS else RECIPES.find(name)
    # Installed recipes are imported only where a handler may be one of theirs.
    is_foreign = any(kind.__module__.partition(".")[0] != "accel_plugins" for kind in handlers)
    for other in (RECIPES.available() if is_foreign else RECIPES.built_in).values():
        for kind in () if spec is other else other.handlers:
            if kind in handlers:
                raise SettingsError(
                    f"kwargs_handlers contains {kind.__name__}, which is for mixed_precision={other.name!r}, "
                    f"and it is {name!r}; change one of the two."
                )
    return None if spec is None else RECIPES.resolve(name, spec.build)(settings, runtime, handlers)


def parameter_ids(models: Sequence[nn.Module]) -> list[dict[str, int]]:
    """Return the `id` of every parameter by its name, for each model; shared ones by all of their names."""
    return [
        {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
        for model in models
    ]


def check_converted(
    recipe: Recipe,
    before: Sequence[Mapping[str, int]],
    bundle: Bundle,
    replaced: Mapping[Tensor, Tensor],
) -> None:
    """Refuse what a recipe has done if parameters that an optimizer trained would not be trained any more.

    Args:
        recipe: The recipe.
        before: The `parameter_ids` of the models before they were converted.
        bundle: The models, converted, and the optimizers, as they were.
        replaced: What the recipe's `convert` has returned.

    Raises:
        SettingsError: An optimizer has a parameter that no model has any more and that `replaced` has not;
            or a model has one that needs gradients, was in an optimizer under its name, and no longer is.
    """
    now = {id(parameter) for model in bundle.models for parameter in model.parameters()}
    held = {
        id(parameter): id(replaced.get(parameter, parameter))
        for optimizer in bundle.optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    lost = [
        name
        for names in before
        for name, identity in names.items()
        if identity in held and held[identity] not in now
    ]
    if lost:
        raise SettingsError(
            f"The precision recipe {recipe.name!r} has replaced {len(lost)} parameters, the first of which "
            f"is {lost[0]!r}, and its convert() does not say by what: they would not be trained."
        )
    trained = {*held.values()}
    frozen = [
        name
        for names, model in zip(before, bundle.models, strict=True)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad and names.get(name) in held and id(parameter) not in trained
    ]
    if frozen:
        raise SettingsError(
            f"The precision recipe {recipe.name!r} has untied {frozen[0]!r} from a parameter that it was "
            "shared with, so that no optimizer would train it; its convert() must share the new one, too."
        )
