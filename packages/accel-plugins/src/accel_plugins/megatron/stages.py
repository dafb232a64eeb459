"""Build pipeline stages of Megatron's models, with PyTorch's attention and norms.

Every context-parallel rank computes two chunks of each sequence, one from either end.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from accel_ops.modules import replaced_attributes
from accel_plugins.megatron.families import FAMILIES, ModelFamily
from accel_plugins.megatron.library import core, uses_transformer_engine
from accel_state.errors import UnsupportedError

if TYPE_CHECKING:
    from accel_plugins.megatron.plugin import MegatronLMPlugin
    from accel_plugins.megatron.strategy import Groups


def build_stages(
    family: ModelFamily | None, plugin: MegatronLMPlugin, config: Any, model: Any, groups: Groups
) -> list[nn.Module]:
    """Build the modules of this rank: one, or one for each virtual stage."""
    number = config.virtual_pipeline_model_parallel_size
    stages = [None] if number is None else [*range(number)]
    provide: Any = plugin.custom_model_provider_function
    made: list[nn.Module] = []
    for stage in stages:
        first = groups.pipeline_rank == 0 and stage in {None, 0}
        last = groups.pipeline_rank == groups.pipeline - 1 and stage in {None, len(stages) - 1}
        if family is None:
            module = provide(first, last, True, True)  # noqa: FBT003 - as documented
        else:
            build, tokens = FAMILIES.resolve(family.name, family.build), model.config.vocab_size
            padded = tokens + -tokens % config.tensor_model_parallel_size
            arguments = dict(family.model_arguments(model))
            module = build(config, arguments, padded, pre_process=first, post_process=last, vp_stage=stage)
            head: Any = getattr(module, "output_layer", None)
            if hasattr(head, "output_size") and padded > tokens:
                head.register_forward_hook(partial(_mask_padding, tokens))
        module = module.to(torch.cuda.current_device())  # Some embeddings are created on the CPU.
        if plugin.custom_prepare_model_function is not None:
            module = plugin.custom_prepare_model_function(module)
        made.append(module)
    return made


def _mask_padding(tokens: int, layer: Any, inputs: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    """Mask the logits of tokens that only pad the vocabulary to split evenly."""
    del inputs
    logits, bias = output
    own = logits.shape[-1]
    rank = core("parallel_state").get_tensor_model_parallel_rank()
    first = 0 if own == layer.output_size else own * rank
    is_padding = torch.arange(first, first + own, device=logits.device) >= tokens
    return logits.masked_fill(is_padding, torch.finfo(logits.dtype).min), bias


def build_gpt(config: Any, arguments: dict[str, Any], vocabulary: int, **stage: Any) -> nn.Module:
    """Build one stage of a decoder.

    TransformerEngine's layers are used on a GPU where it is installed, unless `attention_backend` is
    `"local"`; else megatron-core's own, with PyTorch's attention unless `"unfused"` requests its own, or
    scores are not computed as in PyTorch, which context parallelism refuses.
    """
    specs, block = core("models.gpt.gpt_layer_specs"), core("transformer.transformer_block")
    number = block.get_num_layers_to_build(config, vp_stage=stage["vp_stage"])
    if uses_transformer_engine(config.attention_backend.name):
        layer = specs.get_gpt_layer_with_transformer_engine_spec()
        spec = block.TransformerBlockSubmodules(layer_specs=[layer] * number, layer_norm=block.LayerNormImpl)
    else:
        is_sharded = config.context_parallel_size > 1
        is_plain = config.window_size is None and config.softmax_type == "vanilla"
        if is_sharded and not is_plain:
            raise UnsupportedError(
                f"other_megatron_args: window_size={config.window_size!r} and softmax_type="
                f"{config.softmax_type!r} beside context_parallel_size={config.context_parallel_size} need "
                "TransformerEngine's attention: install transformer-engine, or remove one of them."
            )
        is_wanted = config.attention_backend.name != "unfused" and config.attention_softmax_in_fp32
        layer = specs.get_gpt_layer_local_spec(normalization=config.normalization)
        spec = _block_spec(layer, number, has_attention=is_sharded or (is_plain and is_wanted))
    return core("models.gpt.gpt_model").GPTModel(
        config=config, transformer_layer_spec=spec, vocab_size=vocabulary, **stage, **arguments
    )


def _block_spec(layer: Any, number: int, *, has_attention: bool = True) -> Any:
    """Return a block of layers with PyTorch's norms, and its attention."""
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = TorchNorm
    attentions = [parts.self_attention]
    if parts.cross_attention is not core("transformer.identity_op").IdentityOp:
        parts.pre_cross_attn_layernorm = TorchNorm
        attentions.append(parts.cross_attention)
    for attention in attentions if has_attention else ():
        attention.submodules.core_attention = TorchAttention
    block = core("transformer.transformer_block").TransformerBlockSubmodules
    return block(layer_specs=[layer] * number, layer_norm=TorchNorm)


def build_bert(config: Any, arguments: dict[str, Any], vocabulary: int, **stage: Any) -> nn.Module:
    """Build one stage of a BERT."""
    # 1. Specify layers whose norms follow the residual connections.
    spec = copy.deepcopy(core("models.bert.bert_layer_specs").bert_layer_local_spec)
    norm = core("transformer.spec_utils").ModuleSpec(module=NormAfter, params={"config": config})
    identity = core("transformer.identity_op").IdentityOp
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = identity
    spec.submodules.self_attn_bda = spec.submodules.mlp_bda = norm
    # 2. Build the module. The head and the end of the encoder get norms that sequence parallelism shards; no
    # argument sets them.
    labels, dropout = arguments.pop("num_labels"), arguments.pop("classifier_dropout")
    head, block = core("models.bert.bert_lm_head"), core("transformer.transformer_block")
    with (
        replaced_attributes(head, {"LNImpl": TorchNorm}),
        replaced_attributes(block, {"LayerNormImpl": TorchNorm}),
    ):
        made: Any = core("models.bert.bert_model").BertModel(
            config=config, transformer_layer_spec=spec, vocab_size=vocabulary, **stage, **arguments
        )
    made.encoder.final_layernorm = None
    # 3. Norm the sum of the embeddings, before the dropout; build the head of a classifier.
    if stage["pre_process"]:
        embedding = made.embedding
        embeddings_dropout, embedding.embedding_dropout = embedding.embedding_dropout, nn.Identity()
        embedding.norm = TorchNorm(config, config.hidden_size, config.layernorm_epsilon)

        def normed(module: Any, inputs: Any, output: Tensor) -> Tensor:
            del inputs
            tracker = core("tensor_parallel").get_cuda_rng_tracker()
            with tracker.fork() if config.sequence_parallel else nullcontext():
                return functional.dropout(module.norm(output), embeddings_dropout.p, module.training)

        embedding.register_forward_hook(normed)
    if stage["post_process"] and labels is not None:
        made.lm_head, made.output_layer = nn.Module(), nn.Module()  # it has no head for masked tokens
        made.lm_head.forward = lambda hidden_states: hidden_states
        made.output_layer.forward = lambda hidden_states, **_: (hidden_states, None)
        made.binary_head = nn.Sequential(nn.Dropout(dropout), nn.Linear(config.hidden_size, labels))
    return made


class NormAfter(nn.Module):
    """The end of a residual connection: bias, dropout, sum and norm.

    It replaces megatron-core's bias-dropout-add, which leaves the norm to the next layer.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.norm = TorchNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """Return the function that megatron-core calls."""
        del fused

        def add(output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            output, bias = output_with_bias
            output = output if bias is None else output + bias
            return self.norm(residual + functional.dropout(output, dropout, training))

        return add


def build_t5(config: Any, arguments: dict[str, Any], vocabulary: int, **stage: Any) -> nn.Module:
    """Build a T5, which has one stage."""
    del stage["vp_stage"]
    encoder, specs = copy.deepcopy(config), core("models.T5.t5_spec")
    encoder.num_layers, factor = arguments.pop("encoder_layers"), arguments.pop("output_factor")
    of_encoder, of_decoder = specs.encoder_model_with_local_spec(), specs.decoder_model_with_local_spec()
    made: Any = core("models.T5.t5_model").T5Model(
        config=config,
        encoder_config=encoder,
        transformer_encoder_layer_spec=_block_spec(copy.deepcopy(of_encoder), encoder.num_layers),
        transformer_decoder_layer_spec=_block_spec(copy.deepcopy(of_decoder), config.num_layers),
        vocab_size=vocabulary,
        **stage,
        **arguments,
    )
    made.output_layer.bias = None  # megatron-core adds it to tied weights.
    made.lm_head.register_forward_pre_hook(lambda _, inputs: (inputs[0] * factor, *inputs[1:]))
    return made


class TorchNorm(nn.Module):
    """PyTorch's layer norm or RMS norm, with the constructor of megatron-core's norms.

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


class TorchAttention(nn.Module):
    """PyTorch's attention in place of megatron-core's, with memory linear in the sequence length.

    Context-parallel ranks all-gather keys and values.
    """

    def __init__(self, config: Any, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.config, self.scale = config, softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attention_bias: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Return the context of shape `[queries, batch, heads * features]`.

        Inputs are this rank's chunks, of shape `[queries, batch, heads, features]`; keys and values may have
        fewer heads. The mask, which is true where attention is masked, and the bias of the scores are
        broadcast to `[batch, heads, queries, keys]`. `None` is the causal mask.
        """
        key, value = gather_chunks(key), gather_chunks(value)
        if attention_mask is None and len(query) < len(key):
            positions, group = torch.arange(len(key), device=query.device), _context_group()
            chunks = positions.chunk(2 * group.size())
            own = torch.cat([chunks[group.rank()], chunks[-1 - group.rank()]])
            attention_mask = positions > own[:, None]
        bias = None
        if attention_mask is not None:
            bias = query.new_zeros(()) if attention_bias is None else attention_bias.to(query.dtype)
            bias = torch.where(attention_mask, torch.finfo(bias.dtype).min, bias)
        queries, keys, values = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        tracker = core("tensor_parallel").get_cuda_rng_tracker()
        with nullcontext() if self.config.sequence_parallel else tracker.fork():
            context = functional.scaled_dot_product_attention(
                queries,
                keys,
                values,
                bias,
                self.config.attention_dropout if self.training else 0.0,
                is_causal=bias is None,
                scale=self.scale,
                enable_gqa=keys.shape[1] < queries.shape[1],
            )
        return context.permute(2, 0, 1, 3).flatten(2)


_NAMES = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


def _context_group() -> Any:
    return core("parallel_state").get_context_parallel_group()


def own_chunks(batch: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return this rank's chunks of a batch, cut by megatron-core."""
    named = dict(zip(_NAMES, batch, strict=True))
    return tuple(core("utils").get_batch_on_this_cp_rank(named, _context_group()).values())


def gather_chunks(tensor: Tensor) -> Tensor:
    """All-gather chunks to full sequences, `[sequence, ...]`; gradients are summed over ranks."""
    group = _context_group()
    if group.size() == 1:
        return tensor
    gather = core("tensor_parallel.mappings").gather_from_sequence_parallel_region
    chunks = gather(tensor.contiguous(), group=group).chunk(2 * group.size())
    return torch.cat([*chunks[::2], *reversed(chunks[1::2])])  # Each rank has one from either end.


def sum_over_context(value: Tensor) -> Tensor:
    """All-reduce the sum of a number over context-parallel ranks, without a gradient."""
    total = value.detach().clone()
    if _context_group().size() > 1:
        dist.all_reduce(total, group=_context_group())
    return total
