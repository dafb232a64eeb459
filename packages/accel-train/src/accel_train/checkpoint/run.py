"""The record that saving and loading work with: one run, on one rank."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from accel_ops.modules import extract_model_from_parallel
from accel_state.errors import SettingsError
from accel_train.checkpoint import layout
from accel_train.checkpoint.staging import HostStaging
from accel_train.checkpoint.store_gather import agreement_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn

    from accel_plugins.kwargs.run import ProjectConfiguration
    from accel_plugins.recipe import Recipe
    from accel_plugins.roles import PrecisionPolicy
    from accel_plugins.strategy import Strategy
    from accel_state.runtime import Runtime
    from accel_train.checkpoint.store_gather import Agreement
    from accel_train.checkpoint.writer import Saving
    from accel_train.parts import Prepared
    from accel_train.sync import Synchronizer


@dataclass
class Run:
    """The objects that one `Accelerator` saves and loads, and their folders.

    Args:
        save_hooks: Called as `hook(models, weights, folder)` before anything is written.
        load_hooks: Called as `hook(models, folder)` before anything is loaded.
    """

    runtime: Runtime
    project: ProjectConfiguration
    prepared: Prepared
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
    def numbered(self) -> Path:
        """The folder of numbered checkpoints."""
        if self.project.project_dir is None:
            raise SettingsError(
                "ProjectConfiguration(automatic_checkpoint_naming=True) needs a project_dir: checkpoints go "
                "to <project_dir>/checkpoints."
            )
        return layout.numbered_folders(self.project.project_dir)

    @property
    def committer(self) -> int:
        """The rank that commits the folder in which this one writes."""
        topology = self.runtime.topology
        return topology.rank - topology.local_rank if self.project.save_on_each_node else 0

    @property
    def commits(self) -> bool:
        """Whether this rank is the committer."""
        return self.rank == self.committer

    @property
    def bare_models(self) -> list[nn.Module]:
        """The unwrapped models, as hooks get them."""
        return [extract_model_from_parallel(one, keep_torch_compile=False) for one in self.prepared.models]

    @cached_property
    def main(self) -> Agreement:
        """All-gather between the main threads of all ranks."""
        return agreement_of(self.runtime, "main", in_main_thread=True)

    @cached_property
    def background(self) -> Agreement:
        """All-gather between the writer threads."""
        return agreement_of(self.runtime, "writer", in_main_thread=False)

    @cached_property
    def staging(self) -> HostStaging:
        """Host memory for tensors that are written in the background."""
        return HostStaging()

    def recipe_state(self) -> dict[str, Any]:
        """Return the state that the precision recipe needs to resume; empty if it has none."""
        read = None if self.recipe is None else self.recipe.state_dict
        return {} if read is None else read()

    def finish(self) -> None:
        """Wait until no save is being written; raise its error."""
        saving, self.saving = self.saving, None
        if saving is not None:
            saving.finish()
