"""transformers' Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from small import Stream, Sums, classifier, weights
from transformers import Trainer, TrainingArguments, set_seed

if TYPE_CHECKING:
    from pathlib import Path


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    """Make arguments for small runs on the CPU."""
    usual = {
        "output_dir": str(folder),
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return TrainingArguments(**{**usual, **options})


def trained(folder: Path, data: Any = None, resume: str | None = None, **options: Any) -> dict[str, Any]:
    """Train; return what was logged, the weights and the files."""
    set_seed(0)
    trainer = Trainer(
        model=classifier(),
        args=arguments(folder, **options),
        train_dataset=Sums(48) if data is None else data,
        eval_dataset=Sums(21),
    )
    trainer.train(resume_from_checkpoint=resume)
    return found(trainer, folder)


def found(trainer: Any, folder: Path) -> dict[str, Any]:
    """Collect what a training left behind."""
    timed = ("runtime", "per_second", "flos")
    log = [
        {key: value for key, value in entry.items() if not key.endswith(timed)}
        for entry in trainer.state.log_history
    ]
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    return {
        "log": log,
        "weights": {
            # The reference leaves the prefix of compiled models to the Trainer, which removes it.
            name.removeprefix("_orig_mod."): value.detach().float().cpu().clone()
            for name, value in state.items()
        },
        "files": sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()),
    }


def basic(folder: Path) -> dict[str, Any]:
    """Train and evaluate, with a last batch that is not full."""
    return trained(folder, eval_strategy="epoch")


def best(folder: Path) -> dict[str, Any]:
    """Keep the best model."""
    return trained(
        folder,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        save_total_limit=1,
        num_train_epochs=3,
    )


def resume(folder: Path) -> dict[str, Any]:
    """Accumulate, save, and resume in the middle of an epoch with a window that is not full at its end."""
    options = {"gradient_accumulation_steps": 4, "save_strategy": "steps", "save_steps": 1}
    whole = trained(folder / "whole", **options)
    again = trained(folder / "again", resume=str(folder / "whole" / "checkpoint-3"), **options)
    for name, value in whole["weights"].items():
        torch.testing.assert_close(again["weights"][name], value, rtol=0, atol=1e-6, msg=name)
    return {"whole": whole, "again": again}


def bf16(folder: Path) -> dict[str, Any]:
    """Compute in bfloat16."""
    return trained(folder, bf16=True, eval_strategy="epoch")


def iterable(folder: Path) -> dict[str, Any]:
    """Train on a stream, whose length is not known."""
    return trained(folder, data=Stream(48), max_steps=9, eval_strategy="steps", eval_steps=4)


def accumulated(folder: Path) -> dict[str, Any]:
    """Accumulate gradients over batches."""
    return trained(folder, gradient_accumulation_steps=2, eval_strategy="epoch", save_strategy="epoch")


def compiled(folder: Path) -> dict[str, Any]:
    """Compile the model."""
    return trained(folder, torch_compile=True, torch_compile_backend="aot_eager", eval_strategy="epoch")


def fsdp2(folder: Path) -> dict[str, Any]:
    """Shard the model by FSDP2, save full weights, and resume."""
    options = {
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {
            "fsdp_version": 2,
            "transformer_layer_cls_to_wrap": ["BertLayer"],
            "state_dict_type": "FULL_STATE_DICT",
        },
        "save_strategy": "epoch",
        "eval_strategy": "epoch",
        "optim": "sgd",
        "learning_rate": 0.1,
    }
    return trained(folder, **options)


def evaluated(folder: Path) -> dict[str, Any]:
    """Evaluate and predict without training."""
    trainer = Trainer(model=classifier(), args=arguments(folder), eval_dataset=Sums(21))
    prediction = trainer.predict(Sums(19))
    return {
        "loss": trainer.evaluate()["eval_loss"],
        "logits": torch.as_tensor(prediction.predictions),
        "labels": torch.as_tensor(prediction.label_ids),
        "weights": weights(trainer.model),
    }
