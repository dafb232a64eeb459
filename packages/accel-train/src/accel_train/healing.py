"""State that a rejoining replica group gets from another one, besides models and optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accel_train.checkpoint.context import CheckpointContext

if TYPE_CHECKING:
    from accel_plugins.torchft.groups import ReplicaGroups


def share_state(replicas: ReplicaGroups, run: CheckpointContext, accelerator: Any) -> None:
    """Share schedulers, loss scaler, registered objects, step counters and loader positions between groups.

    Args:
        replicas: The groups of the strategy.
        run: The objects of the run.
        accelerator: Loads the last numbered checkpoint if a group finds no other group.
    """
    prepared = run.prepared

    def read() -> dict[str, Any]:
        return {
            "schedulers": [scheduler.state_dict() for scheduler in prepared.schedulers],
            "scaler": run.precision.state_dict(),
            "registered": [registered.state_dict() for registered in run.custom],
            "steps": [optimizer.num_steps for optimizer in prepared.optimizers],
            "loaders": [loader.state_dict() for loader in prepared.dataloaders],
            "iteration": run.project.iteration,
        }

    def restore(state: Mapping[str, Any], in_step: bool) -> Mapping[Any, dict[str, Any]]:
        for scheduler, own in zip(prepared.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(own)
        if state["scaler"]:
            run.precision.load_state_dict(state["scaler"])
        for registered, own in zip(run.custom, state["registered"], strict=True):
            registered.load_state_dict(own)
        for optimizer, steps in zip(prepared.optimizers, state["steps"], strict=True):
            optimizer.num_steps = steps + in_step
        run.project.iteration = state["iteration"]
        return dict(zip(prepared.dataloaders, state["loaders"], strict=True))

    def load_last() -> str | None:
        if not accelerator.has_checkpoint:
            return None
        accelerator.load_state()
        return str(run.numbered)

    replicas.share(read, restore, load_last)
