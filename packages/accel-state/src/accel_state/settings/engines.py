"""Settings of the training engines. `None` means that a setting has no source."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpSettings:
    """How PyTorch's FSDP shards models; the fields of `FullyShardedDataParallelPlugin`.

    Args:
        fsdp_version: 1 or 2.
        sharding_strategy: Version 1: the name of a `ShardingStrategy`.
        reshard_after_forward: Version 2: whether parameters are freed after the forward pass, or to how many
            ranks they are resharded; version 1: the name of a `ShardingStrategy`.
        backward_prefetch: Version 1: `"BACKWARD_PRE"`, `"BACKWARD_POST"` or `"NO_PREFETCH"`.
        auto_wrap_policy: `"TRANSFORMER_BASED_WRAP"`, `"SIZE_BASED_WRAP"` or `"NO_WRAP"`.
        cpu_offload: Whether parameters and gradients are offloaded to the CPU.
        state_dict_type: `"FULL_STATE_DICT"`, `"SHARDED_STATE_DICT"` or `"LOCAL_STATE_DICT"`.
        use_orig_params: Version 1: whether the original parameters stay visible, rather than flat ones.
        sync_module_states: Version 1: whether rank 0 broadcasts its parameters and buffers.
        forward_prefetch: Whether the next all-gather is prefetched in the forward pass.
        activation_checkpointing: Whether activations are recomputed in the backward pass.
        activation_checkpointing_offload: Whether checkpointed activations are offloaded to the CPU.
        cpu_ram_efficient_loading: Whether only rank 0 loads weights; the other ranks have meta models.
        transformer_cls_names_to_wrap: Class names of the transformer wrap policy.
        min_num_params: Smallest number of parameters of a module for the size wrap policy.
        xla: Whether models are sharded over XLA devices.
        xla_fsdp_v2: Whether the compiler shards them (SPMD).
        xla_fsdp_grad_ckpt: Whether blocks recompute their activations on XLA devices.
    """

    fsdp_version: int | None = None
    sharding_strategy: str | None = None
    reshard_after_forward: bool | int | str | None = None
    backward_prefetch: str | None = None
    auto_wrap_policy: str | None = None
    cpu_offload: bool | None = None
    state_dict_type: str | None = None
    use_orig_params: bool | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: tuple[str, ...] | None = None
    min_num_params: int | None = None
    xla: bool | None = None
    xla_fsdp_v2: bool | None = None
    xla_fsdp_grad_ckpt: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedSettings:
    """How DeepSpeed trains; the fields of `DeepSpeedPlugin`.

    Accumulation is in `Settings.training`, as for every engine.

    Args:
        hf_ds_config: The path of a DeepSpeed configuration in JSON.
        zero_stage: ZeRO stage, 0 to 3.
        gradient_clipping: The norm that gradients are clipped to.
        offload_optimizer_device: `"none"`, `"cpu"` or `"nvme"`.
        offload_param_device: `"none"`, `"cpu"` or `"nvme"`.
        offload_optimizer_nvme_path: The folder for `"nvme"`.
        offload_param_nvme_path: The folder for `"nvme"`.
        zero3_init_flag: Whether models are sharded while they are constructed (`deepspeed.zero.Init`).
        zero3_save_16bit_model: Whether sharded weights are gathered to save a full state dict.
        transformer_moe_cls_names: Classes of mixture-of-experts layers, with commas between.
    """

    hf_ds_config: str | None = None
    zero_stage: int | None = None
    gradient_clipping: float | None = None
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None
    transformer_moe_cls_names: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelismSettings:
    """The sizes of the axes of parallelism; the fields of `ParallelismConfig` and of its handlers.

    Args:
        dp_replicate_size: Number of replicas of the model (replicated data-parallel size).
        dp_shard_size: Number of ranks that shard the model (sharded data-parallel size).
        tp_size: Tensor-parallel size.
        cp_size: Context-parallel size.
        cp_backend: Implementation of context parallelism: `"torch"`.
        cp_comm_strategy: `"allgather"` or `"alltoall"`.
        sp_size: Sequence-parallel size.
        sp_backend: Implementation of sequence parallelism: `"deepspeed"`.
        sp_seq_length: Sequence length in tokens.
        sp_seq_length_is_variable: Whether sequence lengths vary between batches.
        sp_attn_implementation: `"sdpa"`, `"flash_attention_2"` or `"flash_attention_3"`.
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: str | None = None
    cp_comm_strategy: str | None = None
    sp_size: int | None = None
    sp_backend: str | None = None
    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronSettings:
    """How Megatron-LM trains; the fields of `MegatronLMPlugin` that can be set from outside.

    Args:
        tp_degree: Tensor-parallel size.
        pp_degree: Pipeline-parallel size.
        use_custom_fsdp: Whether Megatron's own FSDP shards parameters.
        overlap_cpu_optimizer_d2h_h2d: Whether an offloaded optimizer copies while it computes.
        no_load_optim: Whether checkpoints are read without the optimizer.
        eod_mask_loss: Whether ends of documents do not count in the loss.
        no_save_optim: Whether checkpoints are written without the optimizer.
        optimizer_cpu_offload: Whether the optimizer works on the CPU.
        use_precision_aware_optimizer: Whether the optimizer keeps its state in fewer bits.
        decoder_last_pipeline_num_layers: How many layers the last stage has.
        recompute_granularity: `"full"` or `"selective"`.
        recompute_method: `"uniform"` or `"block"`.
        recompute_num_layers: Layers per recompute unit.
        attention_backend: What computes attention.
        expert_model_parallel_size: Expert-parallel size.
        context_parallel_size: Context-parallel size.
        attention_dropout: Dropout probability of attention weights.
        hidden_dropout: Dropout probability of hidden states.
        attention_softmax_in_fp32: Whether the softmax of attention computes in float32.
        expert_tensor_parallel_size: Tensor-parallel size of experts.
        calculate_per_token_loss: Whether the loss is averaged over tokens.
        use_rotary_position_embeddings: Whether positions are rotary.
        num_micro_batches: Micro-batches per step.
        gradient_clipping: The norm that gradients are clipped to; 0 for none.
        sequence_parallelism: Whether activations are sharded along the sequence dim (sequence parallelism).
        recompute_activations: Whether selected activations are recomputed in the backward pass.
        use_distributed_optimizer: Whether optimizer state is sharded across data-parallel ranks.
    """

    tp_degree: int | None = None
    pp_degree: int | None = None
    use_custom_fsdp: bool | None = None
    overlap_cpu_optimizer_d2h_h2d: bool | None = None
    no_load_optim: bool | None = None
    eod_mask_loss: bool | None = None
    no_save_optim: bool | None = None
    optimizer_cpu_offload: bool | None = None
    use_precision_aware_optimizer: bool | None = None
    decoder_last_pipeline_num_layers: int | None = None
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    attention_backend: str | None = None
    expert_model_parallel_size: int | None = None
    context_parallel_size: int | None = None
    attention_dropout: float | None = None
    hidden_dropout: float | None = None
    attention_softmax_in_fp32: bool | None = None
    expert_tensor_parallel_size: int | None = None
    calculate_per_token_loss: bool | None = None
    use_rotary_position_embeddings: bool | None = None
    num_micro_batches: int | None = None
    gradient_clipping: float | None = None
    sequence_parallelism: bool | None = None
    recompute_activations: bool | None = None
    use_distributed_optimizer: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Settings:
    """How matrices are multiplied in eight bits; the fields of the FP8 recipes.

    Args:
        backend: `"AO"`, `"TE"` or `"MSAMP"`.
        use_autocast_during_eval: TE: whether evaluation uses FP8 too.
        margin: TE: margin of the scaling factors.
        interval: TE: steps between two computations of them.
        fp8_format: TE: `"HYBRID"`, `"E4M3"` or `"E5M2"`.
        amax_history_len: TE: steps that are looked back on for the scaling factors.
        amax_compute_algo: TE: `"max"` or `"most_recent"`.
        override_linear_precision: TE: whether fprop, dgrad and wgrad compute in higher precision.
        use_mxfp8_block_scaling: TE: whether blocks of 32 values have a scale each.
        opt_level: MS-AMP: `"O1"` or `"O2"`.
        enable_fsdp_float8_all_gather: AO: whether FSDP gathers parameters in eight bits.
        pad_inner_dim: AO: whether the inner dim of matrices is padded.
    """

    backend: str | None = None
    use_autocast_during_eval: bool | None = None
    margin: int | None = None
    interval: int | None = None
    fp8_format: str | None = None
    amax_history_len: int | None = None
    amax_compute_algo: str | None = None
    override_linear_precision: tuple[bool, bool, bool] | None = None
    use_mxfp8_block_scaling: bool | None = None
    opt_level: str | None = None
    enable_fsdp_float8_all_gather: bool | None = None
    pad_inner_dim: bool | None = None
