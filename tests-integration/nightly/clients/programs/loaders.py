"""Data loaders in the middle of an epoch: their states, saved and loaded by `accelerate`, whichever it is.

Run as `loaders.py save FOLDER` or `loaders.py load FOLDER`, or with several such pairs: each writes to its
FOLDER, for each rank, which batches come after the saved ones.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

if TYPE_CHECKING:
    from collections.abc import Iterator

NUMBERS = [*range(26)]


class Stream(IterableDataset[int]):
    """Numbers, as they come."""

    def __iter__(self) -> Iterator[int]:
        """Yield them."""
        yield from NUMBERS


class Seekable(IterableDataset[int]):
    """Numbers that know how far they are."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[int]:
        """Yield the rest."""
        while self.next < len(NUMBERS):
            self.next += 1
            yield NUMBERS[self.next - 1]
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        """Say where it is."""
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on there."""
        self.next = state["next"]


DATA: dict[str, tuple[Any, int]] = {
    "map": (NUMBERS, 0),
    "map, workers": (NUMBERS, 2),
    "stream": (Stream(), 0),
    "seekable": (Seekable(), 0),
    "own state": (NUMBERS, 0),
}


OF_ONE_RANK = {
    "seekable, dispatch_batches=False",  # on several ranks the reference ends the epoch for rank 1,
    "seekable, dispatch_batches=None",  # and keeps the state of what it has read ahead,
    "stream, dispatch_batches=None",  # where it reads for all
}


def prepared(kind: str, *, dispatch: bool | None) -> tuple[Accelerator, Any]:
    """Prepare a stateful loader."""
    options = DataLoaderConfiguration(use_stateful_dataloader=True, dispatch_batches=dispatch)
    accelerator = Accelerator(cpu=True, dataloader_config=options)
    data, workers = DATA[kind]
    loader = accelerator.prepare(DataLoader(data, batch_size=2, num_workers=workers))
    assert isinstance(loader, StatefulDataLoader)
    return accelerator, loader


def main(action: str, folder: Path) -> None:
    """Save or load, and write what comes next."""
    torch.manual_seed(0)
    rest: dict[str, list[list[int]]] = {}
    index = 0
    for kind in DATA:
        for dispatch in (None, False):
            name = f"{kind}, dispatch_batches={dispatch}"
            if PartialState(cpu=True).num_processes > 1 and name in OF_ONE_RANK:
                continue
            accelerator, loader = prepared(kind, dispatch=dispatch)
            index = accelerator.process_index
            target = folder / name.replace(", ", "_")
            if action == "save":
                batches = iter(loader)
                for _ in range(3):
                    next(batches)
                accelerator.wait_for_everyone()
                accelerator.save_state(str(target))
            else:
                accelerator.load_state(str(target))
                batches = iter(loader)
            rest[name] = [batch.tolist() for batch in batches]
            accelerator.free_memory()
            accelerator.wait_for_everyone()
    library = Accelerator.__module__.partition(".")[0]
    (folder / f"{action}_{index}.json").write_text(json.dumps({"library": library, "rest": rest}))


if __name__ == "__main__":
    for asked, place in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        main(asked, Path(place))
