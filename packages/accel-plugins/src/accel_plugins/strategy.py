"""A strategy: four roles, a name, and what it declares that it can do."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, TypeAlias

from accel_state.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from accel_plugins.dcp.protocol import RankPlanners, ShardedStates
    from accel_plugins.roles import (
        Generators,
        ModelWrapper,
        NativeFiles,
        Persister,
        PrecisionPolicy,
        Stepper,
        TrainStep,
    )
    from accel_state.runtime import Runtime
    from accel_state.settings.model import Settings
    from accel_state.topology import Topology


class Feature(Enum):
    """What a strategy may or may not offer. The conformance suite runs what is declared."""

    CLIP_GRAD_VALUE = auto()
    """`clip_grad_value` works on the gradients that the strategy keeps."""
    CUSTOM_DEVICE_PLACEMENT = auto()
    """The caller may keep a model from being moved to the device."""
    ITEM_COUNTS = auto()
    """Gradients, the mean over the ranks, can be divided once a backward pass has brought them together."""
    LOADERS_FROM_CONFIGURATION = auto()
    """What stands for data loaders is replaced by loaders of the data sets that it describes."""
    MODEL_WITHOUT_OPTIMIZER = auto()
    """A model can be prepared in a call of its own, without its optimizer."""
    MULTIPLE_MODELS = auto()
    """Several models can be prepared and trained in one run."""
    NO_SYNC = auto()
    """Gradients can stay local for some backward passes."""
    OPTIMIZER_FROM_CONFIGURATION = auto()
    """What stands for an optimizer or a schedule is replaced by what a configuration describes."""
    UNEVEN_INPUTS = auto()
    """Ranks can run out of batches at different times, within `join`."""


PLAIN_FEATURES = frozenset(Feature) - {
    Feature.LOADERS_FROM_CONFIGURATION,
    Feature.OPTIMIZER_FROM_CONFIGURATION,
}
"""What strategies offer that train with PyTorch's own optimizers on whole, ordinary tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSharding:
    """Sharding of batches across ranks.

    Ranks of one tensor-, context- or sequence-parallel group share their batches, so there may be fewer
    shards than ranks.

    Args:
        num_shards: Number of shards of a global batch.
        shard_index: Index of this rank's shard.
        put_on_device: Whether the loader moves batches to the device.
        repeats: Whether another rank computes the same with the same batches, so that this rank's results are
            left out of gathered samples.
        micro_batches: The number of equal parts into which an engine cuts the batch of a rank, so that the
            last batch is completed also where there is one shard.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A way to train: composed of four roles, never subclassed.

    Args:
        name: The name under which it is registered.
        wrapper: Wraps and unwraps models.
        stepper: Runs backward passes and optimizer steps.
        persister: Saves and loads.
        sharding: Who gets which batches.
        features: What is offered; ask with `require`.
        mesh: The device mesh, where it has several axes.
        split_sequences: Makes a context in which every rank has a part of each sequence: called as
            `split_sequences(buffers, buffer_seq_dims, no_restore_buffers)`.
        shard_sequences: Shards the sequences of a batch, where loaders do that.
        precision: The policy to use instead of the one that the strategy was made with, where an engine has
            its own.
        release: Gives up what the strategy keeps of prepared objects.
        shards: Gives what this rank holds, for checkpoints to which every rank writes its part; `None` where
            one rank writes everything.
        planners: Plan what a rank writes and reads of `shards`; PyTorch's, for plain tensors and DTensors, if
            `None`.
        native: Saves and loads the files of a strategy whose `shards` are `NATIVE`.
        generators: Random number generators of the engine, which checkpoints have, too.
        wrap_optimizer: Makes the optimizer that `prepare` returns, as `wrap_optimizer(optimizer, wrapper)`;
            `wrapper(optimizer, step=…, discard=…)` makes one that steps and gives its gradients up through an
            engine. By default optimizers step through the `stepper`.
        wrap_scheduler: Makes the schedule that `prepare` returns, as `wrap_scheduler(scheduler, optimizers,
            wrapper)`; `wrapper(scheduler, optimizers)` makes one that an engine steps by itself, and `None`
            leaves it to `prepare`.
        compiles_in_place: Whether the model inside is compiled, and not what is around it.
        fsdp_version: The version of FSDP that shards its models: 2 for `fully_shard`; `None` for neither.
        train_step: Runs forward and backward of an engine that owns both; see `TrainStep`.
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
    after_micro_batch: Callable[[], None] | None = None
    after_step: Callable[[], None] | None = None

    def require(self, feature: Feature, what: str) -> None:
        """Raise unless a feature is offered.

        Args:
            feature: What is needed.
            what: What the user wrote, for the message, such as `"clip_grad_value_()"`.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategySpec:
    """What is known of a strategy before it is built: what a distribution registers, and a run selects.

    `Accelerator(strategy=…)` takes its name or the record itself; `--strategy`, `ACCELERATE_STRATEGY` and the
    key `strategy` of a config file take its name. Where nothing is selected, the first that applies is used.

    Args:
        name: The name under which it is registered.
        applies: Whether a run uses it: asked with the settings, the topology and the device; pure, and the
            same on every rank.
        build: Makes it, or `"module:function"` of what does.
        sections: The sections of `Settings` that it reads, each of which a plugin fills (`"deepspeed"`,
            `"fsdp"`, `"megatron"`, `"parallelism"`); with the fields of the plugin that is made if the
            strategy is selected and none was given, or `None` if it does without. A strategy cannot be
            selected against sections that it does not read.
        max_processes: The largest number of processes that it can train; None for any.
        shards_gradients: Whether a rank has parts of gradients, and cannot tell alone whether all are finite.
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
