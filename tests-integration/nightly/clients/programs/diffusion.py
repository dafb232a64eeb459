"""diffusers: a training as its examples do it, and pipelines whose models are offloaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import ProjectConfiguration, set_seed
from diffusers import DDIMScheduler, DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from small import weights
from torch.nn.functional import mse_loss


def unet(channels: int = 1) -> UNet2DModel:
    """Make a small network."""
    torch.manual_seed(0)
    return UNet2DModel(
        sample_size=8,
        in_channels=channels,
        out_channels=channels,
        layers_per_block=1,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
    )


def run(folder: Path, *, steps: int, resume: str | None = None) -> dict[str, Any]:
    """Train as the example `train_unconditional.py` does, with hooks, trackers and an average of weights."""
    AcceleratorState._reset_state(reset_partial_state=True)  # `end_training` has ended the group
    project = ProjectConfiguration(project_dir=str(folder), logging_dir=str(folder / "logs"))
    accelerator = Accelerator(
        gradient_accumulation_steps=2, log_with="tensorboard", project_config=project, cpu=True
    )
    set_seed(0)
    model = unet()
    average = EMAModel(model.parameters(), decay=0.9, model_cls=UNet2DModel, model_config=model.config)

    def save_hook(models: list[Any], weights: list[Any], output_dir: str) -> None:
        if accelerator.is_main_process:
            average.save_pretrained(Path(output_dir) / "unet_ema")
            for model in models:
                model.save_pretrained(Path(output_dir) / "unet")
                weights.pop()

    def load_hook(models: list[Any], input_dir: str) -> None:
        loaded = EMAModel.from_pretrained(Path(input_dir) / "unet_ema", UNet2DModel)
        average.load_state_dict(loaded.state_dict())
        for _ in range(len(models)):
            one = models.pop()
            stored = UNet2DModel.from_pretrained(input_dir, subfolder="unet")
            one.register_to_config(**stored.config)
            one.load_state_dict(stored.state_dict())

    accelerator.register_save_state_pre_hook(save_hook)
    accelerator.register_load_state_pre_hook(load_hook)
    noise = DDPMScheduler(num_train_timesteps=20)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images = torch.rand(48, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader(images, batch_size=4)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=12)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    accelerator.init_trackers("training")
    done = 0
    if resume is not None:
        accelerator.load_state(resume)
        done = int(resume.rsplit("-", 1)[1])
    losses: list[float] = []
    for _ in range(2):
        for batch in accelerator.skip_first_batches(loader, 2 * done) if losses == [] else loader:
            generator = torch.Generator().manual_seed(done)
            noisy = torch.randn(batch.shape, generator=generator)
            times = torch.randint(0, 20, (len(batch),), generator=generator)
            with accelerator.accumulate(model):
                loss = mse_loss(model(noise.add_noise(batch, noisy, times), times).sample, noisy)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                average.step(model.parameters())
                done += 1
                accelerator.log({"loss": loss.item(), "lr": schedule.get_last_lr()[0]}, step=done)
                if done == 2:
                    accelerator.save_state(str(folder / f"checkpoint-{done}"))
            losses.append(accelerator.gather(loss.detach()).mean().item())
            if done >= steps:
                break
        if done >= steps:
            break
    accelerator.wait_for_everyone()
    model = accelerator.unwrap_model(model)
    pipeline = DDPMPipeline(unet=model, scheduler=noise)
    images = pipeline(
        batch_size=1, num_inference_steps=2, generator=torch.Generator().manual_seed(0), output_type="np"
    ).images
    accelerator.end_training()
    return {"losses": losses, "weights": weights(model), "images": torch.as_tensor(images)}


def training(folder: Path) -> dict[str, Any]:
    """Train; one process resumes, too: the second process group of a job fails on the reference."""
    whole = run(folder / "whole", steps=5)
    resumed: dict[str, Any] = {}
    if "WORLD_SIZE" not in os.environ:
        resumed = run(folder / "resumed", steps=5, resume=str(folder / "whole" / "checkpoint-2"))
        assert resumed["losses"] == whole["losses"][4:]
    ours = ("accel_manifest.json", "data_position_", "trackers.json")
    names = [path.name for path in (folder / "whole" / "checkpoint-2").iterdir()]
    stored = sorted(name for name in names if not name.startswith(ours))
    logs = sorted((folder / "whole" / "logs").rglob("events*"))
    return {"whole": whole, "resumed": resumed, "is_logged": bool(logs), "files": stored}


def offloaded(folder: Path, device: str = "cpu") -> dict[str, Any]:
    """Generate with a model that is wholly, and one whose parts are, offloaded."""
    del folder
    from accelerate import cpu_offload, cpu_offload_with_hook

    images = {}
    for kind in ("plain", "model", "sequential"):
        model = unet().to(device if kind == "plain" else "cpu")
        hook = None
        if kind == "model":
            model, hook = cpu_offload_with_hook(model, device)
        elif kind == "sequential":
            cpu_offload(model, device, offload_buffers=True)
        made = DDPMPipeline(unet=model, scheduler=DDIMScheduler(num_train_timesteps=20))
        generator = torch.Generator().manual_seed(0)
        result = made(batch_size=1, num_inference_steps=3, generator=generator, output_type="np").images
        images[kind] = torch.as_tensor(result)
        if hook is not None:
            hook.offload()
    for kind in ("model", "sequential"):
        torch.testing.assert_close(images[kind], images["plain"], rtol=0, atol=1e-6)
    return images
