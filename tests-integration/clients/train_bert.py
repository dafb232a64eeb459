"""Train and evaluate a small classifier with transformers' Trainer; write losses and weights to a file."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils.data import Dataset, SequentialSampler
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

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


class InOrder(Trainer):
    """A Trainer that reads the samples in order, as the plain loop does."""

    def _get_train_sampler(self, *_: object) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


def model() -> BertForSequenceClassification:
    """Make the model, always the same."""
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(**CONFIG))


def zero(stage: int) -> dict[str, Any] | None:
    """Make a configuration of DeepSpeed; `None` for stage 0, which here is to do without it."""
    if stage == 0:
        return None
    automatic = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    return {**dict.fromkeys(automatic, "auto"), "zero_optimization": {"stage": stage}}


def main(folder: str, train_size: int, eval_size: int, stage: int) -> None:
    """Train two epochs, evaluate after each."""
    arguments = TrainingArguments(
        output_dir=folder,
        num_train_epochs=2,
        optim="sgd",  # Adam would blow up the rounding of gradients that are zero
        learning_rate=0.1,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        eval_strategy="epoch",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        deepspeed=zero(stage),
    )
    data = {"train_dataset": Sums(train_size), "eval_dataset": Sums(eval_size)}
    trainer = InOrder(model=model(), args=arguments, **data)
    trainer.train()
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if trainer.is_world_process_zero():
        evals = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        home = type(trainer.accelerator).__module__
        torch.save({"eval": evals, "weights": weights, "home": home}, f"{folder}/out.pt")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
