"""What the pool promises to the tests that run in it."""

from __future__ import annotations

import os
import random
import time
import warnings
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch
import torch.distributed as dist

from harness import distributed
from harness.killing import Crowd, mortal
from harness.pool import shared_nursery

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Pair(NamedTuple):
    left: int
    right: int


@distributed(world_size=2)
def test_a_body_runs_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / str(dist.get_rank())).touch()
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


@distributed(world_size=4)
def test_a_pool_has_the_asked_world_size_and_the_environment_of_torchrun() -> None:
    total = torch.ones(())
    dist.all_reduce(total)
    assert total.item() == 4
    assert os.environ["RANK"] == os.environ["LOCAL_RANK"] == str(dist.get_rank())
    assert os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"] == "4"
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("value", [3, torch.arange(3)])
@distributed(world_size=2)
def test_parameters_reach_the_ranks(value: int | torch.Tensor) -> None:
    assert torch.as_tensor(value).sum() == 3


@distributed(world_size=2)
def test_objects_of_classes_of_the_test_module_travel_between_ranks() -> None:
    all_ranks: list[object] = [None, None]
    dist.all_gather_object(all_ranks, Pair(dist.get_rank(), 7))
    assert all_ranks == [Pair(0, 7), Pair(1, 7)]


@pytest.mark.parametrize("repeat", [1, 2])
@distributed(world_size=2)
def test_every_body_starts_with_the_same_seeds(repeat: int) -> None:
    assert torch.rand(()).item() == torch.rand((), generator=torch.Generator().manual_seed(0)).item()
    assert random.random() == random.Random(0).random()


@distributed(world_size=2)
def _fails_on_rank_1() -> None:
    culprit = "the second rank"
    assert dist.get_rank() == 0, culprit


@distributed(world_size=2, timeout=3)
def _hangs_on_rank_1() -> None:
    while dist.get_rank() == 1:
        time.sleep(0.1)


@distributed(world_size=2)
def _waits_for_a_rank_that_failed() -> None:
    if dist.get_rank() == 0:
        raise ValueError("no more")
    dist.all_reduce(torch.ones(()))


@distributed(world_size=2)
def _dies_on_rank_0() -> None:
    if dist.get_rank() == 0:
        os._exit(3)


@distributed(world_size=2)
def _warns() -> None:
    warnings.warn("beware", stacklevel=1)


@distributed(world_size=2)
def _leaks_a_variable() -> None:
    os.environ["LEFT_BEHIND"] = "1"


@distributed(world_size=2)
def _leaks_a_group() -> None:
    dist.new_group([0, 1])


@distributed(world_size=2)
def _skips() -> None:
    pytest.skip("not here")


@distributed(world_size=2)
def _takes_anything(thing: object) -> None:
    del thing


@distributed(world_size=2)
def _says_hello() -> None:
    assert dist.is_initialized()


def _failure(body: Callable[..., None], **fixtures: object) -> str:
    with pytest.raises(AssertionError) as raised:
        body(**fixtures)
    _says_hello()  # the next test finds ranks that work
    return str(raised.value)


def test_a_failing_rank_is_reported_with_its_rank_and_its_variables() -> None:
    story = _failure(_fails_on_rank_1)
    assert "--- rank 1 of 2" in story
    assert "--- rank 0 of 2" not in story
    assert "culprit = 'the second rank'" in story


def test_a_hang_names_the_silent_ranks_and_what_they_do() -> None:
    story = _failure(_hangs_on_rank_1)
    assert "no answer from ranks [1]" in story or "no answer from ranks [0, 1]" in story  # 0 waits at the end
    assert "in _hangs_on_rank_1" in story


def test_a_rank_that_waits_for_a_failed_one_does_not_hide_the_failure() -> None:
    story = _failure(_waits_for_a_rank_that_failed)
    assert "ValueError: no more" in story


@mortal
def _waits_for_a_rank_that_fails(moment: None) -> None:
    del moment
    if dist.get_rank() == 1:
        raise ValueError("no more")
    dist.all_reduce(torch.ones(()))


def test_a_victim_that_waits_for_a_failed_rank_does_not_hide_the_failure() -> None:
    with pytest.raises(AssertionError) as raised:
        Crowd(shared_nursery(), 2).run(_waits_for_a_rank_that_fails, victim=0, moment=None)
    story = str(raised.value)
    assert "--- rank 1\n" in story
    assert "ValueError: no more" in story
    assert "no answer from ranks [0]" in story
    assert "in _waits_for_a_rank_that_fails" in story


def test_a_rank_that_dies_is_reported() -> None:
    assert "--- rank 0 of 2\nthe process of this rank" in _failure(_dies_on_rank_0)


def test_warnings_inside_bodies_are_errors() -> None:
    assert "UserWarning: beware" in _failure(_warns)


def test_an_environment_variable_left_behind_is_an_error() -> None:
    assert "LEFT_BEHIND" in _failure(_leaks_a_variable)


def test_a_process_group_left_behind_is_an_error() -> None:
    assert "+1 process groups" in _failure(_leaks_a_group)


def test_a_skip_inside_a_body_skips_the_test() -> None:
    with pytest.raises(pytest.skip.Exception, match="not here"):
        _skips()


def test_a_fixture_that_cannot_travel_is_named() -> None:
    with pytest.raises(TypeError, match="fixture 'thing' cannot be sent"):
        _takes_anything(thing=lambda: None)


def test_only_functions_at_module_level_can_be_marked() -> None:
    def local() -> None: ...

    with pytest.raises(TypeError, match="module level"):
        distributed()(local)
