"""Train and evaluate a small classifier with transformers' Trainer; write losses and weights to a file."""

from __future__ import annotations

import sys

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


def main(folder: str, train_size: int, eval_size: int) -> None:
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
    )
    data = {"train_dataset": Sums(train_size), "eval_dataset": Sums(eval_size)}
    trainer = InOrder(model=model(), args=arguments, **data)
    trainer.train()
    if trainer.is_world_process_zero():
        evals = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        weights = trainer.accelerator.unwrap_model(trainer.model).state_dict()
        home = type(trainer.accelerator).__module__
        torch.save({"eval": evals, "weights": weights, "home": home}, f"{folder}/out.pt")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
