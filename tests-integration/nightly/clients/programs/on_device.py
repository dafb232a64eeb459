"""The libraries on an accelerator, or on the CPU where there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import adapters
import big_models
import diffusion
import preferences
import torch
import trainer
from diffusers import DDIMScheduler, DDPMPipeline
from transformers import BitsAndBytesConfig

if TYPE_CHECKING:
    from pathlib import Path

FOUND = torch.accelerator.current_accelerator(check_available=True)
DEVICE = "cpu" if FOUND is None else f"{FOUND.type}:0"
FIRST = "cpu" if FOUND is None else 0
"""The device as device maps and memory limits name it."""
OPTIONS: dict[str, Any] = {"use_cpu": FOUND is None}


def trained(folder: Path) -> dict[str, Any]:
    """Train and evaluate with transformers."""
    return trainer.trained(folder, eval_strategy="epoch", **OPTIONS)


def trained_fp16(folder: Path) -> dict[str, Any]:
    """Train with a loss scaler."""
    return trainer.trained(folder, eval_strategy="epoch", fp16=FOUND is not None, **OPTIONS)


def resumed(folder: Path) -> dict[str, Any]:
    """Train in bfloat16, and resume from a checkpoint."""
    options = {"bf16": True, "save_strategy": "steps", "save_steps": 3, **OPTIONS}
    whole = trainer.trained(folder / "whole", **options)
    again = trainer.trained(folder / "again", resume=str(folder / "whole" / "checkpoint-3"), **options)
    return {"whole": whole, "again": again}


def optimizer_in_8_bits(folder: Path) -> dict[str, Any]:
    """Train with an optimizer of bitsandbytes."""
    return trainer.trained(folder, optim="adamw_bnb_8bit", **OPTIONS)


def qlora(folder: Path) -> dict[str, Any]:
    """Train an adapter on a model in 4 bits, under the Trainer."""
    return adapters.qlora(folder, DEVICE, **OPTIONS)


def eight_bits(folder: Path) -> dict[str, Any]:
    """Load a model in 8 bits."""
    config = BitsAndBytesConfig(load_in_8bit=True)
    return big_models.loaded(folder, quantization_config=config, device_map={"": DEVICE})


def spread(folder: Path) -> dict[str, Any]:
    """Load a model onto the device, host memory and the disk."""
    memory = {FIRST: "150KB", "cpu": "200KB"}
    return big_models.loaded(
        folder, device_map="auto", max_memory=memory, offload_folder=str(folder / "offload")
    )


def grpo(folder: Path) -> dict[str, Any]:
    """Learn from rewards."""
    return preferences.grpo(folder, **OPTIONS)


def offloaded(folder: Path) -> dict[str, Any]:
    """Generate images with offloaded models, by the functions that diffusers calls."""
    return diffusion.offloaded(folder, DEVICE)


def pipelines(folder: Path) -> dict[str, Any]:
    """Generate images with pipelines that offload by themselves, which they do on accelerators only."""
    del folder
    images: dict[str, Any] = {}
    for kind in ("plain", "model", "sequential"):
        made = DDPMPipeline(unet=diffusion.unet(), scheduler=DDIMScheduler(num_train_timesteps=20))
        if FOUND is None or kind == "plain":
            made = made.to(DEVICE)
        elif kind == "model":
            made.enable_model_cpu_offload(device=DEVICE)
        else:
            made.enable_sequential_cpu_offload(device=DEVICE)
        generator = torch.Generator().manual_seed(0)
        result = made(batch_size=1, num_inference_steps=3, generator=generator, output_type="np").images
        images[kind] = torch.as_tensor(result)
    for kind in ("model", "sequential"):
        torch.testing.assert_close(images[kind], images["plain"], rtol=0, atol=1e-4)
    return images
