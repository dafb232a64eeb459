"""PyTorch's FSDP. The names of flags, keys and variables differ here and there from those of the fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel_state.settings.option import Answers, documented, rows_of, setting, spelled, switch
from accel_state.settings.parsing import boolean, comma_list, integer, one_of
from accel_state.settings.sections.launch import is_local

_NOT_ON_XLA = "The interview for TPUs asks for nothing about FSDP."

# The lists are public in Accelerate, as lists in this order; transformers relies on it.
FSDP_SHARDING_STRATEGY = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]
"""How FSDP1 shards parameters, gradients and optimizer states; numbered from 1."""
FSDP_BACKWARD_PREFETCH = ["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"]
"""When FSDP1 prefetches the parameters of the next module in a backward pass."""
FSDP_AUTO_WRAP_POLICY = ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]
"""By what modules are wrapped."""
FSDP_STATE_DICT_TYPE = ["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"]
"""The forms in which FSDP1 saves a model."""
FSDP2_STATE_DICT_TYPE = ["SHARDED_STATE_DICT", "FULL_STATE_DICT"]
"""The forms in which FSDP2 saves a model."""


def _reshard(text: str) -> bool | int | str:
    """A truth value, a number of ranks, or a strategy of version 1."""
    if text.strip().isdecimal() and int(text) > 1:
        return int(text)
    try:
        return boolean(text)
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


def _row(help: str, *, short: str | None = None, **more: Any) -> Any:  # noqa: A002 - as the field is called
    return setting(
        lambda field: spelled(f"fsdp_{short or field}", "fsdp_config", ask_if=_on), help=help, **more
    )


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpSettings:
    """How PyTorch's FSDP shards models; the fields of `FullyShardedDataParallelPlugin`."""

    fsdp_version: int | None = _row(
        "1 for FullyShardedDataParallel, 2 for fully_shard.",
        short="version",
        parse=integer(1, 2),
        choices=("1", "2"),
        launch_default="1",
        question="Which version of FSDP? (2 is recommended)",
    )
    sharding_strategy: str | None = _row(
        "Version 1: sharding strategy.",
        parse=one_of(*FSDP_SHARDING_STRATEGY, numbered=True),
        choices=tuple(FSDP_SHARDING_STRATEGY),
        question="Which sharding strategy?",
        ask_if=_first,
    )
    reshard_after_forward: bool | int | str | None = _row(
        "Version 2: free parameters after the forward pass (true, false); or reshard to a number of ranks.",
        parse=_reshard,
        question="Free parameters after the forward pass, and gather them again? (true: less memory)",
        ask_if=_second,
    )
    cpu_offload: bool | None = _row(
        "Offload parameters, gradients and optimizer state to the CPU.",
        short="offload_params",
        question="Offload parameters, gradients and optimizer state to the CPU?",
    )
    auto_wrap_policy: str | None = _row(
        "Auto-wrap policy: which modules are FSDP units.",
        choices=tuple(FSDP_AUTO_WRAP_POLICY),
        question="Which auto-wrap policy?",
    )
    transformer_cls_names_to_wrap: tuple[str, ...] | None = _row(
        "The classes that TRANSFORMER_BASED_WRAP shards on their own, with commas between.",
        short="transformer_layer_cls_to_wrap",
        variable="FSDP_TRANSFORMER_CLS_TO_WRAP",
        parse=comma_list,
        question="Their classes, with commas between? (empty: what the model itself names)",
        ask_if=lambda answers: _on(answers) and answers("fsdp.auto_wrap_policy") == "TRANSFORMER_BASED_WRAP",
    )
    min_num_params: int | None = _row(
        "How many parameters a module has at least that SIZE_BASED_WRAP shards on its own.",
        parse=integer(0),
        launch_default="100000000",
        question="How many parameters have they at least?",
        ask_if=lambda answers: _on(answers) and answers("fsdp.auto_wrap_policy") == "SIZE_BASED_WRAP",
    )
    backward_prefetch: str | None = _row(
        "Version 1: when the next all-gather is prefetched in the backward pass.",
        parse=one_of(*FSDP_BACKWARD_PREFETCH, numbered=True),
        choices=tuple(FSDP_BACKWARD_PREFETCH),
        key_aliases=("fsdp_config.fsdp_backward_prefetch_policy",),
        question="When is the next all-gather prefetched in the backward pass?",
        ask_if=_first,
    )
    forward_prefetch: bool | None = _row(
        "Prefetch the next all-gather in the forward pass.",
        question="Prefetch the next all-gather in the forward pass?",
        ask_if=_first,
    )
    state_dict_type: str | None = _row(
        "State dict type of checkpoints.",
        parse=one_of(*FSDP_STATE_DICT_TYPE, numbered=True),
        choices=tuple(FSDP_STATE_DICT_TYPE),
        question="Which type of state dict do checkpoints hold?",
    )
    use_orig_params: bool | None = _row(
        "Version 1: keep the original parameters visible instead of flat ones.",
        launch_default="true",
        question="Keep the original parameters visible instead of flat ones?",
        ask_if=_first,
    )
    cpu_ram_efficient_loading: bool | None = _row(
        "Load weights on rank 0 only; prepare materialises the other ranks from it.",
        launch_default="true",
        question="Load weights on rank 0 only, and materialise the other ranks from it?",
    )
    sync_module_states: bool | None = _row(
        "Version 1: broadcast the parameters and buffers of rank 0 to all ranks.",
        launch_default="true",
        question="Broadcast the parameters and buffers of rank 0 to all ranks?",
        ask_if=lambda answers: _first(answers) and not answers("fsdp.cpu_ram_efficient_loading"),
    )
    activation_checkpointing: bool | None = _row(
        "Activation checkpointing: recompute the activations of blocks in the backward pass.",
        question="Use activation checkpointing? (less memory, more time)",
    )
    activation_checkpointing_offload: bool | None = _row(
        "Offload checkpointed activations to the CPU.",
        question="Offload checkpointed activations to the CPU?",
        ask_if=lambda answers: _on(answers) and answers("fsdp.activation_checkpointing"),
    )
    ignored_modules: str | None = _row(
        "Modules that are not sharded: a regular expression that matches their whole names.",
        skip_reason="Few models need it; write it into the file.",
    )
    xla: bool | None = _row("Shard models over XLA devices.", key="fsdp_config.xla", skip_reason=_NOT_ON_XLA)
    xla_fsdp_v2: bool | None = _row(
        "On XLA devices: let the compiler shard (SPMD), with one process for all devices of a host.",
        short="xla_v2",
        key="fsdp_config.xla_fsdp_v2",
        skip_reason=_NOT_ON_XLA,
    )
    xla_fsdp_grad_ckpt: bool | None = _row(
        "On XLA devices: recompute the activations of blocks in the backward pass.",
        short="xla_grad_ckpt",
        key="fsdp_config.xla_fsdp_grad_ckpt",
        skip_reason=_NOT_ON_XLA,
    )


FSDP = (
    switch(
        "fsdp",
        "fsdp",
        help="Shard models with PyTorch's FSDP.",
        topic="FSDP",
        question="Shard the model with PyTorch's FSDP?",
        ask_if=lambda answers: (
            is_local(answers)
            and answers("launch.distributed_type") not in {"NO", "XLA"}
            and not answers("deepspeed")
            and not answers("megatron")
        ),
    ),
    *rows_of("fsdp", FsdpSettings, topic="FSDP"),
)
