"""Delete each statement that orders asynchronous work, one at a time, and show which test fails.

A statement whose absence no test notices is redundant, or lacks a test. The tests run on the simulated
accelerator (`tests-integration/harness/simulated`), which reads NaN where a copy is not waited for, and
reports what nothing orders. Nothing is changed on the disk: a child of one warm process imports each change.

    uv run tools/delete_ordering.py
    uv run tools/delete_ordering.py transfer.py
"""

from __future__ import annotations

import ast
import faulthandler
import importlib
import importlib.abc
import importlib.util
import os
import re
import sys
import tempfile
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from handle_signals import handle_signals

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
ORDERING = {"wait_event", "wait_stream", "synchronize", "record", "record_stream", "arrived", "wait"}
TESTS: dict[str, tuple[str, ...]] = {
    "packages/accel-train/src/accel_train/data/transfer.py": ("accel-train/tests/test_side_stream.py",),
    "packages/accel-bigmodel/src/accel_bigmodel/offloaded_block.py": (
        "accel-bigmodel/tests/test_block_stream.py",
    ),
    "packages/accel-bigmodel/src/accel_bigmodel/host_to_device.py": (
        "accel-bigmodel/tests/test_block_stream.py",
    ),
    "packages/accel-cli/src/accel_cli/commands/selftest_checks.py": (
        "accel-cli/tests/test_selftest_checks.py",
    ),
    "packages/accel-plugins/src/accel_plugins/optimizers/host_adamw.py": (
        "accel-plugins/tests/test_host_adamw.py",
    ),
    "packages/accel-trackers/src/accel_trackers/session.py": ("accel-trackers/tests/test_session.py",),
}
"""Modules that order work, and the files in `packages` whose tests marked `gpu` hold it."""

EQUIVALENT = {
    (
        "session.py",
        "event.synchronize()",
    ): "each event has been asked before, which lets its copies run there",
}
"""File and statement to the reason why no test can notice that it is missing."""

FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


def main(argv: Sequence[str]) -> int:
    """Delete every statement and print the table; return 1 if no test notices one."""
    handle_signals()
    os.chdir(ROOT)
    if "SIMULATED_DEVICE" not in os.environ:
        _on_simulated_device(argv)
    if missing := sorted(set(_users()) - set(TESTS)):
        print(f"no tests are named in TESTS for {', '.join(missing)}")
        return 1
    chosen = {path: tests for path, tests in TESTS.items() if not argv or any(word in path for word in argv)}
    for name in ("torch", "torch._dynamo", "torch.distributed", "hypothesis", "numpy", "safetensors"):
        importlib.import_module(name)  # once, and not in every child
    survivors, unneeded = 0, {key for key in EQUIVALENT if any(Path(path).name == key[0] for path in chosen)}
    for path, tests in chosen.items():
        if failed := _run(None, tests):
            print(f"{path}: its tests fail as it is: {failed}")
            return 1
        module = ".".join(Path(path.partition("/src/")[2]).with_suffix("").parts)
        for line, statement, text in deletions((ROOT / path).read_text()):
            key = (Path(path).name, statement)
            failed = _run((module, text), tests)
            if failed is None:
                unneeded -= {key}
                survivors += key not in EQUIVALENT
            outcome = failed or EQUIVALENT.get(key, "NO TEST NOTICES")
            print(f"{key[0]}:{line}".ljust(24), statement.ljust(56), outcome, flush=True)
    for key in sorted(unneeded):
        print(f"EQUIVALENT has {key}, which a test notices or which is not there: delete it")
    return int(bool(survivors or unneeded))


def _on_simulated_device(argv: Sequence[str]) -> None:
    """Run this program again where torch finds the simulated accelerator."""
    sys.path.insert(0, str(ROOT / "tests-integration"))
    from harness import simulated
    from harness.simulated.simulated_device import build

    if (reason := build.why_not()) is not None:
        sys.exit(f"not run: {reason}")
    build.build()
    os.execve(sys.executable, [sys.executable, __file__, *argv], simulated.environment("npu"))


def _users() -> Iterator[str]:
    """Yield the modules that order work through the seam."""
    for path in sorted(ROOT.glob("packages/*/src/**/*.py")):
        text = path.read_text()
        if "accel_state.streams" in text and any(deletions(text)):
            yield path.relative_to(ROOT).as_posix()


def deletions(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line of each statement that orders something, the statement, and the text without it.

    Example:
        >>> [statement for _, statement, _ in deletions("e = f(); s.wait_event(e)")]
        ['s.wait_event(e)']
    """
    tree = ast.parse(text)
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            body: Any = getattr(node, name, None)
            for index, statement in enumerate(body if isinstance(body, list) else []):
                match statement:
                    case ast.Expr(value=ast.Call(func=ast.Attribute(attr=called) | ast.Name(id=called))):
                        if called in ORDERING:
                            body[index] = ast.Pass()
                            yield statement.lineno, ast.unparse(statement), ast.unparse(tree)
                            body[index] = statement
                    case _:
                        pass


def _run(change: tuple[str, str] | None, tests: Sequence[str]) -> str | None:
    """Run tests in a child, with a module's other text; return the test that fails, or None if all pass."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        child = os.fork()
        if child == 0:
            try:
                with log.open("w") as file:
                    os.dup2(file.fileno(), 1)
                    os.dup2(file.fileno(), 2)
                faulthandler.dump_traceback_later(300, exit=True)  # it waits for ever
                os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = folder
                if change is not None:
                    sys.meta_path.insert(0, Changed(*change))
                options = ["-x", "-q", "-m", "gpu", "--tb=no", "--assert=plain", "-p", "no:cacheprovider"]
                status = int(
                    pytest.main([*options, "--hypothesis-seed=0", *(f"packages/{test}" for test in tests)])
                )
                sys.stdout.flush()
            except BaseException:  # noqa: BLE001 - told by the parent, which must not run on in the child
                log.write_text(traceback.format_exc())
                status = 70
            os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output = log.read_text(errors="replace")
    if status == 0:
        return None
    found = FAILED.search(output)
    return f"exit status {status}: {output[-2000:]}" if found is None else found[1].rpartition("/")[2]


class Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import one module, of this dotted name, from another text."""

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
