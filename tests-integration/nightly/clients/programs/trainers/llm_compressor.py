"""llm-compressor: a model is quantised in one shot, offloaded as compressed-tensors does it, and saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from small import text
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainers.inputs import save_model, saved_weights

if TYPE_CHECKING:
    from pathlib import Path


def gptq(folder: Path) -> dict[str, Any]:
    """Quantise to 4 bits with data to calibrate on; a part of the model lies on the disk."""
    path = save_model(folder, width=128)
    kept = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
    model = AutoModelForCausalLM.from_pretrained(
        path,
        device_map={**dict.fromkeys(kept, "cpu"), "model.layers.1": "disk"},
        offload_folder=str(folder / "offload"),
    )
    tokenizer = AutoTokenizer.from_pretrained(path)
    rows = Dataset.from_list([{"text": text(index, 16)} for index in range(8)])
    oneshot(
        model=model,
        tokenizer=tokenizer,
        dataset=rows,
        recipe=GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"], dampening_frac=0.1),
        max_seq_length=16,
        num_calibration_samples=8,
        shuffle_calibration_samples=False,
        output_dir=str(folder / "out"),
    )
    ids = torch.arange(3, 19)[None]
    with torch.no_grad():
        logits = model(ids).logits.float()
    return {"logits": logits, "weights": saved_weights(folder / "out")}
