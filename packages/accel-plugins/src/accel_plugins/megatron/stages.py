"""The modules of this rank's pipeline stages, made by megatron-core."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_plugins.megatron.attention import CausalAttention
from accel_plugins.megatron.families import FAMILIES
from accel_plugins.megatron.library import core, uses_transformer_engine
from accel_state.errors import UnsupportedError

if TYPE_CHECKING:
    from accel_plugins.megatron.groups import Groups
    from accel_plugins.megatron.model_family import ModelFamily
    from accel_plugins.megatron.plugin import MegatronLMPlugin


class TorchNorm(nn.Module):
    """PyTorch's layer norm or RMS norm, as megatron-core makes norms.

    megatron-core's own is refused under sequence parallelism: gradients of its weights must be summed over
    the tensor-parallel ranks, which megatron-core does for parameters with the attribute `sequence_parallel`.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        """Return the norm that the configuration names."""
        kind = {"LayerNorm": nn.LayerNorm, "RMSNorm": nn.RMSNorm}[config.normalization]
        norm = kind(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        for parameter in norm.parameters():
            vars(parameter)["sequence_parallel"] = config.sequence_parallel
        return norm


def layer_specs(config: Any, vp_stage: int | None) -> Any:
    """Return megatron-core's specification of a stage's layers.

    TransformerEngine's layers are used on a GPU where it is installed, unless `attention_backend` is
    `"local"`; else megatron-core's own, with PyTorch's attention unless `"unfused"` asks for its own.
    """
    specs = core("models.gpt.gpt_layer_specs")
    block = core("transformer.transformer_block")
    number = block.get_num_layers_to_build(config, vp_stage=vp_stage)
    if uses_transformer_engine(config.attention_backend.name):
        layer, norm = specs.get_gpt_layer_with_transformer_engine_spec(), block.LayerNormImpl
    else:
        layer, norm = specs.get_gpt_layer_local_spec(normalization=config.normalization), TorchNorm
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
        if uses_torch_attention(config):
            layer.submodules.self_attention.submodules.core_attention = CausalAttention
    return block.TransformerBlockSubmodules(layer_specs=[layer] * number, layer_norm=norm)


def uses_torch_attention(config: Any) -> bool:
    """Return whether PyTorch computes the attention of megatron-core's own layers.

    It does not where the scores are other than PyTorch's, which context parallelism therefore refuses.
    """
    is_plain = config.window_size is None and config.softmax_type == "vanilla"
    if config.context_parallel_size > 1 and not is_plain:
        raise UnsupportedError(
            f"other_megatron_args: window_size={config.window_size!r} and softmax_type="
            f"{config.softmax_type!r} beside context_parallel_size={config.context_parallel_size} need "
            "TransformerEngine's attention: install transformer-engine, or leave one of them out."
        )
    is_wanted = config.attention_backend.name != "unfused" and config.attention_softmax_in_fp32
    return config.context_parallel_size > 1 or (is_plain and is_wanted)


def build_gpt(
    config: Any,
    arguments: dict[str, Any],
    vocabulary: int,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None,
) -> nn.Module:
    """Make one stage of a decoder."""
    padded = padded_vocabulary(vocabulary, config)
    made = core("models.gpt.gpt_model").GPTModel(
        config=config,
        transformer_layer_spec=layer_specs(config, vp_stage),
        vocab_size=padded,
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
        **arguments,
    )
    if post_process and padded > vocabulary:
        mask_padding(made.output_layer, vocabulary)
    return made


def padded_vocabulary(vocabulary: int, config: Any) -> int:
    """Return the rows of an embedding that all tensor-parallel ranks split evenly."""
    return vocabulary + -vocabulary % config.tensor_model_parallel_size


def mask_padding(layer: nn.Module, vocabulary: int) -> None:
    """Give tokens that only pad the vocabulary no probability."""
    layer.register_forward_hook(partial(_masked, vocabulary))


def _masked(vocabulary: int, layer: Any, inputs: Any, output: tuple[torch.Tensor, Any]) -> Any:
    del inputs
    logits, bias = output
    own = logits.shape[-1]
    is_gathered = own == layer.output_size
    first = 0 if is_gathered else own * core("parallel_state").get_tensor_model_parallel_rank()
    is_padding = torch.arange(first, first + own, device=logits.device) >= vocabulary
    return logits.masked_fill(is_padding, torch.finfo(logits.dtype).min), bias


def virtual_stages(plugin: MegatronLMPlugin, layers: int) -> int | None:
    """Return how many virtual stages a rank has; `None` if it has one stage."""
    each = plugin.num_layers_per_virtual_pipeline_stage
    return None if each is None else layers // (plugin.pp_degree or 1) // each


def build_stages(
    family: ModelFamily | None,
    plugin: MegatronLMPlugin,
    config: Any,
    model: Any,
    groups: Groups,
) -> list[nn.Module]:
    """Make the modules of this rank: one, or one for each virtual stage."""
    number = config.virtual_pipeline_model_parallel_size
    stages = [None] if number is None else [*range(number)]
    provide: Any = plugin.custom_model_provider_function
    made: list[nn.Module] = []
    for stage in stages:
        first = groups.pipeline_rank == 0 and stage in {None, 0}
        last = groups.is_last_stage and stage in {None, len(stages) - 1}
        if family is None:
            module = provide(first, last, True, True)  # noqa: FBT003 - as documented
        else:
            build = FAMILIES.resolve(family.name, family.build)
            arguments = dict(family.model_arguments(model))
            module = build(config, arguments, model.config.vocab_size, first, last, stage)
        module = module.to(torch.cuda.current_device())  # megatron-core makes some embeddings on the CPU
        if plugin.custom_prepare_model_function is not None:
            module = plugin.custom_prepare_model_function(module)
        made.append(module)
    return made
