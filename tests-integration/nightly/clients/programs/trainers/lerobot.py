"""lerobot: `lerobot-train` of a policy on episodes without cameras."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lerobot.configs.default import DatasetConfig
from lerobot.configs.train import TrainPipelineConfig
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.policies.act.configuration_act import ACTConfig
from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
from lerobot.scripts import lerobot_train

from trainers.inputs import saved_weights, write_once

if TYPE_CHECKING:
    from pathlib import Path

INPUTS = {"observation.state": FeatureType.STATE, "observation.environment_state": FeatureType.ENV}
OUTPUTS = {"action": FeatureType.ACTION}


def record(root: Path) -> None:
    """Write three episodes, as a robot records them."""
    features = {
        key: {"dtype": "float32", "shape": (4,), "names": list("abcd")} for key in (*INPUTS, *OUTPUTS)
    }
    data = LeRobotDataset.create("own/episodes", fps=10, features=features, root=root, use_videos=False)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for _ in range(12):
            values = {key: torch.randn(4, generator=generator).numpy() for key in features}
            data.add_frame({**values, "task": "move"})
        data.save_episode()
    data.finalize()


def trained(folder: Path, policy: Any) -> dict[str, Any]:
    """Train as the command does; return the losses of the first rank's batches, and the weights."""
    root = write_once(folder / "episodes", lambda: record(folder / "episodes"))
    losses: list[float] = []
    update = lerobot_train.update_policy

    def noting(*arguments: Any, **options: Any) -> Any:
        metrics, output = update(*arguments, **options)
        losses.append(metrics.loss.val)
        return metrics, output

    lerobot_train.update_policy = noting
    config = TrainPipelineConfig(  # the optimizer and its schedule are those of the policy
        dataset=DatasetConfig(repo_id="own/episodes", root=root),
        policy=policy,
        output_dir=folder / "out",
        num_workers=0,
        batch_size=2,
        steps=4,
        log_freq=1,
        save_freq=4,
        seed=0,
    )
    lerobot_train.train(config)
    checkpoint = folder / "out" / "checkpoints" / "last" / "pretrained_model"
    return {"losses": losses, "weights": saved_weights(checkpoint)}


def of_four(features: dict[str, FeatureType]) -> dict[str, PolicyFeature]:
    """Say that each is a vector of four numbers."""
    return {key: PolicyFeature(type=kind, shape=(4,)) for key, kind in features.items()}


def act(folder: Path) -> dict[str, Any]:
    """Train a policy that predicts chunks of actions."""
    policy = ACTConfig(
        input_features=of_four(INPUTS), output_features=of_four(OUTPUTS), device="cpu", push_to_hub=False,
        chunk_size=4, n_action_steps=4, dim_model=16, n_heads=2, dim_feedforward=32, n_encoder_layers=1,
        n_vae_encoder_layers=1, latent_dim=4, optimizer_lr=1e-3, dropout=0.0,
    )  # fmt: skip
    return trained(folder, policy)


def diffusion(folder: Path) -> dict[str, Any]:
    """Train a policy that denoises actions; its schedule moves with each step."""
    policy = DiffusionConfig(
        input_features=of_four(INPUTS), output_features=of_four(OUTPUTS), device="cpu", push_to_hub=False,
        horizon=8, n_action_steps=4, down_dims=(8, 16), n_groups=4, kernel_size=3, num_train_timesteps=10,
        diffusion_step_embed_dim=8, drop_n_last_frames=4, optimizer_lr=1e-3,
    )  # fmt: skip
    return trained(folder, policy)
