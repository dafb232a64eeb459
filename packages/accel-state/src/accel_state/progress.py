"""Progress bars that are shown once per node."""

from __future__ import annotations

import multiprocessing
from typing import Any

from accel_state import runtime


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Make a `tqdm` progress bar that only the first process of each node shows.

    A process that another one started, such as a rank of `notebook_launcher`, shows a bar of text: the
    widgets of a notebook take updates from its own process only.

    Args:
        *args: As of `tqdm.auto.tqdm`, which wraps any iterable.
        main_process_only: Set to `False` to show a bar on every process.
        **kwargs: As of `tqdm.auto.tqdm`.

    Example:
        >>> list(tqdm(range(3), disable=True))
        [0, 1, 2]
    """
    from tqdm.auto import tqdm as progress_bar
    from tqdm.std import tqdm as text_bar

    if main_process_only and not runtime.current_topology().is_local_main:
        kwargs["disable"] = True
    bar: Any = progress_bar if multiprocessing.parent_process() is None else text_bar
    return bar(*args, **kwargs)
