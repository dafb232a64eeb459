"""GPTQModel: a model is quantised on the CPU, its layers offloaded to the disk as they are done."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from small import text
from transformers import AutoTokenizer

from trainers.inputs import save_model, saved_weights

os.environ["GPTQMODEL_CPU_WORKERS"] = "2"  # it wants half of the cores, and two

if TYPE_CHECKING:
    from pathlib import Path


def quantize(folder: Path) -> dict[str, Any]:
    """Quantise to 4 bits, save, load and run."""
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    path = save_model(folder)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = GPTQModel.load(
        path,
        QuantizeConfig(
            bits=4, group_size=32, offload_to_disk=True, offload_to_disk_path=str(folder / "offload")
        ),
        device="cpu",
    )
    model.quantize([dict(tokenizer(text(index, 24))) for index in range(16)], batch_size=1)
    model.save(str(folder / "out"))
    loaded = GPTQModel.load(str(folder / "out"), device="cpu", backend=BACKEND.TORCH)
    with torch.no_grad():
        logits = loaded.model(torch.arange(3, 19)[None]).logits.float()
    return {"logits": logits, "weights": saved_weights(folder / "out")}
