"""setfit and the trainer of sentence-transformers, on a small model without weights from elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
from sentence_transformers.losses import MultipleNegativesRankingLoss
from setfit import SetFitModel, TrainingArguments
from setfit import Trainer as SetFitTrainer
from sklearn.linear_model import LogisticRegression
from small import WORDS, text, tokenizer
from transformers import BertConfig, BertModel, set_seed

from trainers.inputs import training_log, write_once

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = [text(index, 5 + index % 4) for index in range(24)]


def sentence_model(folder: Path) -> SentenceTransformer:
    """Make a model that embeds sentences."""
    set_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    path = folder / "bert"

    def write() -> None:
        BertModel(BertConfig(vocab_size=len(WORDS), **size)).save_pretrained(path)
        tokenizer().save_pretrained(path)

    return SentenceTransformer(write_once(path, write), device="cpu")


def embed(folder: Path) -> dict[str, Any]:
    """Train the embeddings of pairs."""
    model = sentence_model(folder)
    data = Dataset.from_dict({"anchor": TEXTS[:12], "positive": TEXTS[12:]})
    arguments = Arguments(
        output_dir=str(folder / "out"), max_steps=4, per_device_train_batch_size=2, logging_steps=1,
        gradient_accumulation_steps=2, report_to=[], disable_tqdm=True, use_cpu=True, save_steps=4,
        learning_rate=1e-3, seed=0,
    )  # fmt: skip
    loss = MultipleNegativesRankingLoss(model)
    SentenceTransformerTrainer(model=model, args=arguments, train_dataset=data, loss=loss).train()
    return {"log": training_log(folder / "out"), "embeddings": torch.as_tensor(model.encode(TEXTS))}


def classify(folder: Path) -> dict[str, Any]:
    """Train a classifier from a few sentences."""
    model = SetFitModel(model_body=sentence_model(folder), model_head=LogisticRegression(random_state=0))
    arguments = TrainingArguments(
        output_dir=str(folder / "out"), batch_size=4, num_epochs=1, max_steps=4, seed=0, report_to="none",
        save_strategy="steps", save_steps=4, logging_steps=1,
    )  # fmt: skip
    rows = Dataset.from_dict({"text": TEXTS[:8], "label": [0, 1] * 4})
    SetFitTrainer(model=model, args=arguments, train_dataset=rows).train()
    return {"log": training_log(folder / "out"), "chances": torch.as_tensor(model.predict_proba(TEXTS))}
