"""A small classifier and its data, which the Trainer and a plain loop train."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification

CONFIG = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


class Sums(Dataset):
    """Rows of numbers, and whether their sum is odd."""

    def __init__(self, size: int) -> None:
        self.rows = torch.randint(0, 50, (size, 8), generator=torch.Generator().manual_seed(size))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index].sum() % 2}


def model() -> BertForSequenceClassification:
    """Make the model, always the same."""
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(**CONFIG))
