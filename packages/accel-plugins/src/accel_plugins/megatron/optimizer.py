"""Build megatron-core's configurations, optimizer and schedule from the plugin and PyTorch's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_plugins.kwargs import GradScalerKwargs
from accel_plugins.megatron.library import core
from accel_plugins.megatron.plugin import UNSUPPORTED, MegatronLMPlugin, optimizer_args, scheduler_arguments
from accel_plugins.precision import DTYPES
from accel_state.errors import SettingsError, did_you_mean

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_plugins.megatron.data import MegatronLMDummyScheduler
    from accel_plugins.megatron.state import PlacedWeight


def make_optimizer(
    plugin: MegatronLMPlugin,
    optimizer: Optimizer,
    chunks: Sequence[nn.Module],
    groups: dict[nn.Parameter, int],
    precision: str,
    scaling: GradScalerKwargs | None = None,
) -> Any:
    """Build megatron-core's optimizer with the groups of PyTorch's, which gets this rank's parameters."""
    optimizers, config = core("optimizer"), core("optimizer.optimizer_config")
    kinds: dict[tuple[int, float, float], set[int]] = {}
    for name, parameter in chain.from_iterable(chunk.named_parameters() for chunk in chunks):
        if parameter.requires_grad:
            kind = (groups[parameter], *parameter_factors(plugin, name, parameter))
            kinds.setdefault(kind, set()).add(id(parameter))
    overrides = {
        config.ParamKey(
            with_name_predicate=config.ParamWithNamePredicate(
                name=repr(kind), fn=lambda parameter, _, members=members: id(parameter) in members
            )
        ): {_GROUP: kind[0], "wd_mult": kind[1], "lr_mult": kind[2]}
        for kind, members in kinds.items()
    }
    made = optimizers.get_megatron_optimizer(
        optimizer_config(plugin, optimizer, precision, scaling),
        [*chunks],
        config_overrides=overrides,
        use_gloo_process_groups=False,
    )
    _detach_shards(made)
    if scaling is not None:
        for scaler in dynamic_scalers(made):
            scaler.growth_factor.fill_(scaling.growth_factor)
            scaler.backoff_factor.fill_(scaling.backoff_factor)
    for index, group in enumerate(optimizer.param_groups):
        group["params"] = [parameter for parameter, own in groups.items() if own == index]
    return made


_GROUP = "torch_group"


def parameter_factors(plugin: MegatronLMPlugin, name: str, parameter: nn.Parameter) -> tuple[float, float]:
    """Return the factors of weight decay and learning rate of a parameter, named as within its stage."""
    without, scaled = plugin.no_wd_decay_cond, plugin.scale_lr_cond
    decay = 0.0 if without is not None and without(name, parameter) else 1.0
    return decay, plugin.lr_mult if scaled is not None and scaled(name, parameter) else 1.0


def _detach_shards(optimizer: Any) -> None:
    """Detach the distributed optimizer's float32 shards from the parameters whose memory they share.

    A shard is a view with an autograd graph, whose nodes have hooks that refer to the model; Python's garbage
    collector does not see them, so that a model would never be freed.
    """
    for part in optimizer.chained_optimizers:
        if not isinstance(part, core("optimizer").DistributedOptimizer) or part.is_stub_optimizer:
            continue
        detached = {id(shard): shard.detach() for shard in chain.from_iterable(part.shard_fp32_groups)}
        for shard in chain.from_iterable(part.shard_fp32_groups):
            vars(detached[id(shard)]).update(vars(shard))
        for tensors in (*part.shard_fp32_groups, *(group["params"] for group in part.optimizer.param_groups)):
            tensors[:] = [detached.get(id(tensor), tensor) for tensor in tensors]


def copy_hyperparameters(source: Optimizer, target: Any) -> None:
    """Copy hyperparameters, which schedules and users change, from PyTorch's optimizer to megatron-core's."""
    for group in target.param_groups:
        own = source.param_groups[group[_GROUP]]
        for name in own.keys() & group.keys() - {"params", "lr", "weight_decay"}:
            group[name] = own[name]
        group["lr"] = own["lr"] * group["lr_mult"]
        group["weight_decay"] = own["weight_decay"] * group["wd_mult"]


def clip(optimizer: Any, max_norm: float) -> float:
    """Clip unscaled gradients to a norm over all groups; return the norm before clipping."""
    norm = optimizer.get_grad_norm()
    scale = core("optimizer.clip_grads").clip_grad_by_total_norm_fp32
    for part in optimizer.chained_optimizers:
        if parameters := part.get_parameters():
            scale(parameters, max_norm, norm, part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8)
    return float(norm)


def group_of(
    placed: Sequence[PlacedWeight], model: nn.Module, optimizer: Optimizer
) -> dict[nn.Parameter, int]:
    """Return the optimizer's group of every parameter of this rank; parameters in none are frozen."""
    named = dict(model.named_parameters(remove_duplicate=False))
    indices = {
        parameter: index
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        if parameter.requires_grad
    }
    groups: dict[nn.Parameter, int] = {}
    for row in placed:
        index, *others = {indices.get(named[name]) for name in row.names}
        if others:
            raise SettingsError(
                f"{', '.join(row.names)} are one parameter of Megatron, but not in one group, or some "
                "are frozen: put them into one group of the optimizer."
            )
        if index is None:
            row.parameter.requires_grad_(False)  # noqa: FBT003 - as torch has it
        else:
            groups[row.parameter] = index
    return groups


class MegatronSchedule:
    """A schedule that the engine advances by the number of samples of every optimizer step."""

    def __init__(
        self, plugin: MegatronLMPlugin, placeholder: MegatronLMDummyScheduler, optimizer: Optimizer
    ) -> None:
        plugin.set_scheduler_args(placeholder)
        args = plugin.megatron_lm_default_args
        schedule = core("optimizer_param_scheduler").OptimizerParamScheduler
        for group in optimizer.param_groups:
            group["max_lr"] = group["lr"]
            if group["weight_decay"] == 0.0:
                group["wd_mult"] = 0.0
        self.optimizer = optimizer
        self.schedule = schedule(
            optimizer,
            **scheduler_arguments(args),
            use_checkpoint_opt_param_scheduler=True,
            override_opt_param_scheduler=False,
        )
        self._samples = None if args["train_samples"] is not None else args["global_batch_size"]

    def step(self) -> None:
        """Do nothing: the engine advances the schedule."""

    def advance(self, samples: int) -> None:
        """Advance by the samples of one optimizer step; a schedule in iterations counts steps."""
        self.schedule.step(samples if self._samples is None else self._samples)

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of every parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the number of samples so far, and the arguments."""
        return self.schedule.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume."""
        self.schedule.num_steps = 0
        self.schedule.load_state_dict(dict(state))


def dynamic_scalers(optimizer: Any) -> list[Any]:
    """Return the loss scalers of megatron-core's optimizer, all in the same state; none without float16."""
    kind = core("optimizer.grad_scaler").DynamicGradScaler
    scalers = (getattr(part, "grad_scaler", None) for part in optimizer.chained_optimizers)
    return [scaler for scaler in scalers if isinstance(scaler, kind)]


def scaler_state(optimizer: Any) -> dict[str, Any]:
    """Return the state of the loss scale in the form of `GradScaler`; empty if the scale is constant."""
    for scaler in dynamic_scalers(optimizer):
        return {
            "scale": float(scaler.scale),
            "growth_factor": float(scaler.growth_factor),
            "backoff_factor": float(scaler.backoff_factor),
            "growth_interval": scaler.growth_interval,
            "_growth_tracker": scaler._growth_tracker,
            "_hysteresis_tracker": scaler._hysteresis_tracker,
        }
    return {}


def load_scaler_state(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Load the loss scale, of Megatron or of PyTorch; growth and backoff are this run's."""
    for scaler in dynamic_scalers(optimizer):
        scaler.load_state_dict(
            {
                "scale": torch.tensor([float(state["scale"])], device="cpu"),
                "growth_tracker": min(state["_growth_tracker"], scaler.growth_interval - 1),
                "hysteresis_tracker": state.get("_hysteresis_tracker", scaler.hysteresis),
            }
        )


def check_other_args(plugin: MegatronLMPlugin) -> None:
    """Refuse other arguments that no configuration has, unless code of the user may read them."""
    configs = (
        core("transformer.transformer_config").TransformerConfig,
        core("optimizer").OptimizerConfig,
        core("distributed").DistributedDataParallelConfig,
    )
    known = {field.name for config in configs for field in fields(config)}
    has_own_code = any(vars(plugin)[name] for name in vars(plugin) if name.startswith("custom_"))
    for name, value in (plugin.other_megatron_args or {}).items():
        if name not in known and not has_own_code:
            hint = did_you_mean(name, known, "leave it out.")
            raise SettingsError(
                f"MegatronLMPlugin(other_megatron_args=…): {name}={value!r} is unknown; {hint}"
            )


def _shared(plugin: MegatronLMPlugin, config: Any, precision: str) -> dict[str, Any]:
    """Return the fields of a configuration that are set in the arguments of the plugin, and the precision."""
    args = plugin.megatron_lm_default_args
    names = {field.name for field in fields(config)} - UNSUPPORTED.keys()
    known = {name: args[name] for name in names if args.get(name) is not None}
    dtype, bf16, fp16 = DTYPES.get(precision, torch.float32), precision == "bf16", precision == "fp16"
    return known | {"params_dtype": dtype, "bf16": bf16, "fp16": fp16}


def transformer_config(plugin: MegatronLMPlugin, of_model: Mapping[str, Any], precision: str) -> Any:
    """Return a `TransformerConfig`."""
    layers = {**plugin.megatron_lm_default_args, **of_model}["num_layers"]
    of_stage = plugin.num_layers_per_virtual_pipeline_stage
    config = core("transformer.transformer_config").TransformerConfig
    dropouts = {"attention_dropout": plugin.attention_dropout, "hidden_dropout": plugin.hidden_dropout}
    values: dict[str, Any] = {
        **_shared(plugin, config, precision),
        **of_model,
        **{name: value for name, value in dropouts.items() if value is not None},
        "virtual_pipeline_model_parallel_size": of_stage and layers // (plugin.pp_degree or 1) // of_stage,
        "sequence_parallel": bool(plugin.sequence_parallelism) and (plugin.tp_degree or 1) > 1,
        "num_layers_in_last_pipeline_stage": plugin.decoder_last_pipeline_num_layers,
        "attention_backend": core("transformer.enums").AttnBackend[plugin.attention_backend],
        "pipeline_dtype": DTYPES.get(precision, torch.float32),
        "perform_initialization": False,  # The weights come from the prepared model.
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
    }
    return config(**values | plugin.other_args(config))


def ddp_config(plugin: MegatronLMPlugin) -> Any:
    """Return a `DistributedDataParallelConfig`: gradients are kept and reduced in float32."""
    config = core("distributed").DistributedDataParallelConfig
    values = {"grad_reduce_in_fp32": True, "use_distributed_optimizer": plugin.use_distributed_optimizer}
    return config(**values | plugin.other_args(config))


def optimizer_config(
    plugin: MegatronLMPlugin, optimizer: Optimizer, precision: str, scaling: GradScalerKwargs | None = None
) -> Any:
    """Return an `OptimizerConfig`; the factors of PyTorch's loss scaler have no field."""
    config = core("optimizer").OptimizerConfig
    fraction = 1.0 if plugin.optimizer_cpu_offload else 0.0
    values = _shared(plugin, config, precision) | optimizer_args(optimizer)
    values |= {"optimizer_offload_fraction": fraction}
    if precision == "fp16" and scaling is not None and scaling.enabled:
        values |= {
            "initial_loss_scale": scaling.init_scale,
            "min_loss_scale": min(1.0, scaling.init_scale),
            "loss_scale_window": scaling.growth_interval,
            "hysteresis": 1,  # PyTorch's scale shrinks with every overflow.
        }
    elif precision == "fp16" and scaling is not None:
        values["loss_scale"] = 1.0
    return config(**values | plugin.other_args(config))
