"""Valid values of the fields of `MegatronLMPlugin`, and which exclude each other. Pure functions."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from accel_plugins.kwargs.base import is_count
from accel_state.errors import SettingsError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

DEFAULTS: Mapping[str, Any] = {
    "tp_degree": 1,
    "pp_degree": 1,
    "use_custom_fsdp": False,
    "overlap_cpu_optimizer_d2h_h2d": False,
    "no_load_optim": False,
    "eod_mask_loss": False,
    "no_save_optim": False,
    "optimizer_cpu_offload": False,
    "use_precision_aware_optimizer": False,
    "attention_backend": "auto",
    "expert_model_parallel_size": 1,
    "context_parallel_size": 1,
    "attention_softmax_in_fp32": True,
    "expert_tensor_parallel_size": 1,
    "calculate_per_token_loss": False,
    "num_micro_batches": 1,
    "gradient_clipping": 1.0,
    "sequence_parallelism": False,
    "recompute_activations": False,
    "use_distributed_optimizer": False,
}
"""Values of fields that neither an argument nor the environment sets."""

LENGTHS = ("seq_length", "encoder_seq_length", "decoder_seq_length")
"""The longest sequences."""

_CHOICES: Mapping[str, tuple[str | None, ...]] = {
    "attention_backend": ("auto", "flash", "fused", "unfused", "local"),
    "weight_decay_incr_style": ("constant", "linear", "cosine"),
    "lr_decay_style": ("constant", "linear", "cosine", "inverse-square-root"),
    "recompute_granularity": (None, "full", "selective"),
    "recompute_method": (None, "uniform", "block"),
}
_FLAGS = (
    *(name for name, value in DEFAULTS.items() if isinstance(value, bool)),
    "is_train_batch_min",
    "megatron_dataset_flag",
    "set_all_logging_options",
    "return_logits",
)
_SIZES = (*(name for name, value in DEFAULTS.items() if type(value) is int), "eval_iters", "eval_interval")
_OPTIONAL_SIZES = (
    "decoder_last_pipeline_num_layers",
    "recompute_num_layers",
    "num_layers_per_virtual_pipeline_stage",
    "train_iters",
    "train_samples",
    "lr_decay_iters",
    "lr_decay_samples",
    *LENGTHS,
)
_COUNTS = ("lr_warmup_iters", "lr_warmup_samples")
_FRACTIONS = ("attention_dropout", "hidden_dropout", "lr_warmup_fraction")
_AMOUNTS = ("gradient_clipping", "min_lr", "lr_mult")
_OPTIONAL_AMOUNTS = ("start_weight_decay", "end_weight_decay")
OWN_CODE = (
    "custom_train_step_class",
    "custom_model_provider_function",
    "custom_prepare_model_function",
    "custom_megatron_datasets_provider_function",
    "custom_get_batch_function",
    "custom_loss_function",
)
"""Fields with code of the user, which may read any argument."""

_CALLABLES = ("no_wd_decay_cond", "scale_lr_cond", *OWN_CODE)
_DICTIONARIES = ("custom_train_step_kwargs", "other_megatron_args")


def is_number(value: object, low: float = 0.0, high: float = math.inf) -> bool:
    """Return whether a value is a finite number between two others (bools excluded)."""
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
        and low <= value <= high
    )


def _optional(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or holds(value)


_ROWS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    name: (wanted, holds)
    for names, wanted, holds in (
        (_FLAGS, "True or False", lambda value: isinstance(value, int) and value in {0, 1}),
        (("use_rotary_position_embeddings",), "True, False or None", {None, True, False}.__contains__),
        (_SIZES, "a whole number above 0", partial(is_count, least=1)),
        (_OPTIONAL_SIZES, "a whole number above 0, or None", _optional(partial(is_count, least=1))),
        (_COUNTS, "a whole number, 0 or more, or None", _optional(partial(is_count, least=0))),
        (_FRACTIONS, "a number from 0 to 1, or None", _optional(partial(is_number, high=1))),
        (_AMOUNTS, "a number, 0 or more", is_number),
        (_OPTIONAL_AMOUNTS, "a number, 0 or more, or None", _optional(is_number)),
        (_CALLABLES, "something to call, or None", _optional(callable)),
        (_DICTIONARIES, "a dictionary, or None", lambda value: isinstance(value, dict | None)),
        *(((name,), f"one of {words}", words.__contains__) for name, words in _CHOICES.items()),
    )
    for name in names
}


def check_values(fields: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    """Check each field by itself."""
    problems = [
        f"{sources[name]}: expected {wanted}"
        for name, (wanted, holds) in _ROWS.items()
        if not holds(fields[name])
    ]
    consumed = fields["consumed_samples"]
    if consumed is not None and not (
        isinstance(consumed, list) and all(is_count(one, least=0) for one in consumed)
    ):
        problems.append(
            f"{sources['consumed_samples']}: expected a list of whole numbers, one for each loader"
        )
    if problems:
        raise SettingsError("; ".join(problems) + ".")


UNSUPPORTED: Mapping[str, tuple[Any, str]] = {
    "use_custom_fsdp": (
        False,
        (
            "PyTorch's FSDP2 shards parameters: use FullyShardedDataParallelPlugin(fsdp_version=2) instead "
            "of this plugin, or use_distributed_optimizer=True, which shards optimizer state"
        ),
    ),
    "expert_model_parallel_size": (1, "no supported model has experts: leave it out"),
    "expert_tensor_parallel_size": (1, "no supported model has experts: leave it out"),
    "pipeline_model_parallel_split_rank": (
        None,
        "megatron-core no longer places encoders and decoders on separate stages: leave it out",
    ),
    "tensorboard_dir": (
        None,
        "trackers write the logs of a run: use Accelerator(log_with='tensorboard', project_dir=…)",
    ),
    "set_all_logging_options": (
        False,
        (
            "it sets options of Megatron-LM's own training loop: use "
            "Accelerator(log_with='tensorboard', project_dir=…, log_system_metrics=True)"
        ),
    ),
}
"""Fields that are refused unless they have this value, and what to use instead."""


def check_supported(fields: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    """Refuse what no part of the strategy would read."""
    for name, (default, instead) in UNSUPPORTED.items():
        if fields[name] != default:
            raise UnsupportedError(f"{sources[name]} is not supported: {instead}.")


_ALTERNATIVES = (
    ("train_iters", "train_samples"),
    ("lr_decay_iters", "lr_decay_samples"),
    ("lr_warmup_iters", "lr_warmup_samples"),
    ("lr_warmup_iters", "lr_warmup_fraction"),
    ("lr_warmup_samples", "lr_warmup_fraction"),
    ("train_iters", "lr_decay_samples"),
    ("train_iters", "lr_warmup_samples"),
    ("train_samples", "lr_decay_iters"),
    ("train_samples", "lr_warmup_iters"),
    ("num_layers_per_virtual_pipeline_stage", "decoder_last_pipeline_num_layers"),
)
"""Pairs that say one thing twice, or count in different units."""

_GROUP_OF_SCHEDULE = "microbatch_group_size_per_vp_stage"
"""megatron-core's field for micro-batches that a virtual stage computes in a row: `pp_degree` by default."""


def check_combinations(fields: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    """Refuse fields that contradict each other, or have no effect beside the others."""
    problems = [
        f"{sources[one]} and {sources[other]} exclude each other: leave one out"
        for one, other in _ALTERNATIVES
        if fields[one] is not None and fields[other] is not None
    ]
    problems += [*_without_effect(fields, sources), *_uneven_schedule(fields, sources)]
    if problems:
        raise SettingsError("; ".join(problems) + ".")


def _without_effect(fields: Mapping[str, Any], sources: Mapping[str, str]) -> list[str]:
    full, stages = fields["recompute_granularity"] == "full", fields["pp_degree"]
    needs = (
        ("sequence_parallelism", fields["tp_degree"] > 1, "tp_degree of 2 or more"),
        ("num_layers_per_virtual_pipeline_stage", stages > 1, "pp_degree of 2 or more"),
        ("decoder_last_pipeline_num_layers", stages > 1, "pp_degree of 2 or more"),
        ("recompute_method", full, "recompute_granularity='full'"),
        ("recompute_num_layers", full, "recompute_granularity='full'"),
        ("overlap_cpu_optimizer_d2h_h2d", fields["optimizer_cpu_offload"], "optimizer_cpu_offload=True"),
        (
            "optimizer_cpu_offload",
            fields["use_precision_aware_optimizer"],
            "use_precision_aware_optimizer=True, the only optimizer that megatron-core offloads",
        ),
        (
            "use_precision_aware_optimizer",
            fields["use_distributed_optimizer"],
            "use_distributed_optimizer=True",
        ),
        (
            "custom_train_step_kwargs",
            fields["custom_train_step_class"] is not None,
            "custom_train_step_class",
        ),
    )
    found = [
        f"{sources[name]} has no effect without {needed}: add that, or leave it out"
        for name, holds, needed in needs
        if fields[name] and not holds
    ]
    if fields["lr_mult"] != 1 and fields["scale_lr_cond"] is None:
        found.append(f"{sources['lr_mult']} has no effect without scale_lr_cond: add that, or leave it out")
    if fields["recompute_activations"] and full:
        found.append(
            f"{sources['recompute_activations']} recomputes selected activations and "
            f"{sources['recompute_granularity']} all: leave one out"
        )
    start, end = fields["start_weight_decay"], fields["end_weight_decay"]
    if (start is None) != (end is None):
        found.append("start_weight_decay and end_weight_decay belong together: give both, or neither")
    elif start != end and fields["weight_decay_incr_style"] == "constant":
        found.append(
            f"start_weight_decay={start!r} and end_weight_decay={end!r} differ, but "
            "weight_decay_incr_style is 'constant': use 'linear' or 'cosine', or give one value"
        )
    elif start is not None and start > end:
        found.append(f"start_weight_decay={start!r} is above end_weight_decay={end!r}: it can only grow")
    return found


def _uneven_schedule(fields: Mapping[str, Any], sources: Mapping[str, str]) -> list[str]:
    """Refuse the interleaved schedule of micro-batches that the stages do not divide."""
    number, stages = fields["num_micro_batches"], fields["pp_degree"]
    has_own_group = _GROUP_OF_SCHEDULE in (fields["other_megatron_args"] or {})
    if fields["num_layers_per_virtual_pipeline_stage"] is None or has_own_group or number % stages == 0:
        return []
    virtual = sources["num_layers_per_virtual_pipeline_stage"]
    wanted = f"num_micro_batches that pp_degree={stages} divides, not {number}: give a multiple of {stages}"
    return [f"{virtual} needs {wanted}"]
