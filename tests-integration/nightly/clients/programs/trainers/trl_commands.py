"""trl: its command, which starts its script by `accelerate launch`."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

from trainers.inputs import conversations, save_model, saved_weights, training_log, write_rows

if TYPE_CHECKING:
    from pathlib import Path

TRL = ("-c", "from trl.cli import main; main()")


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


def sft(folder: Path) -> dict[str, Any]:
    """Fine-tune all weights on conversations."""
    return trained(folder, TRL, conversations(24), "sft")
