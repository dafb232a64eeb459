"""Build pipeline stages of Megatron's models, with PyTorch's attention and norms.

Every context-parallel rank computes two chunks of each sequence, one from either end.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from accel_ops.modules import replaced_attributes
from accel_plugins.megatron.families import FAMILIES, ModelFamily
from accel_plugins.megatron.library import core, uses_transformer_engine
from accel_state.errors import UnsupportedError

if TYPE_CHECKING:
    from accel_plugins.megatron.plugin import MegatronLMPlugin
    from accel_plugins.megatron.strategy import Groups


def virtual_stages(plugin: MegatronLMPlugin, layers: int) -> int | None:
    """Return the number of virtual stages of a rank; `None` if it has one stage."""
    each = plugin.num_layers_per_virtual_pipeline_stage
    return None if each is None else layers // (plugin.pp_degree or 1) // each


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
        last = groups.is_last_stage and stage in {None, len(stages) - 1}
        if family is None:
            module = provide(first, last, True, True)  # noqa: FBT003 - as documented
        else:
            build = FAMILIES.resolve(family.name, family.build)
            arguments = dict(family.model_arguments(model))
            module = build(config, arguments, model.config.vocab_size, first, last, stage)
        module = module.to(torch.cuda.current_device())  # Some embeddings are created on the CPU.
        if plugin.custom_prepare_model_function is not None:
            module = plugin.custom_prepare_model_function(module)
        made.append(module)
    return made


def build_gpt(
    config: Any,
    arguments: dict[str, Any],
    vocabulary: int,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None,
) -> nn.Module:
    """Build one stage of a decoder."""
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


def layer_specs(config: Any, vp_stage: int | None) -> Any:
    """Return megatron-core's specification of a stage's layers.

    TransformerEngine's layers are used on a GPU where it is installed, unless `attention_backend` is
    `"local"`; else megatron-core's own, with PyTorch's attention unless `"unfused"` requests its own, or
    scores are not computed as in PyTorch, which context parallelism refuses.
    """
    specs = core("models.gpt.gpt_layer_specs")
    block = core("transformer.transformer_block")
    number = block.get_num_layers_to_build(config, vp_stage=vp_stage)
    if uses_transformer_engine(config.attention_backend.name):
        layer, norm = specs.get_gpt_layer_with_transformer_engine_spec(), block.LayerNormImpl
    else:
        layer, norm = specs.get_gpt_layer_local_spec(normalization=config.normalization), TorchNorm
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
        is_sharded = config.context_parallel_size > 1
        is_plain = config.window_size is None and config.softmax_type == "vanilla"
        if is_sharded and not is_plain:
            raise UnsupportedError(
                f"other_megatron_args: window_size={config.window_size!r} and softmax_type="
                f"{config.softmax_type!r} beside context_parallel_size={config.context_parallel_size} need "
                "TransformerEngine's attention: install transformer-engine, or remove one of them."
            )
        is_wanted = config.attention_backend.name != "unfused" and config.attention_softmax_in_fp32
        if is_sharded or (is_plain and is_wanted):
            layer.submodules.self_attention.submodules.core_attention = CausalAttention
    return block.TransformerBlockSubmodules(layer_specs=[layer] * number, layer_norm=norm)


def padded_vocabulary(vocabulary: int, config: Any) -> int:
    """Return the rows of an embedding that all tensor-parallel ranks split evenly."""
    return vocabulary + -vocabulary % config.tensor_model_parallel_size


def mask_padding(layer: nn.Module, vocabulary: int) -> None:
    """Mask the logits of tokens that only pad the vocabulary."""

    def mask(module: Any, inputs: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        del inputs
        logits, bias = output
        own = logits.shape[-1]
        is_gathered = own == module.output_size
        first = 0 if is_gathered else own * core("parallel_state").get_tensor_model_parallel_rank()
        is_padding = torch.arange(first, first + own, device=logits.device) >= vocabulary
        return logits.masked_fill(is_padding, torch.finfo(logits.dtype).min), bias

    layer.register_forward_hook(mask)


def build_bert(
    config: Any,
    arguments: dict[str, Any],
    vocabulary: int,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None,
) -> nn.Module:
    """Build one stage of a BERT."""
    # 1. Specify layers whose norms follow the residual connections.
    spec = copy.deepcopy(core("models.bert.bert_layer_specs").bert_layer_local_spec)
    norm = core("transformer.spec_utils").ModuleSpec(module=NormAfter, params={"config": config})
    identity = core("transformer.identity_op").IdentityOp
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = identity
    spec.submodules.self_attn_bda = spec.submodules.mlp_bda = norm
    # 2. Build the module.
    labels, dropout = arguments.pop("num_labels"), arguments.pop("classifier_dropout")
    padded = padded_vocabulary(vocabulary, config)
    # The head and the end of the encoder get norms that sequence parallelism shards; no argument sets them.
    head, block = core("models.bert.bert_lm_head"), core("transformer.transformer_block")
    with (
        replaced_attributes(head, {"LNImpl": TorchNorm}),
        replaced_attributes(block, {"LayerNormImpl": TorchNorm}),
    ):
        made: Any = core("models.bert.bert_model").BertModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=padded,
            pre_process=pre_process,
            post_process=post_process,
            vp_stage=vp_stage,
            **arguments,
        )
    made.encoder.final_layernorm = None
    # 3. Norm the sum of the embeddings, before the dropout; build the head of a classifier.
    if pre_process:
        embedding = made.embedding
        embeddings_dropout, embedding.embedding_dropout = embedding.embedding_dropout, nn.Identity()
        embedding.norm = TorchNorm(config, config.hidden_size, config.layernorm_epsilon)

        def normed(module: Any, inputs: Any, output: Tensor) -> Tensor:
            del inputs
            tracker = core("tensor_parallel").get_cuda_rng_tracker()
            with tracker.fork() if config.sequence_parallel else nullcontext():
                return functional.dropout(module.norm(output), embeddings_dropout.p, module.training)

        embedding.register_forward_hook(normed)
    if post_process and labels is not None:
        made.lm_head, made.output_layer = _NoHead(), _NoOutputLayer()
        made.binary_head = nn.Sequential(nn.Dropout(dropout), nn.Linear(config.hidden_size, labels))
    elif post_process and padded > vocabulary:
        mask_padding(made.output_layer, vocabulary)
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


class _NoHead(nn.Module):
    """Replaces the head for masked tokens, which a classifier does not have; called by keyword."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states


class _NoOutputLayer(nn.Module):
    """Replaces the output layer, which a classifier does not have."""

    def forward(self, hidden_states: Tensor, weight: Any = None) -> tuple[Tensor, None]:
        del weight
        return hidden_states, None


def build_t5(
    config: Any,
    arguments: dict[str, Any],
    vocabulary: int,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None,
) -> nn.Module:
    """Build a T5, which has one stage."""
    del vp_stage
    granularity, method = config.recompute_granularity, config.recompute_method
    number = config.recompute_num_layers
    # megatron-core's own recompute loses the gradient of relative positions.
    config.recompute_granularity = config.recompute_method = config.recompute_num_layers = None
    specs = core("models.T5.t5_spec")
    encoder = copy.deepcopy(config)
    encoder.num_layers = arguments.pop("encoder_layers")
    factor = arguments.pop("output_factor")
    padded = padded_vocabulary(vocabulary, config)
    made: Any = core("models.T5.t5_model").T5Model(
        config=config,
        encoder_config=encoder,
        transformer_encoder_layer_spec=_t5_block_spec(
            specs.encoder_model_with_local_spec(), encoder.num_layers
        ),
        transformer_decoder_layer_spec=_t5_block_spec(
            specs.decoder_model_with_local_spec(), config.num_layers
        ),
        vocab_size=padded,
        pre_process=pre_process,
        post_process=post_process,
        **arguments,
    )
    made.output_layer.bias = None  # megatron-core adds it to tied weights.
    made.lm_head.register_forward_pre_hook(lambda _, inputs: (inputs[0] * factor, *inputs[1:]))
    if padded > vocabulary:
        mask_padding(made.output_layer, vocabulary)
    if granularity == "selective":
        recompute(module for module in made.modules() if isinstance(module, BiasedAttention))
    elif granularity == "full":
        for side in (made.encoder, made.decoder):
            recompute(side.layers[: number if method == "block" else None])
    return made


def _t5_block_spec(layer: Any, layers: int) -> Any:
    """Return a block of layers with PyTorch's norms and attention."""
    layer = copy.deepcopy(layer)
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = TorchNorm
    parts.self_attention.submodules.core_attention = BiasedAttention
    identity = core("transformer.identity_op").IdentityOp
    if parts.cross_attention is not identity:
        parts.pre_cross_attn_layernorm = TorchNorm
        parts.cross_attention.submodules.core_attention = BiasedAttention
    block = core("transformer.transformer_block").TransformerBlockSubmodules
    return block(layer_specs=[layer] * layers, layer_norm=TorchNorm)


def recompute(modules: Iterable[nn.Module]) -> None:
    """Make modules recompute their activations in the backward pass.

    They draw random numbers from the states of tensor parallelism or the default ones.
    """
    tracker = core("tensor_parallel").get_cuda_rng_tracker()

    @contextmanager
    def with_states(states: Any) -> Generator[None]:
        now = tracker.get_states()
        tracker.set_states(states)
        try:
            yield
        finally:
            tracker.set_states(now)

    def recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        before = tracker.get_states()
        return checkpoint(
            forward,
            *args,
            use_reentrant=False,
            context_fn=lambda: (nullcontext(), with_states(before)),
            **kwargs,
        )

    for module in modules:
        module.forward = partial(recomputed, module.forward)


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


class _TorchAttention(nn.Module):
    """Base of modules that replace megatron-core's attention; other arguments are not used."""

    def __init__(self, config: Any, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.config = config
        self.scale = softmax_scale

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        """Compute attention with a bias of the scores; without one it is causal."""
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
            )
        return context.permute(2, 0, 1, 3).flatten(2)


class BiasedAttention(_TorchAttention):
    """Attention that adds a bias to the scores, as for relative positions."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor,
        attention_bias: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Return the context of shape `[queries, batch, heads * features]`.

        Queries have the shape `[queries, batch, heads, features]`, keys and values likewise. The mask is true
        where attention is masked; it and the bias are broadcast to `[batch, heads, queries, keys]`.
        """
        bias = query.new_zeros(()) if attention_bias is None else attention_bias.to(query.dtype)
        return self._attend(query, key, value, _fill_masked(bias, attention_mask))


class CausalAttention(_TorchAttention):
    """Causal attention of decoders, with memory linear in the sequence length.

    Context-parallel ranks all-gather keys and values.
    """

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
    ) -> Tensor:
        """Return the context of shape `[queries, batch, heads * features]`.

        Inputs are this rank's chunks, of shape `[queries, batch, heads, features]`; keys and values may have
        fewer heads. The mask, of shape `[batch, 1, queries, sequence]`, is true where attention is masked;
        `None` is the causal mask. In generation queries are the last of the sequence.
        """
        keys, values = gather_chunks(key), gather_chunks(value)
        is_square = len(query) == len(keys)
        if attention_mask is None and not is_square:
            positions = torch.arange(len(keys), device=query.device)
            own = positions[-len(query) :]
            if self.config.context_parallel_size > 1:
                group = core("parallel_state").get_context_parallel_group()
                chunks = positions.chunk(2 * group.size())
                own = torch.cat([chunks[group.rank()], chunks[-1 - group.rank()]])
            attention_mask = positions > own[:, None]
        each = query.shape[2] // keys.shape[2]
        keys, values = (tensor.repeat_interleave(each, dim=2) for tensor in (keys, values))
        mask = None if attention_mask is None else _fill_masked(query.new_zeros(()), attention_mask)
        return self._attend(query, keys, values, mask)


def _fill_masked(bias: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, torch.finfo(bias.dtype).min, bias)


_NAMES = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


def own_chunks(batch: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return this rank's chunks of a batch, cut by megatron-core."""
    group = core("parallel_state").get_context_parallel_group()
    parts = core("utils").get_batch_on_this_cp_rank(dict(zip(_NAMES, batch, strict=True)), group)
    return tuple(parts.values())


def gather_chunks(tensor: Tensor) -> Tensor:
    """All-gather chunks to full sequences, `[sequence, ...]`; gradients are summed over ranks."""
    group = core("parallel_state").get_context_parallel_group()
    if group.size() == 1:
        return tensor
    gather = core("tensor_parallel.mappings").gather_from_sequence_parallel_region
    chunks = gather(tensor.contiguous(), group=group).chunk(2 * group.size())
    return torch.cat([*chunks[::2], *reversed(chunks[1::2])])  # Each rank has one from either end.


def sum_over_context(value: Tensor) -> Tensor:
    """All-reduce the sum of a number over context-parallel ranks, without a gradient."""
    group = core("parallel_state").get_context_parallel_group()
    total = value.detach().clone()
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    return total
