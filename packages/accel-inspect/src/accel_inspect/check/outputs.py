"""Keep the outputs of a trial apart from the user's: trackers are off, and files go to a temporary folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from accel_inspect.trial import RankTask, replace_names, wrap_names
from accel_state import environ
from accel_trackers.general import NullTracker

_TRACKERS_OFF = {
    "WANDB_MODE": "disabled",
    "SWANLAB_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "COMET_START_ONLINE": "0",
}
"""The switches of trackers that a script may use without the `Accelerator`."""


def keep_outputs(task: RankTask) -> RedirectedFiles:
    """Start no runs of trackers, and redirect files that the script writes, moves and removes to a folder.

    The folder is in that of the task, and has each file under its absolute path. What the script has written
    is found again; what it removes stays. Caches, hidden folders of the home directory, and files of the
    system and of the command are used as usual.
    """
    variables, folder = environ.read(), Path(task.folder).absolute() / f"{task.run}-files"
    temporary = folder / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    tempfile.tempdir = str(temporary)
    tracking = {"MLFLOW_TRACKING_URI": (folder / "mlflow").as_uri()}
    environ.publish({**_TRACKERS_OFF, **tracking, "TMPDIR": str(temporary)})
    replace_names(
        "accel_trackers.session.TrackerSession",
        _start_tracker=lambda _self, chosen, *_: NullTracker(getattr(chosen, "name", chosen)),
    )
    caches = [
        path for name, path in variables.items() if "CACHE" in name or name in {"HF_HOME", "TORCH_HOME"}
    ]
    files = RedirectedFiles(folder, (folder.parent, *map(Path, (*caches, "/dev", "/proc", "/sys"))))
    for names, *redirections in (
        ("stat lstat access chdir readlink", files.read),
        ("listdir scandir", files.listed),
        ("remove unlink rmdir", files.emptied),
        ("chmod utime truncate", files.changed),
        ("rename replace", files.changed, files.written),
        ("mkdir", files.created),
        ("symlink", unchanged, files.written),
    ):
        for name in names.split():
            redirect("os", name, *redirections)
    redirect("shutil", "rmtree", files.emptied)

    def open_file(real: Any, file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        return real(files.opened(file, mode), mode, *args, **options)

    def open_descriptor(real: Any, path: Any, flags: int, *args: Any, **options: Any) -> Any:
        if options.get("dir_fd") is None:
            modes = {os.O_WRONLY: "+", os.O_RDWR: "+", os.O_CREAT: "+", os.O_EXCL: "x", os.O_TRUNC: "w"}
            path = files.opened(path, [mode for flag, mode in modes.items() if flags & flag])
        return real(path, flags, *args, **options)

    for module in ("builtins", "io"):
        wrap_names(module, open=open_file)
    wrap_names("os", open=open_descriptor)
    return files


def redirect(module: str, name: str, *redirections: Callable[[Any], Any]) -> None:
    """Replace the first arguments of a function by other paths."""

    def call(real: Any, *args: Any, **options: Any) -> Any:
        if options.get("dir_fd") is None:
            paths = [redirected(path) for redirected, path in zip(redirections, args, strict=False)]
            args = (*paths, *args[len(paths) :])
        return real(*args, **options)

    wrap_names(module, **{name: call})


def unchanged(argument: Any) -> Any:
    """Return an argument that is no path."""
    return argument


class RedirectedFiles:
    """The paths that functions get in place of the user's: those of copies, once the script has written."""

    def __init__(self, folder: Path, excluded: Sequence[Path]) -> None:
        self._folder, self._excluded = folder, excluded
        self._home = Path(os.path.expanduser("~"))  # noqa: PTH111 - there may be none
        self._lstat = os.lstat  # not the redirected one

    def read(self, path: Any) -> Any:
        copy = self._copy_of(path)
        return path if copy is None or not self._exists(copy) else copy

    def listed(self, path: Any) -> Any:
        return path if isinstance(path, int) or self._exists(path) else self.read(path)

    def created(self, path: Any) -> Any:
        return path if self._exists(path) else self.written(path)

    def written(self, path: Any) -> Any:
        copy = self._copy_of(path)
        if copy is None or not self._exists(self.read(Path(os.fsdecode(path)).absolute().parent)):
            return path  # with the error of a folder that does not exist
        copy.parent.mkdir(parents=True, exist_ok=True)
        return copy

    def changed(self, path: Any, *, empty: bool = False) -> Any:
        """Return a copy that has the contents so far, unless it is to be `empty`."""
        copy = self.written(path)
        if copy is not path and self._exists(path) and not self._exists(copy):
            if Path(os.fsdecode(path)).is_dir():
                copy.mkdir() if empty else shutil.copytree(path, copy)
            else:
                copy.touch() if empty else shutil.copy2(path, copy)
        return copy

    def emptied(self, path: Any) -> Any:
        return self.changed(path, empty=True)

    def opened(self, path: Any, modes: Collection[str]) -> Any:
        """Return the path of a file that is opened in the modes of `open`."""
        if not {*modes} & {*"wax+"}:
            return self.read(path)
        return self.created(path) if "x" in modes else self.changed(path, empty="w" in modes)

    def _copy_of(self, path: Any) -> Path | None:
        if not isinstance(path, (str, bytes, os.PathLike)):
            return None  # a descriptor
        absolute = Path(os.path.abspath(os.fsdecode(path)))  # noqa: PTH100 - links are the user's
        is_hidden = absolute.is_relative_to(self._home) and str(absolute.relative_to(self._home))[0] == "."
        if is_hidden or any(map(absolute.is_relative_to, self._excluded)):
            return None
        return self._folder / absolute.relative_to(absolute.anchor)

    def _exists(self, path: Any) -> bool:
        try:
            self._lstat(path)
        except OSError:
            return False
        return True
