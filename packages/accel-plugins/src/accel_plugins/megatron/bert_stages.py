"""The modules of a BERT: megatron-core's, with norms where BERT has them."""

from __future__ import annotations

import copy
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn import functional

from accel_plugins.megatron.library import core
from accel_plugins.megatron.stages import TorchNorm, mask_padding, padded_vocabulary
from accel_state.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from torch import Tensor


class NormAfter(nn.Module):
    """The end of a residual connection: bias, dropout, sum and norm.

    It takes the place of megatron-core's bias-dropout-add, which leaves the norm to the next layer.
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
    """Takes the place of the head for masked tokens, which a classifier does not have; called by keyword."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states


class _NoOutputLayer(nn.Module):
    """Takes the place of the output layer, which a classifier does not have."""

    def forward(self, hidden_states: Tensor, weight: Any = None) -> tuple[Tensor, None]:
        del weight
        return hidden_states, None


def layer_spec(config: Any) -> Any:
    """Return megatron-core's specification of BERT's layers."""
    spec = copy.deepcopy(core("models.bert.bert_layer_specs").bert_layer_local_spec)
    identity = core("transformer.identity_op").IdentityOp
    norm = core("transformer.spec_utils").ModuleSpec(module=NormAfter, params={"config": config})
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = identity
    spec.submodules.self_attn_bda = spec.submodules.mlp_bda = norm
    return spec


def build_bert(
    config: Any,
    arguments: dict[str, Any],
    vocabulary: int,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None,
) -> nn.Module:
    """Make one stage of a BERT."""
    backends = core("transformer.enums").AttnBackend
    if config.attention_backend not in {backends.auto, backends.local}:
        raise UnsupportedError(
            f"attention_backend={config.attention_backend.name!r}: BERT is trained with megatron-core's own "
            "attention, as its norms follow the residual connections; leave it out."
        )
    labels, dropout = arguments.pop("num_labels"), arguments.pop("classifier_dropout")
    padded = padded_vocabulary(vocabulary, config)
    with _sharded_norms():
        made: Any = core("models.bert.bert_model").BertModel(
            config=config,
            transformer_layer_spec=layer_spec(config),
            vocab_size=padded,
            pre_process=pre_process,
            post_process=post_process,
            vp_stage=vp_stage,
            **arguments,
        )
    made.encoder.final_layernorm = None
    if pre_process:
        _norm_embeddings(made.embedding, config)
    if post_process and labels is not None:
        made.lm_head, made.output_layer = _NoHead(), _NoOutputLayer()
        made.binary_head = nn.Sequential(nn.Dropout(dropout), nn.Linear(config.hidden_size, labels))
    elif post_process and padded > vocabulary:
        mask_padding(made.output_layer, vocabulary)
    return made


@contextmanager
def _sharded_norms() -> Generator[None]:
    """Give the head and the end of the encoder norms that sequence parallelism shards: no argument does."""
    head, block = core("models.bert.bert_lm_head"), core("transformer.transformer_block")
    before = head.LNImpl, block.LayerNormImpl
    head.LNImpl = block.LayerNormImpl = TorchNorm
    try:
        yield
    finally:
        head.LNImpl, block.LayerNormImpl = before


def _norm_embeddings(embedding: Any, config: Any) -> None:
    """Norm the sum of the embeddings, before the dropout."""
    dropout = embedding.embedding_dropout
    embedding.norm = TorchNorm(config, config.hidden_size, config.layernorm_epsilon)
    embedding.embedding_dropout = nn.Identity()

    def normed(module: Any, inputs: Any, output: Tensor) -> Tensor:
        del inputs
        tracker = core("tensor_parallel").get_cuda_rng_tracker()
        with tracker.fork() if config.sequence_parallel else nullcontext():
            return functional.dropout(module.norm(output), dropout.p, module.training)

    embedding.register_forward_hook(normed)
