"""Small models, data sets and a tokenizer, always the same, made without the hub."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

WORDS = ("<pad>", "<eos>", "<unk>", *(f"w{index}" for index in range(61)))


def tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of 64 words."""
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def text(seed: int, length: int) -> str:
    """Make words by a seed."""
    numbers = torch.randint(0, 61, (length,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{number}" for number in numbers.tolist())


def language_model(layers: int = 2, width: int = 32) -> LlamaForCausalLM:
    """Make a language model."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def classifier() -> BertForSequenceClassification:
    """Make a classifier without dropout."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


class Sums(Dataset[dict[str, torch.Tensor]]):
    """Rows of numbers, and whether their sum is odd."""

    def __init__(self, size: int) -> None:
        self.rows = torch.randint(0, 50, (size, 8), generator=torch.Generator().manual_seed(size))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index].sum() % 2}


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """The rows of `Sums` without a length."""

    def __init__(self, size: int) -> None:
        self.data = Sums(size)

    def __iter__(self) -> Any:
        return (self.data[index] for index in range(len(self.data)))


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copy the state dict of a model, whatever is wrapped around it."""
    return {name: value.detach().float().cpu().clone() for name, value in model.state_dict().items()}
