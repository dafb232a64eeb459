"""DiffSynth-Studio: its loop of training, on a small module of ours in place of a pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from diffsynth.diffusion.logger import ModelLogger
from diffsynth.diffusion.runner import launch_training_task
from diffsynth.diffusion.training_module import DiffusionTrainingModule

from trainers.inputs import saved_weights

if TYPE_CHECKING:
    from pathlib import Path


class Rows(torch.utils.data.Dataset[Any]):
    """Noise and what it should become; more than one process gets."""

    load_from_cache = False

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(4, generator=torch.Generator().manual_seed(index))


class Denoiser(DiffusionTrainingModule):
    """A small network."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
        self.losses: list[float] = []

    def trainable_modules(self) -> Any:
        """What the optimizer gets."""
        return self.network.parameters()

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        """The loss of a sample."""
        loss = (self.network(data) - data.flip(0)).square().mean()
        self.losses.append(loss.item())
        return loss


def train(folder: Path) -> dict[str, Any]:
    """Train two epochs, and save."""
    torch.manual_seed(0)
    model = Denoiser()
    launch_training_task(
        Accelerator(gradient_accumulation_steps=2, cpu=True),
        Rows(),
        model,
        ModelLogger(str(folder)),
        learning_rate=1e-2,
        num_workers=0,
        num_epochs=2,
    )
    return {"losses": model.losses, "weights": saved_weights(folder)}
