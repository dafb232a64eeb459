"""The types of `PartialState`, `AcceleratorState` and `GradientState`; read by type checkers, never run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, assert_type

import torch

from accel_state.accelerator_state import AcceleratorState, GradientState, is_initialized
from accel_state.labels import DistributedType
from accel_state.logging import get_logger
from accel_state.partial_state import PartialState, wait_for_everyone


def facts(state: PartialState) -> None:
    """Where this process is, and on what it computes."""
    assert_type((state.device, state.default_device), tuple[torch.device, torch.device])
    assert_type((state.distributed_type, state.backend), tuple[DistributedType, str | None])
    assert_type((state.num_processes, state.process_index), tuple[int, int])
    assert_type((state.local_process_index, state.debug), tuple[int, bool])
    assert_type((state.use_distributed, state.initialized, state.fork_launched), tuple[bool, bool, bool])
    assert_type((state.is_main_process, state.is_local_main_process), tuple[bool, bool])
    assert_type(state.is_last_process, bool)
    assert_type(state.set_device(), None)
    assert_type(state.destroy_process_group(), None)
    state.no_such_name  # type: ignore[attr-defined]  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


def ranks(state: PartialState, work: Callable[[int], str]) -> None:
    """What runs on some ranks, in some order, with some of the inputs."""
    assert_type(state.wait_for_everyone(), None)
    assert_type(wait_for_everyone(), None)
    assert_type(state.main_process_first(), AbstractContextManager[None])
    assert_type(state.local_main_process_first(), AbstractContextManager[None])
    assert_type(state.on_main_process(work), Callable[[int], str | None])
    assert_type(state.on_local_main_process(work), Callable[[int], str | None])
    assert_type(state.on_last_process(work), Callable[[int], str | None])
    assert_type(state.on_process(work, process_index=2), Callable[[int], str | None])
    assert_type(state.print("text"), None)
    with state.split_between_processes({"text": ["a"]}) as named:
        assert_type(named, dict[str, list[str]])
    with state.split_between_processes(torch.ones(3)) as rows:
        assert_type(rows, torch.Tensor)
    get_logger(__name__).info("text", main_process_only=False, in_order=True)


def shared(state: AcceleratorState, gradients: GradientState) -> None:
    """The precision, the engines and the window of accumulation, which all accelerators share."""
    assert_type((is_initialized(), state.is_fsdp2, state.fork_launched), tuple[bool, bool, bool])
    assert_type(state.mixed_precision, str)
    assert_type(state.num_processes, int)
    assert_type(state.deepspeed_plugins, Mapping[str, Any] | None)
    assert_type(state.select_deepspeed_plugin("student"), None)
    assert_type(state.destroy_process_group(), None)
    assert_type((gradients.sync_gradients, gradients.adjust_scheduler), tuple[bool, bool])
    assert_type((gradients.sync_with_dataloader, gradients.initialized), tuple[bool, bool])
    assert_type((gradients.num_steps, gradients.remainder), tuple[int, int])
    assert_type((gradients.in_dataloader, gradients.end_of_dataloader), tuple[bool, bool])
    assert_type(gradients.is_xla_gradients_synced, bool)
    assert_type(gradients.plugin_kwargs, Mapping[str, Any])
    assert_type(gradients.activate({}), None)
    AcceleratorState(mixed_precision=16)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
