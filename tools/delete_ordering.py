"""Delete each statement that orders asynchronous work, one at a time, and show which test fails without it.

A statement whose removal no test notices is redundant, or lacks a test. Deleted are the statements of the
modules in `TESTS` that call one of `ORDERING`. Nothing is changed on the disk: every deletion happens in a
child of one warm process, which imports the module from the changed text.

    uv run tools/delete_ordering.py
    uv run tools/delete_ordering.py device_transfer.py
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.util
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import Phase, settings

from handle_signals import handle_signals

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
ORDERING = {"wait_event", "wait_stream", "synchronize", "record", "record_stream", "arrived"}
TESTS: dict[str, tuple[str, ...]] = {
    "packages/accel-train/src/accel_train/data/device_transfer.py": (
        "packages/accel-train/tests/test_side_stream.py",
    ),
    "packages/accel-train/src/accel_train/data/scatter.py": (
        "packages/accel-train/tests/test_dispatcher_staging.py",
    ),
    "packages/accel-bigmodel/src/accel_bigmodel/block_stream.py": (
        "packages/accel-bigmodel/tests/test_block_stream.py",
    ),
    "packages/accel-bigmodel/src/accel_bigmodel/host_to_device.py": (
        "packages/accel-bigmodel/tests/test_block_stream.py",
    ),
    "packages/accel-cli/src/accel_cli/commands/selftest/speed.py": (
        "packages/accel-cli/tests/test_speed.py",
    ),
    "packages/accel-trackers/src/accel_trackers/copies.py": (
        "packages/accel-trackers/tests/test_device_values.py",
    ),
    "packages/accel-train/src/accel_train/checkpoint/staging.py": (
        "packages/accel-train/tests/test_checkpoint_staging.py",
    ),
}
"""Module to the tests that hold its ordering; they run in one process."""

WARM = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "hypothesis",
    "_hypothesis_globals",
    "numpy",
    "safetensors",
)
"""What takes long to import and is imported once."""

LIMIT = 300
"""Seconds after which a child that waits for ever is ended; not a measure of speed."""

FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Deletion:
    """A statement to delete: its module's path from the root, its lines, its text."""

    path: str
    first: int
    last: int
    text: str

    @property
    def module(self) -> str:
        """The module's dotted name."""
        return ".".join(Path(self.path.partition("/src/")[2]).with_suffix("").parts)

    def source(self) -> str:
        """The module's text without the statement."""
        lines = (ROOT / self.path).read_text().splitlines()
        line = lines[self.first - 1]
        indent = line[: len(line) - len(line.lstrip())]
        removed = [f"{indent}pass", *[""] * (self.last - self.first)]
        return "\n".join([*lines[: self.first - 1], *removed, *lines[self.last :]]) + "\n"


def main(argv: Sequence[str]) -> int:
    """Run every deletion and print the table; return 1 if one survives, or if the tests fail without any."""
    handle_signals()
    os.chdir(ROOT)
    if missing := sorted(set(users()) - set(TESTS)):
        print(f"no tests are named in TESTS for {', '.join(missing)}")
        return 1
    chosen = {path: tests for path, tests in TESTS.items() if not argv or any(word in path for word in argv)}
    for name in WARM:
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
    survived = 0
    for path, tests in chosen.items():
        if failed := run(None, tests):
            print(f"{path}: its tests fail as it is: {failed}")
            return 1
        found = list(deletions(path, (ROOT / path).read_text()))
        for deletion in found:
            failed = run(deletion, tests)
            survived += failed is None
            name = Path(deletion.path).name
            print(f"{name}:{deletion.first:<4} {deletion.text:<60} {failed or 'SURVIVES'}", flush=True)
    print(f"{survived} deletions that no test notices")
    return int(survived > 0)


def users() -> Iterator[str]:
    """The modules that order work through the seam."""
    for path in sorted(ROOT.glob("packages/*/src/**/*.py")):
        text = path.read_text()
        name = path.relative_to(ROOT).as_posix()
        if "accel_state.streams" in text and "accel_state/testing" not in name and any(deletions(name, text)):
            yield name


def deletions(path: str, text: str) -> Iterator[Deletion]:
    """The ordering statements of a module.

    Args:
        path: From the root.
        text: The module's text.

    Example:
        >>> [found.text for found in deletions("a.py", "done = side.new_event(); side.wait_event(done)")]
        ['side.wait_event(done)']
    """
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name))) if (
                name in ORDERING
            ):
                assert node.end_lineno is not None
                yield Deletion(path, node.lineno, node.end_lineno, ast.unparse(node))
            case _:
                pass


def run(deletion: Deletion | None, tests: Sequence[str]) -> str | None:
    """Run tests in a child without a statement; return the test that fails, or None if all pass."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        child = os.fork()
        if child == 0:
            try:
                os._exit(test(deletion, tests, folder, log))
            except BaseException:  # noqa: BLE001 - told by the parent, which must not run on in the child
                log.write_text(traceback.format_exc())
                os._exit(70)
        status = wait_for(child)
        output = log.read_text(errors="replace")
    if status == 0:
        return None
    found = FAILED.search(output)
    if found is not None:
        return found[1].rpartition("/")[2]
    return "it waits for ever" if status is None else f"exit status {status}: {output[-2000:]}"


def wait_for(child: int) -> int | None:
    """Wait for a child; end it and return None if it takes too long."""
    until = time.monotonic() + LIMIT
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def test(deletion: Deletion | None, tests: Sequence[str], folder: str, log: Path) -> int:
    """Run in the child: import the changed module, and run pytest with its output in a file."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = folder
    settings.register_profile("find", deadline=None, phases=[Phase.explicit, Phase.generate])
    settings.load_profile("find")  # a failure need not be made small
    if deletion is not None:
        sys.meta_path.insert(0, Changed(deletion.module, deletion.source()))
    options = [
        "-x",
        "-q",
        "--assert=plain",
        "--color=no",
        "--tb=no",
        "-p",
        "no:cacheprovider",
        "--hypothesis-seed=0",
    ]
    status = int(pytest.main([*options, *tests]))
    sys.stdout.flush()
    return status


class Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import one module from another text.

    Args:
        name: Its dotted name.
        text: What to run.
    """

    def __init__(self, name: str, text: str) -> None:
        self._name = name
        self._text = text

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Claim the module."""
        del path, target
        return importlib.util.spec_from_loader(fullname, self) if fullname == self._name else None

    def exec_module(self, module: ModuleType) -> None:
        """Run the text."""
        exec(compile(self._text, f"<changed {self._name}>", "exec"), module.__dict__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
