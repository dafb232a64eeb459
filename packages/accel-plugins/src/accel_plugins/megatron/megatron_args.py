"""The plugin's fields under Megatron's names: `MegatronLMPlugin.megatron_lm_default_args`. Pure functions."""

from __future__ import annotations

import math
from inspect import unwrap
from typing import TYPE_CHECKING, Any

from torch.optim import SGD, Adam, AdamW

from accel_state.errors import SettingsError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.optim import Optimizer

    from accel_plugins.megatron.dummy import MegatronLMDummyScheduler
    from accel_plugins.megatron.plugin import MegatronLMPlugin

_RENAMED: Mapping[str, str] = {
    "tp_degree": "tensor_model_parallel_size",
    "pp_degree": "pipeline_model_parallel_size",
    "sequence_parallelism": "sequence_parallel",
    "gradient_clipping": "clip_grad",
}
_SAME = (
    "pipeline_model_parallel_split_rank",
    "num_layers_per_virtual_pipeline_stage",
    "use_distributed_optimizer",
    "num_micro_batches",
    "consumed_samples",
    "no_wd_decay_cond",
    "scale_lr_cond",
    "lr_mult",
    "megatron_dataset_flag",
    "eval_iters",
    "eval_interval",
    "use_custom_fsdp",
    "no_load_optim",
    "eod_mask_loss",
    "no_save_optim",
    "optimizer_cpu_offload",
    "overlap_cpu_optimizer_d2h_h2d",
    "use_precision_aware_optimizer",
    "decoder_last_pipeline_num_layers",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "attention_backend",
    "expert_model_parallel_size",
    "context_parallel_size",
    "attention_dropout",
    "hidden_dropout",
    "attention_softmax_in_fp32",
    "expert_tensor_parallel_size",
    "calculate_per_token_loss",
    "use_rotary_position_embeddings",
)
_OF_SCHEDULES = (
    "lr_decay_style",
    "lr_decay_iters",
    "lr_decay_samples",
    "lr_warmup_fraction",
    "weight_decay_incr_style",
    "start_weight_decay",
    "end_weight_decay",
    "min_lr",
)


def base_args(plugin: MegatronLMPlugin) -> dict[str, Any]:
    """Return what is known before anything is prepared; `other_megatron_args` included."""
    args = {theirs: getattr(plugin, ours) for ours, theirs in _RENAMED.items()}
    args |= {name: getattr(plugin, name) for name in _SAME}
    return args | (plugin.other_megatron_args or {})


def precision_args(mixed_precision: str) -> dict[str, Any]:
    """Return the flag of a precision.

    Example:
        >>> precision_args("bf16"), precision_args("no")
        ({'bf16': True}, {})
    """
    if mixed_precision not in {"no", "bf16", "fp16"}:
        raise UnsupportedError(
            f"mixed_precision={mixed_precision!r} is not supported with Megatron, which would compute in "
            "bfloat16: use 'bf16', or shard the model by FSDP."
        )
    return {} if mixed_precision == "no" else {mixed_precision: True}


def optimizer_args(optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer of PyTorch as Megatron describes it.

    Example:
        >>> import torch
        >>> args = optimizer_args(AdamW(torch.nn.Linear(1, 1).parameters(), lr=0.1, weight_decay=0.02))
        >>> args["optimizer"], args["lr"], args["weight_decay"]
        ('adam', 0.1, 0.02)
    """
    if not isinstance(optimizer, Adam | AdamW | SGD):
        raise UnsupportedError(
            f"{type(optimizer).__name__} is not one of Megatron's optimizers: use torch.optim.AdamW, Adam, "
            "SGD."
        )
    step = unwrap(type(optimizer).step)  # torch wraps the method of a class when its first object is made
    if not any(step is unwrap(kind.step) for kind in (Adam, AdamW, SGD)):
        raise UnsupportedError(
            f"{type(optimizer).__name__} has a step() of its own, which Megatron would not call: it steps by "
            "an optimizer that it makes of the groups. Use torch.optim.AdamW, Adam or SGD itself."
        )
    defaults = optimizer.defaults
    for name in ("amsgrad", "maximize", "nesterov"):
        if defaults.get(name):
            raise UnsupportedError(
                f"{type(optimizer).__name__}({name}=True): Megatron's optimizer has no {name}; leave it out."
            )
    shared = {"lr": float(defaults["lr"]), "weight_decay": defaults["weight_decay"]}
    if isinstance(optimizer, Adam | AdamW):  # before torch 2.7 the latter is not one of the former
        beta1, beta2 = defaults["betas"]
        return {
            "optimizer": "adam",
            "adam_beta1": beta1,
            "adam_beta2": beta2,
            "adam_eps": defaults["eps"],
            "decoupled_weight_decay": isinstance(optimizer, AdamW)
            or defaults.get("decoupled_weight_decay", False),
            **shared,
        }
    return {"optimizer": "sgd", "sgd_momentum": defaults["momentum"], **shared}


def schedule_args(plugin: MegatronLMPlugin, scheduler: MegatronLMDummyScheduler) -> dict[str, Any]:
    """Return the schedule as Megatron describes it."""
    ranks = getattr(plugin, "data_parallel_size", 1)
    args = {name: getattr(plugin, name) for name in _OF_SCHEDULES}
    steps, samples = plugin.train_iters, plugin.train_samples
    if steps is None and samples is None:
        if scheduler.total_num_steps is None:
            raise SettingsError(
                "MegatronLMDummyScheduler has no total_num_steps, and MegatronLMPlugin neither train_iters "
                "nor train_samples: give one of them."
            )
        steps = scheduler.total_num_steps // ranks
    warmup_steps, warmup_samples = plugin.lr_warmup_iters, plugin.lr_warmup_samples
    if plugin.lr_warmup_fraction is None and warmup_steps is None and warmup_samples is None:
        warmup = scheduler.warmup_num_steps // ranks
        if steps is None:
            warmup_samples = warmup * getattr(plugin, "global_batch_size", 1)
        else:
            warmup_steps = warmup
    return args | {
        "train_iters": steps,
        "train_samples": samples,
        "lr_warmup_iters": warmup_steps or 0,
        "lr_warmup_samples": warmup_samples or 0,
    }


def scheduler_arguments(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of megatron-core's `OptimizerParamScheduler`, which counts in samples.

    One step of the optimizer is `step(global_batch_size)`.
    """
    batch = args["global_batch_size"]
    if args["train_samples"] is None:
        decay = (args["lr_decay_iters"] or args["train_iters"]) * batch
        total = args["train_iters"] * batch
        warmup = args["lr_warmup_iters"] * batch
    else:
        decay = args["lr_decay_samples"] or args["train_samples"]
        total = args["train_samples"]
        warmup = args["lr_warmup_samples"]
    if args["lr_warmup_fraction"] is not None:
        warmup = math.floor(args["lr_warmup_fraction"] * decay)
    if not warmup < decay:
        raise SettingsError(
            f"The warm-up of the schedule takes {warmup} samples of {decay}: make it shorter (lr_warmup_*, "
            "or warmup_num_steps of MegatronLMDummyScheduler), or the training longer."
        )
    if args["min_lr"] > args["lr"]:
        raise SettingsError(
            f"MegatronLMPlugin(min_lr={args['min_lr']!r}) is above the learning rate {args['lr']!r}."
        )
    start, end = args["start_weight_decay"], args["end_weight_decay"]
    return {
        "init_lr": 0.0,
        "max_lr": args["lr"],
        "min_lr": args["min_lr"],
        "lr_warmup_steps": warmup,
        "lr_decay_steps": decay,
        "lr_decay_style": args["lr_decay_style"],
        "start_wd": args["weight_decay"] if start is None else start,
        "end_wd": args["weight_decay"] if end is None else end,
        "wd_incr_steps": total,
        "wd_incr_style": args["weight_decay_incr_style"],
    }
