"""PyTorch's FSDP. The names of flags, keys and variables differ here and there from those of the fields."""

from __future__ import annotations

from typing import Any

from accel_state.settings.option import Answers, Option
from accel_state.settings.parsing import flag, one_of, whole, words
from accel_state.settings.rows.launch import here

# The lists are public in Accelerate, as lists in this order; transformers relies on it.
FSDP_SHARDING_STRATEGY = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]
FSDP_BACKWARD_PREFETCH = ["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"]
FSDP_AUTO_WRAP_POLICY = ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]
FSDP_STATE_DICT_TYPE = ["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"]
FSDP2_STATE_DICT_TYPE = ["SHARDED_STATE_DICT", "FULL_STATE_DICT"]


def _reshard(text: str) -> bool | int | str:
    """A truth value, a number of ranks, or a strategy of version 1."""
    if text.strip().isdecimal() and int(text) > 1:
        return int(text)
    try:
        return flag(text)
    except ValueError:
        pass
    try:
        return one_of(*FSDP_SHARDING_STRATEGY)(text)
    except ValueError:
        raise ValueError(
            "expected 'true', 'false', a number of ranks, or one of "
            f"{', '.join(map(repr, FSDP_SHARDING_STRATEGY))}"
        ) from None


def _on(answers: Answers) -> bool:
    return bool(answers("fsdp"))


def _first(answers: Answers) -> bool:
    return _on(answers) and answers("fsdp.fsdp_version") != 2


def _second(answers: Answers) -> bool:
    return _on(answers) and answers("fsdp.fsdp_version") == 2


def _row(field: str, help: str, *, short: str | None = None, **more: Any) -> Option:  # noqa: A002 - as the field is called
    name = f"fsdp_{short or field}"
    rest: dict[str, Any] = {"variable": name.upper(), "when": _on, **more}
    return Option(
        path=f"fsdp.{field}",
        help=help,
        topic="FSDP",
        flags=(f"--{name}",),
        key=f"fsdp_config.{name}",
        **rest,
    )


FSDP = (
    Option(
        path="fsdp",
        help="Shard models with PyTorch's FSDP.",
        topic="FSDP",
        parse=flag,
        variable="ACCELERATE_USE_FSDP",
        flags=("--use_fsdp",),
        const="true",
        question="Shard the model with PyTorch's FSDP?",
        when=lambda answers: (
            here(answers)
            and answers("launch.distributed_type") not in {"NO", "XLA"}
            and not answers("deepspeed")
            and not answers("megatron")
        ),
    ),
    _row(
        "fsdp_version",
        "1 for FullyShardedDataParallel, 2 for fully_shard.",
        short="version",
        parse=whole(1, 2),
        choices=("1", "2"),
        launched="1",
        question="Which version of FSDP? (2 is recommended)",
    ),
    _row(
        "sharding_strategy",
        "Version 1: what is sharded, and among whom.",
        parse=one_of(*FSDP_SHARDING_STRATEGY, numbered=True),
        choices=tuple(FSDP_SHARDING_STRATEGY),
        question="What is sharded?",
        when=_first,
    ),
    _row(
        "reshard_after_forward",
        "Version 2: free parameters after the forward pass (true, false); or reshard to a number of ranks.",
        parse=_reshard,
        question="Free parameters after the forward pass, and gather them again? (true: less memory)",
        when=_second,
    ),
    _row(
        "cpu_offload",
        "Keep parameters, gradients and the optimizer on the CPU.",
        short="offload_params",
        parse=flag,
        question="Keep parameters, gradients and the optimizer on the CPU?",
    ),
    _row(
        "auto_wrap_policy",
        "Which modules are sharded on their own.",
        parse=one_of(*FSDP_AUTO_WRAP_POLICY),
        choices=tuple(FSDP_AUTO_WRAP_POLICY),
        question="Which modules are sharded on their own?",
    ),
    _row(
        "transformer_cls_names_to_wrap",
        "The classes that TRANSFORMER_BASED_WRAP shards on their own, with commas between.",
        short="transformer_layer_cls_to_wrap",
        variable="FSDP_TRANSFORMER_CLS_TO_WRAP",
        parse=words,
        question="Their classes, with commas between? (empty: what the model itself names)",
        when=lambda answers: _on(answers) and answers("fsdp.auto_wrap_policy") == "TRANSFORMER_BASED_WRAP",
    ),
    _row(
        "min_num_params",
        "How many parameters a module has at least that SIZE_BASED_WRAP shards on its own.",
        parse=whole(0),
        launched="100000000",
        question="How many parameters have they at least?",
        when=lambda answers: _on(answers) and answers("fsdp.auto_wrap_policy") == "SIZE_BASED_WRAP",
    ),
    _row(
        "backward_prefetch",
        "Version 1: when the parameters of the next module are gathered in the backward pass.",
        parse=one_of(*FSDP_BACKWARD_PREFETCH, numbered=True),
        choices=tuple(FSDP_BACKWARD_PREFETCH),
        more_keys=("fsdp_config.fsdp_backward_prefetch_policy",),
        question="When are the parameters of the next module gathered in the backward pass?",
        when=_first,
    ),
    _row(
        "forward_prefetch",
        "Gather the parameters of the next module during the forward pass.",
        parse=flag,
        question="Gather the parameters of the next module during the forward pass?",
        when=_first,
    ),
    _row(
        "state_dict_type",
        "What checkpoints hold.",
        parse=one_of(*FSDP_STATE_DICT_TYPE, numbered=True),
        choices=tuple(FSDP_STATE_DICT_TYPE),
        question="What do checkpoints hold?",
    ),
    _row(
        "use_orig_params",
        "Version 1: keep parameters visible one by one.",
        parse=flag,
        launched="true",
        question="Keep parameters visible one by one?",
        when=_first,
    ),
    _row(
        "cpu_ram_efficient_loading",
        "Only rank 0 loads the values of a model; the others get them in prepare.",
        parse=flag,
        launched="true",
        question="Load the values of a model on rank 0 only, and send them to the others?",
    ),
    _row(
        "sync_module_states",
        "Version 1: all ranks take over the values of rank 0.",
        parse=flag,
        launched="true",
        question="Do all ranks take over the values of rank 0?",
        when=lambda answers: _first(answers) and not answers("fsdp.cpu_ram_efficient_loading"),
    ),
    _row(
        "activation_checkpointing",
        "Keep only the inputs of blocks for the backward pass, and compute the rest again.",
        parse=flag,
        question="Keep only the inputs of blocks for the backward pass? (less memory, more time)",
    ),
    _row(
        "activation_checkpointing_offload",
        "Keep these inputs on the CPU.",
        parse=flag,
        question="Keep these inputs on the CPU?",
        when=lambda answers: _on(answers) and answers("fsdp.activation_checkpointing"),
    ),
)
"""Rows of `FsdpSettings`."""
