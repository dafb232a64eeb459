"""The seam of commands that run a script on trial: what its `Accelerator` builds, prepares and reads."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from accel_plugins.registry import load

if TYPE_CHECKING:
    from pathlib import Path

    from accel_plugins.strategy import Bundle, Strategy, StrategySpec
    from accel_state.remote import AnyPath
    from accel_train.accelerator import Accelerator
    from accel_train.checkpoint.context import CheckpointContext
    from accel_train.checkpoint.save import CheckpointFile
    from accel_train.data.adapter import PreparedLoader


class Observer:
    """Is called by every `Accelerator` of this process, once it is `observer`.

    Each method returns what the script gets. Those of this class do what happens without an observer.
    """

    def build(self, spec: StrategySpec, *arguments: Any) -> Strategy:
        """Build the strategy of a run; the arguments are those of a `StrategyFactory`."""
        return load(spec)(*arguments)

    def prepare(self, accelerator: Accelerator, bundle: Bundle, run: Callable[[], Bundle]) -> Bundle:
        """Prepare the objects of one call."""
        del accelerator, bundle
        return run()

    def batches(self, loader: PreparedLoader[Any], read: Callable[[], Generator[Any]]) -> Generator[Any]:
        """Yield the batches of one pass over a prepared loader."""
        del loader
        return read()

    def saved(
        self, run: CheckpointContext, target: AnyPath, parts: Callable[[Path], list[CheckpointFile]]
    ) -> bool:
        """Return whether `save_state` writes a checkpoint; `parts(folder)` are the files of this rank."""
        del run, target, parts
        return True


observer: Observer | None = None
"""What observes this process."""
