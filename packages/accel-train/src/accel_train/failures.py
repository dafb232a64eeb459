"""Failures of the processes of torch's elastic launcher."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any

from accel_state.regular_file import read_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

# The frames around a function: a line that names one of these files, and the lines below it.
_OURS = re.compile(
    r'  File "[^"]*(?:(?:accel_train/(?:forking|launching)|errors/__init__)\.py|<frozen runpy>)", .*\n'
    r"(?:    .*\n)*"
)


def failed_ranks(failures: Mapping[int, ProcessFailure], folder: Path) -> dict[int, str]:
    """Describe the failures of processes of this node, by rank, in the order in which they failed.

    Torch reports one of them, which is any that it finds dead, with a time in whole seconds. Each process
    that raised has left an error file.
    """
    stories = {rank: (float(failure.timestamp), _story(rank, failure)) for rank, failure in failures.items()}
    first = next(rank - failure.local_rank for rank, failure in failures.items())  # of this machine
    attempts = sorted(folder.glob("*/attempt_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    for file in attempts[-1].glob("*/error.json") if attempts else ():
        rank = first + int(file.parent.name)
        with contextlib.suppress(ValueError):  # one that was ended as it wrote
            error = read_json(file, error=ValueError)["message"]
            stories[rank] = file.stat().st_mtime, _story_of_error(rank, error)
    return {rank: story for rank, (_, story) in sorted(stories.items(), key=lambda item: item[1][0])}


def _story(rank: int, failure: ProcessFailure) -> str:
    """Describe a failed process."""
    stories: Any = failure.message
    if isinstance(stories, dict):
        return _story_of_error(rank, stories)
    if failure.exitcode < 0:  # it was killed, and could not write down anything
        return f"Rank {rank} failed: {stories}"
    return f"Rank {rank} failed: it ended with exit code {failure.exitcode}."


def _story_of_error(rank: int, error: Any) -> str:
    """Describe a process by its error file."""
    return f"Rank {rank} failed: {error['message']}\n{_OURS.sub('', error['extraInfo']['py_callstack'])}"
