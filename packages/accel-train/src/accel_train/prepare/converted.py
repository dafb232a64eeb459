"""Models converted by a precision recipe; optimizers follow, also those that are prepared later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from torch.utils.weak import WeakIdKeyDictionary

from accel_plugins import sharding
from accel_plugins.recipe import check_converted

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accel_plugins.bundle import Bundle
    from accel_plugins.recipe import Recipe
    from accel_state.runtime import Runtime


@final
class Converter:
    """Converter that applies a precision recipe to prepared objects."""

    def __init__(self, recipe: Recipe, runtime: Runtime) -> None:
        self.recipe = recipe
        self._runtime = runtime
        self._replaced: Any = WeakIdKeyDictionary()

    def convert(self, bundle: Bundle, mesh: DeviceMesh | None) -> Bundle:
        """Convert the models of a bundle, and point its optimizers at their parameters."""
        if self.recipe.initialize is not None:
            bundle = self.recipe.initialize(bundle)
        if bundle.models:
            before = {id(one): name for model in bundle.models for name, one in model.named_parameters()}
            replaced = self.recipe.convert(bundle, self._runtime, mesh)
            check_converted(self.recipe, before, bundle, replaced)
            for old, new in replaced.items():
                self._replaced[old] = new
        for optimizer in bundle.optimizers:
            own = [one for group in optimizer.param_groups for one in group["params"]]
            sharding.optimizers.switch_parameters(
                optimizer, {one: self._replaced[one] for one in own if one in self._replaced}
            )
        return bundle
