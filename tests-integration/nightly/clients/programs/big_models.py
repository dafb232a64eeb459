"""Models that are loaded onto several places, and in 8 and 4 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from small import language_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = torch.arange(3, 15).reshape(2, 6)


def loaded(folder: Path, **options: Any) -> dict[str, Any]:
    """Save a model, load it, let it write; return logits, tokens and the map."""
    source = folder / "model"
    if not source.exists():
        language_model(layers=4, width=64).save_pretrained(source, max_shard_size="100KB")
    model = AutoModelForCausalLM.from_pretrained(source, **options).eval()
    with torch.no_grad():
        logits = model(PROMPT).logits.float()
    tokens = model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=8, do_sample=False)
    placed = {name: str(device) for name, device in getattr(model, "hf_device_map", {}).items()}
    return {"logits": logits, "tokens": tokens, "map": placed}


def device_maps(folder: Path) -> dict[str, Any]:
    """Load with the maps that are made, and with one that puts most on the disk."""
    plain = loaded(folder)
    disk = {"cpu": "200KB"}
    runs = {
        "auto": loaded(folder, device_map="auto"),
        "balanced": loaded(folder, device_map="balanced", max_memory={"cpu": "1GB"}),
        "sequential": loaded(folder, device_map="sequential", max_memory={"cpu": "1GB"}),
        "disk": loaded(folder, device_map="auto", max_memory=disk, offload_folder=str(folder / "offload")),
    }
    for run in runs.values():
        torch.testing.assert_close(run["logits"], plain["logits"], rtol=0, atol=1e-6)
        assert torch.equal(run["tokens"], plain["tokens"])
    assert "disk" in runs["disk"]["map"].values()
    return runs


def eight_bits(folder: Path) -> dict[str, Any]:
    """Load in 8 bits."""
    return loaded(folder, quantization_config=BitsAndBytesConfig(load_in_8bit=True), device_map={"": "cpu"})


def four_bits(folder: Path) -> dict[str, Any]:
    """Load in 4 bits, of both types."""
    return {
        kind: loaded(
            folder,
            quantization_config=BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type=kind,
                bnb_4bit_compute_dtype=torch.float32,
                bnb_4bit_use_double_quant=kind == "nf4",
            ),
            device_map={"": "cpu"},
        )
        for kind in ("nf4", "fp4")
    }
