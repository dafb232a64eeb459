"""Settings of engines: DeepSpeed, FSDP, Megatron, FP8 and the axes of parallelism."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from accel_state.frozen import frozen
from accel_state.settings.option import (
    Answers,
    boolean,
    booleans,
    comma_list,
    documented,
    integer,
    number,
    one_of,
    optional,
    rows_of,
    setting,
    spelled,
    switch,
)
from accel_state.settings.run import is_local, several_machines

_DEVICES = ("none", "cpu", "nvme")
_LAUNCHERS = ("pdsh", "standard", "openmpi", "mvapich", "mpich", "slurm", "nossh")


def _is_on(section: str) -> Callable[[Answers], bool]:
    return lambda answers: bool(answers(section))


_deepspeed_on, _fsdp_on, _megatron_on = _is_on("deepspeed"), _is_on("fsdp"), _is_on("megatron")
_parallelism_on = _is_on("parallelism")


def _without_file(answers: Answers) -> bool:
    return _deepspeed_on(answers) and not answers("deepspeed.hf_ds_config")


def _is_zero(answers: Answers) -> bool:
    return _without_file(answers) and answers("deepspeed.zero_stage") in {2, 3}


def _stage_three(answers: Answers) -> bool:
    return _deepspeed_on(answers) and (
        answers("deepspeed.zero_stage") == 3 or bool(answers("deepspeed.hf_ds_config"))
    )


def _among_machines(answers: Answers) -> bool:
    return _deepspeed_on(answers) and several_machines(answers)


def _deepspeed_row(help: str, *, long: str | None = None, **more: Any) -> Any:  # noqa: A002 - as the field is called
    def derive(field: str) -> dict[str, Any]:
        variable = f"ACCELERATE_{'' if long else 'DEEPSPEED_'}{(long or field).upper()}"
        return spelled(long or field, "deepspeed_config", variable=variable, ask_if=_deepspeed_on)

    return setting(derive, help=help, **more)


def _hosts(help: str, **more: Any) -> Any:  # noqa: A002 - as the field is called
    names = {
        "inclusion": "inclusion_filter",
        "exclusion": "exclusion_filter",
        "launcher": "multinode_launcher",
    }

    def derive(field: str) -> dict[str, Any]:
        name = f"deepspeed_{names.get(field, field)}"
        return {"flags": (f"--{name}",), "key": f"deepspeed_config.{name}"}

    return setting(derive, help=help, **more)


@documented
@frozen
class DeepSpeedSettings:
    """How DeepSpeed trains; the fields of `DeepSpeedPlugin`.

    Accumulation is in `Settings.training`, as for every engine.
    """

    hf_ds_config: str | None = _deepspeed_row(
        "DeepSpeed configuration file (JSON); accel fills in its auto values.",
        long="deepspeed_config_file",
        question="Path of a DeepSpeed configuration file (JSON)? (empty: answer questions instead)",
    )
    zero_stage: int | None = _deepspeed_row(
        "ZeRO stage: 0 shards nothing, 1 optimizer state, 2 also gradients, 3 also parameters.",
        parse=integer(0, 3),
        choices=("0", "1", "2", "3"),
        ask_if=_without_file,
    )
    offload_optimizer_device: str | None = _deepspeed_row(
        "Device for offloaded optimizer state (none: no offloading).", choices=_DEVICES, ask_if=_is_zero
    )
    offload_param_device: str | None = _deepspeed_row(
        "With stage 3: device for offloaded parameters (none: no offloading).",
        choices=_DEVICES,
        ask_if=lambda answers: _is_zero(answers) and answers("deepspeed.zero_stage") == 3,
    )
    offload_optimizer_nvme_path: str | None = _deepspeed_row(
        "NVMe folder for optimizer state.",
        parse=optional(str, "none"),
        ask_if=lambda answers: _is_zero(answers) and answers("deepspeed.offload_optimizer_device") == "nvme",
    )
    offload_param_nvme_path: str | None = _deepspeed_row(
        "NVMe folder for parameters.",
        parse=optional(str, "none"),
        ask_if=lambda answers: _is_zero(answers) and answers("deepspeed.offload_param_device") == "nvme",
    )
    gradient_clipping: float | None = _deepspeed_row(
        "Maximum gradient norm of each step.",
        long="gradient_clipping",
        parse=optional(number(0), "none", "auto"),
        question="Maximum gradient norm? (empty: the script clips)",
        ask_if=_without_file,
    )
    zero3_init_flag: bool | None = _deepspeed_row(
        "With stage 3: shard models during construction (deepspeed.zero.Init).",
        variable="ACCELERATE_DEEPSPEED_ZERO3_INIT",
        ask_if=_stage_three,
    )
    zero3_save_16bit_model: bool | None = _deepspeed_row(
        "With stage 3: gather sharded weights into a full state dict when saving.",
        ask_if=lambda answers: _without_file(answers) and _stage_three(answers),
    )
    transformer_moe_cls_names: str | None = _deepspeed_row(
        "Class names of mixture-of-experts layers, separated by commas.",
        long="deepspeed_moe_layer_cls_names",
        question="Class names of mixture-of-experts layers, separated by commas? (empty: none)",
        ask_if=lambda answers: _without_file(answers) and _stage_three(answers),
    )


@documented
@frozen
class HostSettings:
    """Starting processes on the machines of a DeepSpeed hostfile."""

    launcher: str | None = _hosts(
        "Program that starts workers on the other nodes.",
        choices=_LAUNCHERS,
        question="Which launcher starts processes on other nodes? (standard: run this command on each)",
        ask_if=_among_machines,
    )
    hostfile: str | None = _hosts(
        "Hostfile of the nodes, with lines such as worker-1 slots=8.",
        ask_if=lambda answers: (
            _among_machines(answers) and answers("hosts.launcher") not in {None, "standard"}
        ),
    )
    inclusion: str | None = _hosts(
        "Nodes and slots to use, such as worker-1@worker-2:0,2.",
        question="Which nodes and slots will you use, such as worker-1@worker-2:0,2? (empty: all)",
        ask_if=lambda answers: _among_machines(answers) and bool(answers("hosts.hostfile")),
    )
    exclusion: str | None = _hosts(
        "Nodes and slots to exclude, such as worker-1:0.",
        question="Which nodes and slots will you exclude, such as worker-1:0? (empty: none)",
        ask_if=lambda answers: (
            _among_machines(answers) and bool(answers("hosts.hostfile")) and not answers("hosts.inclusion")
        ),
    )


DEEPSPEED = (
    switch(
        "deepspeed",
        "deepspeed",
        help="Train with DeepSpeed.",
        topic="DeepSpeed",
        question="Do you want to use DeepSpeed?",
        ask_if=lambda answers: is_local(answers) and answers("launch.distributed_type") not in {"NO", "XLA"},
    ),
    *rows_of("deepspeed", DeepSpeedSettings, topic="DeepSpeed"),
    *rows_of("hosts", HostSettings, topic="DeepSpeed"),
)


# These lists are public in Accelerate, in this order; transformers relies on it.
FSDP_SHARDING_STRATEGY = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]
"""How FSDP1 shards parameters, gradients and optimizer states; numbered from 1."""
FSDP_BACKWARD_PREFETCH = ["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"]
"""When FSDP1 prefetches the parameters of the next module in a backward pass."""
FSDP_AUTO_WRAP_POLICY = ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]
"""How modules are chosen for wrapping."""
FSDP_STATE_DICT_TYPE = ["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"]
"""The forms in which FSDP1 saves a model."""
FSDP2_STATE_DICT_TYPE = ["SHARDED_STATE_DICT", "FULL_STATE_DICT"]
"""The forms in which FSDP2 saves a model."""


def _reshard(text: str) -> bool | int | str:
    """Parse a boolean, a number of ranks, or a strategy of FSDP1."""
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


def _first(answers: Answers) -> bool:
    return _fsdp_on(answers) and answers("fsdp.fsdp_version") != 2


def _fsdp_row(help: str, *, short: str | None = None, **more: Any) -> Any:  # noqa: A002 - as the field is called
    return setting(
        lambda field: spelled(f"fsdp_{short or field}", "fsdp_config", ask_if=_fsdp_on), help=help, **more
    )


@documented
@frozen
class FsdpSettings:
    """How PyTorch's FSDP shards models; the fields of `FullyShardedDataParallelPlugin`."""

    fsdp_version: int | None = _fsdp_row(
        "FSDP version: 1 is FullyShardedDataParallel, 2 is fully_shard.",
        short="version",
        parse=integer(1, 2),
        choices=("1", "2"),
        launch_default="1",
        question="Which FSDP version do you want? (2 is recommended)",
    )
    sharding_strategy: str | None = _fsdp_row(
        "Version 1: sharding strategy.",
        parse=one_of(*FSDP_SHARDING_STRATEGY, numbered=True),
        choices=tuple(FSDP_SHARDING_STRATEGY),
        ask_if=_first,
    )
    reshard_after_forward: bool | int | str | None = _fsdp_row(
        "Version 2: reshard parameters after the forward pass (true, false), or to this many ranks.",
        parse=_reshard,
        ask_if=lambda answers: _fsdp_on(answers) and answers("fsdp.fsdp_version") == 2,
    )
    cpu_offload: bool | None = _fsdp_row(
        "Offload parameters, gradients and optimizer state to the CPU.", short="offload_params"
    )
    auto_wrap_policy: str | None = _fsdp_row(
        "Auto-wrap policy, which chooses the FSDP units.", choices=tuple(FSDP_AUTO_WRAP_POLICY)
    )
    transformer_cls_names_to_wrap: tuple[str, ...] | None = _fsdp_row(
        "Classes that TRANSFORMER_BASED_WRAP makes FSDP units, separated by commas.",
        short="transformer_layer_cls_to_wrap",
        variable="FSDP_TRANSFORMER_CLS_TO_WRAP",
        parse=comma_list,
        question="Which classes to wrap, separated by commas? (empty: those that the model names)",
        ask_if=lambda answers: (
            _fsdp_on(answers) and answers("fsdp.auto_wrap_policy") == "TRANSFORMER_BASED_WRAP"
        ),
    )
    min_num_params: int | None = _fsdp_row(
        "Minimum number of parameters of an FSDP unit with SIZE_BASED_WRAP.",
        parse=integer(0),
        launch_default="100000000",
        ask_if=lambda answers: _fsdp_on(answers) and answers("fsdp.auto_wrap_policy") == "SIZE_BASED_WRAP",
    )
    backward_prefetch: str | None = _fsdp_row(
        "Version 1: backward prefetch policy.",
        parse=one_of(*FSDP_BACKWARD_PREFETCH, numbered=True),
        choices=tuple(FSDP_BACKWARD_PREFETCH),
        key_aliases=("fsdp_config.fsdp_backward_prefetch_policy",),
        ask_if=_first,
    )
    forward_prefetch: bool | None = _fsdp_row(
        "Prefetch the next all-gather in the forward pass.", ask_if=_first
    )
    state_dict_type: str | None = _fsdp_row(
        "State dict type of checkpoints.",
        parse=one_of(*FSDP_STATE_DICT_TYPE, numbered=True),
        choices=tuple(FSDP_STATE_DICT_TYPE),
    )
    use_orig_params: bool | None = _fsdp_row(
        "Version 1: keep the original parameters visible instead of flat ones.",
        launch_default="true",
        ask_if=_first,
    )
    cpu_ram_efficient_loading: bool | None = _fsdp_row(
        "Load weights on rank 0 only; prepare broadcasts them to the other ranks.", launch_default="true"
    )
    sync_module_states: bool | None = _fsdp_row(
        "Version 1: broadcast rank 0's parameters and buffers to all ranks.",
        launch_default="true",
        ask_if=lambda answers: _first(answers) and not answers("fsdp.cpu_ram_efficient_loading"),
    )
    activation_checkpointing: bool | None = _fsdp_row(
        "Activation checkpointing: recompute the activations of blocks in the backward pass."
    )
    activation_checkpointing_offload: bool | None = _fsdp_row(
        "Offload checkpointed activations to the CPU.",
        ask_if=lambda answers: _fsdp_on(answers) and answers("fsdp.activation_checkpointing"),
    )
    ignored_modules: str | None = _fsdp_row(
        "Modules to leave unsharded: a regular expression for their full names.", ask_if=None
    )
    xla: bool | None = _fsdp_row("Shard models over XLA devices.", key="fsdp_config.xla", ask_if=None)
    xla_fsdp_v2: bool | None = _fsdp_row(
        "On XLA devices: the compiler shards (SPMD), in one process per host.",
        short="xla_v2",
        key="fsdp_config.xla_fsdp_v2",
        ask_if=None,
    )
    xla_fsdp_grad_ckpt: bool | None = _fsdp_row(
        "On XLA devices: recompute the activations of blocks in the backward pass.",
        short="xla_grad_ckpt",
        key="fsdp_config.xla_fsdp_grad_ckpt",
        ask_if=None,
    )


FSDP = (
    switch(
        "fsdp",
        "fsdp",
        help="Shard models with PyTorch's FSDP.",
        topic="FSDP",
        question="Do you want to use FSDP (fully sharded data parallelism)?",
        ask_if=lambda answers: (
            is_local(answers)
            and answers("launch.distributed_type") not in {"NO", "XLA"}
            and not answers("deepspeed")
            and not answers("megatron")
        ),
    ),
    *rows_of("fsdp", FsdpSettings, topic="FSDP"),
)


_GRANULARITIES = ("full", "selective")
_METHODS = ("uniform", "block")
_ATTENTION_BACKENDS = ("auto", "flash", "fused", "unfused", "local")
_NO_EXPERTS = "Not supported: no supported model has experts."


def _attention_backend(text: str) -> str:
    """Parse a backend's name; or, as other libraries write, a boolean: whether to use a fused backend."""
    try:
        return "auto" if boolean(text) else "unfused"
    except ValueError:
        return one_of(*_ATTENTION_BACKENDS)(text)


def _megatron_row(help: str, **more: Any) -> Any:  # noqa: A002 - as the field is called
    return setting(lambda field: spelled(f"megatron_lm_{field}", "megatron_lm_config"), help=help, **more)


@documented
@frozen
class MegatronSettings:
    """How Megatron-LM trains; the fields of `MegatronLMPlugin` that can be set outside of the script."""

    tp_degree: int | None = _megatron_row("Tensor-parallel size.", ask_if=_megatron_on)
    sequence_parallelism: bool | None = _megatron_row(
        "Shard activations along the sequence dim (sequence parallelism).",
        ask_if=lambda answers: _megatron_on(answers) and (answers("megatron.tp_degree") or 1) > 1,
    )
    pp_degree: int | None = _megatron_row("Pipeline-parallel size.", ask_if=_megatron_on)
    num_micro_batches: int | None = _megatron_row("Micro-batches per step.", ask_if=_megatron_on)
    recompute_activations: bool | None = _megatron_row(
        "Recompute selected activations in the backward pass.", ask_if=_megatron_on
    )
    use_distributed_optimizer: bool | None = _megatron_row(
        "Shard optimizer state across data-parallel ranks.", ask_if=_megatron_on
    )
    gradient_clipping: float | None = _megatron_row(
        "Maximum gradient norm (0 = off).", parse=number(0), ask_if=_megatron_on
    )
    use_custom_fsdp: bool | None = _megatron_row("Not supported: use --use_fsdp.")
    no_load_optim: bool | None = _megatron_row("Load checkpoints without optimizer state.")
    no_save_optim: bool | None = _megatron_row("Save checkpoints without optimizer state.")
    eod_mask_loss: bool | None = _megatron_row("Exclude end-of-document tokens from the loss.")
    optimizer_cpu_offload: bool | None = _megatron_row("Run the optimizer on the CPU.")
    overlap_cpu_optimizer_d2h_h2d: bool | None = _megatron_row(
        "Overlap an offloaded optimizer's copies with its computation."
    )
    use_precision_aware_optimizer: bool | None = _megatron_row("Store optimizer state in lower precision.")
    decoder_last_pipeline_num_layers: int | None = _megatron_row(
        "Number of layers of the last stage.", parse=integer(0)
    )
    recompute_granularity: str | None = _megatron_row(
        "Granularity of activation recompute.", choices=_GRANULARITIES
    )
    recompute_method: str | None = _megatron_row("Method of activation recompute.", choices=_METHODS)
    recompute_num_layers: int | None = _megatron_row("Layers per recompute unit.")
    attention_backend: str | None = _megatron_row(
        "Attention backend; true means auto, false means unfused.",
        parse=_attention_backend,
        choices=_ATTENTION_BACKENDS,
    )
    expert_model_parallel_size: int | None = _megatron_row(_NO_EXPERTS)
    context_parallel_size: int | None = _megatron_row("Context-parallel size.")
    expert_tensor_parallel_size: int | None = _megatron_row(_NO_EXPERTS)
    attention_dropout: float | None = _megatron_row(
        "Dropout probability of attention weights.", parse=number(0, 1)
    )
    hidden_dropout: float | None = _megatron_row("Dropout probability of hidden states.", parse=number(0, 1))
    attention_softmax_in_fp32: bool | None = _megatron_row("Compute the attention softmax in float32.")
    calculate_per_token_loss: bool | None = _megatron_row("Average the loss over tokens.")
    use_rotary_position_embeddings: bool | None = _megatron_row("Use rotary position embeddings.")


MEGATRON = (
    switch(
        "megatron",
        "megatron_lm",
        help="Train with Megatron: tensor, pipeline, sequence and data parallelism by megatron-core.",
        topic="Megatron-LM",
        question="Do you want to use Megatron-LM?",
        ask_if=lambda answers: (
            is_local(answers)
            and answers("launch.distributed_type") == "MULTI_GPU"
            and not answers("deepspeed")
        ),
    ),
    *rows_of("megatron", MegatronSettings, topic="Megatron-LM"),
)


_FP8_BACKENDS = ("AO", "TE", "MSAMP")
_FORMATS = ("HYBRID", "E4M3", "E5M2")
_ALGORITHMS = ("max", "most_recent")
_LEVELS = ("O1", "O2")


def _fp8_on(answers: Answers) -> bool:
    return is_local(answers) and answers("precision.mixed_precision") == "fp8"


def _with(*backends: str) -> Any:
    return lambda answers: _fp8_on(answers) and answers("fp8.backend") in backends


def _fp8_row(help: str, **more: Any) -> Any:  # noqa: A002 - as the field is called
    def derive(field: str) -> dict[str, Any]:
        name = field.removeprefix("fp8_")
        return {
            "variable": f"ACCELERATE_FP8_{name.upper()}",
            "flags": () if field == "use_mxfp8_block_scaling" else (f"--fp8_{name}",),
            "key": f"fp8_config.{field}",
            "key_aliases": (f"fp8_config.fp8_{field}",) if field == name else (),
        }

    return setting(derive, help=help, **more)


@documented
@frozen
class Fp8Settings:
    """How FP8 training works; the fields of the FP8 recipes."""

    backend: str | None = _fp8_row(
        "FP8 backend: torchao, transformer-engine or MS-AMP.", choices=_FP8_BACKENDS, ask_if=_fp8_on
    )
    use_autocast_during_eval: bool | None = _fp8_row(
        "TE: use FP8 in evaluation.", const="true", ask_if=_with("TE")
    )
    margin: int | None = _fp8_row("TE: margin of the scaling factors.", parse=integer(0), ask_if=_with("TE"))
    interval: int | None = _fp8_row("TE: steps between updates of the scaling factors.", ask_if=_with("TE"))
    fp8_format: str | None = _fp8_row(
        "TE: FP8 format (HYBRID: E4M3 forward, E5M2 backward).", choices=_FORMATS, ask_if=_with("TE")
    )
    amax_history_len: int | None = _fp8_row(
        "TE: length of the amax history, in steps.",
        key_aliases=("fp8_config.fp8_amax_history_len", "fp8_config.amax_history_length"),
        ask_if=_with("TE"),
    )
    amax_compute_algo: str | None = _fp8_row(
        "TE: how the amax is chosen from the history.",
        choices=_ALGORITHMS,
        key_aliases=("fp8_config.fp8_amax_compute_algo", "fp8_config.amax_compute_algorithm"),
        ask_if=_with("TE"),
    )
    override_linear_precision: tuple[bool, bool, bool] | None = _fp8_row(
        "TE: whether fprop, dgrad and wgrad use higher precision, as false,false,true; in the"
        " environment also as ACCELERATE_FP8_OVERRIDE_FPROP, _DGRAD and _WGRAD.",
        parse=booleans(3),
        question="Use higher precision in fprop, dgrad and wgrad, as false,false,true?",
        ask_if=_with("TE"),
    )
    use_mxfp8_block_scaling: bool | None = _fp8_row(
        "TE: scale each block of 32 values separately (MXFP8).", ask_if=_with("TE")
    )
    opt_level: str | None = _fp8_row(
        "MS-AMP: optimization level (O2: optimizer state in FP8 as well).",
        choices=_LEVELS,
        ask_if=_with("MSAMP"),
    )
    enable_fsdp_float8_all_gather: bool | None = _fp8_row(
        "AO: all-gather FSDP parameters in FP8.",
        ask_if=lambda answers: _with("AO")(answers) and bool(answers("fsdp")),
    )
    pad_inner_dim: bool | None = _fp8_row(
        "AO: pad the inner dim of matrices to a multiple of 16.", ask_if=_with("AO")
    )


FP8 = rows_of("fp8", Fp8Settings, topic="FP8")


_COMMUNICATION = ("allgather", "alltoall")
_ATTENTION = ("sdpa", "flash_attention_2", "flash_attention_3")
_SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")


def find_axes_conflict(sizes: Mapping[str, int | None]) -> tuple[str, str, str] | None:
    """Return two axes that cannot be combined, and why; `None` if all can.

    Example:
        >>> find_axes_conflict({"dp_shard": 2, "cp": 2, "sp": 2})
        ('cp', 'sp', 'context and sequence parallelism cannot be combined')
    """
    if all((sizes.get(axis) or 1) > 1 for axis in ("cp", "sp")):
        return "cp", "sp", "context and sequence parallelism cannot be combined"
    return None


def _ulysses_of_deepspeed(answers: Answers) -> bool:
    with_deepspeed = _parallelism_on(answers) and bool(answers("deepspeed"))
    return with_deepspeed and (answers("parallelism.sp_size") or 1) > 1


def _pipeline(answers: Answers) -> bool:
    return _with_torch(answers) and (answers("parallelism.pp_size") or 1) > 1


def _with_torch(answers: Answers) -> bool:
    return _parallelism_on(answers) and not answers("deepspeed")


def _parallelism_row(help: str, **more: Any) -> Any:  # noqa: A002 - as the field is called
    def derive(field: str) -> dict[str, Any]:
        aliases = (f"parallelism_config.{field}",)
        name = f"parallelism_config_{field}"
        return spelled(name, "parallelism_config", key_aliases=aliases, ask_if=_parallelism_on)

    return setting(derive, help=help, **more)


@documented
@frozen
class ParallelismSettings:
    """The sizes of the axes of parallelism; the fields of `ParallelismConfig` and of its handlers."""

    dp_replicate_size: int | None = _parallelism_row(
        "Replicated data-parallel size: number of replicas of the model.", ask_if=_with_torch
    )
    dp_shard_size: int | None = _parallelism_row(
        "Sharded data-parallel size: number of ranks that shard each replica (FSDP).", ask_if=_with_torch
    )
    tp_size: int | None = _parallelism_row("Tensor-parallel size.", ask_if=_with_torch)
    cp_size: int | None = _parallelism_row("Context-parallel size (PyTorch).", ask_if=_with_torch)
    cp_backend: str | None = _parallelism_row(
        "Implementation of context parallelism.", choices=("torch",), ask_if=None
    )
    cp_comm_strategy: str | None = _parallelism_row(
        "Collective for exchanging keys and values.",
        choices=_COMMUNICATION,
        ask_if=lambda answers: _parallelism_on(answers) and (answers("parallelism.cp_size") or 1) > 1,
    )
    sp_size: int | None = _parallelism_row("Sequence-parallel size (Ulysses, with DeepSpeed or FSDP2).")
    sp_backend: str | None = _parallelism_row(
        "Implementation of sequence parallelism (default: deepspeed with DeepSpeed, else torch).",
        choices=("deepspeed", "torch"),
        ask_if=None,
    )
    sp_seq_length_is_variable: bool | None = _parallelism_row(
        "Whether sequence lengths vary between batches.", ask_if=_ulysses_of_deepspeed
    )
    sp_seq_length: int | None = _parallelism_row(
        "Sequence length in tokens.",
        question="Sequence length in tokens? (empty: taken from the first batch)",
        ask_if=_ulysses_of_deepspeed,
    )
    sp_attn_implementation: str | None = _parallelism_row(
        "Attention implementation.", choices=_ATTENTION, ask_if=_ulysses_of_deepspeed
    )
    ep_size: int | None = _parallelism_row(
        "Expert-parallel size: number of ranks across which a layer's experts are sharded.",
        ask_if=_with_torch,
    )
    pp_size: int | None = _parallelism_row("Pipeline-parallel size (PyTorch).", ask_if=_with_torch)
    pp_schedule: str | None = _parallelism_row(
        "Schedule of the pipeline.", choices=_SCHEDULES, ask_if=_pipeline
    )
    pp_num_microbatches: int | None = _parallelism_row(
        "Micro-batches per batch of a rank.",
        question="Micro-batches per batch of a rank? (empty: as many as stages)",
        ask_if=_pipeline,
    )
    pp_stages_per_rank: int | None = _parallelism_row("Pipeline stages per rank.", ask_if=None)
    pp_split_points: str | None = _parallelism_row(
        "First module of each stage but the first, separated by commas.", ask_if=None
    )


PARALLELISM = (
    switch(
        "parallelism",
        "parallelism_config",
        help="Use tensor, context, sequence, expert or pipeline parallelism, with the sizes below.",
        topic="tensor, context, sequence, expert and pipeline parallelism",
        question="Do you want to use tensor, context, sequence, expert or pipeline parallelism?",
        ask_if=lambda answers: (
            is_local(answers) and (bool(answers("deepspeed")) or answers("fsdp.fsdp_version") == 2)
        ),
    ),
    *rows_of(
        "parallelism", ParallelismSettings, topic="tensor, context, sequence, expert and pipeline parallelism"
    ),
)
