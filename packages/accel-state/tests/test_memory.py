from __future__ import annotations

import gc
import inspect
import types
import weakref

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accel_state import runtime
from accel_state.environ import patch_environment
from accel_state.logging import tqdm
from accel_state.memory import (
    clear_device_cache,
    find_executable_batch_size,
    release_memory,
    should_reduce_batch_size,
)

OUT_OF_MEMORY = RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")


def test_released_objects_are_let_go():
    thing = torch.nn.Linear(2, 2)
    gone = weakref.ref(thing)
    thing, other = release_memory(thing, 5)
    assert thing is None
    assert other is None
    assert gone() is None


def test_the_cache_of_the_device_is_emptied(monkeypatch):
    emptied: list[int] = []

    module = types.SimpleNamespace(empty_cache=lambda: emptied.append(1))
    monkeypatch.setattr("accel_state.memory.available_kind", lambda: types.SimpleNamespace(module=module))
    clear_device_cache()
    assert emptied == [1]


@pytest.fixture
def quick(monkeypatch):
    """Without collecting garbage before each try."""
    monkeypatch.setattr("accel_state.memory.clear_device_cache", lambda garbage_collection: None)


@pytest.mark.usefixtures("quick")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(start=st.integers(1, 300), fits=st.integers(1, 300))
def test_the_first_size_that_fits_is_found(start, fits):
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=start)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        if batch_size > fits:
            raise OUT_OF_MEMORY
        return batch_size

    expected = [start]
    while expected[-1] > fits:
        expected.append(int(expected[-1] * 0.9))
    assert train() == expected[-1]
    assert tried == expected


@pytest.mark.usefixtures("quick")
def test_the_documented_sizes_are_tried_and_then_it_gives_up():
    tried: list[int] = []

    @find_executable_batch_size
    def train(batch_size: int) -> None:
        tried.append(batch_size)
        raise OUT_OF_MEMORY

    with pytest.raises(RuntimeError, match="No executable batch size found, reached zero"):
        train()
    assert tried[:6] == [128, 115, 103, 92, 82, 73]
    assert tried[-1] == 1


def test_the_next_size_can_be_chosen():
    sizes = iter([50, 10])

    @find_executable_batch_size(starting_batch_size=100, reduce_batch_size_fn=lambda: next(sizes))
    def train(batch_size: int, offset: int, *, scale: int = 1) -> int:
        if batch_size > 20:
            raise torch.OutOfMemoryError
        return offset + scale * batch_size

    assert train(5, scale=2) == 25


def test_the_next_call_begins_where_the_last_one_ended():
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=10)
    def train(batch_size: int) -> None:
        tried.append(batch_size)
        if batch_size > 8:
            raise OUT_OF_MEMORY

    train()
    train()
    assert tried == [10, 9, 8, 8]


def test_other_errors_are_not_hidden():
    @find_executable_batch_size
    def train(batch_size: int) -> None:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        train()


@pytest.mark.parametrize("is_chained", [False, True])
def test_what_did_not_fit_is_let_go_before_the_next_try(is_chained: bool):
    seen: list[weakref.ref[torch.Tensor]] = []

    @find_executable_batch_size(starting_batch_size=2)
    def train(batch_size: int) -> bool:
        if batch_size == 1:
            gc.collect()
            return seen[0]() is None
        big = torch.zeros(10)
        seen.append(weakref.ref(big))
        try:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        except RuntimeError as error:
            if not is_chained:
                raise
            raise RuntimeError("The step failed: CUDA out of memory.") from error

    assert train()


def test_passing_the_batch_size_is_explained():
    @find_executable_batch_size
    def train(batch_size: int, lr: float) -> None: ...

    with pytest.raises(TypeError, match=r"call `train\(0.1\)`"):
        train(64, 0.1)
    assert list(inspect.signature(train).parameters) == ["lr"]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("x"), True),
        (MemoryError(), True),
        (RuntimeError("XPU out of memory."), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("CUDA out of memory."), False),
    ],
)
def test_which_errors_mean_too_little_memory(error, expected):
    assert should_reduce_batch_size(error) is expected


def test_a_real_allocation_that_does_not_fit_is_recognised():
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**62, dtype=torch.uint8)
    assert should_reduce_batch_size(raised.value)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(("rank", "only", "shown"), [(0, True, True), (1, True, False), (1, False, True)])
def test_a_progress_bar_shows_on_the_first_process_of_a_machine(rank, only, shown, capsys):
    with patch_environment(rank=rank, world_size=2, local_rank=rank, local_world_size=2):
        assert list(tqdm([1, 2], main_process_only=only)) == [1, 2]
    assert ("2/2" in capsys.readouterr().err) == shown
    with pytest.raises(runtime.NotStartedError):  # a bar starts nothing
        runtime.current()


def test_a_progress_bar_can_be_switched_off(capsys):
    assert list(tqdm([1, 2], disable=True)) == [1, 2]
    assert capsys.readouterr().err == ""
