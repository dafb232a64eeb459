"""What a step of training does with a batch of an encoder."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from accel_plugins.megatron.train_steps import (
    IGNORED,
    AbstractTrainStep,
    avg_losses_across_data_parallel_group,
    token_loss,
    with_losses,
)
from accel_state.errors import UnsupportedError

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterator

    from torch import Tensor


class BertTrainStep(AbstractTrainStep):
    """The step of encoders: masked tokens, with or without the order of sentences, or classes.

    A batch has `input_ids` and `labels` of transformers (-100 is left out of the loss of tokens), and may
    have `attention_mask`, `token_type_ids` and `next_sentence_label`.

    Args:
        accelerator: Has `state` and `device`.
        args: `MegatronLMPlugin.megatron_lm_default_args` as attributes.

    Raises:
        UnsupportedError: The plugin wants the loss by token.
    """

    def __init__(self, accelerator: Any, args: Namespace) -> None:
        super().__init__("BertTrainStep")
        if accelerator.state.megatron_lm_plugin.calculate_per_token_loss:
            raise UnsupportedError(
                "BertTrainStep has no loss by token: leave out calculate_per_token_loss of MegatronLMPlugin."
            )
        self.args = args
        self.return_logits = bool(args.return_logits)
        self.get_batch = self.get_batch_func(accelerator, args.megatron_dataset_flag)
        self.loss_func = self.get_loss_func(accelerator, args.pretraining_flag, args.num_labels)
        self.forward_step = self.get_forward_step_func(args.pretraining_flag, args.bert_binary_head)

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[..., Any]:
        """Return the plugin's `custom_get_batch_function`, or one for batches of transformers or of Megatron.

        Args:
            accelerator: Its plugin may have a function.
            megatron_dataset_flag: Whether batches are of Megatron's data sets.
        """
        own = accelerator.state.megatron_lm_plugin.custom_get_batch_function
        if own is not None:
            return own
        return _indexed_batch if megatron_dataset_flag else _encoder_batch

    def get_loss_func(  # pyright: ignore[reportIncompatibleMethodOverride] - as documented
        self, accelerator: Any, pretraining_flag: bool, num_labels: int
    ) -> Callable[..., Any]:
        """Return the plugin's `custom_loss_function`, or the loss of transformers.

        Args:
            accelerator: Its plugin may have a function.
            pretraining_flag: Whether masked tokens are predicted; else classes.
            num_labels: Number of classes.
        """
        own = accelerator.state.megatron_lm_plugin.custom_loss_function
        if own is not None:
            return own
        return _pretraining_loss if pretraining_flag else partial(_class_loss, num_labels, self.return_logits)

    def get_forward_step_func(  # pyright: ignore[reportIncompatibleMethodOverride] - as documented
        self, pretraining_flag: bool, bert_binary_head: bool
    ) -> Callable[..., Any]:
        """Return the forward step.

        Args:
            pretraining_flag: Whether masked tokens are predicted; else classes.
            bert_binary_head: Whether the order of sentences is predicted, too.
        """

        def forward_step(data_iterator: Iterator[Any], model: Any) -> tuple[Any, Callable[..., Any]]:
            tokens, types, order, loss_mask, labels, padding_mask = self.get_batch(data_iterator)
            if not pretraining_flag:
                output = model(tokens, padding_mask, tokentype_ids=types)
                output = output[1] if isinstance(output, tuple) else output
                return output, partial(self.loss_func, labels)
            if self.return_logits:
                output = model(tokens, padding_mask, tokentype_ids=types)
                pair = output if isinstance(output, tuple) else (output, None)
                output = with_losses(model, pair[0], labels)
                output = (*output, pair[1]) if isinstance(output, tuple) else output
            else:
                output = model(tokens, padding_mask, tokentype_ids=types, lm_labels=labels)
                output = (output[0], None, output[1]) if isinstance(output, tuple) else output
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


def _encoder_batch(data_iterator: Iterator[Any]) -> tuple[Any, ...]:
    batch = next(data_iterator)
    tokens, labels = batch["input_ids"], batch["labels"]
    types, padding = batch.get("token_type_ids"), batch.get("attention_mask")
    types = torch.zeros_like(tokens) if types is None else types
    padding = torch.ones_like(tokens) if padding is None else padding
    if labels.shape != tokens.shape:
        return tokens, types, None, None, labels, padding
    is_labelled = labels != IGNORED
    return tokens, types, batch.get("next_sentence_label"), is_labelled, labels.clamp(min=0), padding


def _indexed_batch(data_iterator: Iterator[Any]) -> tuple[Any, ...]:
    batch = next(data_iterator)
    return tuple(
        batch[name] for name in ("text", "types", "is_random", "loss_mask", "labels", "padding_mask")
    )
