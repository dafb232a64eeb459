"""The directories of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_train.accelerator.facet import Facet

if TYPE_CHECKING:
    from pathlib import Path

    from accel_plugins.kwargs.project import ProjectConfiguration


class ProjectFacet(Facet):
    """Directories."""

    __slots__ = ()

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """Directories, and how checkpoints are named and kept."""
        return self._parts.project

    @property
    def project_dir(self) -> str | Path | None:
        """Directory of the project's files."""
        return self._parts.project.project_dir

    @property
    def logging_dir(self) -> str | Path | None:
        """Directory of the trackers' files."""
        return self._parts.project.logging_dir
