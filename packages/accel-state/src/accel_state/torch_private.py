"""Every private name of torch that this project uses: the place to look when a new torch breaks accel.

A name of `NAMES` is imported from torch at its first import from here, so that importing this module
costs nothing and does not import torch. The functions below read private attributes; those that run in
each step of a training loop are `attrgetter`s, or are bound once by their caller. All names exist in
torch 2.15.0; comments note differences of other versions. The files are below
https://github.com/pytorch/pytorch/blob/v2.15.0/; an operator in `torch.ops` is not private, whatever its
first letter.
"""

# ruff: noqa: PLC0414 - the aliases export names to type checkers

from __future__ import annotations

import functools
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

if TYPE_CHECKING:
    import torch
    from torch import Tensor, UntypedStorage, nn
    from torch._guards import active_fake_mode as active_fake_mode
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.distributed import ProcessGroup
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing as apply_activation_checkpointing,
    )
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        checkpoint_wrapper as checkpoint_wrapper,
    )
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper as offload_wrapper
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict as flatten_state_dict
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather as DefaultAllGather
    from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
    from torch.distributed.tensor._dtensor_spec import TensorMeta as TensorMeta
    from torch.distributed.tensor._sharding_prop import ShardingPropagator as ShardingPropagator
    from torch.distributed.tensor._utils import (
        compute_local_shape_and_global_offset as compute_local_shape_and_global_offset,
    )
    from torch.distributed.tensor.experimental._attention import context_parallel as context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method as set_rotate_method
    from torch.testing._internal.distributed.fake_pg import FakeStore as FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map as tree_map
    from torch.utils._pytree import tree_structure as tree_structure
    from torch.utils._pytree import tree_unflatten as tree_unflatten
    from torch.utils.data._utils.pin_memory import pin_memory as pin_memory

    ConvNd: type[nn.Module]
    adjust_muon_lr: Callable[[float, str | None, torch.Size], float]
    amp_unscale_and_check: Callable[[list[Tensor], Tensor, Tensor], None]
    assert_async: Callable[[Tensor, str], None]
    compute_shape_and_offset_at: Callable[..., tuple[tuple[int, ...], tuple[int, ...]]]
    disable_current_modes: Callable[[], AbstractContextManager[Any]]
    foreach_clamp_max_: Callable[..., None]
    foreach_clamp_min_: Callable[..., None]
    foreach_copy_: Callable[..., None]
    foreach_div_: Callable[..., None]
    foreach_mul_: Callable[..., None]
    get_default_group: Callable[[], ProcessGroup]
    get_default_store: Callable[[], Any]
    get_layout: Callable[..., Any]
    parse_to: Callable[..., Any]
    orthogonalize_matrix: Callable[[Tensor, tuple[float, float, float], int, float], Tensor]
    rebuild_parameter: Callable[..., Any]
    rebuild_tensor: Callable[..., Any]
    rebuild_tensor_v2: Callable[..., Any]
    ring_attention: Callable[..., Any]
    set_group_timeout: Callable[..., None]

NAMES = {
    # torch/_guards.py: the active fake tensor mode, for the recorder of `accel check`.
    "active_fake_mode": "torch._guards:active_fake_mode",
    # aten/src/ATen/native/native_functions.yaml: the operator that GradScaler calls.
    "amp_unscale_and_check": "torch:_amp_foreach_non_finite_check_and_unscale_",
    # native_functions.yaml: an assertion that does not wait for the device; it has no public name.
    "assert_async": "torch:_assert_async",
    # torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py: imported by the FSDP tutorials.
    "apply_activation_checkpointing": (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper:apply_activation_checkpointing"
    ),
    "checkpoint_wrapper": "torch.distributed.algorithms._checkpoint.checkpoint_wrapper:checkpoint_wrapper",
    "offload_wrapper": "torch.distributed.algorithms._checkpoint.checkpoint_wrapper:offload_wrapper",
    # torch/distributed/tensor/experimental/_attention.py, in newer versions a package: the documented
    # functions (https://docs.pytorch.org/tutorials/unstable/context_parallel.html) and the ring.
    "context_parallel": "torch.distributed.tensor.experimental._attention:context_parallel",
    "ring_attention": "torch.distributed.tensor.experimental._attention:_templated_ring_attention",
    "set_rotate_method": "torch.distributed.tensor.experimental._attention:set_rotate_method",
    # torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py: the public base class is abstract.
    "DefaultAllGather": "torch.distributed.fsdp._fully_shard._fsdp_collectives:DefaultAllGather",
    # torch/utils/_python_dispatch.py: https://dev-discuss.pytorch.org/t/what-and-why-is-torch-dispatch/557
    "TorchDispatchMode": "torch.utils._python_dispatch:TorchDispatchMode",
    "disable_current_modes": "torch.utils._python_dispatch:_disable_current_modes",
    "is_traceable_wrapper_subclass": "torch.utils._python_dispatch:is_traceable_wrapper_subclass",
    # torch/optim/_muon.py: Muon's update and learning rate of a matrix; the class does not support DTensors.
    "adjust_muon_lr": "torch.optim._muon:_adjust_lr",
    "orthogonalize_matrix": "torch.optim._muon:_zeropower_via_newtonschulz",
    # torch/distributed/tensor/_dtensor_spec.py and _utils.py: create a DTensor without a collective; compute
    # shape and offset of the shard of this rank, or of the rank at some coordinates of the mesh.
    "DTensorSpec": "torch.distributed.tensor._dtensor_spec:DTensorSpec",
    "TensorMeta": "torch.distributed.tensor._dtensor_spec:TensorMeta",
    "compute_shape_and_offset_at": "torch.distributed.tensor._utils:_compute_local_shape_and_global_offset",
    "compute_local_shape_and_global_offset": (
        "torch.distributed.tensor._utils:compute_local_shape_and_global_offset"
    ),
    # torch/distributed/tensor/_sharding_prop.py: infers shapes of results, patched by `accel check`.
    "ShardingPropagator": "torch.distributed.tensor._sharding_prop:ShardingPropagator",
    # torch/testing/_internal/distributed/fake_pg.py: the store of process groups without communication.
    "FakeStore": "torch.testing._internal.distributed.fake_pg:FakeStore",
    # torch/_subclasses/fake_tensor.py: tensors without data,
    # https://docs.pytorch.org/docs/main/torch.compiler_fake_tensor.html
    "FakeTensor": "torch._subclasses.fake_tensor:FakeTensor",
    "FakeTensorMode": "torch._subclasses.fake_tensor:FakeTensorMode",
    # torch/distributed/checkpoint/_nested_dict.py: creates a checkpoint's keys from nested names.
    "flatten_state_dict": "torch.distributed.checkpoint._nested_dict:flatten_state_dict",
    # torch/distributed/checkpoint/filesystem.py: the rows of a folder's index.
    "StorageInfo": "torch.distributed.checkpoint.filesystem:_StorageInfo",
    # native_functions.yaml: listed under https://docs.pytorch.org/docs/stable/torch.html#foreach-operations
    "foreach_clamp_max_": "torch:_foreach_clamp_max_",
    "foreach_clamp_min_": "torch:_foreach_clamp_min_",
    "foreach_copy_": "torch:_foreach_copy_",
    "foreach_div_": "torch:_foreach_div_",
    "foreach_mul_": "torch:_foreach_mul_",
    # torch/distributed/distributed_c10d.py: neither the default group nor its store has a public getter;
    # `set_group_timeout` is for versions without `torch.distributed.set_timeout`.
    "get_default_group": "torch.distributed.distributed_c10d:_get_default_group",
    "get_default_store": "torch.distributed.distributed_c10d:_get_default_store",
    "set_group_timeout": "torch.distributed.distributed_c10d:_set_pg_timeout",
    # torch/serialization.py and torch/_utils.py: functions in pickled tensors, for restricted unpicklers.
    "get_layout": "torch.serialization:_get_layout",
    "rebuild_parameter": "torch._utils:_rebuild_parameter",
    "rebuild_tensor": "torch._utils:_rebuild_tensor",
    "rebuild_tensor_v2": "torch._utils:_rebuild_tensor_v2",
    # torch/nn/modules: base classes of all convolutions and batch norms, and load_state_dict's result.
    "ConvNd": "torch.nn.modules.conv:_ConvNd",
    "IncompatibleKeys": "torch.nn.modules.module:_IncompatibleKeys",
    "NormBase": "torch.nn.modules.batchnorm:_NormBase",
    # torch/distributed/tensor/placement_types.py: shards of several slices, or of dims sharded twice.
    "StridedShard": "torch.distributed.tensor.placement_types:_StridedShard",
    # torch/csrc/utils/python_arg_parsing.h: reads the arguments of `to`, as nn.Module.to does.
    "parse_to": "torch:_C._nn._parse_to",
    # torch/utils/data/_utils/pin_memory.py: pins nested data as DataLoader does.
    "pin_memory": "torch.utils.data._utils.pin_memory:pin_memory",
    # torch/utils/_pytree.py: https://github.com/pytorch/pytorch/issues/65761; torch.utils.pytree, which is
    # public in newer versions, has other signatures.
    "tree_leaves": "torch.utils._pytree:tree_leaves",
    "tree_map": "torch.utils._pytree:tree_map",
    "tree_structure": "torch.utils._pytree:tree_structure",
    "tree_unflatten": "torch.utils._pytree:tree_unflatten",
}
"""Names of this module to their objects in torch, in the notation of `pkgutil.resolve_name`."""


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    value = globals()[name] = pkgutil.resolve_name(NAMES[name])
    return value


# Tensors and storages.

version_of: Callable[[Tensor], int] = attrgetter("_version")
"""Return a tensor's version, the number of in-place writes (torch/_tensor.py, in the notes on autograd)."""

local_tensor: Callable[[Any], Any] = attrgetter("_local_tensor")
"""Return the shard of a DTensor (torch/distributed/tensor/_api.py); `to_local` creates another object."""

dtensor_spec: Callable[[Any], Any] = attrgetter("_spec")
"""Return mesh, placements and shape of a DTensor (torch/distributed/tensor/_api.py)."""


storage_address: Callable[[UntypedStorage], int] = attrgetter("_cdata")
"""Return the address of a storage object, which fake storages also have (torch/storage.py).

`torch.save` identifies storages by it.
"""

checkpoint_offset: Callable[[UntypedStorage], int] = attrgetter("_checkpoint_offset")
"""Return the file offset of a storage that `torch.load` has faked (torch/serialization.py).

`torch.serialization.skip_data` documents that its files are filled at this offset.
"""


gradient_hooks: Callable[[Tensor], tuple[dict[int, Any] | None, dict[int, Any] | None]] = attrgetter(
    "_backward_hooks", "_post_accumulate_grad_hooks"
)
"""Return the hooks that `register_hook` and `register_post_accumulate_grad_hook` fill (torch/_tensor.py)."""


def set_gradient_hooks(tensor: Tensor, hooks: tuple[Any, Any]) -> None:
    """Set a tensor's hooks to those of another; existing handles still remove them."""
    tensor._backward_hooks, tensor._post_accumulate_grad_hooks = hooks  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


def not_views() -> Callable[[], Any]:
    """Return a guard in which slices of a buffer are not "views" to autograd.

    Each slice has its own version counter, so that an in-place change of one does not invalidate graphs that
    use another; slicing is also cheaper (torch/csrc/autograd/python_variable.cpp, c10/core/DispatchKey.h).
    """
    torch_c = import_module("torch._C")
    keys = torch_c.DispatchKeySet(torch_c.DispatchKey.AutogradFunctionality)
    keys |= torch_c.DispatchKeySet(torch_c.DispatchKey.ADInplaceOrView)
    return lambda: torch_c._ExcludeDispatchKeyGuard(keys)


schema_of: Callable[[Any], Any] = attrgetter("_schema")
"""Return the schema of an operator (torch/_ops.py): its name, and the arguments that it mutates."""


def is_in_backward() -> bool:
    """Return whether this thread runs a backward pass (torch/utils/checkpoint.py asks the same)."""
    return import_module("torch._C")._current_graph_task_id() != -1


# Modules.

tables_of: Callable[
    [nn.Module], tuple[dict[str, nn.Parameter | None], dict[str, Tensor | None], dict[str, nn.Module | None]]
] = attrgetter("_parameters", "_buffers", "_modules")
"""Return a module's dicts of direct parameters, buffers and children (torch/nn/modules/module.py)."""

parameter_table: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
"""Return the module's dict of direct parameters, to be read and written.

`setattr` does much more, and is too slow for hooks that swap tensors around each forward.
"""

buffer_table: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
"""Return the module's dict of direct buffers, to be read and written."""

child_table: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
"""Return the module's dict of children; `named_children()` hides a child that is registered twice."""


non_persistent_names: Callable[[nn.Module], set[str]] = attrgetter("_non_persistent_buffers_set")
"""Return the names of the module's direct non-persistent buffers (torch/nn/modules/module.py)."""


def optimized_module() -> type[Any] | None:
    """Return the class of `torch.compile`'s results, or `None` if the compiler has not been imported.

    No module is compiled then, and importing the compiler takes seconds (torch/_dynamo/eval_frame.py).
    """
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return None if dynamo is None else dynamo.OptimizedModule


def import_compiler() -> None:
    """Import torch's compiler, which takes seconds, before forking processes that need it."""
    import_module("torch._dynamo")


compiled_module: Callable[[Any], nn.Module] = attrgetter("_orig_mod")
"""Return the module inside the result of `torch.compile` (torch/_dynamo/eval_frame.py)."""


def compile_call(module: nn.Module, like: Any) -> None:
    """Compile a module in place, as `Module.compile` does, with the options of a `torch.compile` result."""
    module._compiled_call_impl = like.dynamo_ctx(module._call_impl)  # pyright: ignore[reportPrivateUsage]


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return whether `Module.compile` was called (torch/nn/modules/module.py)."""
    return module._compiled_call_impl is not None  # pyright: ignore[reportPrivateUsage]


def disable_compiler(function: F) -> F:
    """Exclude a function, but not its callees, from compilation (torch/_compile.py).

    `torch.compiler.disable` does the same, but imports the compiler.
    """
    return import_module("torch")._disable_dynamo(recursive=False)(function)


def run_uncompiled(function: F) -> F:
    """Exclude a function and its callees from compilation, without importing the compiler."""
    uncompiled = import_module("torch")._disable_dynamo(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (uncompiled if "torch._dynamo" in sys.modules else function)(*args, **kwargs)

    return cast("F", call)


# Optimizers and data.


def supports_amp_scaling(optimizer: Any) -> bool:
    """Return whether an optimizer unscales in its own kernel (as torch/amp/grad_scaler.py asks)."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def infinite_flags(scaler: Any, optimizer: Any) -> list[Tensor]:
    """Return GradScaler's flags, one per device, of non-finite gradients (torch/amp/grad_scaler.py)."""
    return [*scaler._found_inf_per_device(optimizer).values()]


def let_foreach_run_on(device_type: str, tensor_type: type[Tensor]) -> None:
    """Enable the foreach kernels of optimizers for a device and a tensor type (torch/optim/optimizer.py)."""
    optimizer: Any = import_module("torch.optim.optimizer")
    real = optimizer._get_foreach_kernels_supported_devices
    optimizer._get_foreach_kernels_supported_devices = lambda: [*real(), device_type]
    optimizer._foreach_supported_types.append(tensor_type)


requested_samples: Callable[[Any], int | None] = attrgetter("_num_samples")
"""Return the `num_samples` argument of a `RandomSampler` (torch/utils/data/sampler.py)."""


# Process groups.


def process_groups() -> Mapping[ProcessGroup, Any]:
    """Return all existing process groups (torch/distributed/distributed_c10d.py, no public list)."""
    return import_module("torch.distributed.distributed_c10d")._world.pg_map


def abort_process_groups() -> None:
    """Abort all process groups, or destroy them in a version without such a function."""
    c10d = import_module("torch.distributed.distributed_c10d")
    getattr(c10d, "_abort_process_group", c10d.destroy_process_group)()


def device_types(group: ProcessGroup) -> frozenset[str]:
    """Return the device types for which a group has a backend (torch/csrc/distributed/c10d/init.cpp)."""
    return frozenset(device.type for device in group._device_types)


def backend_of(group: ProcessGroup, device: torch.device) -> Any:
    """Return a group's backend for a device (torch/csrc/distributed/c10d/init.cpp).

    Raises:
        RuntimeError: If the group has none.
    """
    return group._get_backend(device)


backend_timeout: Callable[[Any], Any] = attrgetter("options._timeout")
"""Return the timeout of a backend's collectives (torch/csrc/distributed/c10d/init.cpp)."""


def set_terminate_handler(handler: Callable[..., Any]) -> None:
    """Replace the signal handler of torch's launcher (torch/distributed/elastic/multiprocessing/api.py)."""
    module: Any = import_module("torch.distributed.elastic.multiprocessing.api")
    module._terminate_process_handler = handler


# Meshes, FSDP and context parallelism.


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Flatten a mesh to one axis with the given name (torch/distributed/device_mesh.py).

    It is the documented way: https://docs.pytorch.org/tutorials/recipes/distributed_device_mesh.html
    """
    return mesh._flatten(name)  # pyright: ignore[reportPrivateUsage]


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Concatenate the axes of several meshes (torch/distributed/device_mesh.py, no public function)."""
    return type(meshes[0])._concatenate(meshes)  # pyright: ignore[reportPrivateUsage]


MESH_METHODS = ("__init__", "__getitem__", "_concatenate", "_flatten", "_unflatten", "get_coordinate")
"""The methods of a device mesh that read its tensor of ranks; not every torch has all of them."""

PROPAGATION_METHODS = ("_propagate_tensor_meta_non_cached", "_propagate_tensor_meta")
"""The methods of `ShardingPropagator` that infer a result's shape; each torch version has one of them."""


def hybrid_shard_zero2() -> ShardingStrategy:
    """Return `_HYBRID_SHARD_ZERO2`, which has no public name (torch/distributed/fsdp/api.py)."""
    return import_module("torch.distributed.fsdp").ShardingStrategy._HYBRID_SHARD_ZERO2


def fully_sharded_mesh(module: FSDPModule) -> DeviceMesh | None:
    """Return the mesh of the parameters in a module's own FSDP2 group (torch/distributed/fsdp/_fully_shard).

    torch 2.9 has one parameter group per module, later versions a list; `None` if there is none.
    """
    state: Any = module._get_fsdp_state()  # pyright: ignore[reportPrivateUsage]
    groups: Any = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return None if groups[0] is None else groups[0].mesh_info.mesh


flat_handle: Callable[[FullyShardedDataParallel], Any] = attrgetter("_handle")
"""Return the handle of an FSDP1 module's flat parameter or `None` (torch/distributed/fsdp)."""


def refresh_original_parameters(module: FullyShardedDataParallel, handle: Any) -> None:
    """Point the original parameters of an FSDP1 module, if it keeps them, into its new flat parameter."""
    if module._use_orig_params:  # pyright: ignore[reportPrivateUsage]
        handle._use_sharded_views()


flat_names: Callable[[Any], list[str]] = attrgetter("_fqns")
"""Return the names of the parameters in a flat parameter (torch/distributed/fsdp/_flat_param.py)."""


def flat_shards(flat: Any) -> zip[tuple[Any, Any, Any]]:
    """Return original parameter, shape and shard of each item of a flat parameter, with `use_orig_params`."""
    return zip(flat._params or (), flat._shapes, flat._shard_param_infos, strict=False)


def flat_slices(handle: Any) -> Iterator[tuple[str, torch.Size, int, Tensor]]:
    """Yield name, full shape, offset and elements of this rank's shard of each item of a flat parameter."""
    flat = handle.flat_param
    is_sharded = handle.uses_sharded_strategy
    local = flat._local_shard.detach() if is_sharded else flat.detach()
    first = handle.rank * local.numel() if is_sharded else 0
    paddings = zip(handle._get_flat_param_offsets(), flat._is_padding_mask, strict=True)
    spans = [span for span, is_padding in paddings if not is_padding]
    for name, shape, (begin, last) in zip(flat._fqns, flat._shapes, spans, strict=True):
        start, stop = max(begin, first), min(last + 1, first + local.numel())
        yield name, shape, max(start - begin, 0), local[start - first : max(start, stop) - first]


shared_parameters: Callable[[Any], list[tuple[Any, ...]]] = attrgetter("_shared_param_infos")
"""Return repeated and first locations of tied weights of a flat parameter (`SharedParamInfo`)."""


def replace_fsdp_chunks(make: Callable[..., Any]) -> None:
    """Replace FSDP2's chunking of parameters (torch/distributed/fsdp/_fully_shard/_fsdp_param.py)."""
    module: Any = import_module("torch.distributed.fsdp._fully_shard._fsdp_param")
    module._chunk_with_empty = make


def context_parallel_options() -> Any:
    """Return torch's context-parallel options (torch/distributed/tensor/experimental)."""
    return _ring_module()._cp_options


def context_parallel_rules() -> dict[Any, Any]:
    """Return torch's table of dispatch rules of operators within context parallelism."""
    return _ring_module().custom_ops


def ring_attention_backward(*args: Any, **kwargs: Any) -> Any:
    """Compute the gradients of ring attention (torch/distributed/tensor/experimental)."""
    return _ring_module()._templated_ring_attention_backward(*args, **kwargs)


def _ring_module() -> Any:
    # The module of the dispatch rules; newer versions have moved it.
    attention = import_module("torch.distributed.tensor.experimental._attention")
    return sys.modules[attention._templated_ring_attention.__module__]
