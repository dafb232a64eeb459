"""Train and evaluate a small classifier with transformers' Trainer; write losses and weights to a file."""

from __future__ import annotations

from typing import Any

import torch
from small_bert import Sums, model
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainingArguments


class InOrder(Trainer):
    """A Trainer that reads the samples in order, as the plain loop does."""

    def _get_train_sampler(self, *_: object) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


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
