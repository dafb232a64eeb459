"""Rules for every test of the workspace, imported by the two `conftest.py` files that cover them all."""

from __future__ import annotations

import gc
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest

from handle_signals import handle_signals

if TYPE_CHECKING:
    from collections.abc import Iterator

# pytest's own, and what torch sets when it imports its compiler (the profiler and DDP do).
SET_BY_OTHERS = (
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
    "GLOO_ENABLE_STORE_V2_API",
    "KMP_DUPLICATE_LIB_OK",  # older versions of OpenMP, when they are loaded
    "KMP_INIT_AT_FORK",
)


handle_signals()

STATES = (
    ("accel_state.accelerator_state", "GradientState"),
    ("accel_state.accelerator_state", "AcceleratorState"),
    ("accel_state.partial_state", "PartialState"),
)


def reset_states() -> None:
    """Make this process forget its accel state; the process group stays. Imports nothing."""
    for module, name in STATES:
        if module in sys.modules:
            getattr(sys.modules[module], name)._reset_state()
    if "accel_state.runtime" in sys.modules:
        sys.modules["accel_state.runtime"].reset()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu` where there is no accelerator; torch is asked only if there are any."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if torch.accelerator.is_available():
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="needs an accelerator; tools/gpu_check.sh runs it on one"))


def pytest_collection_finish() -> None:
    """Leave out what is imported by now when garbage is looked for: that takes 0.3 s each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def simulated() -> Any:
    """The module of the simulated accelerator, with its limits and counters; other accelerators have none."""
    import torch

    if "SIMULATED_DEVICE" not in os.environ:
        pytest.skip("needs the simulated accelerator: tests-integration/simulated/test_gpu_marked.py has it")
    return torch.get_device_module(os.environ["SIMULATED_DEVICE"])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute with one thread: several that share a core wait for each other, and keep it busy meanwhile."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Start without accel state; fail a test that leaves a variable or a process group, or had a race."""
    before = dict(os.environ)
    reset_states()
    yield
    reset_states()
    after = dict(os.environ)
    for name in SET_BY_OTHERS:
        before.pop(name, None)
        after.pop(name, None)
    changed = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    assert not changed, f"the test left these environment variables changed: {', '.join(changed)}"
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        pytest.fail("the test left the default process group initialised")
    if torch is not None and "SIMULATED_DEVICE" in os.environ:
        device = torch.get_device_module()
        for index in range(device.device_count()):
            device.synchronize(index)
        races = device.take_races()
        assert not races, "\n".join(("races on the simulated accelerator:", *dict.fromkeys(races)))
