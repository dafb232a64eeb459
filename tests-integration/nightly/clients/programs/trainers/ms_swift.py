"""ms-swift: `swift sft` and `swift rlhf`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from small import text
from swift.pipelines import rlhf_main, sft_main

from trainers.inputs import conversations, save_model, saved_weights, training_log, write_rows

if TYPE_CHECKING:
    from pathlib import Path


def trained(main: Any, folder: Path, rows: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    """Train as the command does with these words."""
    options = {
        "model": save_model(folder),
        "model_type": "llama",
        "template": "dummy",
        "dataset": write_rows(folder / "rows.jsonl", rows),
        "output_dir": str(folder / "out"),
        "add_version": "false",
        "torch_dtype": "float32",
        "tuner_type": "full",
        "max_length": 32,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "max_steps": 4,
        "logging_steps": 1,
        "save_steps": 4,
        "report_to": "none",
        "use_cpu": "true",
        "fp16": "false",
        "bf16": "false",
        "seed": 0,
        "dataloader_num_workers": 0,
        "dataset_num_proc": 1,
        "split_dataset_ratio": 0,
        "attn_impl": "eager",
        "gradient_checkpointing": "false",
        **options,
    }
    main([word for key, value in options.items() for word in (f"--{key}", str(value))])
    (checkpoint,) = (folder / "out").glob("checkpoint-*")
    return {"log": training_log(folder / "out"), "weights": saved_weights(checkpoint)}


def sft(folder: Path) -> dict[str, Any]:
    """Fine-tune all weights on conversations."""
    return trained(sft_main, folder, conversations(24))


def lora(folder: Path) -> dict[str, Any]:
    """Learn an adapter."""
    return trained(
        sft_main, folder, conversations(24), tuner_type="lora", lora_rank=4, target_modules="all-linear"
    )


def dpo(folder: Path) -> dict[str, Any]:
    """Learn from preferences."""
    rows = [{**row, "rejected_response": text(200 + index, 6)} for index, row in enumerate(conversations(24))]
    return trained(rlhf_main, folder, rows, rlhf_type="dpo")
