"""What test bodies do around DeepSpeed, whose process groups and few variables stay with a process."""

from __future__ import annotations

import os
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Generator


@contextmanager
def new_groups_end() -> Generator[None]:
    """A block after which the process groups that it made are gone."""
    known = {*_groups()}
    try:
        yield
    finally:
        for group in {*_groups()} - known:
            if group in _groups():  # The end of the default group is that of all others.
                dist.destroy_process_group(group)


@contextmanager
def deepspeed_process() -> Generator[None]:
    """A block after which nothing is left of DeepSpeed but the imported library."""
    before = dict(os.environ)
    with warnings.catch_warnings(), new_groups_end():
        # Some of its modules warn of what they use.
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=UserWarning, module=r"deepspeed\.|torch\.")
        from accel_plugins.deepspeed.library import ds_module, load_library

        load_library("a test")
        try:
            yield
        finally:
            for name in ("_WORLD", "_DATA_PARALLEL", "_MODEL_PARALLEL", "_TENSOR_MODEL_PARALLEL"):
                setattr(ds_module("utils.groups"), f"{name}_GROUP", None)
            ds_module("utils.groups").mpu = None  # AutoTP's, which each later engine would ask for its groups
            for name in {*os.environ} - {*before}:
                del os.environ[name]


def _groups() -> list[dist.ProcessGroup]:
    return [*dist.distributed_c10d._world.pg_map]
