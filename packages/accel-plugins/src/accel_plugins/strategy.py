"""The interface of training strategies: the roles of a `Strategy`, its features, and the `Bundle` it wraps.

Every implementation runs the suite in `accel_plugins.testing`. In an engine that owns everything, a single
object may fill several roles.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import field
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

from accel_state.errors import UnsupportedError
from accel_state.frozen import frozen

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.amp.grad_scaler import GradScaler
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from accel_plugins.full_parameters import FullParameters
    from accel_plugins.kwargs import AutocastKwargs
    from accel_plugins.sharding.state import RankPlanners, ShardedStates
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
    OPTIMIZER_FROM_CONFIGURATION = auto()
    """Placeholders for an optimizer or a schedule are replaced by those that a configuration describes."""
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

    def __post_init__(self) -> None:
        if not 0 <= self.shard_index < self.num_shards:
            raise ValueError(
                f"shard_index={self.shard_index!r} is not one of the num_shards={self.num_shards!r} shards, "
                "which are counted from 0."
            )


@frozen
class Strategy:
    """A training strategy, composed of four roles; never subclassed.

    Args:
        name: The name under which it is registered.
        wrapper: Wraps and unwraps models.
        stepper: Runs backward passes and optimizer steps.
        persister: Saves and loads.
        sharding: Which batches this rank reads.
        features: The optional features that it offers; checked by `require`.
        mesh: The device mesh, if it has several axes.
        split_sequences: Returns a context in which every rank has a shard of each sequence: called as
            `split_sequences(buffers, buffer_seq_dims, no_restore_buffers)`.
        prepare_for_split: Changes a model in place, before it is wrapped, so that it works in this context.
        shard_sequences: Shards the sequences of a batch, where loaders do that.
        precision: The precision policy of an engine that has its own; replaces the one passed to `build`.
        release: Releases the strategy's references to prepared objects.
        shards: Returns this rank's states, for checkpoints to which every rank writes shards; `None` where
            rank 0 writes full states.
        planners: Plan a rank's writes and reads of `shards`; PyTorch's, for plain tensors and DTensors, if
            `None`.
        native: Saves and loads the files of a strategy whose `shards` are `NATIVE`.
        generators: Random number generators of the engine, for checkpoints.
        wrap_optimizer: Builds the optimizer that `prepare` returns, as `wrap_optimizer(optimizer, wrapper)`;
            `wrapper(optimizer, step=…, discard=…)` builds one that steps and discards gradients through an
            engine. By default optimizers step through the `stepper`.
        wrap_scheduler: Builds the schedule that `prepare` returns, as `wrap_scheduler(scheduler, optimizers,
            wrapper)`; `wrapper(scheduler, optimizers)` builds one that an engine steps by itself, and `None`
            leaves it to `prepare`.
        compiles_in_place: Whether the unwrapped model is compiled instead of its wrapper.
        fsdp_version: The version of FSDP that shards its models: 2 for `fully_shard`; `None` for neither.
        train_step: Runs forward and backward of an engine that owns both; see `TrainStep`.
        calls_forward: Whether `train_step` calls the model's own `forward`, as it is when models are wrapped.
        replicas: Groups of processes that train copies of the model, of which any may die.
        after_micro_batch: Called after every backward pass that does not complete an accumulation window.
        after_step: Called after every optimizer step. Both hooks serve devices that record operations and
            execute them on request.
    """

    name: str
    wrapper: ModelWrapper
    stepper: Stepper
    persister: Persister
    sharding: BatchSharding
    features: frozenset[Feature]
    mesh: DeviceMesh | None = None
    split_sequences: Callable[..., AbstractContextManager[None]] | None = None
    prepare_for_split: Callable[[nn.Module], None] | None = None
    shard_sequences: Callable[[Any], Any] | None = None
    precision: PrecisionPolicy | None = None
    release: Callable[[], None] | None = None
    shards: ShardedStates | None = None
    planners: RankPlanners | None = None
    native: NativeFiles | None = None
    generators: Generators | None = None
    wrap_optimizer: Callable[[Any, Callable[..., Any]], Any] | None = None
    wrap_scheduler: Callable[[Any, Sequence[Any], Callable[..., Any]], Any] | None = None
    compiles_in_place: bool = False
    fsdp_version: int | None = None
    train_step: TrainStep | None = None
    calls_forward: bool = False
    replicas: Replicas | None = None
    after_micro_batch: Callable[[], None] | None = None
    after_step: Callable[[], None] | None = None

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


StrategyFactory: TypeAlias = "Callable[[Settings, Runtime, PrecisionPolicy, Mapping[type, Any]], Strategy]"
"""`build(settings, runtime, precision, handlers)`; `handlers` maps the type of a kwargs handler to it."""


@frozen
class StrategySpec:
    """The registry entry of a strategy: a distribution registers it, and a run selects it.

    `Accelerator(strategy=…)` takes its name or the record itself; `--strategy`, `ACCELERATE_STRATEGY` and the
    key `strategy` of a config file take its name. By default the first that applies is used.

    Args:
        name: The name under which it is registered.
        applies: Whether a run uses it: called with the settings, the topology and the device; a pure
            function, with the same result on every rank.
        build: Builds it, or the `"module:function"` that does.
        sections: The sections of `Settings` that it reads, each of which a plugin fills (`"deepspeed"`,
            `"fsdp"`, `"megatron"`, `"parallelism"`); with the arguments of the plugin that is created if the
            strategy is selected without one, or `None` if it needs none. A strategy cannot be selected
            against sections that it does not read.
        max_processes: The largest number of processes that it can train; None for any.
        shards_gradients: Whether a rank has shards of gradients, so that only all ranks together know whether
            they are finite.
        master_weights: Whether models are wrapped so that, under mixed precision, trained parameters are in
            float32 whatever they were loaded in.

    Example:
        >>> spec = StrategySpec(name="mine", applies=lambda *_: False, build="my_package:build")
        >>> spec.shards_gradients
        False
    """

    name: str
    applies: Callable[[Settings, Topology, torch.device], bool]
    build: StrategyFactory | str
    sections: Mapping[str, Mapping[str, Any] | None] = field(default_factory=dict[str, Any])
    max_processes: int | None = None
    shards_gradients: bool = False
    master_weights: bool = False


StateDict: TypeAlias = dict[str, Any]
Parameters: TypeAlias = "Tensor | Iterable[Tensor]"
Optimizers: TypeAlias = "Iterable[Optimizer]"


class ModelWrapper(Protocol):
    """Wraps models for training by several processes, and unwraps them."""

    def check(self, bundle: Bundle) -> None:
        """Raise if the bundle cannot be wrapped, on every rank alike; modify nothing.

        Called once per `prepare`, before any collective.

        Raises:
            ValueError: The bundle has something that cannot be wrapped.
        """
        ...

    def wrap(self, bundle: Bundle, *, evaluation: bool = False) -> Bundle:
        """Return the bundle with its models placed and wrapped, its optimizers pointing at them.

        Called once per `prepare`, on every rank. A model that is already wrapped is unchanged. Afterwards all
        ranks have rank 0's parameter values.

        Args:
            bundle: Models that `check` has let pass.
            evaluation: The models will never be trained: place them, and wrap them only if they could
                not run otherwise.
        """
        ...

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Remove exactly what `wrap` added; any other module is returned as it is."""
        ...


class Stepper(Protocol):
    """Runs backward passes and optimizer steps."""

    def backward(self, loss: Tensor, *, accumulation: int, sync: bool, **kwargs: Any) -> None:
        """Add the gradients of `loss / accumulation` to the parameters.

        Args:
            loss: 0-d tensor, or any shape with `gradient=` in `kwargs`.
            accumulation: Number of micro-batches that make one optimizer step.
            sync: Whether this backward pass completes the accumulation window, for engines that need to know.
                It changes nothing if the forward pass ran within `no_sync`.
            **kwargs: Passed to `Tensor.backward`.
        """
        ...

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Leave gradients local in backward passes within; the next one outside reduces their sum."""
        ...

    def join(
        self, joinables: Sequence[Any], *, divide_by_initial_world_size: bool = True
    ) -> AbstractContextManager[None]:
        """Let ranks run out of batches at different times within the context.

        Args:
            joinables: Wrapped models, and optimizers that are `torch.distributed` joinables.
            divide_by_initial_world_size: Average gradients over all ranks, including finished ones; else over
                ranks that still have batches.
        """
        ...

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
        ...

    def clip_grad_value(
        self, parameters: Parameters, clip_value: float, *, optimizers: Optimizers = ()
    ) -> None:
        """Clamp every gradient to `[-clip_value, clip_value]`; `optimizers` as in `clip_grad_norm`."""
        ...

    def step(self, optimizer: Optimizer, closure: Callable[[], float] | None = None) -> bool | Tensor:
        """Step the optimizer; return False if the step was skipped because gradients were not finite.

        Where the device decides, as for fused optimizers, the result is a 0-d tensor on the device.
        """
        ...


class TrainStep(Protocol):
    """Runs forward and backward passes in one call, for engines that own both, such as pipelines.

    Calls of a prepared model in training mode, with gradients enabled, run through it;
    `accelerator.backward(loss)` then computes nothing and only accepts a loss that such a call has returned.
    """

    def __call__(
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

        Called on every rank.

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
        ...


Write: TypeAlias = "Callable[[Any, Path], object]"
"""Writes a state to a file."""


class Persister(Protocol):
    """Reads and loads full state dicts of models and optimizers. Called on every rank."""

    def full_state_dict(self, model: nn.Module, *, keep: bool = True) -> StateDict:
        """Return the full state dict under the unwrapped model's names; on the CPU if models are sharded.

        Args:
            model: Prepared or not.
            keep: Whether this rank needs it. Otherwise it takes part in the collectives, and the result may
                be empty.
        """
        ...

    def iter_full_state_dict(self, model: nn.Module, *, keep: bool = True) -> Iterator[StateDict]:
        """Yield the full state dict in dictionaries that share no memory.

        If models are sharded, each is gathered when it is requested, so that no rank needs memory for the
        full state dict: every rank iterates over all.

        Args:
            model: Prepared or not.
            keep: As in `full_state_dict`.
        """
        ...

    def iter_full_parameters(self, model: nn.Module, request: FullParameters) -> Iterator[tuple[str, Tensor]]:
        """Yield names of the unwrapped model and full parameters, bit-identical to `full_state_dict`.

        Every rank iterates over all, in the same order; a rank that keeps nothing gets nothing.
        `ReplicatedPersister` does it where every rank has full parameters, and
        `accel_plugins.full_parameters.iter_gathered` where it has shards.

        Args:
            model: Prepared or not.
            request: Their dtype, the size of buckets, and the ranks that need them.
        """
        ...

    def load_full_state_dict(self, model: nn.Module, state: Mapping[str, Any], **options: Any) -> Any:
        """Load a full state dict, which every rank has, into the wrapped model.

        Args:
            model: Prepared or not.
            state: Name to tensor; tensors may be read from a file when they are needed.
            **options: Options of `Module.load_state_dict`, whose result is returned.
        """
        ...

    def full_optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], *, keep: bool = True
    ) -> StateDict:
        """Return the state dict that the optimizer would have in a run of one process.

        Args:
            optimizer: Prepared, without any wrapper of ours.
            models: All prepared models, of which some own its parameters.
            keep: As in `full_state_dict`.
        """
        ...

    def load_full_optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]
    ) -> None:
        """Load a full optimizer state dict, which every rank has."""
        ...


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


class Replicas(Protocol):
    """Groups of processes that train copies of the model; any group may die and return.

    Ranks, collectives and main process of a run belong to its own group.
    """

    @property
    def is_saver(self) -> bool:
        """Whether this group writes the checkpoints."""
        ...

    @property
    def covers(self) -> str:
        """What collectives cover, for messages, such as `"replica group 1 of 4"`."""
        ...

    def share(
        self,
        read: Callable[[], StateDict],
        restore: Callable[[StateDict, bool], Mapping[Any, StateDict]],
        load_last: Callable[[], str | None],
    ) -> None:
        """Register how a group gets state other than models and optimizers from another; called once.

        Args:
            read: Returns the state of everything else; may be called in another thread.
            restore: Restores it, and returns the positions of loaders, which follow their current batch. Its
                second argument says whether the optimizers are about to step, having counted that.
            load_last: Loads the last checkpoint and returns its folder; `None` where there is none.
        """
        ...

    def watched(self, loader: Any, begin: Callable[[], Generator[Any]]) -> Generator[Any]:
        """Yield the batches of an epoch; after this group was healed, from the restored position."""
        ...


class NativeFiles(Protocol):
    """Saves and loads a strategy's own files. Called on every rank; complete after the next barrier."""

    def save_model(self, model: nn.Module, directory: Path, index: int, *, write: Write = ...) -> None:
        """Write the model that was prepared as number `index` into an existing directory.

        Args:
            model: Prepared.
            directory: Exists already.
            index: The number with which it was prepared.
            write: Called as `write(state, path)` for each file. It may write later, while the model stays as
                it is.
        """
        ...

    def load_model(self, model: nn.Module, directory: Path, index: int) -> None:
        """Load the files of `save_model` into the wrapped model."""
        ...

    def save_optimizer(
        self, optimizer: Optimizer, model: nn.Module, directory: Path, index: int, *, write: Write = ...
    ) -> None:
        """Write the optimizer that was prepared as number `index`; `model` owns its parameters.

        The arguments are as for `save_model`.
        """
        ...

    def load_optimizer(self, optimizer: Optimizer, model: nn.Module, directory: Path, index: int) -> None:
        """Load the files of `save_optimizer`."""
        ...


class PrecisionPolicy(Protocol):
    """Decides in which dtypes models compute, and scales losses where the dtype needs it."""

    @property
    def name(self) -> str:
        """`"no"`, `"fp16"`, `"bf16"` or `"fp8"`."""
        ...

    @property
    def scaler(self) -> GradScaler | None:
        """The loss scaler, where the policy has one."""
        ...

    def autocast(self, kwargs: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return a new context in which operations run in the policy's dtype; `kwargs` replace options."""
        ...

    def convert(self, bundle: Bundle) -> Bundle:
        """Make the models compute in this format and return float32; names in state dicts do not change.

        Called once per `prepare`, before the strategy wraps. Optimizers in the bundle become known to
        the loss scaler.
        """
        ...

    def scale(self, loss: Tensor) -> Tensor:
        """Return the scaled loss, to call `backward` on; only for policies with a loss scaler."""
        ...

    def unscale(self, optimizers: Iterable[Optimizer]) -> None:
        """Divide the gradients of these optimizers by the scale, once per step however often it is called."""
        ...

    def step(self, optimizer: Optimizer, closure: Callable[[], float] | None = None) -> bool | Tensor:
        """Unscale if necessary, and step; return False if gradients were not finite and nothing was done.

        Where the device decides, as for fused optimizers, the result is a 0-d tensor on the device.
        """
        ...

    def state_dict(self) -> StateDict:
        """Return the state needed to resume; empty without a loss scaler."""
        ...

    def load_state_dict(self, state: StateDict) -> None:
        """Resume from a `state_dict`."""
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

    def may_move(self, index: int) -> bool:
        """Return whether the model at `index` may be moved to the device."""
        return self.placements[index] if self.placements else True

    def in_order(self) -> list[Any]:
        """Return the contents in the caller's order."""
        return [getattr(self, kind)[index] for kind, index in self.order]
