"""What `accel check` runs for each rank: the user's script, with tensors that have no values."""

from __future__ import annotations

import runpy
import sys
import traceback
from pathlib import Path

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from accel_cli.commands.check.observer import Observer
from accel_cli.commands.check.record import Order, Record
from accel_cli.commands.check.stand_ins import install
from accel_cli.commands.estimate.memory import Sizes
from accel_cli.commands.estimate.weights import sizes_of
from accel_state import environ
from accel_state.settings import from_environ


def main(order: Order) -> None:
    """Play a rank, and write down what it did.

    Args:
        order: What to do.
    """
    dist.init_process_group("fake", rank=order.rank, world_size=order.world, store=FakeStore())
    observer = Observer()
    install(observer, order)
    stopped = _play(observer, order)
    chosen = observer.strategy
    record = Record(
        rank=order.rank,
        strategy=chosen.name,
        counted_as=chosen.counted_as,
        axes=chosen.axes,
        offloaded=chosen.offloaded,
        precision=from_environ(environ.read()).precision.mixed_precision,
        sizes=_sizes(observer),
        moments=() if observer.ledger is None else observer.ledger.moments,
        parts={} if observer.meter is None else observer.meter.parts,
        events=tuple(observer.events),
        files=tuple(observer.files),
        stopped=stopped,
    )
    Path(order.output).write_text(record.to_text(), encoding="utf-8")


def _play(observer: Observer, order: Order) -> str:
    """Run the script; say why it ended before its end, if it did."""
    sys.argv = [order.script, *order.arguments]
    sys.path.insert(0, str(Path(order.script).resolve().parent))
    try:
        with observer.watching():
            runpy.run_path(order.script, run_name="__main__")
    except SystemExit as leaving:
        return "" if leaving.code in {None, 0} else f"it exits with {leaving.code!r}"
    except Exception as error:  # noqa: BLE001 - whatever the script raises is what was found
        traceback.print_exc()
        place = next(
            (
                f" at {Path(frame.filename).name}:{frame.lineno}"
                for frame in reversed(traceback.extract_tb(error.__traceback__))
                if Path(frame.filename).resolve() == Path(order.script).resolve()
            ),
            "",
        )
        lines = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}{place}: {lines[0]}"
    return ""


def _sizes(observer: Observer) -> Sizes | None:
    if not observer.models:
        return None
    each = [sizes_of(model) for model in observer.models]
    return Sizes(
        parameters=sum(one.parameters for one in each),
        trainable=sum(one.trainable for one in each),
        blocks=tuple(block for one in each for block in one.blocks),
        largest=max(one.largest for one in each),
        buffers=sum(one.buffers for one in each),
    )


if __name__ == "__main__":
    main(Order.from_text(Path(sys.argv[1]).read_text(encoding="utf-8")))
