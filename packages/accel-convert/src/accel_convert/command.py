"""`accel convert-checkpoint`: write a checkpoint in another format."""

from __future__ import annotations

from argparse import Namespace

from accel_cli.output import Table, show, working
from accel_convert.convert import convert_checkpoint
from accel_ops.weights.layout import convert_bytes
from accel_state.errors import SettingsError


def run(options: Namespace) -> int:
    """Convert a checkpoint."""
    try:
        with working(f"converting {options.source!r}"):
            done = convert_checkpoint(
                options.source,
                options.target,
                to=options.to,
                base=options.base,
                max_memory=options.max_memory,
                max_shard_size=options.max_shard_size,
                dry_run=options.dry_run,
            )
    except FileNotFoundError as error:
        raise SettingsError(f"argument FROM: {error}") from None
    except OSError as error:
        raise SettingsError(f"{options.source!r} cannot be converted: {error}") from None
    if options.quiet:
        return 0
    would = "would " if options.dry_run else ""
    tensors = f"{done.num_tensors} tensors, {convert_bytes(done.nbytes)}"
    rows = tuple(
        (name, str(count) if count else "", convert_bytes(nbytes) if count else "")
        for name, (count, nbytes) in done.files.items()
    )
    show(
        f"{would}read {str(done.source)!r}: {done.form}",
        f"{would or 'wrote and compared '}{'write ' if would else ''}{tensors}, in {str(done.target)!r}:",
        Table(head=("file", "tensors", "size"), rows=rows),
        *(f"{'would be ' if would else ''}dropped: {phrase}" for phrase in done.dropped),
    )
    return 0
