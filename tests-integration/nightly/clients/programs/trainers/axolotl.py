"""axolotl: `axolotl train` with a file of options."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import yaml
from small import text

from trainers.inputs import conversations, save_model, saved_weights, training_log, write_once, write_rows

os.environ |= {"AXOLOTL_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1"}

if TYPE_CHECKING:
    from pathlib import Path


def trained(folder: Path, **options: Any) -> dict[str, Any]:
    """Train as the command does with a file of options."""
    from axolotl.cli.args import TrainerCliArgs
    from axolotl.cli.config import load_cfg
    from axolotl.cli.train import do_train

    config = {
        "base_model": save_model(folder),
        "sequence_len": 32,
        "dataset_prepared_path": str(folder / "prepared"),
        "output_dir": str(folder / "out"),
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "num_epochs": 1,
        "learning_rate": 1e-2,
        "optimizer": "adamw_torch",
        "lr_scheduler": "cosine",
        "logging_steps": 1,
        "save_steps": 4,
        "bf16": False,
        "fp16": False,
        "tf32": False,
        "gradient_checkpointing": False,
        "attn_implementation": "eager",
        "use_cpu": True,
        "seed": 0,
        "dataset_num_proc": 1,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
        "val_set_size": 0,
        **options,
    }
    path = folder / "config.yml"
    write_once(path, lambda: path.write_text(yaml.safe_dump(config)))
    do_train(load_cfg(str(path)), TrainerCliArgs())
    return {"log": training_log(folder / "out"), "weights": saved_weights(folder / "out")}


def sft(folder: Path) -> dict[str, Any]:
    """Fine-tune all weights on conversations."""
    rows = write_rows(folder / "rows.jsonl", conversations(24))
    return trained(folder, datasets=[{"path": rows, "ds_type": "json", "type": "chat_template"}])


def lora(folder: Path) -> dict[str, Any]:
    """Learn an adapter on plain text."""
    rows = write_rows(folder / "rows.jsonl", [{"text": text(index, 6 + index % 5)} for index in range(96)])
    return trained(
        folder,
        datasets=[{"path": rows, "ds_type": "json", "type": "completion"}],
        adapter="lora",
        lora_r=4,
        lora_alpha=8,
        lora_target_linear=True,
        lora_mlp_kernel=False,  # these are for CUDA
        lora_qkv_kernel=False,
        lora_o_kernel=False,
    )
