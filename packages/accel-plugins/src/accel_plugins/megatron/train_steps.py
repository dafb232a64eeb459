"""Train steps of Megatron, per kind of model: read a batch, run the model, compute the loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from accel_plugins.megatron.library import core, load_library, uses_transformer_engine
from accel_plugins.megatron.stages import gather_chunks, own_chunks, sum_over_context
from accel_state.errors import SettingsError, UnsupportedError

if TYPE_CHECKING:
    from accel_plugins.megatron.plugin import MegatronLMPlugin

IGNORED = -100
"""The label of tokens that the loss ignores."""


class AbstractTrainStep(ABC):
    """Defines how a batch is read, the forward step, and the loss.

    Args:
        name: Name of the model class.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    @abstractmethod
    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[..., Any]:
        """Return a function of an iterator of batches that returns the model's inputs."""

    @abstractmethod
    def get_forward_step_func(self) -> Callable[..., Any]:
        """Return `forward_step(data_iterator, model)`, which returns an output and its loss function."""

    @abstractmethod
    def get_loss_func(self, accelerator: Any) -> Callable[..., Any]:
        """Return the loss function: it returns the loss, and a dictionary of losses over all replicas."""


class _TrainStep(AbstractTrainStep):
    """A step that reads batches of transformers, or of Megatron's indexed data sets."""

    indexed: tuple[str, ...]
    """Names of the inputs in batches of Megatron's indexed data sets."""
    of_loss: tuple[str, ...] = ()
    of_step: tuple[str, ...] = ()
    """Names of the further arguments of `get_loss_func` and of `get_forward_step_func`."""

    def __init__(self, accelerator: Any, args: Namespace) -> None:
        super().__init__(type(self).__name__)
        self.args = args
        self.return_logits = bool(args.return_logits)
        self.per_token = bool(accelerator.state.megatron_lm_plugin.calculate_per_token_loss)
        self.get_batch = self.get_batch_func(accelerator, args.megatron_dataset_flag)
        self.loss_func = self.get_loss_func(accelerator, *(getattr(args, name) for name in self.of_loss))
        self.forward_step = self.get_forward_step_func(*(getattr(args, name) for name in self.of_step))

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[..., Any]:
        """Return the plugin's function, or one for batches of transformers or of Megatron's data sets."""
        own = accelerator.state.megatron_lm_plugin.custom_get_batch_function
        read = self._read_indexed if megatron_dataset_flag else self._read
        return own or (lambda data_iterator: read(next(data_iterator)))

    @abstractmethod
    def _read(self, batch: Mapping[str, Any]) -> tuple[Any, ...]: ...

    def _read_indexed(self, batch: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(batch[name] for name in self.indexed)


class _TokenTrainStep(_TrainStep):
    """A step with a loss over tokens; `_arguments` are of a kind of model."""

    def get_loss_func(self, accelerator: Any) -> Callable[..., Any]:
        """Return the plugin's function, or the mean loss of the tokens of a micro-batch."""
        own = accelerator.state.megatron_lm_plugin.custom_loss_function
        return own or partial(token_loss, per_token=self.per_token)

    def get_forward_step_func(self) -> Callable[..., Any]:
        """Return the forward step."""

        def forward_step(data_iterator: Iterator[Any], model: Any) -> tuple[Any, Callable[..., Any]]:
            inputs, named, labels, loss_mask = self._arguments(self.get_batch(data_iterator))
            if self.return_logits:
                output = with_losses(model, model(*inputs), labels)
            else:
                output = model(*inputs, **named)
            return output, partial(self.loss_func, loss_mask)

        return forward_step

    @abstractmethod
    def _arguments(self, batch: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any], Tensor, Tensor]:
        """Return the model's inputs, its labels by name, the labels and the mask of the loss."""


class GPTTrainStep(_TokenTrainStep):
    """The train step of decoders: the loss of the next token.

    A batch has `input_ids`, and may have `labels` (as for transformers: not shifted, -100 is ignored by the
    loss; `input_ids` by default), `attention_mask` and `position_ids`.

    Args:
        accelerator: Has `state` and `device`.
        args: `MegatronLMPlugin.megatron_lm_default_args` as attributes.
    """

    indexed = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")

    def _read(self, batch: Mapping[str, Any]) -> tuple[Any, ...]:
        tokens = batch["input_ids"]
        targets = batch.get("labels")
        shifted = functional.pad((tokens if targets is None else targets)[:, 1:], (0, 1), value=IGNORED)
        position_ids = batch.get("position_ids")
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        by_engine = uses_transformer_engine(self.args.attention_backend)
        mask = causal_mask(batch.get("attention_mask"), padding_at_end=by_engine)
        return tokens, shifted.clamp(min=0), shifted != IGNORED, mask, position_ids

    def _read_indexed(self, batch: Mapping[str, Any]) -> tuple[Any, ...]:
        return super()._read_indexed({"attention_mask": None, **batch})

    def _arguments(self, batch: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any], Tensor, Tensor]:
        tokens, labels, loss_mask, attention_mask, position_ids = own_chunks(batch)
        return (tokens, position_ids, attention_mask), {"labels": labels}, labels, loss_mask


def token_loss(loss_mask: Tensor, output_tensor: Any, *, per_token: bool) -> tuple[Any, ...]:
    """Return the mean loss of the tokens of a micro-batch, in the form that schedules expect.

    Context-parallel ranks have chunks of its sequences, and each returns its part of the mean.

    Args:
        loss_mask: 0 for ignored tokens.
        output_tensor: The tokens' losses, or a pair of these and logits sharded over the vocabulary.
        per_token: Return the sum and the number of the tokens in place of the mean.
    """
    losses, logits = output_tensor if isinstance(output_tensor, tuple) else (output_tensor, None)
    mask = loss_mask.view(-1).float()
    total, count = (losses.float().view(-1) * mask).sum(), mask.sum()
    mean = total / sum_over_context(count).clamp(min=1)
    reduced = {"lm loss": avg_losses_across_data_parallel_group([sum_over_context(mean)])[0]}
    if logits is not None:
        gather_vocabulary = core("tensor_parallel.mappings").gather_from_tensor_model_parallel_region
        by_position = gather_vocabulary(logits.detach()).transpose(0, 1)
        reduced["logits"] = gather_chunks(by_position).transpose(0, 1)
    return (total, count.int(), reduced) if per_token else (mean, reduced)


def with_losses(model: Any, output: Tensor, labels: Tensor) -> Any:
    """Return losses and logits on the last stage; on others, return hidden states unchanged.

    Logits have the shape `[batch, sequence, vocabulary]`, labels `[batch, sequence]`.
    """
    inner = model
    while not hasattr(inner, "post_process"):
        inner = inner.module
    if not inner.post_process:
        return output
    # The loss overwrites it.
    by_position = output.transpose(0, 1).clone(memory_format=torch.contiguous_format)
    return inner.compute_language_model_loss(labels, by_position), output


def causal_mask(attention_mask: Tensor | None, *, padding_at_end: bool = False) -> Tensor | None:
    """Return the causal mask with padding: `[batch, 1, sequence, sequence]`, true where masked.

    `None` if nothing is padded: megatron-core then uses its own mask.

    Args:
        attention_mask: Of shape `[batch, sequence]`, 0 for padding.
        padding_at_end: Whether padding can only follow tokens, so that the causal mask covers it:
            TransformerEngine's causal attention reads no other mask.

    Example:
        >>> causal_mask(torch.tensor([[0, 1]])).tolist()
        [[[[True, True], [True, False]]]]
    """
    if attention_mask is None or bool(attention_mask.all()):
        return None
    if padding_at_end:
        if bool((attention_mask.diff(dim=1) > 0).any()):
            raise UnsupportedError(
                "attention_mask has padding before tokens, which TransformerEngine's causal attention would "
                "read: pad on the right, or use MegatronLMPlugin(attention_backend='local')."
            )
        return None
    length = attention_mask.shape[1]
    future = torch.ones(length, length, dtype=torch.bool, device=attention_mask.device).triu(1)
    return future | (attention_mask == 0)[:, None, None, :]


def avg_losses_across_data_parallel_group(losses: Sequence[Tensor]) -> Tensor:
    """Average losses over the data-parallel ranks of a run with Megatron.

    Args:
        losses: Tensors of one element each, as many on every rank of the group.

    Returns:
        A tensor of one dim: the average of each, the same on all ranks of the group.

    Raises:
        SettingsError: Megatron's process groups have not been created.
    """
    load_library("avg_losses_across_data_parallel_group()")
    groups = core("parallel_state")
    if not groups.model_parallel_is_initialized():
        raise SettingsError(
            "avg_losses_across_data_parallel_group() was called before Megatron's process groups were made: "
            "prepare a model with an Accelerator(megatron_lm_plugin=…) first."
        )
    averages = torch.cat([loss.detach().reshape(1) for loss in losses])
    group = groups.get_data_parallel_group()
    dist.all_reduce(averages, group=group)
    return averages / dist.get_world_size(group)


class BertTrainStep(_TrainStep):
    """The train step of encoders: masked tokens, with or without sentence order, or classes.

    A batch has `input_ids` and `labels` of transformers (-100 is ignored by the loss of tokens), and may have
    `attention_mask`, `token_type_ids` and `next_sentence_label`.

    Args:
        accelerator: Has `state` and `device`.
        args: `MegatronLMPlugin.megatron_lm_default_args` as attributes.

    Raises:
        UnsupportedError: The plugin requests the loss per token.
    """

    indexed = ("text", "types", "is_random", "loss_mask", "labels", "padding_mask")
    of_loss = ("pretraining_flag", "num_labels")
    of_step = ("pretraining_flag", "bert_binary_head")

    def __init__(self, accelerator: Any, args: Namespace) -> None:
        if accelerator.state.megatron_lm_plugin.calculate_per_token_loss:
            raise UnsupportedError(
                "BertTrainStep has no loss by token: leave out calculate_per_token_loss of MegatronLMPlugin."
            )
        super().__init__(accelerator, args)

    def _read(self, batch: Mapping[str, Any]) -> tuple[Any, ...]:
        tokens, labels = batch["input_ids"], batch["labels"]
        types, padding = batch.get("token_type_ids"), batch.get("attention_mask")
        types = torch.zeros_like(tokens) if types is None else types
        padding = torch.ones_like(tokens) if padding is None else padding
        if labels.shape != tokens.shape:
            return tokens, types, None, None, labels, padding
        is_labelled = labels != IGNORED
        return tokens, types, batch.get("next_sentence_label"), is_labelled, labels.clamp(min=0), padding

    def get_loss_func(  # pyright: ignore[reportIncompatibleMethodOverride] - as documented
        self, accelerator: Any, pretraining_flag: bool, num_labels: int
    ) -> Callable[..., Any]:
        """Return the plugin's `custom_loss_function`, or the loss of transformers.

        Args:
            accelerator: Its plugin may set the function.
            pretraining_flag: Whether masked tokens are predicted; else classes.
            num_labels: Number of classes.
        """
        own = accelerator.state.megatron_lm_plugin.custom_loss_function
        return own or (
            _pretraining_loss if pretraining_flag else partial(_class_loss, num_labels, self.return_logits)
        )

    def get_forward_step_func(  # pyright: ignore[reportIncompatibleMethodOverride] - as documented
        self, pretraining_flag: bool, bert_binary_head: bool
    ) -> Callable[..., Any]:
        """Return the forward step.

        Args:
            pretraining_flag: Whether masked tokens are predicted; else classes.
            bert_binary_head: Whether sentence order is predicted, too.
        """

        def forward_step(data_iterator: Iterator[Any], model: Any) -> tuple[Any, Callable[..., Any]]:
            tokens, types, order, loss_mask, labels, padding_mask = self.get_batch(data_iterator)
            named = {"lm_labels": labels} if pretraining_flag and not self.return_logits else {}
            output = model(tokens, padding_mask, tokentype_ids=types, **named)
            # The last stage returns a pair: losses or logits of tokens, and logits of sentences.
            if not pretraining_flag:
                return output[1] if isinstance(output, tuple) else output, partial(self.loss_func, labels)
            if isinstance(output, tuple):
                first, order_logits = output
                pair = with_losses(model, first, labels) if self.return_logits else (first, None)
                output = (*pair, order_logits)
            return output, partial(self.loss_func, loss_mask, order if bert_binary_head else None)

        return forward_step


def _pretraining_loss(
    loss_mask: Tensor, sentence_order: Tensor | None, output_tensor: tuple[Any, ...]
) -> tuple[Any, ...]:
    losses, logits, order_logits = output_tensor
    tokens = losses if logits is None else (losses, logits)
    loss, reduced = token_loss(loss_mask, tokens, per_token=False)
    if sentence_order is not None:
        order = functional.cross_entropy(order_logits.float(), sentence_order.view(-1))
        reduced["sop loss"] = avg_losses_across_data_parallel_group([order])[0]
        loss = loss + order
    if logits is not None and order_logits is not None:
        reduced["order logits"] = order_logits.detach()
    return loss, reduced


def _class_loss(
    num_labels: int, return_logits: bool, labels: Tensor, output_tensor: Tensor
) -> tuple[Any, ...]:
    logits = output_tensor.float()
    if num_labels == 1:
        loss = functional.mse_loss(logits.view(-1), labels.view(-1).float())
    elif not labels.is_floating_point():
        loss = functional.cross_entropy(logits, labels.view(-1))
    else:
        loss = functional.binary_cross_entropy_with_logits(logits, labels)
    reduced = {"loss": avg_losses_across_data_parallel_group([loss])[0]}
    return loss, (reduced | {"logits": logits.detach()} if return_logits else reduced)


class T5TrainStep(_TokenTrainStep):
    """The train step of encoder-decoders: the loss of the decoder's tokens.

    A batch has `input_ids` and `labels` of transformers (-100 is ignored by the loss), and may have
    `attention_mask`, `decoder_input_ids` (the labels shifted by default) and `decoder_attention_mask`.

    Args:
        accelerator: Has `state` and `device`.
        args: `MegatronLMPlugin.megatron_lm_default_args` as attributes.
    """

    indexed = ("text_enc", "text_dec", "loss_mask", "labels", "enc_mask", "dec_mask", "enc_dec_mask")

    @staticmethod
    def attn_mask_postprocess(attention_mask: Tensor) -> Tensor:
        """Return the mask of token pairs that may not attend to each other.

        Args:
            attention_mask: Of shape `[batch, sequence]`, 0 for padding.

        Returns:
            A bool tensor `[batch, sequence, sequence]`, true where attention is masked.

        Example:
            >>> T5TrainStep.attn_mask_postprocess(torch.tensor([[1, 0]])).tolist()
            [[[False, True], [True, True]]]
        """
        return attention_mask.unsqueeze(1) * attention_mask.unsqueeze(2) < 0.5

    @staticmethod
    def get_decoder_mask(seq_length: int, device: torch.device | str) -> Tensor:
        """Return the causal mask.

        Args:
            seq_length: Tokens of the decoder.
            device: Device of the mask.

        Returns:
            A bool tensor `[1, sequence, sequence]`, true where attention is masked.

        Example:
            >>> T5TrainStep.get_decoder_mask(2, "cpu").tolist()
            [[[False, True], [False, False]]]
        """
        return torch.ones(1, seq_length, seq_length, dtype=torch.bool, device=device).triu(1)

    @staticmethod
    def get_enc_dec_mask(attention_mask: Tensor, dec_seq_length: int, device: torch.device | str) -> Tensor:
        """Return the mask of encoder tokens that decoder tokens may not attend to.

        Args:
            attention_mask: Of the encoder, of shape `[batch, sequence]`, 0 for padding.
            dec_seq_length: Tokens of the decoder.
            device: Device of the mask.

        Returns:
            A bool tensor `[batch, decoder, encoder]`, true where attention is masked.

        Example:
            >>> T5TrainStep.get_enc_dec_mask(torch.tensor([[1, 0]]), 1, "cpu").tolist()
            [[[False, True]]]
        """
        masked = (attention_mask < 0.5).to(device)
        return masked.unsqueeze(1).expand(-1, dec_seq_length, -1)

    def _arguments(self, batch: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any], Tensor, Tensor]:
        tokens, decoder_tokens, loss_mask, labels, *masks = batch
        inputs = (tokens, decoder_tokens, *(mask.unsqueeze(1) for mask in masks))
        return inputs, {"lm_labels": labels}, labels, loss_mask

    def _read(self, batch: Mapping[str, Any]) -> tuple[Any, ...]:
        tokens, labels = batch["input_ids"], batch["labels"]
        padding, inputs = batch.get("attention_mask"), batch.get("decoder_input_ids")
        padding = torch.ones_like(tokens) if padding is None else padding
        if inputs is None:  # the labels shifted to the right, as in transformers
            inputs = labels.roll(1, dims=1)
            inputs[:, 0] = self.args.decoder_start_token_id
            inputs = inputs.masked_fill(inputs == IGNORED, self.args.pad_token_id)
        future = self.get_decoder_mask(labels.shape[1], labels.device)
        own = batch.get("decoder_attention_mask")
        masks = (
            self.attn_mask_postprocess(padding),
            future if own is None else future | (own == 0).unsqueeze(1),
            self.get_enc_dec_mask(padding, labels.shape[1], labels.device),
        )
        return tokens, inputs, labels != IGNORED, labels.clamp(min=0), *masks

    def _read_indexed(self, batch: Mapping[str, Any]) -> tuple[Any, ...]:
        *inputs, first, second, third = super()._read_indexed(batch)
        return *inputs, first < 0.5, second < 0.5, third < 0.5


def train_step_of(plugin: MegatronLMPlugin, context: Any) -> AbstractTrainStep:
    """Build the train step of a run; `context` has the `state` and the `device` of an accelerator."""
    own, args = plugin.custom_train_step_class, Namespace(**plugin.megatron_lm_default_args)
    if own is not None:
        return own(context, args, **(plugin.custom_train_step_kwargs or {}))
    kind: Any = getattr(args, "model_type_name", None)
    steps: dict[str, Any] = {"bert": BertTrainStep, "gpt": GPTTrainStep, "t5": T5TrainStep}
    if kind not in steps:
        raise UnsupportedError(
            f"There is no train step for a model of the type {kind!r}: give MegatronLMPlugin a "
            "custom_train_step_class."
        )
    return steps[kind](context, args)
