"""Fake of Megatron's engine: its checks of models and sizes, without megatron-core."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch.optim.lr_scheduler import LambdaLR

from accel_plugins.megatron.dummy import MegatronLMDummyScheduler, with_all_micro_batches
from accel_plugins.megatron.plugin import MegatronLMPlugin
from accel_plugins.megatron.sizes import stage_elements
from accel_plugins.strategies.megatron import MegatronWrapper, Trained

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from torch import nn

    from accel_plugins.bundle import Bundle
    from accel_plugins.megatron.groups import Groups
    from accel_state.runtime import Runtime


def plugin_of(handlers: Mapping[type, Any]) -> MegatronLMPlugin:
    """Return the plugin of a run."""
    return handlers.get(MegatronLMPlugin) or MegatronLMPlugin()


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeMegatron:
    """Fake of Megatron's engine with its checks; models are not sharded."""

    runtime: Runtime
    plugin: MegatronLMPlugin
    groups: Groups
    on_elements: Callable[[int], None]

    def check(self, bundle: Bundle) -> None:
        """Refuse what Megatron's wrapper refuses."""
        MegatronWrapper(
            runtime=self.runtime, plugin=self.plugin, precision="no", trained=Trained(), groups=self.groups
        ).check(bundle)

    def wrap(self, bundle: Bundle, *, evaluation: bool = False) -> Bundle:
        """Replace placeholders of schedules by real ones, and loaders by those of all micro-batches."""
        del evaluation
        if self.plugin.custom_model_provider_function is None:
            for model in bundle.models:
                last = self.plugin.decoder_last_pipeline_num_layers
                stages = stage_elements(model, self.groups.tensor, self.groups.pipeline, last=last)
                self.on_elements(stages[self.groups.pipeline_rank])
        schedulers = [_real(one, bundle) for one in bundle.schedulers]
        loaders = [with_all_micro_batches(one, self.plugin) for one in bundle.dataloaders]
        return replace(bundle, schedulers=schedulers, dataloaders=loaders)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model."""
        return model


def _real(scheduler: Any, bundle: Bundle) -> Any:
    is_placeholder = isinstance(scheduler, MegatronLMDummyScheduler)
    return LambdaLR(bundle.optimizers[0], lambda _: 1.0) if is_placeholder else scheduler
