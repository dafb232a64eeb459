"""Build Megatron's arguments from an optimizer, a schedule and the sizes of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import unwrap
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from accel_plugins.megatron.families import FAMILIES
from accel_state.errors import SettingsError, UnsupportedError

if TYPE_CHECKING:
    from accel_plugins.megatron.plugin import MegatronLMPlugin

    Parser: TypeAlias = Callable[[MegatronLMPlugin, nn.Module, Mapping[str, Any] | None], None]


def optimizer_args(optimizer: Optimizer) -> dict[str, Any]:
    """Convert an optimizer of PyTorch to Megatron's arguments.

    Example:
        >>> import torch
        >>> args = optimizer_args(AdamW(torch.nn.Linear(1, 1).parameters(), lr=0.1, weight_decay=0.02))
        >>> args["optimizer"], args["lr"], args["weight_decay"]
        ('adam', 0.1, 0.02)
    """
    name = type(optimizer).__name__
    advice = "Use torch.optim.AdamW, Adam or SGD."
    if not isinstance(optimizer, Adam | AdamW | SGD):  # Before torch 2.7 AdamW is not a subclass of Adam.
        raise UnsupportedError(f"{name} is not one of Megatron's optimizers. {advice}")
    step = unwrap(type(optimizer).step)  # torch wraps the method when the first instance is created.
    if not any(step is unwrap(kind.step) for kind in (Adam, AdamW, SGD)):
        raise UnsupportedError(f"{name} has its own step(), which Megatron would not call. {advice}")
    defaults = optimizer.defaults
    for option in ("amsgrad", "maximize", "nesterov"):
        if defaults.get(option):
            raise UnsupportedError(f"{name}({option}=True): Megatron's optimizer has no {option}. Remove it.")
    shared = {"lr": float(defaults["lr"]), "weight_decay": defaults["weight_decay"]}
    if isinstance(optimizer, SGD):
        return {"optimizer": "sgd", "sgd_momentum": defaults["momentum"], **shared}
    return {
        "optimizer": "adam",
        "adam_beta1": defaults["betas"][0],
        "adam_beta2": defaults["betas"][1],
        "adam_eps": defaults["eps"],
        "decoupled_weight_decay": isinstance(optimizer, AdamW)
        or defaults.get("decoupled_weight_decay", False),
        **shared,
    }


def scheduler_arguments(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of megatron-core's `OptimizerParamScheduler`, which counts in samples.

    One step of the optimizer is `step(global_batch_size)`.
    """
    unit, batch = ("iters", args["global_batch_size"]) if args["train_samples"] is None else ("samples", 1)
    total = args[f"train_{unit}"] * batch
    decay = (args[f"lr_decay_{unit}"] or args[f"train_{unit}"]) * batch
    warmup, fraction = args[f"lr_warmup_{unit}"] * batch, args["lr_warmup_fraction"]
    start, end = args["start_weight_decay"], args["end_weight_decay"]
    return {
        "init_lr": 0.0,
        "max_lr": args["lr"],
        "min_lr": args["min_lr"],
        "lr_warmup_steps": warmup if fraction is None else int(fraction * decay),
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


def enter_network_args(plugin: MegatronLMPlugin, model: Any, batch_data: Mapping[str, Any] | None) -> None:
    """Set the sizes of a model in the arguments of a plugin."""
    config: Any = getattr(model, "config", None)
    model_type: Any = getattr(config, "model_type", None)
    families = FAMILIES.available()
    if model_type in _PARSERS:
        _PARSERS[model_type](plugin, model, batch_data)
        return
    if model_type not in families:
        raise SettingsError(
            f"{type(model).__name__} is of type {model_type!r}, which is not described to Megatron (known: "
            f"{', '.join(sorted({*_PARSERS, *families}))}): register a function with "
            f"@add_model_config_to_megatron_parser({model_type!r})."
        )
    # 1. Set the lengths of sequences: the plugin's, those of the batch, or the number of positions.
    family, batch, args = families[model_type], batch_data or {}, plugin.megatron_lm_default_args
    kind, sizes, arguments = family.kind, family.transformer_config(config), family.model_arguments(model)
    longest = (None if kind == "t5" else arguments.get("max_sequence_length")) or _ANY_LENGTH
    lengths = {"encoder_seq_length": "input_ids", "decoder_seq_length": "labels"}
    for name, key in (lengths if kind == "t5" else {"seq_length": "input_ids"}).items():
        args[name] = getattr(plugin, name) or (int(batch[key].shape[1]) if key in batch else longest)
        setattr(plugin, name, args[name])
    # 2. Set the sizes.
    class_name = type(model).__name__.lower()
    args |= {
        "model_type_name": kind,
        "num_layers": arguments.get("encoder_layers", sizes["num_layers"]),
        **{name: sizes[name] for name in ("hidden_size", "ffn_hidden_size", "num_attention_heads")},
        "num_query_groups": sizes.get("num_query_groups", sizes["num_attention_heads"]),
        "max_position_embeddings": longest,
        "orig_vocab_size": config.vocab_size,
        "model_return_dict": bool(getattr(config, "return_dict", True)),
        "pretraining_flag": kind != "bert" or "pretraining" in class_name or "maskedlm" in class_name,
        "return_logits": plugin.return_logits,
        "bert_binary_head": "pretraining" in class_name,
        "num_labels": int(getattr(config, "num_labels", 2)),
        "decoder_start_token_id": getattr(config, "decoder_start_token_id", None) or 0,
        "pad_token_id": getattr(config, "pad_token_id", None) or 0,
    }
