"""Build Megatron's arguments from the plugin, an optimizer, a schedule and the sizes of a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from inspect import unwrap
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from accel_plugins.megatron.families import FAMILIES, ModelFamily
from accel_state.errors import SettingsError, UnsupportedError

if TYPE_CHECKING:
    from accel_plugins.megatron.data import MegatronLMDummyScheduler
    from accel_plugins.megatron.plugin import MegatronLMPlugin

    Parser: TypeAlias = Callable[[MegatronLMPlugin, nn.Module, Mapping[str, Any] | None], None]

_RENAMED: Mapping[str, str] = {
    "tp_degree": "tensor_model_parallel_size",
    "pp_degree": "pipeline_model_parallel_size",
    "sequence_parallelism": "sequence_parallel",
    "gradient_clipping": "clip_grad",
}


def base_args(plugin: MegatronLMPlugin) -> dict[str, Any]:
    """Return the arguments known before preparation, including `other_megatron_args`."""
    values = {field.name: getattr(plugin, field.name) for field in fields(plugin)}
    args = {_RENAMED.get(name, name): value for name, value in values.items()}
    return args | (args.pop("other_megatron_args") or {})


def optimizer_args(optimizer: Optimizer) -> dict[str, Any]:
    """Convert an optimizer of PyTorch to Megatron's arguments.

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
    step = unwrap(type(optimizer).step)  # torch wraps the method when the first instance is created.
    if not any(step is unwrap(kind.step) for kind in (Adam, AdamW, SGD)):
        raise UnsupportedError(
            f"{type(optimizer).__name__} has its own step(), which Megatron would not call: it builds its "
            "own optimizer from the groups. Use torch.optim.AdamW, Adam or SGD itself."
        )
    defaults = optimizer.defaults
    for name in ("amsgrad", "maximize", "nesterov"):
        if defaults.get(name):
            raise UnsupportedError(
                f"{type(optimizer).__name__}({name}=True): Megatron's optimizer has no {name}. Remove it."
            )
    shared = {"lr": float(defaults["lr"]), "weight_decay": defaults["weight_decay"]}
    if isinstance(optimizer, Adam | AdamW):  # Before torch 2.7 AdamW is not a subclass of Adam.
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
    """Convert the schedule to Megatron's arguments."""
    ranks = getattr(plugin, "data_parallel_size", 1)
    steps, samples = plugin.train_iters, plugin.train_samples
    if steps is None and samples is None:
        if scheduler.total_num_steps is None:
            raise SettingsError(
                "MegatronLMDummyScheduler has no total_num_steps, and MegatronLMPlugin neither "
                "train_iters nor train_samples: set one of them."
            )
        steps = scheduler.total_num_steps // ranks
    warmup_steps, warmup_samples = plugin.lr_warmup_iters, plugin.lr_warmup_samples
    if plugin.lr_warmup_fraction is None and warmup_steps is None and warmup_samples is None:
        warmup = scheduler.warmup_num_steps // ranks
        if steps is None:
            warmup_samples = warmup * getattr(plugin, "global_batch_size", 1)
        else:
            warmup_steps = warmup
    return {
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


_PARSERS: dict[str, Parser] = {}
_ANY_LENGTH = 1024
"""Sequence length of a model without a limit of positions, if no length is set."""


def add_model_config_to_megatron_parser(model_type: str) -> Callable[[Parser], Parser]:
    """Return a decorator that registers the description of a model type for Megatron.

    Args:
        model_type: As in `model.config.model_type`.

    Returns:
        A decorator of functions `f(megatron_lm_plugin, model, batch_data)` that set the sizes of the model in
        `megatron_lm_plugin.megatron_lm_default_args`.

    Example:
        >>> @add_model_config_to_megatron_parser("my_model")
        ... def describe(megatron_lm_plugin, model, batch_data):
        ...     megatron_lm_plugin.megatron_lm_default_args["num_layers"] = model.config.num_layers
    """

    def register(parser: Parser) -> Parser:
        _PARSERS[model_type] = parser
        return parser

    return register


def enter_network_args(
    plugin: MegatronLMPlugin, model: nn.Module, batch_data: Mapping[str, Any] | None
) -> None:
    """Set the sizes of a model in the arguments of a plugin."""
    config: Any = getattr(model, "config", None)
    model_type: Any = getattr(config, "model_type", None)
    families = FAMILIES.available()
    if model_type in _PARSERS:
        _PARSERS[model_type](plugin, model, batch_data)
    elif model_type in families:
        _enter_sizes(plugin, model, families[model_type], batch_data or {})
    else:
        raise SettingsError(
            f"{type(model).__name__} is of type {model_type!r}, which is not described to Megatron (known: "
            f"{', '.join(sorted({*_PARSERS, *families}))}): register a function with "
            f"@add_model_config_to_megatron_parser({model_type!r})."
        )


def _enter_sizes(plugin: MegatronLMPlugin, model: Any, family: ModelFamily, batch: Mapping[str, Any]) -> None:
    config, kind = model.config, family.kind
    fields, arguments = family.transformer_config(config), family.model_arguments(model)
    longest = (None if kind == "t5" else arguments.get("max_sequence_length")) or _ANY_LENGTH
    lengths = {"encoder_seq_length": "input_ids", "decoder_seq_length": "labels"}
    for name, key in (lengths if kind == "t5" else {"seq_length": "input_ids"}).items():
        length = getattr(plugin, name) or (int(batch[key].shape[1]) if key in batch else longest)
        setattr(plugin, name, length)
        plugin.megatron_lm_default_args[name] = length
    name = type(model).__name__.lower()
    plugin.megatron_lm_default_args |= {
        "model_type_name": kind,
        "num_layers": arguments.get("encoder_layers", fields["num_layers"]),
        "hidden_size": fields["hidden_size"],
        "ffn_hidden_size": fields["ffn_hidden_size"],
        "num_attention_heads": fields["num_attention_heads"],
        "num_query_groups": fields.get("num_query_groups", fields["num_attention_heads"]),
        "max_position_embeddings": longest,
        "orig_vocab_size": config.vocab_size,
        "model_return_dict": bool(getattr(config, "return_dict", True)),
        "pretraining_flag": kind != "bert" or "pretraining" in name or "maskedlm" in name,
        "return_logits": plugin.return_logits,
    }
    if kind == "bert":
        plugin.megatron_lm_default_args |= {
            "bert_binary_head": "pretraining" in name,
            "num_labels": int(getattr(config, "num_labels", 2)),
        }
    if kind == "t5":
        plugin.megatron_lm_default_args |= {
            "decoder_start_token_id": getattr(config, "decoder_start_token_id", None) or 0,
            "pad_token_id": getattr(config, "pad_token_id", None) or 0,
        }


def described_sizes(plugin: MegatronLMPlugin) -> dict[str, Any]:
    """Return fields of megatron-core's `TransformerConfig` for a model that has no row."""
    args = plugin.megatron_lm_default_args
    names = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups")
    return {name: args[name] for name in names if name in args}
