"""What a plugin, a model and an optimizer say, as the configurations of megatron-core."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from accel_plugins.megatron.check import has_own_code
from accel_plugins.megatron.library import core
from accel_plugins.megatron.megatron_args import optimizer_args
from accel_plugins.precision.amp import DTYPES
from accel_state.did_you_mean import did_you_mean
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.optim import Optimizer

    from accel_plugins.kwargs.amp import GradScalerKwargs
    from accel_plugins.megatron.plugin import MegatronLMPlugin


def check_other_args(plugin: MegatronLMPlugin) -> None:
    """Refuse further arguments that no configuration has, unless code of the user may read them."""
    if not plugin.other_megatron_args or has_own_code(plugin):
        return
    configs = (
        core("transformer.transformer_config").TransformerConfig,
        core("optimizer").OptimizerConfig,
        core("distributed").DistributedDataParallelConfig,
    )
    known = {one.name for config in configs for one in fields(config)}
    for name, value in plugin.other_megatron_args.items():
        if name not in known:
            hint = did_you_mean(name, known, "leave it out.")
            raise SettingsError(
                f"MegatronLMPlugin(other_megatron_args={{{name!r}: …}}): {name}={value!r} is no field of "
                f"megatron-core's configurations; {hint}"
            )


def dtype_of(precision: str) -> torch.dtype:
    """Return the dtype of parameters under a mixed precision."""
    return DTYPES.get(precision, torch.float32)


def transformer_config(
    plugin: MegatronLMPlugin, of_model: Mapping[str, Any], precision: str, virtual: int | None
) -> Any:
    """Return a `TransformerConfig`."""
    config = core("transformer.transformer_config").TransformerConfig
    dropouts = {"attention_dropout": plugin.attention_dropout, "hidden_dropout": plugin.hidden_dropout}
    backend = core("transformer.enums").AttnBackend[plugin.attention_backend]
    values: dict[str, Any] = {
        **of_model,
        **{name: value for name, value in dropouts.items() if value is not None},
        "tensor_model_parallel_size": plugin.tp_degree,
        "pipeline_model_parallel_size": plugin.pp_degree,
        "virtual_pipeline_model_parallel_size": virtual,
        "context_parallel_size": plugin.context_parallel_size or 1,
        "sequence_parallel": bool(plugin.sequence_parallelism) and (plugin.tp_degree or 1) > 1,
        "num_layers_in_last_pipeline_stage": plugin.decoder_last_pipeline_num_layers,
        "params_dtype": dtype_of(precision),
        "pipeline_dtype": dtype_of(precision),
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        "perform_initialization": False,  # the weights are those of the model that is prepared
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "recompute_granularity": plugin.recompute_granularity,
        "recompute_method": plugin.recompute_method,
        "recompute_num_layers": plugin.recompute_num_layers,
        "attention_softmax_in_fp32": plugin.attention_softmax_in_fp32,
        "attention_backend": backend,
        "calculate_per_token_loss": plugin.calculate_per_token_loss,
    }
    return config(**values | plugin.other_args(config))


def ddp_config(plugin: MegatronLMPlugin) -> Any:
    """Return a `DistributedDataParallelConfig`: gradients are kept and reduced in float32."""
    config = core("distributed").DistributedDataParallelConfig
    values = {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": plugin.use_distributed_optimizer,
    }
    return config(**values | plugin.other_args(config))


def optimizer_config(
    plugin: MegatronLMPlugin, optimizer: Optimizer, precision: str, scaling: GradScalerKwargs | None = None
) -> Any:
    """Return an `OptimizerConfig`."""
    config = core("optimizer").OptimizerConfig
    values = optimizer_values(plugin, optimizer, precision)
    if precision == "fp16" and scaling is not None:
        values |= scaling_values(scaling)
    return config(**values | plugin.other_args(config))


def scaling_values(scaling: GradScalerKwargs) -> dict[str, Any]:
    """Return the options of PyTorch's loss scaler as megatron-core calls them; the factors have no field.

    Example:
        >>> from accel_plugins.kwargs.amp import GradScalerKwargs
        >>> scaling_values(GradScalerKwargs(enabled=False))
        {'loss_scale': 1.0}
    """
    if not scaling.enabled:
        return {"loss_scale": 1.0}
    return {
        "initial_loss_scale": scaling.init_scale,
        "min_loss_scale": min(1.0, scaling.init_scale),
        "loss_scale_window": scaling.growth_interval,
        "hysteresis": 1,  # PyTorch's scale falls with every overflow
    }


def optimizer_values(plugin: MegatronLMPlugin, optimizer: Optimizer, precision: str) -> dict[str, Any]:
    """Return the fields of an `OptimizerConfig` that a plugin and an optimizer decide."""
    return {
        **optimizer_args(optimizer),
        "params_dtype": dtype_of(precision),
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        "use_distributed_optimizer": plugin.use_distributed_optimizer,
        "optimizer_cpu_offload": plugin.optimizer_cpu_offload,
        "optimizer_offload_fraction": 1.0 if plugin.optimizer_cpu_offload else 0.0,
        "overlap_cpu_optimizer_d2h_h2d": plugin.overlap_cpu_optimizer_d2h_h2d,
        "use_precision_aware_optimizer": plugin.use_precision_aware_optimizer,
        "clip_grad": plugin.gradient_clipping,
    }
