"""The base class of training strategies, their features and registry entries, and the `Bundle` they wrap."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import field, replace
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from accel_ops.tree import walk
from accel_plugins.host_copies import HostCopy, StateKind, move_back, move_to_host
from accel_plugins.optimizer import AcceleratedOptimizer, AcceleratedScheduler
from accel_plugins.precision import PrecisionPolicy
from accel_plugins.unsharded import States, check_materialised, move_to_device
from accel_state.errors import SettingsError, UnsupportedError
from accel_state.frozen import frozen

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from accel_plugins.torchft.groups import ReplicaGroups
    from accel_state.remote import AnyPath
    from accel_state.runtime import Runtime
    from accel_state.settings.model import Settings
    from accel_state.topology import Topology


class Feature(Enum):
    """The optional features of a strategy; the conformance suite checks declared ones."""

    CLIP_GRAD_VALUE = auto()
    """`clip_grad_value` works on the strategy's gradients."""
    CUSTOM_DEVICE_PLACEMENT = auto()
    """The caller may keep a model from being moved to the device."""
    ITEM_COUNTS = auto()
    """Gradients, averaged over the ranks, can be divided after the backward pass that reduces them."""
    LOADERS_FROM_CONFIGURATION = auto()
    """Placeholders for data loaders are replaced by loaders of the data sets that they describe."""
    MODEL_WITHOUT_OPTIMIZER = auto()
    """A model can be prepared in a separate call, without its optimizer."""
    MULTIPLE_MODELS = auto()
    """Several models can be prepared and trained in one run."""
    NO_SYNC = auto()
    """Gradients can stay local for some backward passes."""
    OFFLOADED_STATES = auto()
    """Parameters, gradients and states of optimizers can leave the device and come back."""
    OPTIMIZER_FROM_CONFIGURATION = auto()
    """Placeholders for an optimizer or a schedule are replaced by those that a configuration describes."""
    STEP_GUARD = auto()
    """Optimizers step through the precision policy, which may skip a step by the norm of the gradients."""
    UNEVEN_INPUTS = auto()
    """Ranks can run out of batches at different times, within `join`."""


PLAIN_FEATURES = frozenset(Feature) - {
    Feature.LOADERS_FROM_CONFIGURATION,
    Feature.OPTIMIZER_FROM_CONFIGURATION,
}
"""The features of strategies that train full, ordinary tensors with PyTorch's optimizers."""


@frozen
class BatchSharding:
    """Sharding of batches across ranks.

    Ranks of one tensor-, context- or sequence-parallel group share their batches, so there may be fewer
    shards than ranks.

    Args:
        num_shards: Number of shards of a global batch.
        shard_index: Index of this rank's shard.
        put_on_device: Whether the loader moves batches to the device.
        repeats: Whether another rank computes the same results from the same batches, so that this rank's are
            omitted from gathered samples.
        micro_batches: The number of equal parts into which an engine cuts the batch of a rank, so that the
            last batch is completed even with a single shard.
    """

    num_shards: int
    shard_index: int
    put_on_device: bool = True
    repeats: bool = False
    micro_batches: int = 1


StrategyFactory: TypeAlias = "Callable[[Settings, Runtime, PrecisionPolicy, Mapping[type, Any]], Strategy]"
"""`build(settings, runtime, precision, handlers)`; `handlers` maps the type of a kwargs handler to it."""


@frozen
class StrategySpec:
    """The registry entry of a strategy: a distribution registers it, and a run selects it.

    `Accelerator(strategy=…)` takes its name or the record itself; `--strategy`, `ACCELERATE_STRATEGY` and the
    key `strategy` of a config file take its name. By default the first that applies is used.

    Args:
        name: The name under which it is registered.
        build: The class of the strategy, or its `"module:class"`.
        applies: Whether a run uses it without selecting it: called with the settings, the topology and the
            device; a pure function, with the same result on every rank. `None`: only if it is selected.
        sections: The sections of `Settings` that it reads, each of which a plugin fills (`"deepspeed"`,
            `"fsdp"`, `"megatron"`, `"parallelism"`); with the arguments of the plugin that is created if the
            strategy is selected without one, or `None` if it needs none. A strategy cannot be selected
            against sections that it does not read.
        max_processes: The largest number of processes that it can train; None for any.
        shards_gradients: Whether a rank has shards of gradients, so that only all ranks together know whether
            they are finite.
        master_weights: Whether models are wrapped so that, under mixed precision, trained parameters are in
            float32 whatever they were loaded in.
        files: The `"module:object"` of a `ForeignFiles`, if the engine writes files of its own that every
            strategy can load.

    Example:
        >>> spec = StrategySpec(name="mine", build="my_package:Mine")
        >>> spec.shards_gradients
        False
    """

    name: str
    build: StrategyFactory | str
    applies: Callable[[Settings, Topology, torch.device], bool] | None = None
    sections: Mapping[str, Mapping[str, Any] | None] = field(default_factory=dict[str, Any])
    max_processes: int | None = None
    shards_gradients: bool = False
    master_weights: bool = False
    files: str | None = None


@frozen
class ForeignFiles:
    """Reads the files of an engine without the engine, so that every strategy can load them.

    Args:
        find: Returns the folder with the files of a model, or `None`: called with the folder of a checkpoint,
            the name of the model's folder, and the number with which the model was prepared.
        read: Reads that folder. The result has the methods `weights()`, `numbered_optimizer()` and
            `optimizer()`: full state dicts; of the optimizer, by number, if known, and by name.
    """

    find: Callable[[AnyPath, str, int], AnyPath | None]
    read: Callable[[Path], Any]


StateDict: TypeAlias = dict[str, Any]
Parameters: TypeAlias = "Tensor | Iterable[Tensor]"
Optimizers: TypeAlias = "Iterable[Optimizer]"


class Generators(Protocol):
    """Random number generators of an engine, in addition to those of PyTorch."""

    def state_dict(self) -> StateDict:
        """Return their states on this rank; empty if there are none."""
        ...

    def load_state_dict(self, state: StateDict) -> str | None:
        """Resume on this rank, once PyTorch's generators have their states.

        Args:
            state: The state of one rank in the checkpoint; empty if another strategy wrote it.

        Returns:
            A description of what could not be resumed, for a warning.
        """
        ...


class FromConfiguration:
    """Base of placeholders for what an engine builds from its configuration, which `prepare` accepts.

    Attributes:
        kind: The field of `Bundle` that it belongs to.
        feature: What a strategy needs for it.
    """

    kind: ClassVar[str]
    feature: ClassVar[Feature]


@frozen
class Bundle:
    """The arguments of `prepare`, sorted by kind.

    A stage returns a changed copy (`dataclasses.replace`) and keeps the length and order of every field,
    so that the caller's order can be rebuilt. An engine that owns everything (DeepSpeed, Megatron) gets all
    its arguments at once.

    Args:
        models: The modules, as passed or as changed by earlier stages.
        optimizers: The optimizers, without the wrapper `AcceleratedOptimizer`.
        schedulers: The learning rate schedulers.
        dataloaders: The data loaders.
        others: Everything else; passed through.
        order: One `(field name, index)` per argument of `prepare`, in the caller's order.
        placements: For every model, whether it may be moved to the device. Empty means yes for all.

    Example:
        >>> bundle = Bundle(models=["m"], optimizers=["o"], order=[("optimizers", 0), ("models", 0)])
        >>> bundle.in_order()
        ['o', 'm']
    """

    models: Sequence[nn.Module] = ()
    optimizers: Sequence[Optimizer] = ()
    schedulers: Sequence[Any] = ()
    dataloaders: Sequence[Any] = ()
    others: Sequence[object] = ()
    order: Sequence[tuple[str, int]] = ()
    placements: Sequence[bool] = ()

    def in_order(self) -> list[Any]:
        """Return the contents in the caller's order."""
        return [getattr(self, kind)[index] for kind, index in self.order]


class Strategy:
    """A training strategy: how models are wrapped, optimizers step, and states are read and loaded.

    Each engine is a subclass, which overrides what it does in another way; a `StrategySpec` registers it.
    This class trains full, ordinary tensors with PyTorch's optimizers, in one process. Every subclass passes
    the suite in `accel_plugins.testing`.

    Args:
        settings: The settings of the run.
        runtime: Topology, device and collectives.
        precision: The precision policy; an engine with its own one replaces the attribute.
        handlers: The kwargs handlers and plugins of the run, each by its type.

    Attributes:
        settings, runtime, precision, handlers: The arguments.
        name: The name under which it is registered.
        features: The optional features that it offers; checked by `require`.
        sharding: Which batches this rank reads.
        states: Reads and loads the states of models and optimizers.
        mesh: The device mesh, if it has several axes.
        fsdp_version: The version of FSDP that shards its models: 2 for `fully_shard`; `None` for neither.
        compiles_in_place: Whether the unwrapped model is compiled instead of its wrapper.
        keeps_weight_types: Whether weights stay tensors of the type that an FP8 library gives them.
        keeps_sharded: Whether models that are sharded before `prepare` are trained as they are, by another
            strategy in its place.
        owns_forward: Whether calls of prepared models, in training mode with gradients enabled, run through
            `train_step`. `accelerator.backward(loss)` then computes nothing, and only accepts a loss that
            such a call has returned.
        calls_forward: Whether `train_step` calls the model's own `forward`, as it is when models are wrapped.
        generators: Random number generators of the engine, for checkpoints.
        replicas: Groups of processes that train copies of the model, of which any may die.
        offloaded: The states that `offload_states` has moved to the host, by kind.
        split_sequences: Returns a context in which every rank has a shard of each sequence: called as
            `split_sequences(buffers, buffer_seq_dims, no_restore_buffers)`.
        shard_sequences: Shards the sequences of a batch, where loaders do that.
        after_micro_batch: Called after every backward pass that does not complete an accumulation window.
        after_step: Called after every optimizer step. Both hooks serve devices that record operations and
            execute them on request.

    Example:
        >>> class Counting(Strategy):
        ...     name = "counting"
        ...     steps = 0
        ...     def step(self, optimizer, closure=None):
        ...         self.steps += 1
        ...         return super().step(optimizer, closure)
    """

    name: str = "single"
    features: frozenset[Feature] = PLAIN_FEATURES
    mesh: DeviceMesh | None = None
    fsdp_version: int | None = None
    compiles_in_place: bool = False
    keeps_weight_types: bool = True
    keeps_sharded: bool = False
    owns_forward: bool = False
    calls_forward: bool = False
    generators: Generators | None = None
    replicas: ReplicaGroups | None = None

    def __init__(
        self, settings: Settings, runtime: Runtime, precision: PrecisionPolicy, handlers: Mapping[type, Any]
    ) -> None:
        topology = runtime.topology
        self.settings, self.runtime, self.precision, self.handlers = settings, runtime, precision, handlers
        self.sharding = BatchSharding(num_shards=topology.world_size, shard_index=topology.rank)
        self.states = States()
        self.split_sequences: Callable[..., AbstractContextManager[None]] | None = None
        self.shard_sequences: Callable[[Any], Any] | None = None
        self.after_micro_batch: Callable[[], None] | None = None
        self.after_step: Callable[[], None] | None = None
        self.offloaded: dict[StateKind, list[HostCopy]] = {}
        self.setup()

    def setup(self) -> None:
        """Set the attributes that differ from those of this class; the arguments are attributes already."""

    def require(self, feature: Feature, what: str) -> None:
        """Raise unless a feature is offered.

        Args:
            feature: The feature needed.
            what: The user's call or option, for the message, such as `"clip_grad_value_()"`.

        Raises:
            UnsupportedError: The strategy does not declare the feature.
        """
        if feature not in self.features:
            offered = ", ".join(sorted(f.name for f in self.features)) or "none"
            raise UnsupportedError(
                f"`{what}` needs {feature.name}, which the {self.name!r} strategy does not offer "
                f"(it offers: {offered})."
            )

    def release(self) -> None:
        """Release the references to prepared objects."""

    def adapt_loader(self, loader: Any) -> Any:
        """Return a loader of this rank's shards of sequences, for one that is not prepared.

        Raises:
            SettingsError: The engine reads prepared loaders only.
        """
        raise SettingsError(
            f"deepspeed_ulysses_dl_adapter(): {type(loader).__name__} is not prepared, and adapting it "
            "needs DeepSpeed. Pass it to prepare() first."
        )

    def engine_of(self, model: nn.Module) -> Any:
        """Return the engine that trains a model; `None` if there is none."""
        del model
        return None

    # Models.

    def check(self, bundle: Bundle) -> None:
        """Raise if the bundle cannot be wrapped, on every rank alike; modify nothing.

        Called once per `prepare`, before any collective.

        Raises:
            ValueError: The bundle has something that cannot be wrapped.
        """
        check_materialised(bundle)

    def prepare_sequences(self, model: nn.Module) -> None:
        """Change a model in place, before it is wrapped, so that it works on shards of sequences."""

    def wrap(self, bundle: Bundle, *, evaluation: bool = False) -> Bundle:
        """Return the bundle with its models placed and wrapped, its optimizers pointing at them.

        Called once per `prepare`, on every rank. A model that is already wrapped is unchanged. Afterwards all
        ranks have rank 0's parameter values.

        Args:
            bundle: Models that `check` has let pass.
            evaluation: The models will never be trained: place them, and wrap them only if they could
                not run otherwise.
        """
        del evaluation
        return replace(bundle, models=move_to_device(bundle, self.runtime.device))

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Remove exactly what `wrap` added; any other module is returned as it is."""
        return model

    # States on the host.

    def offload_states(
        self, kinds: Iterable[StateKind], models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> None:
        """Move states to the host, and free their memory on the device. All tensors stay the same objects.

        Between two steps of training, or between a backward pass and its step.

        Args:
            kinds: Which states, none of which is in `offloaded`.
            models: All prepared models.
            optimizers: All prepared optimizers, without our wrapper.
        """
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        parameters: list[Tensor] = [
            *(parameter for model in models for parameter in model.parameters()),
            *(parameter for group in groups for parameter in group["params"]),
        ]
        for kind in kinds:
            scratch: Iterable[Tensor] = ()
            if kind == "optimizer":
                states = [state for optimizer in optimizers for state in optimizer.state.values()]
                tensors = [leaf for state in states for _, leaf in walk(state) if isinstance(leaf, Tensor)]
            elif kind == "parameters":
                tensors = [*parameters, *(buffer for model in models for buffer in model.buffers())]
            else:
                tensors = [parameter.grad for parameter in parameters if parameter.grad is not None]
                scratch = self.gradient_buckets(models)
            self.offloaded[kind] = move_to_host(tensors, scratch)

    def reload_states(self, kinds: Iterable[StateKind]) -> None:
        """Move states back to the device, bit for bit; `kinds` are in `offloaded`."""
        for kind in kinds:
            move_back(self.offloaded.pop(kind))

    def gradient_buckets(self, models: Sequence[nn.Module]) -> Iterable[Tensor]:
        """Return memory in which gradients are reduced, whose values are not needed after it."""
        del models
        return ()

    # Steps.

    def backward(self, loss: Tensor, *, accumulation: int, sync: bool, **kwargs: Any) -> None:
        """Add the gradients of `loss / accumulation` to the parameters.

        Args:
            loss: 0-d tensor, or any shape with `gradient=` in `kwargs`.
            accumulation: Number of micro-batches that make one optimizer step.
            sync: Whether this backward pass completes the accumulation window, for engines that need to know.
                It changes nothing if the forward pass ran within `no_sync`.
            **kwargs: Passed to `Tensor.backward`.
        """
        del sync  # `no_sync` around the forward pass decides
        if accumulation != 1:
            loss = loss / accumulation
        if self.precision.scaling is not None:
            loss = self.precision.scale(loss)
        loss.backward(**kwargs)

    def train_step(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        accumulation: int,
        sync: bool,
    ) -> Any:
        """Add the gradients of `loss / accumulation` of one micro-batch to the parameters.

        Called on every rank, if the strategy `owns_forward`.

        Args:
            model: The model as wrapped by the strategy.
            forward: The model's own `forward`, bound.
            args: Positional arguments of the model call.
            kwargs: Keyword arguments of the model call.
            accumulation: Number of micro-batches that make one optimizer step.
            sync: Whether this micro-batch ends the accumulation window.

        Returns:
            The result of the model call: the loss, or a structure with the loss in it, the same on all ranks.
        """
        raise NotImplementedError

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Leave gradients local in backward passes within; the next one outside reduces their sum."""
        del model
        return nullcontext()

    def join(self, joinables: Sequence[Any]) -> AbstractContextManager[None]:
        """Let ranks run out of batches at different times within the context.

        Gradients are averaged over all ranks, including finished ones.

        Args:
            joinables: Wrapped models, and optimizers that are `torch.distributed` joinables.
        """
        del joinables
        return nullcontext()

    def clip_grad_norm(
        self, parameters: Parameters, max_norm: float, norm_type: float = 2.0, *, optimizers: Optimizers = ()
    ) -> Tensor | None:
        """Scale the gradients down so that their norm over all parameters and ranks is at most `max_norm`.

        Args:
            parameters: Tensors with gradients.
            max_norm: The largest norm allowed.
            norm_type: The p of the norm; `inf` for the largest absolute value.
            optimizers: The optimizers that may own the parameters, if loss scaling may be active.

        Returns:
            The norm before clipping, 0-d, the same on all ranks; `None` where the engine clips later.
        """
        return clip_grad_norm_(self.unscale(parameters, optimizers), max_norm, norm_type)

    def clip_grad_value(
        self, parameters: Parameters, clip_value: float, *, optimizers: Optimizers = ()
    ) -> None:
        """Clamp every gradient to `[-clip_value, clip_value]`; `optimizers` as in `clip_grad_norm`."""
        tensors = self.unscale(parameters, optimizers)
        if any(parameter.grad is not None for parameter in tensors):  # torch's function needs one
            clip_grad_value_(tensors, clip_value)

    def unscale(self, parameters: Parameters, optimizers: Optimizers) -> list[Tensor]:
        """Unscale the gradients of the optimizers that own any of the parameters; return the parameters."""
        tensors = [parameters] if isinstance(parameters, torch.Tensor) else [*parameters]
        if self.precision.scaling is not None:
            ids = {*map(id, tensors)}
            self.precision.unscale(
                optimizer
                for optimizer in optimizers
                if any(id(p) in ids for group in optimizer.param_groups for p in group["params"])
            )
        return tensors

    def step(self, optimizer: Optimizer, closure: Callable[[], float] | None = None) -> bool | Tensor:
        """Step the optimizer; return False if the step was skipped because gradients were not finite.

        Where the device decides, as for fused optimizers, the result is a 0-d tensor on the device.
        """
        return self.precision.step(optimizer, closure)

    def wrap_optimizer(self, optimizer: Any, **options: Any) -> Any:
        """Return the optimizer that `prepare` returns; `options` are those of `AcceleratedOptimizer`."""
        return AcceleratedOptimizer(optimizer, **options)

    def wrap_scheduler(self, scheduler: Any, optimizers: Sequence[Any], **options: Any) -> Any:
        """Return the schedule that `prepare` returns; `options` are those of `AcceleratedScheduler`."""
        return AcceleratedScheduler(scheduler, [*optimizers], **options)
