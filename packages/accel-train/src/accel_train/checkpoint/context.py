"""`CheckpointContext`: the objects that an `Accelerator` saves and loads; light to import."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import nn

from accel_ops.modules import extract_model_from_parallel
from accel_plugins import sharding
from accel_state.errors import SettingsError
from accel_state.files import any_path
from accel_state.remote import AnyPath
from accel_state.runtime import Runtime
from accel_train import checkpoint

if TYPE_CHECKING:
    from accel_plugins.fp8.recipe import Recipe
    from accel_plugins.kwargs import ProjectConfiguration
    from accel_plugins.sharding.state import StateForm
    from accel_plugins.strategy import PrecisionPolicy, Strategy
    from accel_train.accelerator.build import PreparedObjects
    from accel_train.checkpoint.agreement import Agreement
    from accel_train.checkpoint.save import Saving
    from accel_train.checkpoint.staging import HostStaging
    from accel_train.step import Synchronizer


@dataclass
class CheckpointContext:
    """The objects that an `Accelerator` saves and loads, and their folders.

    Args:
        save_hooks: Called as `hook(models, weights, folder)` before anything is written.
        load_hooks: Called as `hook(models, folder)` before anything is loaded.
    """

    runtime: Runtime
    project: ProjectConfiguration
    prepared: PreparedObjects
    synchronizer: Synchronizer
    strategy: Strategy
    precision: PrecisionPolicy
    recipe: Recipe | None = None
    custom: list[Any] = field(default_factory=list[Any])
    save_hooks: OrderedDict[int, Callable[..., None]] = field(default_factory=OrderedDict)
    load_hooks: OrderedDict[int, Callable[..., None]] = field(default_factory=OrderedDict)
    saving: Saving | None = None

    @property
    def rank(self) -> int:
        """Index of this process."""
        return self.runtime.topology.rank

    @property
    def is_automatic(self) -> bool:
        """Whether checkpoints are numbered."""
        return self.project.automatic_checkpoint_naming

    @property
    def numbered(self) -> AnyPath:
        """The folder of numbered checkpoints."""
        if self.project.project_dir is None:
            raise SettingsError(
                "ProjectConfiguration(automatic_checkpoint_naming=True) needs a project_dir: checkpoints go "
                "to <project_dir>/checkpoints."
            )
        return any_path(self.project.project_dir, "project_dir") / "checkpoints"

    @property
    def committer(self) -> int:
        """The rank that commits the folder in which this rank writes."""
        topology = self.runtime.topology
        return topology.rank - topology.local_rank if self.project.save_on_each_node else 0

    @property
    def commits(self) -> bool:
        """Whether this rank is the committer."""
        return self.rank == self.committer

    @property
    def form(self) -> StateForm:
        """The form in which models and optimizers are saved."""
        states = self.strategy.states
        return states.form() if states.is_sharded else sharding.state.StateForm.FULL

    @property
    def bare_models(self) -> list[nn.Module]:
        """The unwrapped models, which hooks get."""
        return [
            extract_model_from_parallel(model, keep_torch_compile=False) for model in self.prepared.models
        ]

    @cached_property
    def main(self) -> Agreement:
        """All-gather between the main threads of all ranks."""
        return checkpoint.agreement.make_all_gather(self.runtime, "main", in_main_thread=True)

    @cached_property
    def background(self) -> Agreement:
        """All-gather between the writer threads."""
        return checkpoint.agreement.make_all_gather(self.runtime, "writer", in_main_thread=False)

    def meet(self, operation: str) -> None:
        """Wait for all ranks where models are sharded: a gather that one rank begins alone ends processes."""
        if self.strategy.states.is_sharded:
            self.main.exchange(operation, None)

    @cached_property
    def staging(self) -> HostStaging:
        """Host memory for tensors that are written in the background."""
        return checkpoint.staging.HostStaging()

    def finish(self) -> None:
        """Wait for a save that is being written; raise its error."""
        saving, self.saving = self.saving, None
        if saving is not None:
            saving.finish()
