"""The private modules of torch that this project imports: the place to look when a new torch breaks accel.

Private attributes, such as `module._parameters` and `torch._foreach_mul_`, are read where they are needed.
All names exist in torch 2.15.0. The files are below https://github.com/pytorch/pytorch/blob/v2.15.0/.
"""

# ruff: noqa: PLC0414 - the aliases export private names

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch._guards import active_fake_mode as active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor  # tensors without data
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_structure as tree_structure
from torch.utils._pytree import tree_unflatten as tree_unflatten
from torch.utils.data._utils.pin_memory import pin_memory as pin_memory  # pins nested data as DataLoader does

NAMES = {
    # Muon's update and learning rate of a matrix; the class does not support DTensors.
    "adjust_muon_lr": "torch.optim._muon:_adjust_lr",
    "orthogonalize_matrix": "torch.optim._muon:_zeropower_via_newtonschulz",
    "disable_current_modes": "torch.utils._python_dispatch:_disable_current_modes",
    # The keys of a checkpoint of nested names, and back; the rows of a folder's index.
    "flatten_state_dict": "torch.distributed.checkpoint._nested_dict:flatten_state_dict",
    "set_element": "torch.distributed.checkpoint._traverse:set_element",
    "StorageInfo": "torch.distributed.checkpoint.filesystem:_StorageInfo",
    "create_file_view": "torch.distributed.checkpoint.utils:_create_file_view",
    # The public base class is abstract.
    "DefaultAllGather": "torch.distributed.fsdp._fully_shard._fsdp_collectives:DefaultAllGather",
    # Frees the gathered parameters of a unit of FSDP1.
    "reshard_unit": "torch.distributed.fsdp._runtime_utils:_reshard",
    # Create a DTensor without a collective; compute shape and offset of the shard of this rank, or of the
    # rank at some coordinates of the mesh.
    "DTensorSpec": "torch.distributed.tensor._dtensor_spec:DTensorSpec",
    "TensorMeta": "torch.distributed.tensor._dtensor_spec:TensorMeta",
    "compute_shape_and_offset_at": "torch.distributed.tensor._utils:_compute_local_shape_and_global_offset",
    "compute_local_shape_and_global_offset": (
        "torch.distributed.tensor._utils:compute_local_shape_and_global_offset"
    ),
    # Shards of several slices, or of dims sharded twice.
    "StridedShard": "torch.distributed.tensor.placement_types:_StridedShard",
    # Infers the shapes of results.
    "ShardingPropagator": "torch.distributed.tensor._sharding_prop:ShardingPropagator",
    # The store of process groups without communication.
    "FakeStore": "torch.testing._internal.distributed.fake_pg:FakeStore",
}
"""Private names, and names in modules that `import torch` leaves out: imported at their first use."""


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    value = globals()[name] = pkgutil.resolve_name(NAMES[name])
    return value


def ring_attention_module() -> Any:
    """Return the module of ring attention with its options and rules, which newer versions have moved."""
    attention = import_module("torch.distributed.tensor.experimental._attention")
    return sys.modules[attention._templated_ring_attention.__module__]


def process_groups() -> Mapping[Any, Any]:
    """Return all existing process groups (torch/distributed/distributed_c10d.py)."""
    return torch.distributed.distributed_c10d._world.pg_map
