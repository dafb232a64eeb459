"""Shard models, optimizer states and batches over the devices of a mesh, by annotations for XLA's compiler.

What `torch_xla.experimental.spmd_fully_sharded_data_parallel` does, without a module around each block: names
in state dicts stay as they are.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from accel_ops.tree import recursively_apply, walk
from accel_state.devices.xla import library, start

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

AXIS = "fsdp"
"""The axis of the mesh over which parameters and batches are sharded."""


def start_mesh() -> Any:
    """Let the compiler shard from now on, and return the mesh.

    Returns:
        The global mesh, where the caller has set one with an axis `"fsdp"`; else one of all devices along
        that axis, which becomes the global one.

    Raises:
        SettingsError: Something has used a device before.
    """
    start(spmd=True)
    runtime, spmd = xla_module("runtime"), xla_module("distributed.spmd")
    mesh = spmd.get_global_mesh()
    if mesh is None or AXIS not in mesh.axis_names:
        count = runtime.global_runtime_device_count()
        mesh = spmd.Mesh([*range(count)], (count, 1), (AXIS, "model"))
        spmd.set_global_mesh(mesh)
    return mesh


def largest_dim(shape: Sequence[int]) -> tuple[str | None, ...]:
    """Return the partition of a parameter: its largest dimension is sharded.

    Example:
        >>> largest_dim((8, 16)), largest_dim(())
        ((None, 'fsdp'), ())
    """
    largest = max(range(len(shape)), key=lambda dim: shape[dim], default=None)
    return tuple(AXIS if dim == largest else None for dim in range(len(shape)))


def shard(tensor: Tensor, mesh: Any) -> None:
    """Shard a tensor along its largest dimension, unless it is sharded or has none."""
    if tensor.dim() and not library()._XLAC._get_xla_sharding_spec(tensor):
        xla_module("distributed.spmd").mark_sharding(tensor, mesh, largest_dim(tensor.shape))


def first_dim(tensor: Tensor) -> tuple[str | None, ...]:
    """Return the partition of a batch, or of activations: the first dimension is sharded."""
    return (AXIS, *(None for _ in tensor.shape[1:]))


def shard_model(model: nn.Module, blocks: Sequence[nn.Module], mesh: Any) -> None:
    """Shard the parameters of a model that is on the device, in place, and what its blocks return.

    The outputs of blocks, of which the model is one, are sharded along the batch, which makes the compiler
    gather parameters block by block.
    """
    spmd = xla_module("distributed.spmd")
    _shard_parameters(model, mesh)
    model.register_load_state_dict_post_hook(lambda module, _: _shard_parameters(module, mesh))

    def shard_output(module: nn.Module, inputs: Any, output: Any) -> None:
        del module, inputs
        for _, leaf in walk(output):
            if isinstance(leaf, torch.Tensor) and leaf.dim():
                spmd.mark_sharding(leaf, mesh, first_dim(leaf))

    for block in blocks:
        block.register_forward_hook(shard_output)
        if block is not model:
            spmd.xla_sharding.apply_backward_optimization_barrier(block)


def checkpoint_blocks(blocks: Sequence[nn.Module]) -> None:
    """Let blocks recompute their activations in the backward pass."""
    for block in blocks:
        xla_module("distributed.fsdp").checkpoint_module(block)


def shard_optimizer(optimizer: Optimizer, mesh: Any) -> None:
    """Shard the state of an optimizer as its parameters, whenever it is loaded or made."""

    def shard_state(optimizer: Optimizer, *_: Any) -> None:
        for parameter, values in optimizer.state.items():
            for value in values.values():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape and not value.is_cpu:
                    shard(value, mesh)

    optimizer.register_load_state_dict_post_hook(shard_state)
    optimizer.register_step_post_hook(shard_state)
    shard_state(optimizer)


@dataclass(frozen=True, slots=True)
class BatchSharder:
    """Moves batches to the devices, sharded along their first dimension."""

    mesh: Any
    device: torch.device
    num_hosts: int

    def __call__(self, batch: Any) -> Any:
        """Return the batch with its tensors on the devices."""
        return recursively_apply(self._move, batch)

    def _move(self, tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.device.type != "cpu":
            return tensor.to(self.device)
        spec = xla_module("distributed.spmd").ShardingSpec(
            self.mesh, first_dim(tensor), minibatch=self.num_hosts > 1
        )
        return xla_module("core.xla_model").send_cpu_data_to_device([tensor], self.device, spec)[0]


@contextmanager
def quiet_backward() -> Generator[None]:
    """Run a backward pass without a warning about the optimization barriers of blocks that get only data."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        yield


def _shard_parameters(model: nn.Module, mesh: Any) -> None:
    for parameter in model.parameters():
        shard(parameter, mesh)


def xla_module(name: str) -> Any:
    """Import a submodule of torch_xla."""
    library()
    return import_module(f"torch_xla.{name}")
