"""LLaMA-Factory: `llamafactory-cli train` of each stage that it has."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from llamafactory.train.tuner import run_exp
from small import text

from trainers.inputs import conversations, save_model, saved_weights, training_log, write_once, write_rows

if TYPE_CHECKING:
    from pathlib import Path


def trained(
    folder: Path, rows: list[dict[str, Any]], about_data: dict[str, Any], **options: Any
) -> dict[str, Any]:
    """Train as the command does with a file of options."""
    model = save_model(folder)
    write_rows(folder / "data" / "rows.jsonl", rows)
    table = folder / "data" / "dataset_info.json"
    write_once(
        table, lambda: table.write_text(json.dumps({"rows": {"file_name": "rows.jsonl", **about_data}}))
    )
    run_exp(
        {
            "model_name_or_path": model,
            "dataset_dir": str(folder / "data"),
            "dataset": "rows",
            "template": "empty",
            "cutoff_len": 32,
            "output_dir": str(folder / "out"),
            "overwrite_cache": True,
            "preprocessing_num_workers": 1,
            "dataloader_num_workers": 0,
            "do_train": True,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2,
            "max_steps": 4,
            "logging_steps": 1,
            "save_strategy": "steps",
            "save_steps": 4,
            "report_to": "none",
            "use_cpu": True,
            "seed": 0,
            **options,
        }
    )
    return {"log": training_log(folder / "out"), "weights": saved_weights(folder / "out")}


def sft(folder: Path) -> dict[str, Any]:
    """Fine-tune all weights on conversations."""
    about = {
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": {
            "role_tag": "role",
            "content_tag": "content",
            "user_tag": "user",
            "assistant_tag": "assistant",
        },
    }
    return trained(folder, conversations(24), about, stage="sft", finetuning_type="full")


def lora(folder: Path) -> dict[str, Any]:
    """Learn an adapter on plain text."""
    rows = [{"text": text(index, 6 + index % 5)} for index in range(24)]
    about = {"columns": {"prompt": "text"}}
    return trained(folder, rows, about, stage="pt", finetuning_type="lora", lora_target="all", lora_rank=4)


def dpo(folder: Path) -> dict[str, Any]:
    """Learn from preferences."""
    rows = [
        {"instruction": text(index, 4), "chosen": text(100 + index, 5), "rejected": text(200 + index, 6)}
        for index in range(24)
    ]
    about = {
        "ranking": True,
        "columns": {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"},
    }
    return trained(
        folder, rows, about, stage="dpo", finetuning_type="full", pref_beta=0.1, pref_loss="sigmoid"
    )
