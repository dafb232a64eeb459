"""The strategy FSDP1: the model wrapper, its gradients, and sharded states by the original names."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffload,
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.optim import Optimizer

from accel_ops.modules import compiled_in_place, extract_model_from_parallel, unwrap_once, without_compiler
from accel_plugins.fsdp.blocks import (
    checkpoint_activations,
    ensure_weights_retied,
    get_parameters_from_modules,
    modules_named,
    separable_only,
)
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin, form_of
from accel_plugins.full_parameters import ParameterSource
from accel_plugins.parallelism.config import mesh_of
from accel_plugins.sharding.shards import ShardedStates, group_tied_names, source_of
from accel_plugins.sharding.state import (
    StateAllocator,
    StateForm,
    allocator_like,
    check_groups,
    strip_wrapper_prefixes,
)
from accel_plugins.sharding.wrap import (
    check_parameters,
    dtype_to_train,
    follow_replacements,
    hook_of,
    is_replaced,
    note_replacement,
    replacement_of,
    warn_about_master_weights,
)
from accel_plugins.strategy import (
    PLAIN_FEATURES,
    Bundle,
    Feature,
    Optimizers,
    Parameters,
    StateDict,
    Strategy,
)
from accel_plugins.unsharded import check_materialised, move_to_device
from accel_state import hang_monitor
from accel_state.errors import SettingsError, UnsupportedError
from accel_state.torch_private import reshard_unit

unwrap_once.register(FullyShardedDataParallel, lambda model: model.module)

_MIXING = frozenset({"adafactor", "fusedlamb", "lamb", "lars", "lbfgs", "muon", "shampoo", "soap"})
"""Optimizers that compute the update of an element from other elements of its parameter."""


class Fsdp1Strategy(Strategy):
    """Put models into `FullyShardedDataParallel`."""

    name = "fsdp1"
    fsdp_version = 1
    keeps_weight_types = False
    features = PLAIN_FEATURES - {Feature.CUSTOM_DEVICE_PLACEMENT, Feature.UNEVEN_INPUTS}

    def setup(self) -> None:
        topology, precision = self.runtime.topology, self.precision.name
        plugin = self.handlers.get(FullyShardedDataParallelPlugin) or FullyShardedDataParallelPlugin(
            fsdp_version=1
        )
        plugin.set_mixed_precision(precision)
        sizes = {"dp_shard": topology.world_size}
        if plugin.sharding_strategy in {ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2}:
            local = topology.local_world_size
            sizes = {"dp_replicate": topology.world_size // local, "dp_shard": local}  # a row for each node
        self.plugin, self.shard_mesh = plugin, mesh_of(self.runtime.device.type, sizes)
        # The mixed precision under which trained parameters are cast to float32.
        self.master_weights = None if precision == "no" else precision
        self.roots: WeakSet[FullyShardedDataParallel] = WeakSet()
        self.states = Fsdp1States(self.roots, self.runtime.device, partial(form_of, plugin))

    def check(self, bundle: Bundle) -> None:
        """Refuse models that FSDP1 cannot shard, and optimizers that are foreign or cannot train shards."""
        plugin = self.plugin
        if not plugin.cpu_ram_efficient_loading and plugin.param_init_fn is None:
            check_materialised(bundle)
        models = [without_compiler(model) for model in bundle.models]
        check_parameters(bundle.optimizers, (*models, *self.roots))
        new = [model for model in models if not isinstance(model, FullyShardedDataParallel)]
        for model in new:
            copy.copy(plugin).set_auto_wrap_policy(model)
            if getattr(model, "_is_fsdp_managed_module", False):
                raise SettingsError(
                    f"{type(model).__name__} was taken out of its FSDP1 wrapper: pass the model that "
                    "prepare() returned, not that of unwrap_model()."
                )
            ignored = modules_named(plugin.ignored_modules, model)
            kept = {id(parameter) for part in ignored for parameter in part.parameters()}
            for name, parameter in model.named_parameters():
                if id(parameter) not in kept and (hook := hook_of(parameter)):
                    # Autograd sees views of the flat parameter only.
                    raise SettingsError(
                        f"{type(model).__name__}: the parameter {name!r} has a hook ({hook}), which FSDP1 "
                        "would never call. Remove it, and change the gradients between backward() and step()."
                    )
        sharded = plugin.sharding_strategy is not ShardingStrategy.NO_SHARD and self.shard_mesh.size() > 1
        originals = {id(parameter) for model in new for parameter in model.parameters()}
        for optimizer in bundle.optimizers:
            kind = type(optimizer).__qualname__
            if sharded and not _MIXING.isdisjoint(base.__name__.lower() for base in type(optimizer).__mro__):
                raise SettingsError(
                    f"{kind} computes the update of an element from others of its parameter, and FSDP1 gives "
                    "every rank a flat shard: it would train other weights. Use fsdp_version=2, whose shards "
                    "are DTensors, if it works with them, or no FSDP."
                )
            if not plugin.use_orig_params and any(
                id(parameter) in originals or is_replaced(parameter) for parameter in optimizer.state
            ):
                raise SettingsError(
                    f"{kind} has state for parameters that FSDP1 flattens. Create it after prepare() of the "
                    "model, or set FullyShardedDataParallelPlugin(use_orig_params=True)."
                )

    def wrap(self, bundle: Bundle, *, evaluation: bool = False) -> Bundle:
        """Wrap the models with trainable parameters; move the others to the device."""
        if evaluation:
            return replace(bundle, models=move_to_device(bundle, self.runtime.device))
        models = [
            model if isinstance(without_compiler(model), FullyShardedDataParallel) else self._wrap(model)
            for model in bundle.models
        ]
        for optimizer in bundle.optimizers:
            _check_flat_parameters(optimizer)
            follow_replacements(optimizer)
            for root in self.roots:
                _shard_state(optimizer, root)
        return replace(bundle, models=models)

    def backward(self, loss: Tensor, *, accumulation: int, sync: bool, **kwargs: Any) -> None:
        with hang_monitor.collective_scope("backward"):
            super().backward(loss, accumulation=accumulation, sync=sync, **kwargs)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        root = self.states.root_of(model)
        return nullcontext() if root is None else root.no_sync()  # pyright: ignore[reportReturnType] - a context manager without annotations

    def clip_grad_norm(
        self, parameters: Parameters, max_norm: float, norm_type: float = 2.0, *, optimizers: Optimizers = ()
    ) -> Tensor | None:
        """Clip the gradients of all parameters of one model, as FSDP1 does."""
        tensors = self.unscale(parameters, optimizers)
        ids = {*map(id, tensors)}
        root = next((root for root in self.roots if any(id(p) in ids for p in root.parameters())), None)
        if root is None:
            return super().clip_grad_norm(tensors, max_norm, norm_type)
        own = {id(parameter) for parameter in root.parameters() if parameter.requires_grad}
        if {id(parameter) for parameter in tensors if parameter.requires_grad} != own:
            raise SettingsError(
                f"clip_grad_norm_() was given {len(ids & own)} of the {len(own)} parameters of a model, and "
                f"{len(ids - own)} others. FSDP1 computes the norm of one model: call it for each prepared "
                "model, with its model.parameters()."
            )
        with hang_monitor.collective_scope("clip_grad_norm_"):
            return root.clip_grad_norm_(max_norm, norm_type)

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model.module if isinstance(model, FullyShardedDataParallel) else model

    def _wrap(self, model: nn.Module) -> nn.Module:
        plugin, device = copy.copy(self.plugin), self.runtime.device
        # 1. Resolve the wrap policy, and record the names of the original parameters.
        # The compiler's wrapper would change the names by which optimizers and checkpoints know parameters.
        model = compiled_in_place(model)
        plugin.set_auto_wrap_policy(model)
        if plugin.auto_wrap_policy is not None:
            plugin.auto_wrap_policy = separable_only(plugin.auto_wrap_policy, model)
        notes = {name: vars(parameter) for name, parameter in model.named_parameters()}
        if self.master_weights is not None and self.runtime.topology.is_main:
            warn_about_master_weights(model, self.master_weights)
        # 2. Wrap it, which materialises it. FSDP1 broadcasts values only between accelerators.
        on_cpu, sync = device.type == "cpu", bool(plugin.sync_module_states)
        init = plugin.param_init_fn or partial(nn.Module.to_empty, device=device, recurse=False)
        init = ensure_weights_retied(init, model, device)
        if on_cpu:
            for module in model.modules():
                own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
                if any(tensor.is_meta for tensor in own):
                    init(module)
            model.to(device)
            for tensor in (*model.parameters(), *model.buffers()) if sync else ():
                contiguous = tensor.detach().contiguous()
                self.runtime.collectives.broadcast(contiguous, 0)
                tensor.detach().copy_(contiguous)
        ignored = get_parameters_from_modules(plugin.ignored_modules, model, device)
        # On the CPU there is nothing to offload, and FSDP1 would pin memory, which needs a driver.
        offload = plugin.cpu_offload if isinstance(plugin.cpu_offload, CPUOffload) and not on_cpu else None
        arguments = ("sharding_strategy", "auto_wrap_policy", "backward_prefetch", "limit_all_gathers")
        arguments += ("forward_prefetch", "use_orig_params")
        options: dict[str, Any] = {name: getattr(plugin, name) for name in arguments}
        options["mixed_precision"] = plugin.mixed_precision_policy
        with hang_monitor.collective_scope("prepare"), _suppress_warnings():
            root = MonitoredFSDP(
                model,
                cpu_offload=offload,
                ignored_states=ignored or None,
                param_init_fn=init,
                device_id=device,
                sync_module_states=sync and not on_cpu,
                device_mesh=self.shard_mesh,
                **options,
            )
        # 3. Add what FSDP1 lacks.
        if self.master_weights is not None:
            _upcast_flat_parameters(root)
        recompute, to_cpu = plugin.activation_checkpointing, plugin.activation_checkpointing_offload
        if recompute or to_cpu:
            blocks = [part for part in FullyShardedDataParallel.fsdp_modules(root) if part is not root]
            for block in blocks or [root]:
                checkpoint_activations(block.module, recompute=bool(recompute), offload=bool(to_cpu))
        _gather_in_generate(root)
        self.roots.add(root)
        if plugin.use_orig_params:
            named = root.named_parameters(remove_duplicate=False)
            now: dict[str, Tensor] = {strip_wrapper_prefixes(name): parameter for name, parameter in named}
        else:
            now = {prefix + name: flat for prefix, flat in _flat_parameters(root) for name in flat._fqns}
        for name in notes.keys() & now.keys():
            note_replacement(notes[name], now[name])
        return root


def _check_flat_parameters(optimizer: Optimizer) -> None:
    """Refuse groups that have some of the parameters of which FSDP1 has made one."""
    for index, group in enumerate(optimizer.param_groups):
        flat = [new for old in group["params"] if (new := replacement_of(old)) is not old]
        for new, count in Counter(flat).items():
            total = getattr(new, "_num_params", count)
            if count < total:
                raise SettingsError(
                    f"Group {index} of {type(optimizer).__qualname__} has {count} of the {total} parameters "
                    "of one block, of which FSDP1 makes one flat parameter: it would train all of them. Set "
                    "FullyShardedDataParallelPlugin(use_orig_params=True)."
                )


def _shard_state(optimizer: Optimizer, root: FullyShardedDataParallel) -> None:
    """Shard an optimizer's state of full parameters in place, under `use_orig_params`."""
    for _, flat in _flat_parameters(root):
        rows = zip(flat._params or (), flat._shapes, flat._shard_param_infos, strict=False)
        for parameter, shape, shard in rows:
            state: dict[str, Any] = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if getattr(value, "shape", None) == shape != parameter.shape:
                    begin, end = (shard.intra_param_start_idx or 0, shard.intra_param_end_idx)
                    local = value.flatten()[begin : end + 1 if shard.in_shard else begin]
                    state[key] = local.to(parameter, copy=True)


class MonitoredFSDP(FullyShardedDataParallel):
    """FSDP1 whose forward pass explains a stall in its gathers, and keeps nothing gathered without gradients.

    FSDP1 keeps what the backward pass needs first. If none follows, the next forward pass would use it
    again, although the shards may have been written to in between, such as by averaged weights.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with hang_monitor.transport_errors_explained("forward"):
            output = super().forward(*args, **kwargs)
        if self._is_root and not torch.is_grad_enabled():
            for unit in FullyShardedDataParallel.fsdp_modules(self):
                handle: Any = unit._handle
                if handle is not None and handle.uses_sharded_strategy and not handle.needs_unshard():
                    reshard_unit(unit, handle, free_unsharded_flat_param=True)
        return output

    def _get_name(self) -> str:
        return FullyShardedDataParallel.__name__  # `print(model)` shows torch's own name


def _gather_in_generate(root: FullyShardedDataParallel) -> None:
    """Gather the root's own parameters within `generate`, which calls the model without its wrapper."""
    generate = getattr(root.module, "generate", None)
    if generate is None:
        return

    @wraps(generate)
    def gather_and_generate(*args: Any, **kwargs: Any) -> Any:
        with FullyShardedDataParallel.summon_full_params(root, recurse=False, writeback=False):
            return generate(*args, **kwargs)

    vars(root.module)["generate"] = gather_and_generate


def _upcast_flat_parameters(root: FullyShardedDataParallel) -> None:
    """Convert the trained flat parameters of FSDP1 to float32, before the first forward pass.

    torch accepts a dtype that changes between wrapping and the first forward pass.
    """
    for module in FullyShardedDataParallel.fsdp_modules(root):
        handle: Any = module._handle
        if handle is None or dtype_to_train(handle.flat_param) is handle.flat_param.dtype:
            continue
        handle.flat_param.data = handle.flat_param.data.float()
        if module._use_orig_params:
            handle._use_sharded_views()  # the original parameters are views of the flat one


class Fsdp1States(ShardedStates):
    """Sharded state dicts of FSDP1, with the original parameters instead of the flat ones."""

    def __init__(
        self, roots: WeakSet[FullyShardedDataParallel], device: torch.device, form: Callable[[], StateForm]
    ) -> None:
        super().__init__(device, form)
        self.roots = roots

    def root_of(self, model: nn.Module) -> FullyShardedDataParallel | None:
        """Return the root module of a model; `None` if it was not wrapped."""
        outer = without_compiler(model)
        if isinstance(outer, FullyShardedDataParallel):
            return outer
        core = extract_model_from_parallel(model, keep_torch_compile=False)
        return next((root for root in self.roots if root.module is core), None)

    def model_tensors(self, model: nn.Module) -> StateDict:
        root = self.root_of(model)
        if root is None:
            return super().model_tensors(model)
        with _sharded_states(root):
            state = {strip_wrapper_prefixes(name): value for name, value in root.state_dict().items()}
        # FSDP1 returns tied weights as several tensors; make them a single object again.
        tied = {name: first for name, first in _tied_names(root).items() if {name, first} <= state.keys()}
        return state | {name: state[first] for name, first in tied.items()}

    def load_model(self, model: nn.Module, state: StateDict, **options: Any) -> Any:
        root = self.root_of(model)
        if root is None:
            return super().load_model(model, state, **options)
        complete = dict(state)
        for name, first in _tied_names(root).items():  # files have a single name of tied weights
            saved_name = first if first in state else name
            if saved_name in state:
                complete[name] = complete[first] = state[saved_name]
        with _sharded_states(root):
            return root.load_state_dict(complete, **options)

    def own_names(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> list[list[str]]:
        """Return the original names; a flat parameter has several."""
        root = self._root_trained_by(optimizer, models)
        if root is None:
            return super().own_names(optimizer, models)
        names = {id(parameter): [strip_wrapper_prefixes(name)] for name, parameter in root.named_parameters()}
        names |= {id(flat): [prefix + name for name in flat._fqns] for prefix, flat in _flat_parameters(root)}
        return [[name for p in group["params"] for name in names[id(p)]] for group in optimizer.param_groups]

    def optimizer_tensors(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> StateDict:
        root = self._root_trained_by(optimizer, models)
        if root is None:
            return super().optimizer_tensors(optimizer, models)
        for values in optimizer.state_dict()["state"].values():
            for key, value in values.items():
                if isinstance(value, dict):  # torch requires it to be the same on every rank
                    raise UnsupportedError(
                        f"{type(optimizer).__qualname__} keeps {key!r} for this rank's shards, which torch "
                        "cannot gather from FSDP1: save the model alone, with save_model()."
                    )
        with _sharded_states(root, optimizer):
            return FullyShardedDataParallel.optim_state_dict(root, optimizer)

    def state_allocator(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> StateAllocator:
        root = self._root_trained_by(optimizer, models)
        if root is None:
            return super().state_allocator(optimizer, models)
        return allocator_like(self.model_tensors(root))

    def load_optimizer(self, optimizer: Optimizer, models: Sequence[nn.Module], state: StateDict) -> None:
        root = self._root_trained_by(optimizer, models)
        if root is None:
            super().load_optimizer(optimizer, models, state)
            return
        saved = [group["params"] for group in state["param_groups"]]
        check_groups(saved, self.own_names(optimizer, models))
        with _sharded_states(root, optimizer):
            local = FullyShardedDataParallel.optim_state_dict_to_load(root, optimizer, state)
        optimizer.load_state_dict(local)

    def sources(self, model: nn.Module) -> Sequence[ParameterSource]:
        root = self.root_of(model)
        if root is None:
            return super().sources(model)
        buffers = {strip_wrapper_prefixes(name) for name, _ in root.named_buffers(remove_duplicate=False)}
        state = {name: value for name, value in self.model_tensors(model).items() if name not in buffers}
        return [source_of(names, value) for names, value in group_tied_names(state)]

    def _root_trained_by(
        self, optimizer: Optimizer, models: Sequence[nn.Module]
    ) -> FullyShardedDataParallel | None:
        owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        roots = [
            root
            for model in models
            if (root := self.root_of(model)) is not None
            and any(id(parameter) in owned for parameter in root.parameters())
        ]
        if len(roots) > 1:
            raise UnsupportedError(
                f"{type(optimizer).__qualname__} trains {len(roots)} models, and torch gathers from FSDP1 "
                "the state of an optimizer of one: make one for each model, or use fsdp_version=2."
            )
        return next(iter(roots), None)


@contextmanager
def _sharded_states(root: FullyShardedDataParallel, optimizer: Optimizer | None = None) -> Generator[None]:
    """Make state dicts of a model and its optimizer sharded, as DTensors, within the block.

    torch converts states only for an optimizer that has every trained parameter: others are frozen meanwhile.
    """
    others: list[nn.Parameter] = []
    if optimizer is not None:
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        others = [p for p in root.parameters() if p.requires_grad and id(p) not in own]
    kind, config = StateDictType.SHARDED_STATE_DICT, ShardedOptimStateDictConfig(offload_to_cpu=False)
    for parameter in others:
        parameter.requires_grad = False
    try:
        with (
            _suppress_warnings(),
            FullyShardedDataParallel.state_dict_type(root, kind, optim_state_dict_config=config),
        ):
            yield
    finally:
        for parameter in others:
            parameter.requires_grad = True


@contextmanager
def _suppress_warnings() -> Generator[None]:
    """Suppress FSDP1's deprecation warnings, and those about calls that torch makes itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings(
            "ignore", message=".*(NO_SHARD|_get_pg_default_device|Multiple backends are registered)"
        )
        yield


def _tied_names(root: FullyShardedDataParallel) -> dict[str, str]:
    """Map the other names of tied weights to the name under which FSDP1 has the weight."""
    return {
        prefix + f"{module}.{name}".lstrip("."): prefix + f"{first_module}.{first}".lstrip(".")
        for prefix, flat in _flat_parameters(root)
        for name, _, module, first, _, first_module in flat._shared_param_infos
    }


def _flat_parameters(root: FullyShardedDataParallel) -> Iterator[tuple[str, Any]]:
    """Yield each flat parameter with the name prefix of its module."""
    for name, module in root.named_modules():
        handle: Any = getattr(module, "_handle", None)  # only FSDP modules have one
        if isinstance(module, FullyShardedDataParallel) and handle is not None:
            yield strip_wrapper_prefixes(f"{name}.") if name else "", handle.flat_param
