"""Aim: a repository on this machine or a server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from accel_trackers.general import GeneralTracker, import_vendor, on_main_process
from accel_trackers.values import join_keys, separate_vectors, to_images, to_plain, warn_skipped


class AimTracker(GeneralTracker):
    """Log to a run in an Aim repository, which is written before a call returns.

    Args:
        run_name: Name of the run.
        logging_dir: The repository; created if absent.
        **kwargs: More arguments of `aim.Run`.
    """

    name = "aim"
    requires_logging_directory = True
    resumes_with = ("writer.hash", "run_hash", {"force_resume": True})

    @on_main_process
    def __init__(
        self, run_name: str, logging_dir: str | os.PathLike[str] | None = ".", **kwargs: Any
    ) -> None:
        super().__init__()
        self.run_name = run_name
        self._aim = import_vendor(self.name)
        self._pil = import_vendor(self.name, "PIL.Image")
        aim_object = import_vendor(self.name, "aim.storage.object").CustomObject
        self._kinds = (bool, int, float, list, tuple, aim_object)
        repo = None if logging_dir is None else str(logging_dir)
        self.writer: Any = self._aim.Run(**{"repo": repo, **kwargs})
        self.writer.name = run_name

    tracker = property(attrgetter("writer"))

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters as `run["hparams"]`."""
        self.writer["hparams"] = to_plain(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers, strings and objects of Aim; tensors with several elements as distributions."""
        scalars, vectors = separate_vectors(join_keys(values))
        for name, value in scalars.items():
            tracked = self._aim.Text(value) if isinstance(value, str) else value
            if isinstance(tracked, self._kinds):
                self.writer.track(tracked, name=name, step=step, **kwargs)
            else:
                warn_skipped(self.name, name, value)
        self._log_vectors(vectors, step)

    @on_main_process
    def log_images(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Log images; see `GeneralTracker.log_images`.

        `kwargs` are more arguments of `aim.Image` under `"aim_image"` and of `run.track` under `"track"`.
        """
        dataformats = options.pop("dataformats", None)
        to_library = kwargs or {}
        for name, value in values.items():
            images = [
                self._aim.Image(
                    self._pil.fromarray(image.squeeze(-1) if image.shape[-1] == 1 else image),
                    **{**to_library.get("aim_image", {}), **options},
                )
                for image in to_images(name, value, dataformats)
            ]
            self.writer.track(images, name=name, step=step, **to_library.get("track", {}))

    def _log_histograms(self, values: Mapping[str, Any], step: int | None, options: dict[str, Any]) -> None:
        for name, value in values.items():
            self.writer.track(self._aim.Distribution(value, **options), name=name, step=step)

    def _log_text(self, texts: Mapping[str, str], step: int | None, options: dict[str, Any]) -> None:
        for name, text in texts.items():
            self.writer.track(self._aim.Text(text), name=name, step=step, **options)

    @on_main_process
    def finish(self) -> None:
        self.writer.close()
