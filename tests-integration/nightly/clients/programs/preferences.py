"""trl: supervised fine-tuning, preferences, rewards."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from adapters import CONFIG
from datasets import Dataset
from peft import LoraConfig
from small import language_model, text, tokenizer
from trainer import found
from transformers import LlamaForSequenceClassification, set_seed
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

if TYPE_CHECKING:
    from pathlib import Path

USUAL = {
    "learning_rate": 1e-2,
    "max_steps": 4,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "logging_steps": 1,
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
}


def texts(size: int) -> Any:
    """Make texts of different lengths."""
    return Dataset.from_list([{"text": text(index, 3 + index % 7)} for index in range(size)])


def pairs(size: int) -> Any:
    """Make prompts with a better and a worse answer."""
    return Dataset.from_list(
        [
            {
                "prompt": text(index, 4),
                "chosen": " " + text(index + 100, 5),
                "rejected": " " + text(index + 200, 6),
            }
            for index in range(size)
        ]
    )


def trained(trainer: Any, folder: Path) -> dict[str, Any]:
    """Train, evaluate if there is something to evaluate on, return what is left behind."""
    trainer.train()
    if trainer.eval_dataset is not None:
        trainer.evaluate()
    result = found(trainer, folder)
    changing = ("time", "speed", "profiling")
    for entry in result["log"]:
        for key in [key for key in entry if any(word in key for word in changing)]:
            del entry[key]
    return result


def sft(folder: Path) -> dict[str, Any]:
    """Fine-tune on texts that are packed into rows, with an adapter."""
    set_seed(0)
    arguments = SFTConfig(
        output_dir=str(folder), max_length=16, packing=True, packing_strategy="wrapped", **USUAL
    )
    trainer = SFTTrainer(
        model=language_model(),
        args=arguments,
        processing_class=tokenizer(),
        train_dataset=texts(48),
        eval_dataset=texts(22),
        peft_config=LoraConfig(**CONFIG),
    )
    return trained(trainer, folder)


def dpo(folder: Path) -> dict[str, Any]:
    """Learn from preferences, with a reference model; the last batch of the evaluation is not full."""
    set_seed(0)
    trainer = DPOTrainer(
        model=language_model(),
        ref_model=language_model(),
        args=DPOConfig(output_dir=str(folder), max_length=24, **USUAL),
        processing_class=tokenizer(),
        train_dataset=pairs(16),
        eval_dataset=pairs(7),
    )
    return trained(trainer, folder)


def grpo(folder: Path, **options: Any) -> dict[str, Any]:
    """Learn from rewards of what the model writes."""
    set_seed(0)

    def count(completions: list[str], **_: Any) -> list[float]:
        return [float(completion.count("w1")) for completion in completions]

    trainer = GRPOTrainer(
        model=language_model(),
        reward_funcs=count,
        args=GRPOConfig(
            output_dir=str(folder), max_completion_length=6, num_generations=4, **{**USUAL, **options}
        ),
        processing_class=tokenizer(),
        train_dataset=pairs(16).select_columns(["prompt"]),
    )
    return trained(trainer, folder)


def reward(folder: Path) -> dict[str, Any]:
    """Train a model that tells the better answer; the last batch of the evaluation is not full."""
    set_seed(0)
    config = language_model().config
    config.num_labels = 1
    torch.manual_seed(0)
    trainer = RewardTrainer(
        model=LlamaForSequenceClassification(config),
        args=RewardConfig(output_dir=str(folder), max_length=24, **USUAL),
        processing_class=tokenizer(),
        train_dataset=pairs(16).remove_columns(["prompt"]),
        eval_dataset=pairs(7).remove_columns(["prompt"]),
    )
    return trained(trainer, folder)


def command(folder: Path) -> dict[str, Any]:
    """Fine-tune by the command `trl sft`, which starts a process of its own."""
    import os

    from safetensors.torch import load_file
    from trl.cli.main import main as trl

    language_model().save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    (folder / "data").mkdir(parents=True)
    texts(24).to_json(folder / "data" / "train.jsonl")
    out = folder / "out"
    words = [
        *(
            "trl",
            "sft",
            "--model_name_or_path",
            str(folder / "model"),
            "--dataset_name",
            str(folder / "data"),
        ),
        *("--output_dir", str(out), "--max_steps", "3", "--max_length", "16", "--use_cpu", "--bf16", "false"),
        *(
            "--report_to",
            "none",
            "--dtype",
            "float32",
            "--gradient_checkpointing",
            "false",
            "--num_processes",
            "1",
        ),
    ]
    before, sys.argv = sys.argv, words
    os.environ["ACCELERATE_USE_CPU"] = "true"
    try:
        trl()
    finally:
        sys.argv = before
        del os.environ["ACCELERATE_USE_CPU"]
    return {
        "weights": load_file(out / "model.safetensors"),
        "files": sorted(path.name for path in out.iterdir() if path.is_file()),
    }
