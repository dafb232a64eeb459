"""Compile the extension once per version of torch and of the sources, and keep it in the user's cache."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

SOURCES = Path(__file__).resolve().parent / "csrc"
MODULE = "simulated_device_c"


def library() -> Path:
    """The compiled library of this Python and torch, which may not exist yet. Does not import torch."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    version = Path(torch.origin).with_name("version.py").read_bytes()
    sources = b"".join(path.read_bytes() for path in sorted(SOURCES.iterdir()))
    digest = hashlib.sha256(version + sys.version.encode() + sources).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "accel-simulated-device" / digest / f"{MODULE}.so"


def why_not() -> str | None:
    """Why the device cannot be used here; None if it can."""
    if sys.platform != "linux":
        return f"the simulated device needs Linux, not {sys.platform}"
    if library().exists():
        return None
    missing = [name for name in (os.environ.get("CXX", "c++"), "ninja") if shutil.which(name) is None]
    return (
        f"the simulated device is compiled by {' and '.join(missing)}, which is missing" if missing else None
    )


def build() -> Path:
    """Compile the library unless the cache has it; takes a minute. Processes wait for each other.

    Raises:
        RuntimeError: The compiler failed; its output is in the message.
    """
    path = library()
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return path
        objects = path.parent / "objects"
        objects.mkdir(exist_ok=True)
        # A process of its own: torch's `load` also loads the library, and operators are registered once.
        environment = {name: value for name, value in os.environ.items() if name != "SIMULATED_DEVICE"}
        done = subprocess.run(
            [sys.executable, __file__, str(objects)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"The simulated device does not compile:\n{done.stdout}{done.stderr}")
        (objects / path.name).replace(path)
        shutil.rmtree(objects)
    return path


def load() -> ModuleType:
    """Load the library into this process."""
    spec = importlib.util.spec_from_file_location(MODULE, build())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile(objects: str) -> None:
    cpp_extension: Any = importlib.import_module("torch.utils.cpp_extension")
    cpp_extension.load(
        MODULE,
        [str(path) for path in sorted(SOURCES.glob("*.cpp"))],
        build_directory=objects,
        extra_cflags=["-O1", "-w"],
        with_cuda=False,
        is_python_module=False,
    )


if __name__ == "__main__":
    _compile(sys.argv[1])
