"""The state of a run of several processes."""

from __future__ import annotations

import logging
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from accel_state import (
    AcceleratorState,
    DistributedType,
    PartialState,
    get_logger,
    hang_monitor,
    set_seed,
    synchronize_rng_states,
    wait_for_everyone,
)
from accel_state.collectives import group_timeout
from accel_state.environ import patch_environment
from harness import distributed

if TYPE_CHECKING:
    from pathlib import Path


@distributed(world_size=2)
def test_the_state_reuses_the_group_that_is_there() -> None:
    state = PartialState(cpu=True)
    assert (state.process_index, state.num_processes) == (dist.get_rank(), 2)
    assert state.local_process_index == dist.get_rank()
    assert state.distributed_type == DistributedType.MULTI_CPU
    assert state.backend == "gloo"
    assert state.use_distributed
    assert state.is_main_process == (dist.get_rank() == 0)
    assert state.is_last_process == (dist.get_rank() == 1)
    assert "Distributed environment: DistributedType.MULTI_CPU  Backend: gloo" in repr(state)
    PartialState._reset_state()
    assert dist.is_initialized()
    assert AcceleratorState(cpu=True).distributed_type == DistributedType.MULTI_CPU


@distributed(world_size=2)
def test_no_thread_outlives_the_state() -> None:
    def watching() -> int:
        return sum(thread.name == "accel-hang-monitor" for thread in threading.enumerate())

    assert watching() == 0
    PartialState(cpu=True)
    assert watching() == 1
    PartialState._reset_state()
    assert watching() == 0


@distributed(world_size=2)
def test_the_rank_of_the_group_wins_over_the_environment() -> None:
    with patch_environment(rank=0, world_size=1, local_rank=0, local_world_size=1):
        state = PartialState(cpu=True)
    assert (state.process_index, state.num_processes) == (dist.get_rank(), 2)


@distributed(world_size=2)
def test_a_timeout_is_applied_to_the_group_also_when_it_comes_late() -> None:
    before = group_timeout(torch.device("cpu"))
    try:
        PartialState(cpu=True, timeout=timedelta(minutes=7))
        assert group_timeout(torch.device("cpu")) == timedelta(minutes=7)
        monitor = hang_monitor.active()
        PartialState(cpu=True, timeout=timedelta(minutes=8))
        assert hang_monitor.active() is monitor  # with the callbacks of others
        assert group_timeout(torch.device("cpu")) == timedelta(minutes=8)
    finally:
        PartialState(cpu=True, timeout=before)


@distributed(world_size=3)
def test_the_main_process_goes_first(tmp_path: Path) -> None:
    state = PartialState(cpu=True)
    cache = tmp_path / "cache"
    with state.main_process_first():
        if state.is_main_process:
            time.sleep(0.2)
            cache.touch()
        assert cache.exists()
    wait_for_everyone()
    with state.local_main_process_first():
        if state.is_local_main_process:
            time.sleep(0.2)
            cache.rename(tmp_path / "moved")
        assert not cache.exists()


@distributed(world_size=2)
def test_an_error_on_the_main_process_lets_the_others_go_on() -> None:
    state = PartialState(cpu=True)
    if state.is_main_process:
        with pytest.raises(OSError, match="disk"), state.main_process_first():
            raise OSError("disk full")
    else:
        with state.main_process_first():
            pass


@distributed(world_size=3)
def test_decorated_functions_run_where_they_shall() -> None:
    state = PartialState(cpu=True)
    rank = state.process_index

    def here() -> int:
        return rank

    def runs(function) -> list[bool]:
        return state.runtime.collectives.all_gather_object(function() is not None)

    assert runs(state.on_main_process(here)) == [True, False, False]
    assert runs(state.on_local_main_process(here)) == [True, False, False]
    assert runs(state.on_last_process(here)) == [False, False, True]
    assert runs(state.on_process(here, process_index=1)) == [False, True, False]
    assert runs(state.on_local_process(local_process_index=2)(here)) == [False, False, True]


@distributed(world_size=3)
def test_every_process_gets_its_share() -> None:
    state = PartialState(cpu=True)
    with state.split_between_processes(list(range(7))) as share:
        everyone = state.runtime.collectives.all_gather_object(share)
    assert everyone == [[0, 1, 2], [3, 4], [5, 6]]
    with state.split_between_processes(torch.arange(7), apply_padding=True) as share:
        out = torch.empty(9, dtype=torch.int64)
        state.runtime.collectives.all_gather_into(out, share)
    assert out.tolist() == [0, 1, 2, 3, 4, 6, 5, 6, 6]


@distributed(world_size=2)
def test_printing_happens_once() -> None:
    state = PartialState(cpu=True)
    printed: list[str] = []

    class Writer:
        def write(self, text: str) -> None:
            printed.append(text)

    state.print("once", file=Writer())
    assert bool(printed) == state.is_main_process


@distributed(world_size=2)
def test_logging_in_order_lets_one_speak_after_the_other(tmp_path: Path) -> None:
    PartialState(cpu=True)
    said = tmp_path / "said"

    class Appending(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            with said.open("a") as file:
                file.write(record.getMessage() + "\n")

    logger = get_logger("in_order", log_level="INFO")
    handler = Appending()
    logger.logger.addHandler(handler)
    try:
        for repeat in range(3):
            logger.info("%d from %d", repeat, dist.get_rank(), main_process_only=False, in_order=True)
        logger.info("main")
        wait_for_everyone()
    finally:
        logger.logger.removeHandler(handler)
    expected = [f"{repeat} from {rank}" for repeat in range(3) for rank in range(2)]
    assert said.read_text().split("\n") == [*expected, "main", ""]


@distributed(world_size=2)
def test_random_states_become_those_of_process_0() -> None:
    PartialState(cpu=True)
    set_seed(5, device_specific=True)
    generator = torch.Generator().manual_seed(100 + dist.get_rank())

    def drawn() -> list[float]:
        return [torch.rand(()).item(), torch.rand((), generator=generator).item()]

    first = torch.Generator().manual_seed(5), torch.Generator().manual_seed(100)
    synchronize_rng_states(["torch", "generator"], generator)
    assert drawn() == [torch.rand((), generator=source).item() for source in first]


@distributed(world_size=2)
def test_device_specific_seeds_differ() -> None:
    state = PartialState(cpu=True)
    set_seed(5, device_specific=True)
    drawn = state.runtime.collectives.all_gather_object(torch.rand(()).item())
    expected = [torch.rand((), generator=torch.Generator().manual_seed(5 + rank)).item() for rank in range(2)]
    assert drawn == expected
