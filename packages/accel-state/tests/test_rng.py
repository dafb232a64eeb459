from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from accel_state import runtime
from accel_state.device_kinds import KINDS
from accel_state.environ import patch_environment
from accel_state.errors import SettingsError
from accel_state.labels import RNGType
from accel_state.rng import rng_source, set_seed, synchronize_rng_state, synchronize_rng_states

pytestmark = pytest.mark.usefixtures("fresh")


class FromRank0:
    """Collectives of rank 1 of 2, on which rank 0's broadcasts arrive."""

    rank, world_size = 1, 2

    def __init__(self, sent: torch.Tensor) -> None:
        self.sent, self.broadcasts = sent, 0

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        assert src == 0
        self.broadcasts += 1
        tensor.copy_(self.sent)


@pytest.fixture
def rank1(monkeypatch):
    def make(sent: torch.Tensor) -> FromRank0:
        collectives = FromRank0(sent)
        monkeypatch.setattr(runtime, "active", runtime.Runtime(collectives=collectives))
        return collectives

    return make


def draw():
    return random.random(), np.random.rand(), torch.rand(()).item()


def test_a_seed_repeats_all_random_numbers():
    set_seed(3)
    first = draw()
    assert draw() != first
    set_seed(3)
    assert draw() == first


def test_a_seed_is_that_of_the_libraries_themselves():
    set_seed(3)
    assert random.random() == random.Random(3).random()
    assert torch.rand(()) == torch.rand((), generator=torch.Generator().manual_seed(3))


def test_device_specific_seeds_differ_by_rank():
    with patch_environment(rank=2, world_size=4):
        set_seed(3, device_specific=True)
    third = draw()
    set_seed(5)
    assert draw() == third


def test_deterministic_algorithms_are_switched_on():
    try:
        set_seed(3, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(mode=False)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_out_of_range_is_named(seed):
    with pytest.raises(SettingsError, match=f"seed={seed}"):
        set_seed(seed)


def test_several_sources_are_synchronised_in_one_broadcast(rank1):
    theirs = torch.Generator().manual_seed(11)
    torch.manual_seed(10)
    collectives = rank1(torch.cat([torch.get_rng_state(), theirs.get_state()]))
    expected = torch.rand(3), torch.rand(3, generator=theirs)
    torch.manual_seed(99)
    mine = torch.Generator().manual_seed(98)
    synchronize_rng_states([RNGType.TORCH, "generator"], mine)
    assert collectives.broadcasts == 1
    assert torch.equal(torch.rand(3), expected[0])
    assert torch.equal(torch.rand(3, generator=mine), expected[1])


def test_without_a_type_the_generator_is_synchronised_if_there_is_one(rank1):
    theirs = torch.Generator().manual_seed(11)
    rank1(theirs.get_state())
    mine = torch.Generator().manual_seed(98)
    before = torch.get_rng_state()
    synchronize_rng_state(generator=mine)
    assert torch.equal(mine.get_state(), theirs.get_state())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_process_alone_keeps_its_state():
    before = torch.get_rng_state()
    synchronize_rng_state("torch")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("rng_type", "reason"),
    [("dice", "rng_type='dice'"), ("generator", "needs a generator"), ("npu", "'npu'.*no such device")],
)
def test_a_source_that_is_not_there_is_named(rng_type, reason):
    with pytest.raises(SettingsError, match=reason):
        synchronize_rng_states(["torch", rng_type])


def test_every_documented_source_has_a_row_or_says_why_not():
    for rng_type in RNGType:
        rows = [kind for kind in KINDS if kind.rng_key == rng_type.value]
        if rows and not any(kind.probe() for kind in rows):
            with pytest.raises(SettingsError, match="no such device"):
                rng_source(rng_type)
        else:
            assert rng_source(rng_type, torch.Generator()).read().dtype == torch.uint8


def test_a_seed_is_any_whole_number_and_nothing_is_seeded_by_another():
    set_seed(5)
    expected = torch.rand(3)
    set_seed(np.int64(5))
    assert torch.equal(torch.rand(3), expected)
    random.seed(7)
    state = random.getstate()
    with pytest.raises(TypeError, match="float"):
        set_seed(1.5)
    assert random.getstate() == state
