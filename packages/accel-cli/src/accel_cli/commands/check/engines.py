"""Fakes of the engines of DeepSpeed and Megatron: their checks and casts, without sharding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from accel_cli.commands.estimate.memory import Buckets
from accel_plugins.deepspeed.dummy import DummyOptim, DummyScheduler
from accel_plugins.deepspeed.validate import check_request
from accel_plugins.megatron.dummy import MegatronLMDummyScheduler, with_all_micro_batches
from accel_plugins.megatron.plugin import MegatronLMPlugin
from accel_plugins.megatron.sizes import stage_elements
from accel_plugins.strategies.deepspeed import configuration_of
from accel_plugins.strategies.megatron import MegatronWrapper, Trained
from accel_plugins.strategies.replicated import check_materialised

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from accel_plugins.bundle import Bundle
    from accel_plugins.deepspeed.fill import KnownValue
    from accel_plugins.deepspeed.plugin import DeepSpeedPlugin
    from accel_plugins.megatron.groups import Groups
    from accel_state.runtime import Runtime

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The element types of engines by the name of their precision."""

_KEYS = {
    "reduce": "reduce_bucket_size",
    "prefetch": "stage3_prefetch_bucket_size",
    "live": "stage3_max_live_parameters",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeDeepSpeed:
    """Fake of DeepSpeed's engine: it fills the configuration, and casts the model."""

    plugin: DeepSpeedPlugin
    world_size: int
    accumulation: KnownValue
    split_batches: bool
    on_buckets: Callable[[Buckets], None]

    def check(self, bundle: Bundle) -> None:
        """Check that an engine can be built, and that the configuration does not contradict."""
        check_materialised(bundle)
        check_request(self.plugin.hf_ds_config, bundle, trains=False)
        if bundle.models:
            self._configuration(bundle)

    def wrap(self, bundle: Bundle, *, evaluation: bool = False) -> Bundle:
        """Cast models to their precision, and replace placeholders by real objects."""
        if not bundle.models or evaluation:
            return bundle
        self.on_buckets(buckets_of(self._configuration(bundle)))
        dtype = DTYPES.get(self.plugin.mixed_precision)
        models = [model if dtype is None else model.to(dtype) for model in bundle.models]
        optimizers: list[Any] = [
            torch.optim.AdamW(one.params) if isinstance(one, DummyOptim) else one for one in bundle.optimizers
        ]
        return _with_real_schedulers(replace(bundle, models=models, optimizers=optimizers), DummyScheduler)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model."""
        return model

    def _configuration(self, bundle: Bundle) -> dict[str, Any]:
        return configuration_of(
            self.plugin,
            bundle.models[0],
            bundle,
            world_size=self.world_size,
            accumulation=self.accumulation,
            split_batches=self.split_batches,
        )


def buckets_of(configuration: dict[str, Any]) -> Buckets:
    """Return the buckets that a configuration allocates, with DeepSpeed's defaults.

    Example:
        >>> buckets_of({"zero_optimization": {"reduce_bucket_size": 1e6}}).reduce
        1000000
    """
    zero = configuration.get("zero_optimization", {})
    return Buckets(**{name: int(zero[key]) for name, key in _KEYS.items() if key in zero})


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
        loaders = [with_all_micro_batches(one, self.plugin) for one in bundle.dataloaders]
        return _with_real_schedulers(replace(bundle, dataloaders=loaders), MegatronLMDummyScheduler)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model."""
        return model


def _with_real_schedulers(bundle: Bundle, placeholder: type[Any]) -> Bundle:
    schedulers: list[Any] = [
        LambdaLR(bundle.optimizers[0], lambda _: 1.0) if isinstance(one, placeholder) else one
        for one in bundle.schedulers
    ]
    return replace(bundle, schedulers=schedulers)
