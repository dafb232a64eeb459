"""Change each statement that orders asynchronous work, one at a time, and show which test fails.

A statement whose change no test notices is redundant, or lacks a test. Changed are the statements of the
modules in `TESTS` that call one of `ORDERING`: each is deleted, and swapped with the statement before it and
with the one after it. Where a stream is passed, another one of its device is passed instead. A change that
makes no difference here is in `EQUIVALENT`, with the reason. Nothing is changed on the disk: every change
happens in a child of one warm process, which imports the module from the changed text.

    uv run tools/delete_ordering.py
    uv run tools/delete_ordering.py loader.py
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
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import Phase, settings

from handle_signals import handle_signals

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
ORDERING = {"wait_event", "wait_stream", "synchronize", "record", "record_stream", "arrived", "wait"}
STREAM_ARGUMENT = {"record": 0, "wait_stream": 0, "on": 0, "record_stream": -1}
"""Calls to which a stream is passed, and the position of the argument."""
STREAM_RECEIVER = {"wait_stream", "wait_event"}
"""Methods of streams."""
TESTS: dict[str, tuple[str, ...]] = {
    "packages/accel-train/src/accel_train/data/loader.py": (
        "packages/accel-train/tests/test_side_stream.py",
    ),
    "packages/accel-train/src/accel_train/data/scatter.py": (
        "packages/accel-train/tests/test_data_scatter.py",
    ),
    "packages/accel-bigmodel/src/accel_bigmodel/offloaded_block.py": (
        "packages/accel-bigmodel/tests/test_block_stream.py",
    ),
    "packages/accel-bigmodel/src/accel_bigmodel/host_to_device.py": (
        "packages/accel-bigmodel/tests/test_block_stream.py",
    ),
    "packages/accel-cli/src/accel_cli/commands/selftest_checks.py": (
        "packages/accel-cli/tests/test_selftest_checks.py",
    ),
    "packages/accel-plugins/src/accel_plugins/optimizers/host_adamw.py": (
        "packages/accel-plugins/tests/test_host_adamw.py",
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

EQUIVALENT = {
    ("offloaded_block.py", "swap with the next", "done.record(current)"): (
        "the lock is held until the event is recorded, and in the list"
    ),
    ("host_to_device.py", "swap with the previous", "slot.copied.synchronize()"): (
        "the statement before takes a view, and touches no memory"
    ),
    (
        "scatter.py",
        "swap with the next",
        "arrived()",
    ): "a notice goes by the host: it needs no round to be there",
    ("selftest_checks.py", "swap with the next", "synchronize(device)"): (
        "the late device takes no time: only a GPU shows that the clock is read after the wait"
    ),
    ("loader.py", "swap with the next", "current.wait_event(pending.arrived)"): (
        "record_stream only says what is awaited when the memory is freed, which is later than both"
    ),
    ("host_adamw.py", "swap with the next", "copies.wait_stream(streams.current_stream())"): (
        "as above: the statement after is record_stream"
    ),
    ("host_adamw.py", "swap with the next", "streams.record_stream(gradient, copies)"): (
        "as above: the gradient is freed later than the next statement"
    ),
    **{
        ("host_adamw.py", change, "streams.record_stream(gradient, copies)"): (
            "the late device does not see that memory of the host's allocator is freed while it is copied"
        )
        for change in ("delete", "another copies")
    },
}
"""Module, change and statement to the reason why no test notices the change."""

TIMEOUT_FACTOR = 5
"""A child that takes as many times as long as the unchanged module, and a minute, waits for ever."""

FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A changed module.

    Args:
        path: The module's path from the root.
        line: The line of the statement.
        change: What was done to it.
        text: The statement.
        source: The module's changed text.
    """

    path: str
    line: int
    change: str
    text: str
    source: str

    @property
    def module(self) -> str:
        """The module's dotted name."""
        return ".".join(Path(self.path.partition("/src/")[2]).with_suffix("").parts)

    @property
    def key(self) -> tuple[str, str, str]:
        """Its key in `EQUIVALENT`."""
        return Path(self.path).name, self.change, self.text


def main(argv: Sequence[str]) -> int:
    """Run every mutant and print the table; return 1 if one survives, or if the tests fail without any."""
    handle_signals()
    os.chdir(ROOT)
    if missing := sorted(set(users()) - set(TESTS)):
        print(f"no tests are named in TESTS for {', '.join(missing)}")
        return 1
    chosen = {path: tests for path, tests in TESTS.items() if not argv or any(word in path for word in argv)}
    for name in WARM:
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
    counts = dict.fromkeys(("killed", "equivalent", "survived"), 0)
    unneeded = {key for key in EQUIVALENT if any(Path(path).name == key[0] for path in chosen)}
    for path, tests in chosen.items():
        start = time.monotonic()
        if failed := run(None, tests, 600):
            print(f"{path}: its tests fail as it is: {failed}")
            return 1
        limit = 60 + TIMEOUT_FACTOR * (time.monotonic() - start)
        for mutant in mutants(path, (ROOT / path).read_text()):
            failed = run(mutant, tests, limit)
            reason = EQUIVALENT.get(mutant.key)
            unneeded -= {mutant.key} if failed is None else set()
            outcome = "killed" if failed else "survived" if reason is None else "equivalent"
            counts[outcome] += 1
            location = f"{Path(path).name}:{mutant.line}"
            print(
                f"{location:<24} {mutant.change:<22} {mutant.text:<60} {failed or reason or 'SURVIVES'}",
                flush=True,
            )
    for key in sorted(unneeded):
        print(f"EQUIVALENT has {key}, which a test notices or which is no mutant: delete it")
    print(f"{sum(counts.values())} mutants: {', '.join(f'{count} {name}' for name, count in counts.items())}")
    return int(bool(counts["survived"] or unneeded))


def users() -> Iterator[str]:
    """The modules that order work through the seam."""
    for path in sorted(ROOT.glob("packages/*/src/**/*.py")):
        text = path.read_text()
        name = path.relative_to(ROOT).as_posix()
        if "accel_state.streams" in text and "accel_state/testing" not in name and any(mutants(name, text)):
            yield name


def mutants(path: str, text: str) -> Iterator[Mutant]:
    """Change a module in every way, one at a time.

    Args:
        path: From the root.
        text: The module's text.

    Example:
        >>> [found.change for found in mutants("a.py", "e = f(); s.wait_event(e)")]
        ['delete', 'swap with the previous', 'another s']
    """
    tree = ast.parse(text)

    def mutant(node: ast.stmt | ast.expr, change: str) -> Mutant:
        return Mutant(path, node.lineno, change, shown, ast.unparse(tree))

    for body in bodies(tree):
        for index, statement in enumerate(body):
            if not is_ordering(statement):
                continue
            shown = ast.unparse(statement)
            body[index] = ast.Pass()
            yield mutant(statement, "delete")
            body[index] = statement
            for other, change in ((index - 1, "swap with the previous"), (index + 1, "swap with the next")):
                if can_swap(body, index, other):
                    body[index], body[other] = body[other], body[index]
                    yield mutant(statement, change)
                    body[index], body[other] = body[other], body[index]
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        shown = ast.unparse(call)
        if name in STREAM_ARGUMENT and call.args:
            at = STREAM_ARGUMENT[name]
            stream, call.args[at] = call.args[at], another(call.args[at])
            yield mutant(call, f"another {ast.unparse(stream)}")
            call.args[at] = stream
        if name in STREAM_RECEIVER and isinstance(call.func, ast.Attribute):
            stream, call.func.value = call.func.value, another(call.func.value)
            yield mutant(call, f"another {ast.unparse(stream)}")
            call.func.value = stream


def bodies(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    """All lists of statements."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            body: Any = getattr(node, name, None)
            if isinstance(body, list):
                yield body


def can_swap(body: list[ast.stmt], index: int, other: int) -> bool:
    """Whether two statements are there to be swapped; of two that order something, the first one does it."""
    if not 0 <= other < len(body) or (other < index and is_ordering(body[other])):
        return False
    match body[other]:
        case ast.Expr(value=ast.Constant()):  # a docstring
            return False
        case _:
            return True


def is_ordering(statement: ast.stmt) -> bool:
    """Whether a statement is a call that orders something."""
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name))):
            return name in ORDERING
        case _:
            return False


def another(stream: ast.expr) -> ast.expr:
    """The expression for another stream."""
    return ast.Call(ast.Name("_another_stream", ast.Load()), [stream], [])


def another_stream(stream: Any) -> Any:
    """Return the default stream of a stream's device, or a new one instead of the default stream."""
    default = stream.device.streams[0]
    return stream.device.new_stream() if stream is default else default


def run(mutant: Mutant | None, tests: Sequence[str], limit: float) -> str | None:
    """Run tests in a child with a changed module; return the test that fails, or None if all pass."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        child = os.fork()
        if child == 0:
            try:
                os._exit(test(mutant, tests, folder, log))
            except BaseException:  # noqa: BLE001 - told by the parent, which must not run on in the child
                log.write_text(traceback.format_exc())
                os._exit(70)
        status = wait_for(child, limit)
        output = log.read_text(errors="replace")
    if status == 0:
        return None
    found = FAILED.search(output)
    if found is not None:
        return found[1].rpartition("/")[2]
    return "it waits for ever" if status is None else f"exit status {status}: {output[-2000:]}"


def wait_for(child: int, limit: float) -> int | None:
    """Wait for a child; end it and return None if it takes too long."""
    until = time.monotonic() + limit
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def test(mutant: Mutant | None, tests: Sequence[str], folder: str, log: Path) -> int:
    """Run in the child: import the changed module, and run pytest with its output in a file."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = folder
    settings.register_profile("find", deadline=None, phases=[Phase.explicit, Phase.generate])
    settings.load_profile("find")  # a failure need not be made small
    if mutant is not None:
        sys.meta_path.insert(0, Changed(mutant.module, mutant.source))
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
        vars(module)["_another_stream"] = another_stream
        exec(compile(self._text, f"<changed {self._name}>", "exec"), module.__dict__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
