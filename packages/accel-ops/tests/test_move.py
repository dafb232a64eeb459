from __future__ import annotations

import dataclasses
from collections import namedtuple

import pytest
import torch

from accel_ops import DistributedOperationException, copy_tensor_to_devices, send_to_device

Pair = namedtuple("Pair", "left right")
META = torch.device("meta")


@dataclasses.dataclass
class Batch:
    ids: torch.Tensor
    mask: torch.Tensor


class Encoding(dict):
    """A mapping that knows how to move, but not without waiting."""

    def to(self, device: object) -> Encoding:
        return Encoding({key: value.to(device) for key, value in self.items()})


class Picky:
    def __init__(self) -> None:
        self.calls: list[tuple[object, bool]] = []

    def to(self, device: object, non_blocking: bool = False) -> Picky:
        self.calls.append((device, non_blocking))
        return self


class Broken:
    def to(self, device: object, non_blocking: bool = False) -> Broken:
        raise TypeError("this object cannot move at all")


def test_everything_with_a_to_method_moves_and_the_rest_stays() -> None:
    data = {
        "a": [torch.ones(1), "text"],
        "b": Pair(torch.ones(1), None),
        "c": Batch(torch.ones(1), torch.ones(1)),
    }
    found = send_to_device(data, META)
    assert found["a"][0].device == found["b"].left.device == found["c"].mask.device == META
    assert found["a"][1] == "text"
    assert type(found["b"]) is Pair
    assert data["a"][0].device.type == "cpu"


@pytest.mark.parametrize("skip", ["keep", ["keep"], {"keep"}])
def test_skipped_keys_stay_at_every_depth(skip) -> None:
    found = send_to_device(
        [{"keep": torch.ones(1), "x": {"keep": torch.ones(1), "y": torch.ones(1)}}], META, skip_keys=skip
    )
    assert found[0]["keep"].device.type == found[0]["x"]["keep"].device.type == "cpu"
    assert found[0]["x"]["y"].device == META


def test_a_tensor_that_is_there_is_not_copied() -> None:
    tensor = torch.ones(1)
    assert send_to_device(tensor, "cpu") is tensor


@dataclasses.dataclass
class State:
    parts: list[torch.Tensor]
    count: int


def test_containers_without_anything_to_move_are_reused_on_request():
    kept, moving = [torch.ones(1, device="meta")], State([torch.ones(1)], 3)
    data = {"kept": kept, "moving": moving, "listed": [torch.ones(1)], "none": []}
    found = send_to_device(data, META, reuse_containers=True)
    assert found is not data
    assert found["kept"] is kept
    assert found["none"] is data["none"]
    assert found["listed"][0].is_meta
    assert not data["listed"][0].is_meta
    assert found["moving"] is moving
    assert moving.parts[0].is_meta
    assert send_to_device(kept, META) is not kept


@pytest.mark.parametrize("non_blocking", [True, False])
def test_objects_move_themselves_and_get_told_not_to_wait_if_they_understand(non_blocking: bool) -> None:
    picky = Picky()
    assert send_to_device((picky,), META, non_blocking=non_blocking)[0] is picky
    assert picky.calls == [(META, non_blocking)]
    moved = send_to_device(Encoding(x=torch.ones(1)), META, non_blocking=non_blocking)
    assert type(moved) is Encoding
    assert moved["x"].device == META


def test_a_type_error_of_the_object_itself_is_not_swallowed() -> None:
    with pytest.raises(TypeError, match="cannot move at all"):
        send_to_device(Broken(), META, non_blocking=True)


@pytest.mark.parametrize(("name", "device"), [("npu", "npu:0"), ("xpu", "xpu"), ("cuda", "cuda")])
def test_a_bare_name_means_the_current_device_but_for_npu(name: str, device: str) -> None:
    picky = Picky()
    send_to_device(picky, name)
    assert picky.calls == [(device, False)]


@pytest.mark.parametrize("owner", [0, 2])
def test_a_tensor_that_one_rank_has_reaches_all(world, owner: int) -> None:
    tensor = torch.arange(6, dtype=torch.int16).view(2, 3).t()
    for found in world(3).run(lambda rank: copy_tensor_to_devices(tensor if rank == owner else None)):
        assert found.dtype == torch.int16
        assert torch.equal(found, tensor)


@pytest.mark.parametrize(("owners", "words"), [((), "no rank has one"), ((0, 1), r"ranks \[0, 1\] have one")])
def test_a_tensor_on_no_or_several_ranks_is_an_error_on_all(world, owners, words: str) -> None:
    def body(rank: int) -> None:
        with pytest.raises(DistributedOperationException, match=words):
            copy_tensor_to_devices(torch.ones(1) if rank in owners else None)

    assert world(2).run(body) == [None, None]


def test_a_process_alone_gets_a_copy() -> None:
    tensor = torch.ones(2)
    found = copy_tensor_to_devices(tensor)
    assert torch.equal(found, tensor)
    assert found is not tensor
