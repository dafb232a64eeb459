"""Collectives and moves over nested data, on one process and on two."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from cases import cases


class Point(NamedTuple):
    """Two things of any kind."""

    x: Any
    y: Any


KINDS = (
    "0-d", "1-d", "2-d", "int", "bool", "half", "list", "tuple", "dict", "ordered", "namedtuple", "nested",
    "empty list",
    "mixed", "text", "number", "none",
)  # fmt: skip


def data_of(kind: str, rank: int) -> Any:
    """Data of some kind that tells the rank."""
    base = torch.arange(4, dtype=torch.float32).view(2, 2) + 10 * rank
    return {
        "0-d": base.sum(),
        "1-d": base[0],
        "2-d": base,
        "int": base.long(),
        "bool": base > 11,
        "half": base.half(),
        "list": [base, base[0]],
        "tuple": (base, base[0]),
        "dict": {"a": base, "b": base[0]},
        "ordered": OrderedDict(b=base, a=base[0]),
        "namedtuple": Point(base, base[0]),
        "nested": {"a": [base, (base[0], {"b": base[1]})]},
        "empty list": [],
        "mixed": {"a": base, "b": "text", "c": 3, "d": None},
        "text": "text",
        "number": 3.5,
        "none": None,
    }[kind]


def rank_of(lib: Any) -> int:
    """Make a state on the CPU, and give the rank."""
    return lib.state.PartialState(cpu=True).process_index


@cases("collectives", worlds=(1, 2), kind=KINDS)
def gathered(lib: Any, *, kind: str) -> Any:
    return lib.utils.gather(data_of(kind, rank_of(lib)))


@cases("collectives", worlds=(1, 2), kind=KINDS)
def gathered_objects(lib: Any, *, kind: str) -> Any:
    return lib.utils.gather_object([data_of(kind, rank_of(lib))])


@cases("collectives", worlds=(1, 2), kind=KINDS, as_objects=(False, True))
def gathered_for_metrics(lib: Any, *, kind: str, as_objects: bool) -> Any:
    accelerator = lib.Accelerator(cpu=True)
    return accelerator.gather_for_metrics(data_of(kind, accelerator.process_index), as_objects)


@cases("collectives", worlds=(1, 2), kind=KINDS, reduction=("sum", "mean", "none"))
def reduced(lib: Any, *, kind: str, reduction: str) -> Any:
    return lib.utils.reduce(data_of(kind, rank_of(lib)), reduction)


@cases("collectives", worlds=(1, 2), kind=("1-d", "int"), reduction=("sum", "mean"))
def reduced_and_scaled(lib: Any, *, kind: str, reduction: str) -> Any:
    return lib.utils.reduce(data_of(kind, rank_of(lib)), reduction, 0.5)


@cases("collectives", worlds=(1, 2), kind=KINDS, source=(0, 1))
def broadcasted(lib: Any, *, kind: str, source: int) -> Any:
    return lib.utils.broadcast(data_of(kind, rank_of(lib)), from_process=source)


@cases("collectives", worlds=(1, 2), source=(0, 1))
def broadcasted_objects(lib: Any, *, source: int) -> Any:
    rank = rank_of(lib)
    return lib.utils.broadcast_object_list([rank, f"of {rank}", {"a": rank}], from_process=source)


@cases("collectives", worlds=(1, 2), kind=KINDS, first=(False, True))
def padded(lib: Any, *, kind: str, first: bool) -> Any:
    return lib.utils.pad_across_processes(data_of(kind, rank_of(lib)), pad_index=7, pad_first=first)


@cases("collectives", worlds=(1, 2), dim=(0, 1, -1, 2), first=(False, True))
def padded_to_longest(lib: Any, *, dim: int, first: bool) -> Any:
    rank = rank_of(lib)
    return lib.utils.pad_across_processes(torch.ones(1 + rank, 3 - rank), dim=dim, pad_first=first)


@cases("collectives", worlds=(1, 2), size=(2, 3, 5), processes=(2, 4), dim=(0,))
def padded_inputs(lib: Any, *, size: int, processes: int, dim: int) -> Any:
    rank_of(lib)
    return lib.utils.pad_input_tensors({"a": torch.arange(size) + 1}, size, processes, dim)


@cases("collectives", worlds=(1, 2), kinds=(("1-d", "2-d"), ("dict", "list"), ("list", "tuple")))
def concatenated(lib: Any, *, kinds: tuple[str, str]) -> Any:
    return [lib.utils.concatenate([data_of(kind, 0), data_of(kind, 1)]) for kind in kinds]


@cases("data", kind=KINDS)
def moved(lib: Any, *, kind: str) -> Any:
    return lib.utils.send_to_device(data_of(kind, 0), torch.device("cpu"))


@cases("data", skip=(None, ["a"], ["b", "c"]))
def moved_without(lib: Any, *, skip: Any) -> Any:
    return lib.utils.send_to_device(data_of("mixed", 0), "cpu", skip_keys=skip)


@cases("data", kind=KINDS)
def batch_size(lib: Any, *, kind: str) -> Any:
    return [lib.utils.find_batch_size(data_of(kind, 0))]


@cases("data", kind=KINDS)
def listed(lib: Any, *, kind: str) -> Any:
    return lib.utils.listify(data_of(kind, 0))


@cases("data", kind=KINDS)
def structure(lib: Any, *, kind: str) -> Any:
    found = lib.utils.get_data_structure(data_of(kind, 0))
    return [found, lib.utils.initialize_tensors(found) is not None]


@cases("data", kind=KINDS)
def in_full_precision(lib: Any, *, kind: str) -> Any:
    return lib.utils.convert_to_fp32(data_of(kind, 0))


@cases("data", kind=KINDS)
def shapes(lib: Any, *, kind: str) -> Any:
    return [type(data_of(kind, 0)).__name__, lib.utils.is_namedtuple(data_of(kind, 0))]


@cases("data", kind=KINDS, error=(False, True))
def applied(lib: Any, *, kind: str, error: bool) -> Any:
    return lib.utils.recursively_apply(lambda tensor: tensor + 1, data_of(kind, 0), error_on_other_type=error)
