"""trl: its commands, which launch its scripts by `accelerate launch`, and a script under that launcher."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

from small import text

from trainers.inputs import conversations, save_model, saved_weights, training_log, write_rows

if TYPE_CHECKING:
    from pathlib import Path

TRL = ("-c", "from trl.cli import main; main()")
LAUNCH = ("-m", "accelerate.commands.launch")


def trained(
    folder: Path, python: tuple[str, ...], rows: list[dict[str, Any]], *words: str, **options: Any
) -> dict[str, Any]:
    """Run the interpreter on a command that trains, as a user does; return what it left behind."""
    write_rows(folder / "data" / "train.jsonl", rows)
    options = {
        "model_name_or_path": save_model(folder),
        "dtype": "float32",
        "dataset_name": str(folder / "data"),
        "output_dir": str(folder / "out"),
        "max_length": 32,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "max_steps": 4,
        "logging_steps": 1,
        "save_steps": 4,
        "gradient_checkpointing": "false",
        "bf16": "false",
        "use_cpu": "true",
        "report_to": "none",
        "seed": 0,
        **options,
    }
    long = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    done = subprocess.run(
        [sys.executable, *python, *words, *long], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return {"log": training_log(folder / "out"), "weights": saved_weights(folder / "out")}


def preferences(size: int) -> list[dict[str, Any]]:
    """Make prompts with an answer that is better and one that is worse."""
    return [
        {"prompt": text(index, 4), "chosen": text(100 + index, 5), "rejected": text(200 + index, 6)}
        for index in range(size)
    ]


def sft(folder: Path) -> dict[str, Any]:
    """Fine-tune all weights on conversations."""
    return trained(folder, TRL, conversations(24), "sft")


def lora(folder: Path) -> dict[str, Any]:
    """Learn an adapter."""
    options = {"lora_r": 4, "lora_alpha": 8, "lora_target_modules": "all-linear"}
    return trained(folder, TRL, conversations(24), "sft", "--use_peft", **options)


def dpo(folder: Path) -> dict[str, Any]:
    """Learn from preferences."""
    return trained(folder, TRL, preferences(24), "dpo")


def reward(folder: Path) -> dict[str, Any]:
    """Train a model of rewards."""
    return trained(folder, TRL, preferences(24), "reward")


def kto(folder: Path) -> dict[str, Any]:
    """Learn from answers that are good or bad."""
    rows = [
        {"prompt": text(index, 4), "completion": text(100 + index, 5), "label": index % 2 == 0}
        for index in range(24)
    ]
    return trained(folder, TRL, rows, "kto")


def two_processes(folder: Path) -> dict[str, Any]:
    """Let the command start two processes."""
    return trained(folder, TRL, conversations(24), "sft", num_processes=2, cpu="")


def launched(folder: Path) -> dict[str, Any]:
    """Start a script by the launcher's own command, as two processes."""
    words = ("--cpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no")
    return trained(folder, LAUNCH, conversations(24), *words, "-m", "trl.scripts.sft")
