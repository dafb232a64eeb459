"""The strategy FSDP1: the model wrapper, its gradients, and sharded states by the original names."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffload,
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_
from torch.optim import Optimizer

from accel_ops.modules import compiled_in_place, extract_model_from_parallel, unwrap_once, without_compiler
from accel_plugins.fsdp.blocks import (
    checkpoint_function,
    ensure_weights_retied,
    get_parameters_from_modules,
    materialize_fsdp1,
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
    notes_of,
    replacement_of,
    warn_about_master_weights,
)
from accel_plugins.strategy import (
    Bundle,
    Feature,
    Optimizers,
    Parameters,
    PrecisionPolicy,
    StateDict,
    Strategy,
)
from accel_plugins.unsharded import check_materialised, move_to_device
from accel_state import hang_monitor
from accel_state.errors import SettingsError, UnsupportedError
from accel_state.runtime import Runtime
from accel_state.settings.model import Settings
from accel_state.torch_private import apply_activation_checkpointing, checkpoint_wrapper, offload_wrapper

unwrap_once.register(FullyShardedDataParallel, lambda model: model.module)


class Fsdp1Strategy(Strategy):
    """Put models into `FullyShardedDataParallel`."""

    name = "fsdp1"
    fsdp_version = 1
    features = frozenset(
        {
            Feature.CLIP_GRAD_VALUE,
            Feature.ITEM_COUNTS,
            Feature.MODEL_WITHOUT_OPTIMIZER,
            Feature.MULTIPLE_MODELS,
            Feature.NO_SYNC,
        }
    )

    def __init__(
        self, settings: Settings, runtime: Runtime, precision: PrecisionPolicy, handlers: Mapping[type, Any]
    ) -> None:
        super().__init__(settings, runtime, precision, handlers)
        topology = runtime.topology
        plugin = handlers.get(FullyShardedDataParallelPlugin) or FullyShardedDataParallelPlugin(
            fsdp_version=1
        )
        plugin.set_mixed_precision(precision.name)
        sizes = {"dp_shard": topology.world_size}
        if plugin.sharding_strategy in {
            ShardingStrategy.HYBRID_SHARD,
            ShardingStrategy._HYBRID_SHARD_ZERO2,
        }:  # one row for each node
            local = topology.local_world_size
            sizes = {"dp_replicate": topology.world_size // local, "dp_shard": local}
        self.plugin, self.shard_mesh = plugin, mesh_of(runtime.device.type, sizes)
        # The mixed precision under which trained parameters are cast to float32.
        self.master_weights = None if precision.name == "no" else precision.name
        self.roots = FsdpRoots()
        self.states = Fsdp1States(self.roots, runtime.device, partial(form_of, plugin))

    def check(self, bundle: Bundle) -> None:
        """Refuse models that FSDP1 cannot shard, and optimizers that are foreign or cannot train shards."""
        plugin = self.plugin
        if not plugin.cpu_ram_efficient_loading and plugin.param_init_fn is None:
            check_materialised(bundle)
        for model in bundle.models:
            copy.copy(plugin).set_auto_wrap_policy(without_compiler(model))
        models = [without_compiler(model) for model in bundle.models]
        check_parameters(bundle.optimizers, (*models, *self.roots))
        new = [model for model in models if not isinstance(model, FullyShardedDataParallel)]
        for model in new:
            if getattr(model, "_is_fsdp_managed_module", False):
                raise SettingsError(
                    f"{type(model).__name__} was taken out of its FSDP1 wrapper, and has flat shards of its "
                    "parameters: pass the model that prepare() returned, not that of unwrap_model()."
                )
            ignored = {
                id(parameter)
                for part in modules_named(plugin.ignored_modules, model)
                for parameter in part.parameters()
            }
            for name, parameter in model.named_parameters():
                if id(parameter) not in ignored and (hook := hook_of(parameter)):
                    # Autograd sees views of the flat parameter only.
                    raise SettingsError(
                        f"{type(model).__name__}: the parameter {name!r} has a hook ({hook}), which FSDP1 "
                        "would never call. Remove it, and change the gradients between backward() and step() "
                        "instead; fsdp_version=2 calls hooks of register_post_accumulate_grad_hook."
                    )
        for optimizer in bundle.optimizers:
            self._check_optimizer(optimizer, new)

    def _check_optimizer(self, optimizer: Optimizer, models: Iterable[nn.Module]) -> None:
        kind = type(optimizer).__qualname__
        sharded = (
            self.plugin.sharding_strategy is not ShardingStrategy.NO_SHARD and self.shard_mesh.size() > 1
        )
        if sharded and not _MIXING.isdisjoint(base.__name__.lower() for base in type(optimizer).__mro__):
            raise SettingsError(
                f"{kind} computes the update of an element from others of its parameter, and FSDP1 gives "
                "every rank a flat shard: it would train other weights. Use fsdp_version=2, whose shards "
                "are DTensors, if it works with them, or no FSDP."
            )
        originals = {id(parameter) for model in models for parameter in model.parameters()}
        if not self.plugin.use_orig_params and any(
            id(parameter) in originals or is_replaced(parameter) for parameter in optimizer.state
        ):
            raise SettingsError(
                f"{kind} has state for parameters that FSDP1 flattens. Create it after prepare() "
                "of the model, load its state afterwards, or set "
                "FullyShardedDataParallelPlugin(use_orig_params=True)."
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
            self.roots.shard_state(optimizer)
        return replace(bundle, models=models)

    def backward(self, loss: Tensor, *, accumulation: int, sync: bool, **kwargs: Any) -> None:
        with hang_monitor.collective_scope("backward"):
            super().backward(loss, accumulation=accumulation, sync=sync, **kwargs)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        root = self.roots.of_model(model)
        return nullcontext() if root is None else root.no_sync()  # pyright: ignore[reportReturnType] - a context manager without annotations

    def join(
        self, joinables: Sequence[Any], *, divide_by_initial_world_size: bool = True
    ) -> AbstractContextManager[None]:
        del joinables, divide_by_initial_world_size
        raise UnsupportedError("FSDP1 cannot train on batches that run out earlier on some ranks.")

    def clip_grad_norm(
        self, parameters: Parameters, max_norm: float, norm_type: float = 2.0, *, optimizers: Optimizers = ()
    ) -> Tensor:
        return _clip_norm(self.roots, self.unscale(parameters, optimizers), max_norm, norm_type)

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
        notes = notes_of(model)
        if self.master_weights is not None and self.runtime.topology.is_main:
            warn_about_master_weights(model, self.master_weights)
        # 2. Materialise the model, now or module by module.
        on_cpu = device.type == "cpu"
        sync = bool(plugin.sync_module_states)
        if on_cpu:  # FSDP1 broadcasts values only between accelerators
            materialize_fsdp1(model, self.runtime, plugin, broadcast=sync)
        init = plugin.param_init_fn
        if (
            not on_cpu
            and init is None
            and plugin.cpu_ram_efficient_loading
            and not self.runtime.topology.is_main
        ):
            init = partial(nn.Module.to_empty, device=device, recurse=False)
        # 3. Wrap it.
        ignored = get_parameters_from_modules(plugin.ignored_modules, model, device)
        # On the CPU there is nothing to offload, and FSDP1 would pin memory, which needs a driver.
        offload = plugin.cpu_offload if isinstance(plugin.cpu_offload, CPUOffload) and not on_cpu else None
        with hang_monitor.collective_scope("prepare"), suppress_fsdp1_warnings(), _explain_errors(model):
            root = MonitoredFSDP(
                model,
                sharding_strategy=plugin.sharding_strategy,  # pyright: ignore[reportArgumentType] - settled by the plugin
                cpu_offload=offload,
                auto_wrap_policy=plugin.auto_wrap_policy,  # pyright: ignore[reportArgumentType] - settled above
                backward_prefetch=plugin.backward_prefetch,  # pyright: ignore[reportArgumentType] - settled by the plugin
                mixed_precision=plugin.mixed_precision_policy,  # pyright: ignore[reportArgumentType] - settled by the plugin
                ignored_states=ignored or None,
                param_init_fn=None if init is None or on_cpu else ensure_weights_retied(init, model, device),
                device_id=device,
                sync_module_states=sync and not on_cpu,
                forward_prefetch=bool(plugin.forward_prefetch),
                limit_all_gathers=plugin.limit_all_gathers,
                use_orig_params=bool(plugin.use_orig_params),
                device_mesh=self.shard_mesh,
            )
        # 4. Add what FSDP1 lacks.
        if self.master_weights is not None:
            _upcast_flat_parameters(root)
        if plugin.activation_checkpointing or plugin.activation_checkpointing_offload:
            _checkpoint_blocks(root, plugin)
        _gather_in_generate(root)
        self.roots.add(root)
        now = parameters_by_name(root, flat=not plugin.use_orig_params)
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


class MonitoredFSDP(FullyShardedDataParallel):
    """FSDP1 whose forward pass explains a stall in its gathers."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with hang_monitor.transport_errors_explained("forward"):
            return super().forward(*args, **kwargs)

    def _get_name(self) -> str:
        return FullyShardedDataParallel.__name__  # `print(model)` shows torch's own name


@contextmanager
def _explain_errors(model: nn.Module) -> Generator[None]:
    """Add names of parameters to torch's errors about parameters it cannot flatten."""
    try:
        yield
    except ValueError as error:
        problem = f"FSDP1 cannot shard {type(model).__name__}: {str(error).rstrip('.')}."
        if "dtype" not in problem:
            raise SettingsError(problem) from error
        first: dict[Any, str] = {}
        for name, parameter in model.named_parameters():
            first.setdefault(parameter.dtype, name)
        listed = ", ".join(f"{name!r} in {dtype}" for dtype, name in first.items())
        raise SettingsError(
            f"{problem} It has {listed}. Cast the parameters of a block to one floating-point dtype, put the "
            "others in ignored_modules, or use fsdp_version=2, which needs one dtype for those that are "
            "trained only."
        ) from error


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


def _checkpoint_blocks(root: FullyShardedDataParallel, plugin: FullyShardedDataParallelPlugin) -> None:
    blocks = {
        id(module.module) for module in FullyShardedDataParallel.fsdp_modules(root) if module is not root
    }
    recompute, offload = plugin.activation_checkpointing, plugin.activation_checkpointing_offload
    if not blocks:
        raise SettingsError(
            f"FullyShardedDataParallelPlugin(activation_checkpointing={recompute!r}, "
            f"activation_checkpointing_offload={offload!r}): no block of the model is wrapped on its "
            "own, so there is nothing to recompute. Choose an auto_wrap_policy."
        )

    def wrap_block(module: nn.Module) -> nn.Module:
        if recompute:
            module = checkpoint_wrapper(module, checkpoint_fn=checkpoint_function(module))
        return offload_wrapper(module) if offload else module

    apply_activation_checkpointing(
        root, checkpoint_wrapper_fn=wrap_block, check_fn=lambda module: id(module) in blocks
    )


def _clip_norm(roots: FsdpRoots, clipped: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
    """Clip gradients by their norm over all parameters of all models."""
    ids = {id(parameter) for parameter in clipped}
    models = [root for root in roots if any(id(parameter) in ids for parameter in root.parameters())]
    inside = {id(parameter) for root in models for parameter in root.parameters()}
    absent = {
        id(parameter) for root in models for parameter in root.parameters() if parameter.requires_grad
    } - ids
    if absent:
        raise SettingsError(
            f"clip_grad_norm_() was given {len(clipped)} parameters, but {len(absent)} more of the same "
            "model are missing. FSDP1 computes the norm over all of them: pass model.parameters() of the "
            "prepared model."
        )
    outside = [parameter for parameter in clipped if id(parameter) not in inside]
    if not models:
        return clip_grad_norm_(outside, max_norm, norm_type)
    with hang_monitor.collective_scope("clip_grad_norm_"):
        if len(models) == 1 and not outside:
            return models[0].clip_grad_norm_(max_norm, norm_type)
        largest = torch.finfo(torch.float32).max  # so that computing the norm changes no gradient
        norms = [root.clip_grad_norm_(largest, norm_type) for root in models]
    if outside:
        norms.append(clip_grad_norm_(outside, largest, norm_type))
    norm = torch.linalg.vector_norm(torch.stack([norm.float() for norm in norms]), norm_type)
    clip_grads_with_norm_(clipped, max_norm, norm)
    return norm


class Fsdp1States(ShardedStates):
    """Sharded state dicts of FSDP1, with the original parameters instead of the flat ones."""

    def __init__(self, roots: FsdpRoots, device: torch.device, form: Callable[[], StateForm]) -> None:
        super().__init__(device, form)
        self.roots = roots

    def model_tensors(self, model: nn.Module) -> StateDict:
        """Return the sharded state dict of the model; tied weights are one object."""
        root = self.roots.of_model(model)
        if root is None:
            return super().model_tensors(model)
        with sharded_states(root):
            state = {strip_wrapper_prefixes(name): value for name, value in root.state_dict().items()}
        # FSDP1 returns tied weights as several tensors; make them a single object again.
        tied = {name: first for name, first in tied_names(root).items() if {name, first} <= state.keys()}
        return state | {name: state[first] for name, first in tied.items()}

    def load_model(self, model: nn.Module, state: StateDict, **options: Any) -> Any:
        """Load a sharded state dict; one name of tied weights suffices."""
        root = self.roots.of_model(model)
        if root is None:
            return super().load_model(model, state, **options)
        complete = dict(state)
        for name, first in tied_names(root).items():  # files have a single name of tied weights
            saved_name = first if first in state else name
            if saved_name in state:
                complete[name] = complete[first] = state[saved_name]
        with sharded_states(root):
            return root.load_state_dict(complete, **options)

    def optimizer_tensors(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> StateDict:
        roots = self.roots.of_optimizer(optimizer, models)
        if not roots:
            return super().optimizer_tensors(optimizer, models)
        for values in optimizer.state_dict()["state"].values():
            for key, value in values.items():
                if isinstance(value, dict):  # torch requires it to be the same on every rank
                    raise UnsupportedError(
                        f"{type(optimizer).__qualname__} keeps {key!r} for this rank's shards, which torch "
                        "cannot gather from FSDP1: its state cannot be saved. Save the model alone, with "
                        "save_model(), or use an optimizer whose state is tensors of the parameters' shapes."
                    )
        state: StateDict = {}
        for prefix, root in roots.items():
            with sharded_states(root), _trained_by(optimizer, root) as part:
                states = FullyShardedDataParallel.optim_state_dict(root, part)["state"]
            state |= {prefix + name: values for name, values in states.items()}
        return {"state": state, "param_groups": self._named_groups(optimizer, roots)}

    def state_allocator(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> StateAllocator:
        roots = self.roots.of_optimizer(optimizer, models)
        if not roots:
            return super().state_allocator(optimizer, models)
        return allocator_like(
            {
                prefix + name: tensor
                for prefix, root in roots.items()
                for name, tensor in self.model_tensors(root).items()
            }
        )

    def load_optimizer(self, optimizer: Optimizer, models: Sequence[nn.Module], state: StateDict) -> None:
        roots = self.roots.of_optimizer(optimizer, models)
        if not roots:
            super().load_optimizer(optimizer, models, state)
            return
        names = self._named_groups(optimizer, roots)
        check_groups(*[[group["params"] for group in groups] for groups in (state["param_groups"], names)])
        # 1. Convert the states of each model's parameters to this rank's flat shards.
        every_parameter = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        indices = {id(parameter): index for index, parameter in enumerate(every_parameter)}
        local: dict[int, Any] = {}
        for prefix, root in roots.items():
            with sharded_states(root), _trained_by(optimizer, root) as part:
                own = {
                    name.removeprefix(prefix): values
                    for name, values in state["state"].items()
                    if name.startswith(prefix)
                }
                groups = [{"params": [*own]}]
                loaded = FullyShardedDataParallel.optim_state_dict_to_load(
                    root, part, {"state": own, "param_groups": groups}
                )["state"]
            parameters = part.param_groups[0]["params"]
            local |= {indices[id(parameters[index])]: values for index, values in loaded.items()}
        # 2. Load them, by index, with the saved options of the groups.
        counts = iter(range(len(every_parameter)))
        groups = [
            {**group, "params": [next(counts) for _ in now["params"]]}
            for group, now in zip(state["param_groups"], optimizer.param_groups, strict=True)
        ]
        optimizer.load_state_dict({"state": local, "param_groups": groups})

    def sources(self, model: nn.Module) -> Sequence[ParameterSource]:
        root = self.roots.of_model(model)
        if root is None:
            return super().sources(model)
        buffers = {strip_wrapper_prefixes(name) for name, _ in root.named_buffers(remove_duplicate=False)}
        state = {name: value for name, value in self.model_tensors(model).items() if name not in buffers}
        return [source_of(names, value) for names, value in group_tied_names(state)]

    def _named_groups(
        self, optimizer: Optimizer, roots: Mapping[str, FullyShardedDataParallel]
    ) -> list[dict[str, Any]]:
        """Return the optimizer's groups with the original names of their parameters."""
        names: dict[int, list[str]] = {}
        for prefix, root in roots.items():
            names |= {
                id(parameter): [prefix + strip_wrapper_prefixes(name)]
                for name, parameter in root.named_parameters()
            }
            for inside, flat in _flat_parameters(root):
                names[id(flat)] = [prefix + inside + name for name in flat._fqns]
        return [
            {**group, "params": [name for parameter in group["params"] for name in names[id(parameter)]]}
            for group in optimizer.param_groups
        ]


@contextmanager
def _trained_by(optimizer: Optimizer, root: FullyShardedDataParallel) -> Generator[Optimizer]:
    """Yield an optimizer of the parameters of one model; the model's other parameters are frozen meanwhile.

    torch converts states only for an optimizer that has every trained parameter of a model.
    """
    inside = {id(parameter) for parameter in root.parameters()}
    own = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) in inside
    ]
    ids = {id(parameter) for parameter in own}
    frozen = [
        parameter for parameter in root.parameters() if parameter.requires_grad and id(parameter) not in ids
    ]
    part = Optimizer([{"params": own}], {})
    part.state.update(
        {parameter: optimizer.state[parameter] for parameter in own if parameter in optimizer.state}
    )
    for parameter in frozen:
        parameter.requires_grad = False
    try:
        yield part
    finally:
        for parameter in frozen:
            parameter.requires_grad = True


@contextmanager
def sharded_states(root: FullyShardedDataParallel) -> Generator[None]:
    """Make state dicts of a model and its optimizer sharded, as DTensors, within the block."""
    with (
        suppress_fsdp1_warnings(),
        FullyShardedDataParallel.state_dict_type(
            root,
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(offload_to_cpu=False),
            ShardedOptimStateDictConfig(offload_to_cpu=False),
        ),
    ):
        yield


@contextmanager
def suppress_fsdp1_warnings() -> Generator[None]:
    """Suppress FSDP1's deprecation warnings, and those about calls that torch makes itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings(
            "ignore", message=".*(NO_SHARD|_get_pg_default_device|Multiple backends are registered)"
        )
        yield


def parameters_by_name(root: FullyShardedDataParallel, *, flat: bool) -> dict[str, Tensor]:
    """Return FSDP1's parameters by original name; a flat one by the names of all its original parameters."""
    if not flat:
        return {
            strip_wrapper_prefixes(name): parameter
            for name, parameter in root.named_parameters(remove_duplicate=False)
        }
    return {prefix + inner: flat for prefix, flat in _flat_parameters(root) for inner in flat._fqns}


def tied_names(root: FullyShardedDataParallel) -> dict[str, str]:
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


_MIXING = frozenset({"adafactor", "fusedlamb", "lamb", "lars", "lbfgs", "muon", "shampoo", "soap"})
"""Optimizers that compute the update of an element from other elements of its parameter."""


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


class FsdpRoots:
    """Weak set of root FSDP1 modules in insertion order, the same on every rank."""

    def __init__(self) -> None:
        self._roots: WeakKeyDictionary[FullyShardedDataParallel, None] = WeakKeyDictionary()

    def __iter__(self) -> Iterator[FullyShardedDataParallel]:
        return iter(self._roots)

    def add(self, root: FullyShardedDataParallel) -> None:
        """Add a root module."""
        self._roots[root] = None

    def of_model(self, model: nn.Module) -> FullyShardedDataParallel | None:
        """Return the root module of a model; `None` if it was not wrapped."""
        outer = without_compiler(model)
        if isinstance(outer, FullyShardedDataParallel):
            return outer
        core = extract_model_from_parallel(model, keep_torch_compile=False)
        return next((root for root in self._roots if root.module is core), None)

    def shard_state(self, optimizer: Optimizer) -> None:
        """Shard an optimizer's state of full parameters in place, under `use_orig_params`."""
        for root in self._roots:
            for _, flat in _flat_parameters(root):
                rows = zip(flat._params or (), flat._shapes, flat._shard_param_infos, strict=False)
                for parameter, shape, shard in rows:
                    state: dict[str, Any] = optimizer.state.get(parameter, {})
                    for key, value in state.items():
                        if getattr(value, "shape", None) == shape != parameter.shape:
                            begin, end = (shard.intra_param_start_idx or 0, shard.intra_param_end_idx)
                            local = value.flatten()[begin : end + 1 if shard.in_shard else begin]
                            state[key] = local.to(parameter, copy=True)

    def of_optimizer(
        self, optimizer: Optimizer, models: Sequence[nn.Module]
    ) -> dict[str, FullyShardedDataParallel]:
        """Map prefixes of parameter names in an optimizer to the root modules of the models that it trains.

        As in `parameter_names`, the prefix is empty for a single model, else the model's index.
        """
        owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        roots = {
            index: root
            for index, model in enumerate(models)
            if (root := self.of_model(model)) is not None
            and any(id(parameter) in owned for parameter in root.parameters())
        }
        return {f"{index}." if len(roots) > 1 else "": root for index, root in roots.items()}
