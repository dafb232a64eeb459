"""`prepare`: sort the arguments by kind, and run the stages that wrap, compile and shard them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

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
    without_compiler,
)
from accel_plugins import sharding
from accel_plugins.kwargs import TilingKwargs, TorchDynamoPlugin
from accel_plugins.optimizer import AcceleratedScheduler, StepPer, without_wrapper
from accel_plugins.strategy import Bundle, FromConfiguration
from accel_plugins.unsharded import has_device_map, has_offloaded_parameters
from accel_state.errors import SettingsError, UnsupportedError
from accel_state.frozen import frozen
from accel_state.labels import DynamoBackend
from accel_state.logging import get_logger
from accel_train import observing
from accel_train.accelerator.presharded import adopt_sharded
from accel_train.data.adapter import DataLoaderAdapter, PreparedLoader
from accel_train.data.prepare import prepare_data_loader
from accel_train.step import is_lomo

if TYPE_CHECKING:
    from accel_train.accelerator import Accelerator
    from accel_train.accelerator.build import Parts


logger = get_logger(__name__)

Placement: TypeAlias = "Sequence[bool | None] | None"


def prepare_all(
    accelerator: Accelerator,
    args: Sequence[Any],
    device_placement: Placement = None,
    *,
    kind: str | None = None,
    **options: Any,
) -> list[Any]:
    """Run the stages of `prepare` on all of its arguments.

    `kind` is the only kind of the arguments, if known; `options` are fields of `PrepareRequest`.
    """
    bundle, placements = sort_arguments(
        args,
        device_placement=device_placement,
        default=accelerator.device_placement,
        prepared=accelerator._parts.prepared,
        kind=kind,
    )
    request = PrepareRequest(accelerator=accelerator, placements=placements, **options)
    run, observer = partial(run_stages, bundle, request), observing.observer
    return (run() if observer is None else observer.prepare(accelerator, bundle, run)).in_order()


def prepare_single(
    accelerator: Accelerator, kind: str, argument: Any, placement: bool | None, **options: Any
) -> Any:
    """Run the stages on one object of a known kind."""
    is_known = kind == "schedulers" or argument in accelerator._parts.prepared
    if not is_known and kind_of(argument) != kind:
        names = " or ".join(f"{expected.__module__}.{expected.__qualname__}" for expected in _KINDS[kind])
        raise TypeError(f"{argument!r} cannot be prepared as one of the {kind}: it is not a {names}.")
    return prepare_all(accelerator, [argument], [placement], kind=kind, **options)[0]


# The first kind whose types match an argument; arguments of no kind are passed through.
_KINDS: dict[str, tuple[type, ...]] = {
    "models": (nn.Module,),
    "optimizers": (Optimizer,),
    "schedulers": (LRScheduler, AcceleratedScheduler),
    "dataloaders": (DataLoader, DataLoaderAdapter),
}
OTHERS = "others"


def sort_arguments(
    arguments: Sequence[Any],
    *,
    device_placement: Sequence[bool | None] | None,
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
    if kind is None:
        _warn_unprepared(arguments)
    by_kind: dict[str, list[Any]] = {known: [] for known in (*_KINDS, OTHERS)}
    placements: dict[str, list[bool]] = {known: [] for known in by_kind}
    order: list[tuple[str, int]] = []
    for argument, placement in zip(arguments, device_placement, strict=True):
        is_prepared = argument in prepared
        found = OTHERS if is_prepared else kind or kind_of(argument)
        order.append((found, len(by_kind[found])))
        # A wrapper of another Accelerator would step through the strategy of that Accelerator.
        by_kind[found].append(argument if is_prepared else without_wrapper(argument))
        placements[found].append(default if placement is None else placement)
    fields = {known: tuple(values) for known, values in by_kind.items()}
    return Bundle(**fields, order=tuple(order), placements=placements["models"]), placements


def kind_of(argument: object) -> str:
    """Name the field of `Bundle` that an argument of `prepare` belongs to.

    Example:
        >>> kind_of(nn.Linear(1, 1)), kind_of("neither")
        ('models', 'others')
    """
    if isinstance(argument, FromConfiguration):
        return argument.kind
    return next((kind for kind, types in _KINDS.items() if isinstance(argument, types)), OTHERS)


def _warn_unprepared(arguments: Sequence[Any]) -> None:
    """Warn about arguments that look like models or optimizers but are passed through."""
    for argument in arguments:
        items: Any = argument if isinstance(argument, list | tuple) else ()
        first = next((item for item in items if kind_of(item) != OTHERS), None)
        if first is not None:
            logger.warning(
                "prepare() got a %s that contains a %s, and returns it unchanged. Pass each object "
                "separately, as in prepare(*objects).",
                type(argument).__name__,
                type(first).__qualname__,
            )
        elif isinstance(argument, type) and issubclass(argument, tuple(itertools.chain(*_KINDS.values()))):
            logger.warning(
                "prepare() got the class %s, and returns it unchanged. Pass an instance.",
                argument.__qualname__,
            )
        elif kind_of(argument) == OTHERS and (role := _role_of(argument)):
            logger.warning(
                "prepare() got a %s, which looks like %s but is none of torch's, and returns it unchanged: "
                "%s. Prepare the object inside, and wrap the result.",
                type(argument).__qualname__,
                *role,
            )


def _role_of(argument: Any) -> tuple[str, str] | None:
    """Return what an object of no known type is used as, and what it does if it is not prepared."""
    if isinstance(argument, type):
        return None
    if callable(getattr(argument, "step", None)) and callable(getattr(argument, "zero_grad", None)):
        return "an optimizer", "it steps in every micro-batch"
    holds_loader = any(isinstance(value, DataLoader) for value in getattr(argument, "__dict__", {}).values())
    if hasattr(type(argument), "__iter__") and (holds_loader or hasattr(argument, "batch_size")):
        return "a loader", "every process reads all of its data, on the CPU"
    return None


@frozen
class PrepareRequest:
    """The arguments of the stages in one `prepare` call, besides the bundle; `leave_out` are skipped."""

    accelerator: Accelerator
    placements: Mapping[str, Sequence[bool]]
    leave_out: Container[str] = ()
    evaluation: bool = False
    slice_fn: Callable[..., Any] | None = None
    step_per: StepPer | None = None

    @property
    def parts(self) -> Parts:
        """The parts of the accelerator."""
        return self.accelerator._parts


def run_stages(bundle: Bundle, request: PrepareRequest) -> Bundle:
    """Run every stage in order, and record the prepared objects."""
    for name, stage in STAGES.items():
        if name not in request.leave_out:
            bundle = stage(bundle, request)
    for wrapped in (*bundle.models, *bundle.optimizers, *bundle.schedulers, *bundle.dataloaders):
        vars(wrapped)["_is_accelerate_prepared"] = True  # libraries read it
    prepared = request.parts.prepared
    prepared.models.extend(bundle.models)
    prepared.optimizers.extend(bundle.optimizers)  # pyright: ignore[reportArgumentType] - wrapped by now
    prepared.schedulers.extend(bundle.schedulers)
    prepared.dataloaders.extend(bundle.dataloaders)
    return bundle


def _check(bundle: Bundle, request: PrepareRequest) -> Bundle:
    for model in bundle.models if not request.evaluation else ():
        _check_quantised(model, request.accelerator.device)
    if request.accelerator.use_distributed and not request.evaluation:
        adopt_sharded(bundle.models, request.accelerator)
        for model in bundle.models:
            if has_device_map(model) or has_offloaded_parameters(model):
                raise UnsupportedError(
                    f"{type(model).__qualname__} is spread over several devices, the host or the disk, and "
                    "cannot be trained by several processes. Load it without device_map, or start one "
                    "process."
                )
    for argument in (*bundle.optimizers, *bundle.schedulers, *bundle.dataloaders):
        if isinstance(argument, FromConfiguration):
            request.parts.strategy.require(argument.feature, type(argument).__name__)
    request.parts.strategy.check(bundle)
    return bundle


def _check_quantised(model: nn.Module, device: torch.device) -> None:
    """Refuse to train a quantised model that has offloaded parts."""
    for part in model.modules():
        bits = [n for n in (8, 4) if getattr(part, f"is_loaded_in_{n}bit", False)]
        devices = {str(device) for device in getattr(part, "hf_device_map", {}).values()}
        offloaded = (
            devices & {"disk", "cpu"} if len(devices) > 1 or device.type != "cpu" else devices & {"disk"}
        )
        if bits and offloaded:
            raise SettingsError(
                f"{type(part).__qualname__} is quantised to {bits[0]} bits and has parts on "
                f"{' and '.join(sorted(offloaded))}, because of its device map. Such a model cannot be "
                "trained. Load "
                "it with all parts on one device, or prepare it with evaluation_mode=True."
            )


def _recipe(bundle: Bundle, request: PrepareRequest) -> Bundle:
    recipe = request.parts.recipe
    if recipe is None:
        return bundle
    if recipe.initialize is not None:
        bundle = recipe.initialize(bundle)
    for old, new in recipe.convert(bundle.models).items():
        sharding.wrap.note_replacement(vars(old), new)
    for optimizer in bundle.optimizers:
        sharding.wrap.follow_replacements(optimizer)
    return bundle


def _tiles(bundle: Bundle, request: PrepareRequest) -> Bundle:
    parts = request.parts
    sizes: TilingKwargs = parts.handlers[TilingKwargs]
    wanted = [name for name, size in vars(sizes).items() if size is not None]
    if not wanted:
        return bundle
    models = [
        model
        for model in map(without_compiler, bundle.models)
        # transformers' Trainer prepares an already sharded model in evaluation mode, and trains it.
        if not request.evaluation or getattr(model, "is_distributed_loading_by_transformers", False)
    ]
    if not models:
        return bundle
    if parts.engine is not None and not parts.strategy.calls_forward:
        raise UnsupportedError(
            f"{sizes!r}: the strategy {parts.strategy.name!r} runs the full training step and would "
            f"ignore {' and '.join(wanted)}. Remove it."
        )
    for model in models:
        if sizes.mlp_tile_size is not None:
            accel_plugins.tiling.tile_mlps(model, sizes.mlp_tile_size)
        if sizes.loss_chunk_size is not None:
            accel_plugins.tiling.chunk_loss(model, sizes.loss_chunk_size)
    return bundle


def _sequences(bundle: Bundle, request: PrepareRequest) -> Bundle:
    for model in () if request.evaluation else bundle.models:
        request.parts.strategy.prepare_sequences(without_compiler(model))
    return bundle


def _wrap(bundle: Bundle, request: PrepareRequest) -> Bundle:
    accelerator, strategy, engine = request.accelerator, request.parts.strategy, request.parts.engine
    replaced = accel_train.fsdp.replacements(accelerator) if strategy.fsdp_version == 2 else {}
    # Accelerate chooses the wrapper by this property; unsloth overrides it to keep models unwrapped.
    is_overridden = accelerator.distributed_type != accelerator.state.distributed_type
    unwrapped = request.evaluation or is_overridden
    bundle = strategy.wrap(bundle, evaluation=unwrapped, **replaced)
    if engine is not None and not request.evaluation:
        for model in bundle.models:
            engine.route(model)
    return bundle


def _compile(bundle: Bundle, request: PrepareRequest) -> Bundle:
    plugin, in_place = request.parts.compiler, request.parts.strategy.compiles_in_place
    models = tuple(compile_model(model, plugin, in_place=in_place) for model in bundle.models)
    return replace(bundle, models=models)


def compile_model(model: nn.Module, plugin: TorchDynamoPlugin, *, in_place: bool = False) -> nn.Module:
    """Compile a model with the plugin's options; do not change a compiled one.

    With regions or `in_place`, the unwrapped model is compiled in place; otherwise the result wraps it.
    """
    if plugin.backend == DynamoBackend.NO or is_compiled_module(model):
        return model
    if not (plugin.use_regional_compilation or in_place):
        return cast("nn.Module", torch.compile(model, **plugin.to_kwargs()))
    inner = extract_model_from_parallel(model)
    if has_compiled_regions(inner):
        return model
    if plugin.use_regional_compilation:
        compile_regions(inner, **plugin.to_kwargs())
    else:
        inner.compile(**plugin.to_kwargs())
    return model


def _optimizers(bundle: Bundle, request: PrepareRequest) -> Bundle:
    parts = request.parts
    parts.gradient_state.activate(parts.synchronizer.accumulation)  # which optimizers follow
    wrapped = tuple(
        parts.strategy.wrap_optimizer(
            optimizer,
            device_placement=move,
            scaler=parts.precision.scaler,
            step=parts.step,
            window=parts.items,
        )
        for optimizer, move in zip(bundle.optimizers, request.placements["optimizers"], strict=True)
    )
    request.accelerator.has_lomo_optimizer |= any(map(is_lomo, bundle.optimizers))
    return replace(bundle, optimizers=wrapped)


def _dataloaders(bundle: Bundle, request: PrepareRequest) -> Bundle:
    parts = request.parts
    config, sharding = request.accelerator.dataloader_config, parts.strategy.sharding
    # Arguments outside Accelerate's signature are passed only if needed: the function may be replaced.
    own: dict[str, Any] = {"micro_batches": sharding.micro_batches} if sharding.micro_batches > 1 else {}
    if config.already_sharded:
        own["already_sharded"] = True
    if not config.shard_iterable_dataset:
        own["shard_iterable_dataset"] = False
    loaders = tuple(
        prepare_data_loader(
            loader,
            request.accelerator.device,
            num_processes=sharding.num_shards,
            process_index=sharding.shard_index,
            split_batches=config.split_batches,
            put_on_device=move and sharding.put_on_device,
            rng_types=[*request.accelerator.rng_types],
            dispatch_batches=config.dispatch_batches,
            even_batches=config.even_batches,
            slice_fn_for_dispatch=request.slice_fn,
            use_seedable_sampler=config.use_seedable_sampler,
            data_seed=config.data_seed,
            non_blocking=config.non_blocking,
            use_stateful_dataloader=config.use_stateful_dataloader,
            torch_device_mesh=parts.strategy.mesh,
            **own,
        )
        for loader, move in zip(bundle.dataloaders, request.placements["dataloaders"], strict=True)
    )
    # A replacement of `prepare_data_loader` may return any loader.
    for loader in (loader for loader in loaders if isinstance(loader, PreparedLoader)):
        loader.meter, loader.replicas = parts.meter, parts.strategy.replicas
        loader.resume_mid_epoch = config.resume_mid_epoch or loader.replicas is not None
        if parts.preemption is not None:
            parts.preemption.watch(loader)
        if bundle.models:
            loader.shard_sequences = parts.strategy.shard_sequences
    return replace(bundle, dataloaders=loaders)


def _schedulers(bundle: Bundle, request: PrepareRequest) -> Bundle:
    parts = request.parts
    known = [*parts.prepared.optimizers, *bundle.optimizers]
    accelerator = request.accelerator
    wrapped = tuple(
        parts.strategy.wrap_scheduler(
            scheduler,
            _optimizers_of(scheduler, known),
            step_with_optimizer=accelerator.step_scheduler_with_optimizer,
            split_batches=accelerator.split_batches,
            step_per=request.step_per or accelerator.step_scheduler_per,
            num_shards=parts.strategy.sharding.num_shards,
        )
        for scheduler in bundle.schedulers
    )
    return replace(bundle, schedulers=wrapped)


def _optimizers_of(scheduler: Any, known: list[Any]) -> list[Any]:
    optimizer = getattr(scheduler, "optimizer", None)  # other libraries' schedulers may lack it
    matches = [wrapped for wrapped in known if optimizer is wrapped or optimizer is wrapped.optimizer]
    return known if optimizer is None else matches or known


STAGES: Mapping[str, Callable[[Bundle, PrepareRequest], Bundle]] = {
    "check": _check,
    "recipe": _recipe,
    "tiles": _tiles,
    "precision": lambda bundle, request: request.parts.precision.convert(bundle),
    "sequences": _sequences,
    "wrap": _wrap,
    "compile": _compile,
    "optimizers": _optimizers,
    "dataloaders": _dataloaders,
    "schedulers": _schedulers,
}
"""What `prepare` does, in this order; every stage gets the bundle that the stages before it have changed.

A recipe converts models before their parameters are sharded. Tiles are inside of what precision does.
Precision comes before the strategy wraps, so that the strategy's own communication stays outside autocast;
compiling comes after, so that the compiler sees the all-reduce of gradients; optimizers, loaders and
schedulers come last, in the order in which they depend on each other.
"""

SEAMS: Mapping[str, tuple[str, Callable[[Accelerator], bool]]] = {
    "_prepare_cp": ("sequences", lambda accelerator: accelerator._parts.strategy.split_sequences is not None),
    "_prepare_fsdp2": ("wrap", lambda accelerator: accelerator.state.is_fsdp2),
}
"""Private methods of Accelerate's `Accelerator` that programs replace, in the order of their calls.

Each takes the arguments of `prepare` and returns them partly prepared. With each are the stage that is left
out if a program has replaced it, so that the other stages get what the replacement returns, and whether
Accelerate would call it in a run.
"""
