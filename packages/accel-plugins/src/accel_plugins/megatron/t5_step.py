"""What a step of training does with a batch of an encoder and a decoder."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from accel_plugins.megatron.train_steps import IGNORED, TokenTrainStep, with_losses

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterator

    from torch import Tensor


class T5TrainStep(TokenTrainStep):
    """The step of encoder-decoders: the loss of the tokens of the decoder.

    A batch has `input_ids` and `labels` of transformers (-100 is left out of the loss), and may have
    `attention_mask`, `decoder_input_ids` (the labels shifted by default) and `decoder_attention_mask`.

    Args:
        accelerator: Has `state` and `device`.
        args: `MegatronLMPlugin.megatron_lm_default_args` as attributes.
    """

    def __init__(self, accelerator: Any, args: Namespace) -> None:
        super().__init__("T5TrainStep", accelerator, args)

    @staticmethod
    def attn_mask_postprocess(attention_mask: Tensor) -> Tensor:
        """Return which tokens of a sequence may not attend to which others.

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
        """Return the mask of the future.

        Args:
            seq_length: Tokens of the decoder.
            device: Where to make it.

        Returns:
            A bool tensor `[1, sequence, sequence]`, true where attention is masked.

        Example:
            >>> T5TrainStep.get_decoder_mask(2, "cpu").tolist()
            [[[False, True], [False, False]]]
        """
        return torch.ones(1, seq_length, seq_length, dtype=torch.bool, device=device).triu(1)

    @staticmethod
    def get_enc_dec_mask(attention_mask: Tensor, dec_seq_length: int, device: torch.device | str) -> Tensor:
        """Return which tokens of the encoder those of the decoder may not attend to.

        Args:
            attention_mask: Of the encoder, of shape `[batch, sequence]`, 0 for padding.
            dec_seq_length: Tokens of the decoder.
            device: Where to make it.

        Returns:
            A bool tensor `[batch, decoder, encoder]`, true where attention is masked.

        Example:
            >>> T5TrainStep.get_enc_dec_mask(torch.tensor([[1, 0]]), 1, "cpu").tolist()
            [[[False, True]]]
        """
        masked = (attention_mask < 0.5).to(device)
        return masked.unsqueeze(1).expand(-1, dec_seq_length, -1)

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[..., Any]:
        """Return the plugin's `custom_get_batch_function`, or one for batches of transformers or of Megatron.

        Args:
            accelerator: Its plugin may have a function.
            megatron_dataset_flag: Whether batches are of Megatron's data sets.
        """
        own = accelerator.state.megatron_lm_plugin.custom_get_batch_function
        if own is not None:
            return own
        return _indexed_batch if megatron_dataset_flag else self._batch

    def get_forward_step_func(self) -> Callable[..., Any]:
        """Return the forward step."""

        def forward_step(data_iterator: Iterator[Any], model: Any) -> tuple[Any, Callable[..., Any]]:
            tokens, decoder_tokens, loss_mask, labels, *masks = self.get_batch(data_iterator)
            inputs = (tokens, decoder_tokens, *(mask.unsqueeze(1) for mask in masks))
            if self.return_logits:
                output = with_losses(model, model(*inputs), labels)
            else:
                output = model(*inputs, lm_labels=labels)
            return output, partial(self.loss_func, loss_mask)

        return forward_step

    def _batch(self, data_iterator: Iterator[Any]) -> tuple[Any, ...]:
        batch = next(data_iterator)
        tokens, labels = batch["input_ids"], batch["labels"]
        padding, inputs = batch.get("attention_mask"), batch.get("decoder_input_ids")
        padding = torch.ones_like(tokens) if padding is None else padding
        inputs = self._shifted(labels) if inputs is None else inputs
        future = self.get_decoder_mask(labels.shape[1], labels.device)
        own = batch.get("decoder_attention_mask")
        return (
            tokens,
            inputs,
            labels != IGNORED,
            labels.clamp(min=0),
            self.attn_mask_postprocess(padding),
            future if own is None else future | (own == 0).unsqueeze(1),
            self.get_enc_dec_mask(padding, labels.shape[1], labels.device),
        )

    def _shifted(self, labels: Tensor) -> Tensor:
        """Return labels shifted to the right, as transformers does."""
        shifted = labels.roll(1, dims=1)
        shifted[:, 0] = self.args.decoder_start_token_id
        return shifted.masked_fill(shifted == IGNORED, self.args.pad_token_id)


def _indexed_batch(data_iterator: Iterator[Any]) -> tuple[Any, ...]:
    batch = next(data_iterator)
    masks = (batch[name] < 0.5 for name in ("enc_mask", "dec_mask", "enc_dec_mask"))
    return batch["text_enc"], batch["text_dec"], batch["loss_mask"], batch["labels"], *masks
