"""Directories of a project."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accel_plugins.kwargs.base import expect, expect_flags, is_count

if TYPE_CHECKING:
    from pathlib import Path


@dataclass
class ProjectConfiguration:
    """Directories of checkpoints and logs, and the names and number of checkpoints.

    Args:
        project_dir: Directory of the project's files.
        logging_dir: Directory of the trackers' files; `project_dir` if `None`.
        automatic_checkpoint_naming: Whether checkpoints are called
            `<project_dir>/checkpoints/checkpoint_<iteration>`.
        total_limit: Number of those to keep; all if `None`.
        iteration: Number of the next checkpoint.
        save_on_each_node: Whether each node's local main process writes the files of the main process, for
            nodes without a shared file system.

    Raises:
        SettingsError: A field has another type or is out of its range.

    Example:
        >>> ProjectConfiguration(project_dir="runs/7").logging_dir
        'runs/7'
    """

    project_dir: str | Path | None = None
    logging_dir: str | Path | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        for name in ("project_dir", "logging_dir"):
            expect(self, name, "a path or None", lambda value: isinstance(value, str | os.PathLike | None))
        expect_flags(self, "automatic_checkpoint_naming", "save_on_each_node")
        wanted = "a whole number above 0, or None"
        expect(self, "total_limit", wanted, lambda value: value is None or is_count(value, least=1))
        expect(self, "iteration", "a whole number of at least 0", lambda value: is_count(value, least=0))
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | Path | None = None) -> None:
        """Set `project_dir`, and `logging_dir` with it unless that is set.

        Args:
            project_dir: Directory of the project's files.
        """
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir
