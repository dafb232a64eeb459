"""`prepare`: sort the arguments by kind, and prepare models, optimizers, loaders and schedulers in turn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

import accel_plugins
import accel_train
from accel_ops.modules import (
    compile_regions,
    extract_model_from_parallel,
    has_compiled_regions,
    is_compiled_module,
    model_has_dtensor,
    size_at_load,
    without_compiler,
)
from accel_plugins import fsdp, sharding
from accel_plugins.kwargs import AutocastKwargs, GradScalerKwargs, TilingKwargs
from accel_plugins.optimizer import AcceleratedScheduler, StepPer, is_lomo, without_wrapper
from accel_plugins.precision import build_precision
from accel_plugins.strategy import Bundle, FromConfiguration
from accel_plugins.unsharded import has_device_map, has_offloaded_parameters
from accel_state.errors import SettingsError, UnsupportedError
from accel_state.labels import DynamoBackend
from accel_state.logging import get_logger
from accel_train import observing
from accel_train.data.adapter import DataLoaderAdapter, PreparedLoader
from accel_train.data.prepare import prepare_data_loader
from accel_train.step import bind_backward, bind_step

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accel_train.accelerator import Accelerator


logger = get_logger(__name__)

Placement: TypeAlias = "Sequence[bool | None] | None"

# The first kind whose types match an argument; arguments of no kind are passed through.
_KINDS: dict[str, tuple[type, ...]] = {
    "models": (nn.Module,),
    "optimizers": (Optimizer,),
    "schedulers": (LRScheduler, AcceleratedScheduler),
    "dataloaders": (DataLoader, DataLoaderAdapter),
}
OTHERS = "others"


def prepare_all(
    accelerator: Accelerator,
    args: Sequence[Any],
    device_placement: Placement = None,
    *,
    kind: str | None = None,
    replaced: Collection[str] = (),
    evaluation: bool = False,
    slice_fn: Callable[..., Any] | None = None,
    step_per: StepPer | None = None,
) -> list[Any]:
    """Prepare all arguments of one call.

    Args:
        accelerator: The accelerator.
        args: The arguments.
        device_placement: As for `Accelerator.prepare`.
        kind: The only kind of the arguments, if known.
        replaced: The methods that a program has replaced, and that have done their part.
        evaluation: Whether models are only evaluated.
        slice_fn: As for `Accelerator.prepare_data_loader`.
        step_per: As for `Accelerator.prepare_scheduler`.
    """
    known = accelerator._parts.prepared
    bundle, placements = sort_arguments(
        args,
        device_placement=device_placement,
        default=accelerator.device_placement,
        prepared=known,
        kind=kind,
    )

    def run() -> Bundle:
        _check(accelerator, bundle, evaluation=evaluation)
        done = _prepare_models(accelerator, bundle, evaluation=evaluation, replaced=replaced)
        done = replace(done, optimizers=_wrap_optimizers(accelerator, done, placements["optimizers"]))
        loaders = _shard_loaders(accelerator, done, placements["dataloaders"], slice_fn)
        done = replace(done, dataloaders=loaders, schedulers=_wrap_schedulers(accelerator, done, step_per))
        for wrapped in (*done.models, *done.optimizers, *done.schedulers, *done.dataloaders):
            vars(wrapped)["_is_accelerate_prepared"] = True  # libraries read it
        known.models.extend(done.models)
        known.optimizers.extend(done.optimizers)  # pyright: ignore[reportArgumentType] - wrapped by now
        known.schedulers.extend(done.schedulers)
        known.dataloaders.extend(done.dataloaders)
        return done

    observer = observing.observer
    return (run() if observer is None else observer.prepare(accelerator, bundle, run)).in_order()


def sort_arguments(
    arguments: Sequence[Any],
    *,
    device_placement: Placement,
    default: bool,
    prepared: Container[object] = (),
    kind: str | None = None,
) -> tuple[Bundle, dict[str, list[bool]]]:
    """Sort the arguments of `prepare` by kind, unless they are of one; pass through those in `prepared`.

    Returns:
        The sorted arguments and, by kind, whether each may be moved to the device.

    Example:
        >>> bundle, placements = sort_arguments(
        ...     [nn.Linear(1, 1), "other"], device_placement=None, default=True
        ... )
        >>> bundle.order, placements["models"]
        ((('models', 0), ('others', 0)), [True])
    """
    if device_placement is None:
        device_placement = [None] * len(arguments)
    if len(device_placement) != len(arguments):
        raise ValueError(
            f"device_placement={device_placement!r} has {len(device_placement)} entries for the "
            f"{len(arguments)} arguments of prepare(). Pass one for each, or None for the default."
        )
    by_kind: dict[str, list[Any]] = defaultdict(list)
    placements: dict[str, list[bool]] = defaultdict(list)
    order: list[tuple[str, int]] = []
    for argument, placement in zip(arguments, device_placement, strict=True):
        is_prepared, found = argument in prepared, kind_of(argument)
        if is_prepared:
            found = OTHERS
        elif kind is None and found == OTHERS:
            _warn_unprepared(argument)
        elif kind not in {None, found}:
            if kind != "schedulers":  # any object may be one
                raise TypeError(f"{argument!r} cannot be prepared as one of the {kind}: it has another type.")
            found = kind
        order.append((found, len(by_kind[found])))
        # A wrapper of another Accelerator would step through the strategy of that Accelerator.
        by_kind[found].append(argument if is_prepared else without_wrapper(argument))
        placements[found].append(default if placement is None else placement)
    return Bundle(**by_kind, order=tuple(order), placements=placements["models"]), placements


def kind_of(argument: object) -> str:
    """Name the field of `Bundle` that an argument of `prepare` belongs to.

    Example:
        >>> kind_of(nn.Linear(1, 1)), kind_of("neither")
        ('models', 'others')
    """
    if isinstance(argument, FromConfiguration):
        return argument.kind
    for kind, types in _KINDS.items():
        if isinstance(argument, types):
            return kind
    return OTHERS


def _warn_unprepared(argument: Any) -> None:
    """Warn about an argument that looks like a model, an optimizer or a loader, but is passed through."""
    name, inside = type(argument).__qualname__, ""
    if isinstance(argument, list | tuple):
        held: list[Any] = [item for item in argument if kind_of(item) != OTHERS]
        if held:
            inside = f"{name} that contains a {type(held[0]).__qualname__}. Pass each object separately"
    elif isinstance(argument, type):
        if issubclass(argument, (nn.Module, Optimizer, LRScheduler, DataLoader)):
            inside = f"class {argument.__qualname__}. Pass an instance"
    elif hasattr(argument, "zero_grad") and hasattr(argument, "step"):
        inside = (
            f"{name}, which steps in every micro-batch. Prepare the optimizer inside, and wrap the result"
        )
    elif hasattr(type(argument), "__iter__"):
        holds_loader = any(
            isinstance(value, DataLoader) for value in getattr(argument, "__dict__", {}).values()
        )
        if holds_loader or hasattr(argument, "batch_size"):
            inside = f"{name}, which reads all data. Prepare the loader inside, and wrap the result"
    if inside:
        logger.warning("prepare() returns an argument unchanged, the %s.", inside)


def _check(accelerator: Accelerator, bundle: Bundle, *, evaluation: bool) -> None:
    """Refuse what the run cannot train, before anything is changed; adopt models that are sharded already."""
    parts = accelerator._parts
    for model in () if evaluation else bundle.models:
        _check_quantised(model, accelerator.device)
    if parts.runtime.topology.world_size > 1 and not evaluation:
        for model in bundle.models:
            if parts.strategy.name != "presharded" and _is_sharded(model, parts.strategy.mesh):
                _adopt_sharded(model, accelerator)
            if has_device_map(model) or has_offloaded_parameters(model):
                raise UnsupportedError(
                    f"{type(model).__qualname__} is spread over several devices, the host or the disk, and "
                    "cannot be trained by several processes. Load it without device_map, or start one "
                    "process."
                )
    strategy = parts.strategy
    for argument in (*bundle.optimizers, *bundle.schedulers, *bundle.dataloaders):
        if isinstance(argument, FromConfiguration):
            strategy.require(argument.feature, type(argument).__name__)
    strategy.check(bundle)


def _prepare_models(
    accelerator: Accelerator, bundle: Bundle, *, evaluation: bool, replaced: Collection[str]
) -> Bundle:
    """Convert, wrap and compile the models, to whose parameters optimizers then point.

    A recipe converts models before their parameters are sharded. Tiles are inside of what precision does.
    Precision comes before the strategy wraps, so that the strategy's own communication stays outside
    autocast; compiling comes after, so that the compiler sees the all-reduce of gradients.
    """
    parts, strategy = accelerator._parts, accelerator._parts.strategy
    # 1. Convert models: layers for FP8, MLPs and losses in tiles, the forward in mixed precision, sequences.
    if (recipe := parts.recipe) is not None:
        for old, new in recipe.convert(bundle.models).items():
            sharding.wrap.note_replacement(vars(old), new)
        for optimizer in bundle.optimizers:
            sharding.wrap.follow_replacements(optimizer)
    tiles: TilingKwargs = parts.handlers[TilingKwargs]
    if tiles.mlp_tile_size is not None or tiles.loss_chunk_size is not None:
        _tile(accelerator, bundle.models, tiles, evaluation=evaluation)
    bundle = parts.precision.convert(bundle)
    if not evaluation and "_prepare_cp" not in replaced:
        for model in bundle.models:
            strategy.prepare_sequences(without_compiler(model))
    # 2. Place and wrap them.
    if "_prepare_fsdp2" not in replaced:
        functions = accel_train.fsdp.replacements(accelerator) if strategy.fsdp_version == 2 else {}
        # Accelerate chooses the wrapper by this property; unsloth overrides it to keep models unwrapped.
        is_overridden = accelerator.distributed_type != accelerator.state.distributed_type
        bundle = strategy.wrap(bundle, evaluation=evaluation or is_overridden, **functions)
        if parts.engine is not None and not evaluation:
            for model in bundle.models:
                parts.engine.route(model)
    # 3. Compile them.
    if parts.compiler.backend == DynamoBackend.NO:
        return bundle
    return replace(bundle, models=[_compile(accelerator, model) for model in bundle.models])


def _is_sharded(model: nn.Module, mesh: DeviceMesh | None) -> bool:
    """Return whether a model was already sharded; under tensor parallelism, its layers may be DTensors."""
    if getattr(model, "is_distributed_loading_by_transformers", False):
        return True
    if "_is_accelerate_prepared" in vars(model):
        return False
    has_tp = mesh is not None and "tp" in (mesh.mesh_dim_names or ())
    return model_has_dtensor(model) and (not has_tp or fsdp.presharded.data_mesh(model) is not None)


def _adopt_sharded(model: nn.Module, accelerator: Accelerator) -> None:
    """Switch to the strategy that trains models that are sharded already, such as this one, as they are."""
    parts, name = accelerator._parts, type(model).__qualname__
    if not parts.strategy.keeps_sharded:
        raise UnsupportedError(
            f"{name} is already sharded, as by from_pretrained(distributed_config=...), but the strategy "
            f"{parts.strategy.name!r} shards models itself. Load it without these arguments."
        )
    stages = size_at_load(model, "pp_size") or 1
    if stages > 1:
        raise UnsupportedError(
            f"{name} was loaded with pp_size={stages}, as stages of transformers' own pipeline, which "
            "returns no gradients from one stage to the one before. Load it without these arguments, and "
            f"pass ParallelismConfig(pp_size={stages})."
        )
    if parts.recipe is not None:
        raise UnsupportedError(
            f"{name} is already sharded, but mixed_precision={accelerator.state.mixed_precision!r} replaces "
            "layers, which must come first. Use 'bf16'."
        )
    if parts.prepared.optimizers or parts.prepared.dataloaders or parts.prepared.models:
        raise SettingsError(
            f"{name} is already sharded and determines which ranks read different batches. Prepare it before "
            "anything else, or together with its optimizer and loaders."
        )
    runtime, handlers = parts.runtime, parts.handlers
    precision = build_precision(
        accelerator.state.mixed_precision,
        runtime.device,
        handlers.get(AutocastKwargs),  # pyright: ignore[reportArgumentType] - by its own type
        handlers.get(GradScalerKwargs),  # pyright: ignore[reportArgumentType] - by its own type
        shared=True,
    )
    strategy = fsdp.presharded.PreshardedStrategy(model, runtime, precision, handlers)
    accelerator.state.device_mesh = strategy.mesh
    parts.synchronizer.no_sync = strategy.no_sync
    parts.strategy, parts.precision = strategy, precision
    parts.backward = bind_backward(strategy, None, None)
    parts.after_step = (parts.preemption and parts.preemption.count_optimizer_step,)
    parts.step = bind_step(strategy, parts.after_step)
    parts.checkpoints.strategy, parts.checkpoints.precision = strategy, precision


def _check_quantised(model: nn.Module, device: torch.device) -> None:
    """Refuse to train a quantised model that has offloaded parts."""
    for part in model.modules():
        bits = "8" if getattr(part, "is_loaded_in_8bit", False) else "4"
        if not getattr(part, f"is_loaded_in_{bits}bit", False):
            continue
        devices = {str(device) for device in getattr(part, "hf_device_map", {}).values()}
        is_on_host = len(devices) > 1 or device.type != "cpu"
        offloaded = sorted(devices & ({"disk", "cpu"} if is_on_host else {"disk"}))
        if offloaded:
            raise SettingsError(
                f"{type(part).__qualname__} is quantised to {bits} bits and has parts on "
                f"{' and '.join(offloaded)}, because of its device map. Load it with all parts on one "
                "device to train it, or prepare it with evaluation_mode=True."
            )


def _tile(
    accelerator: Accelerator, models: Sequence[nn.Module], sizes: TilingKwargs, *, evaluation: bool
) -> None:
    """Compute the MLPs and losses of models in tiles."""
    parts = accelerator._parts
    for model in map(without_compiler, models):
        # transformers' Trainer prepares an already sharded model in evaluation mode, and trains it.
        if evaluation and not getattr(model, "is_distributed_loading_by_transformers", False):
            continue
        if parts.engine is not None and not parts.strategy.calls_forward:
            raise UnsupportedError(
                f"{sizes!r}: the strategy {parts.strategy.name!r} runs the full training step and would "
                "ignore it. Remove it."
            )
        if sizes.mlp_tile_size is not None:
            accel_plugins.tiling.tile_mlps(model, sizes.mlp_tile_size)
        if sizes.loss_chunk_size is not None:
            accel_plugins.tiling.chunk_loss(model, sizes.loss_chunk_size)


def _compile(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Compile a model that is not compiled yet: regions and sharded models in place, others in a wrapper."""
    plugin, in_place = accelerator._parts.compiler, accelerator._parts.strategy.compiles_in_place
    if is_compiled_module(model):
        return model
    options = plugin.to_kwargs()
    if not (plugin.use_regional_compilation or in_place):
        return torch.compile(model, **options)  # pyright: ignore[reportReturnType] - a module
    inner = extract_model_from_parallel(model)
    if not has_compiled_regions(inner):
        if plugin.use_regional_compilation:
            compile_regions(inner, **options)
        else:
            inner.compile(**options)
    return model


def _wrap_optimizers(accelerator: Accelerator, bundle: Bundle, placements: Sequence[bool]) -> list[Any]:
    """Wrap optimizers, so that they step when an accumulation window is complete."""
    parts = accelerator._parts
    parts.gradient_state.activate(parts.synchronizer.accumulation)  # which optimizers follow
    wrapped: list[Any] = []
    for optimizer, move in zip(bundle.optimizers, placements, strict=True):
        accelerator.has_lomo_optimizer |= is_lomo(optimizer)
        wrapped.append(
            parts.strategy.wrap_optimizer(
                optimizer,
                device_placement=move,
                scaler=parts.precision.scaler,
                step=parts.step,
                window=parts.items,
            )
        )
    return wrapped


def _shard_loaders(
    accelerator: Accelerator,
    bundle: Bundle,
    placements: Sequence[bool],
    slice_fn: Callable[..., Any] | None,
) -> list[Any]:
    """Give this rank its batches of each loader, on its device."""
    parts = accelerator._parts
    config, strategy, batches = accelerator.dataloader_config, parts.strategy, parts.strategy.sharding
    # Arguments outside Accelerate's signature are passed only if needed: the function may be replaced.
    own: dict[str, Any] = {"micro_batches": batches.micro_batches} if batches.micro_batches > 1 else {}
    if config.already_sharded:
        own["already_sharded"] = True
    if not config.shard_iterable_dataset:
        own["shard_iterable_dataset"] = False
    loaders: list[Any] = []
    for torch_loader, move in zip(bundle.dataloaders, placements, strict=True):
        loader = prepare_data_loader(
            torch_loader,
            accelerator.device,
            num_processes=batches.num_shards,
            process_index=batches.shard_index,
            split_batches=config.split_batches,
            put_on_device=move and batches.put_on_device,
            rng_types=[*accelerator.rng_types],
            dispatch_batches=config.dispatch_batches,
            even_batches=config.even_batches,
            slice_fn_for_dispatch=slice_fn,
            use_seedable_sampler=config.use_seedable_sampler,
            data_seed=config.data_seed,
            non_blocking=config.non_blocking,
            use_stateful_dataloader=config.use_stateful_dataloader,
            torch_device_mesh=strategy.mesh,
            **own,
        )
        loaders.append(loader)
        if isinstance(loader, PreparedLoader):  # a replacement of the function may return any
            loader.meter, loader.replicas = parts.meter, strategy.replicas
            loader.resume_mid_epoch = config.resume_mid_epoch or strategy.replicas is not None
            if parts.preemption is not None:
                parts.preemption.watch(loader)
            if bundle.models:
                loader.shard_sequences = strategy.shard_sequences
    return loaders


def _wrap_schedulers(accelerator: Accelerator, bundle: Bundle, step_per: StepPer | None) -> list[Any]:
    """Wrap schedulers, so that they step with their optimizers; with all, if one's is not known."""
    strategy = accelerator._parts.strategy
    known: list[Any] = [*accelerator._parts.prepared.optimizers, *bundle.optimizers]
    wrapped: list[Any] = []
    for scheduler in bundle.schedulers:
        optimizer = getattr(scheduler, "optimizer", None)  # other libraries' schedulers may lack it
        own = [one for one in known if optimizer is not None and optimizer in (one, one.optimizer)]
        wrapped.append(
            strategy.wrap_scheduler(
                scheduler,
                own or known,
                step_with_optimizer=accelerator.step_scheduler_with_optimizer,
                split_batches=accelerator.dataloader_config.split_batches,
                step_per=step_per or accelerator.step_scheduler_per,
                num_shards=strategy.sharding.num_shards,
            )
        )
    return wrapped
