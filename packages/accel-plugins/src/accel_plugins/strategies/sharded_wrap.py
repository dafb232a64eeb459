"""Shard a model in place: move it to meta, apply the parallelism, materialise it from rank 0."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch.nn.parameter import is_lazy

from accel_ops.modules import without_compiler
from accel_plugins.sharding.master_weights import dtype_to_train, warn_about_master_weights
from accel_plugins.sharding.materialize import materialize_from_rank0, to_meta
from accel_plugins.sharding.optimizers import ParamRemap, detach_params, reattach_params
from accel_plugins.strategies.replicated import move_to_device
from accel_plugins.strategy import PLAIN_FEATURES, Feature
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import nn

    from accel_plugins.bundle import Bundle
    from accel_state.runtime import Runtime

SHARDED_FEATURES = PLAIN_FEATURES - {Feature.CUSTOM_DEVICE_PLACEMENT, Feature.UNEVEN_INPUTS}
"""The features of strategies with sharded models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedWrapper:
    """Model wrapper that shards models in place; they stay the same objects, with the same names.

    Args:
        validate: Raises `ValueError` for a model that cannot be sharded; checks this rank alone.
        master_weights: The mixed precision under which trained parameters are cast to float32; `None` to keep
            all dtypes.
        only_main_has_values: Whether models of ranks other than 0 may be on the meta device.
    """

    runtime: Runtime
    shard: Callable[[nn.Module], None]
    validate: Callable[[nn.Module], None]
    parameters_on: torch.device
    master_weights: str | None = None
    only_main_has_values: bool = False
    book: ParamRemap = field(default_factory=ParamRemap)

    def check(self, bundle: Bundle) -> None:
        """Refuse models that cannot be sharded or that differ between ranks; all ranks raise if one does."""
        problem = ""
        models = [model for model in map(without_compiler, bundle.models) if not self.book.has(model)]
        try:
            for model in models:
                _check_quantised(model)
                self._validate(model)
            self.book.check(bundle.optimizers, map(without_compiler, bundle.models))
        except ValueError as error:
            problem = str(error)
        reports = self.runtime.collectives.all_gather_object((problem, [*map(_digest, models)]))
        for rank, (text, _) in enumerate(reports):
            if text:
                raise SettingsError(text if text == problem else f"rank {rank}: {text}")
        for rank, (_, digests) in enumerate(reports):
            if digests != reports[0][1]:
                raise SettingsError(
                    f"prepare() got other models on rank {rank} than on rank 0: names, shapes or dtypes "
                    "of their parameters differ. Make the same models on every rank."
                )

    def wrap(self, bundle: Bundle, *, evaluation: bool = False) -> Bundle:
        """Shard the models that are not sharded yet, and switch optimizers to the new parameters."""
        models = [*bundle.models]
        for index, model in enumerate(models):
            core = without_compiler(model)
            if self.book.has(core):
                continue
            if evaluation and not self.only_main_has_values:
                models[index] = move_to_device(
                    replace(bundle, models=[model], placements=()), self.runtime.device
                )[0]
            else:
                self._wrap(core, bundle)
        for optimizer in bundle.optimizers:
            self.book.switch(optimizer)
        return replace(bundle, models=models)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model without the compiler's wrapper; sharding adds none."""
        return without_compiler(model)

    def _wrap(self, model: nn.Module, bundle: Bundle) -> None:
        names = {id(one): name for name, one in model.named_parameters()}
        is_main = self.runtime.topology.is_main
        if self.master_weights is not None and is_main:
            warn_about_master_weights(model, self.master_weights)
        values = to_meta(
            model,
            keep=is_main,
            device=self.runtime.device,
            dtype_of=None if self.master_weights is None else dtype_to_train,
        )
        held = detach_params(bundle.optimizers, names)
        self.shard(model)
        materialize_from_rank0(model, values, self.runtime, parameters_on=self.parameters_on)
        reattach_params(held, model)
        self.book.add(model, values.before.items(), dict(model.named_parameters(remove_duplicate=False)))

    def _validate(self, model: nn.Module) -> None:
        may_be_empty = self.only_main_has_values and not self.runtime.topology.is_main
        for name, parameter in model.named_parameters():
            if is_lazy(parameter):
                raise SettingsError(
                    f"{type(model).__name__}: the parameter {name!r} of a lazy module has no shape yet; "
                    "run one batch through the model before prepare()."
                )
            if parameter.is_meta and not may_be_empty:
                raise SettingsError(
                    f"{type(model).__name__}: the parameter {name!r} is on the meta device on "
                    f"rank {self.runtime.topology.rank}. Load the weights there before prepare(); with "
                    "FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=True), rank 0 alone needs them."
                )
        self.validate(model)


def _digest(model: nn.Module) -> str:
    tensors = (*model.named_parameters(), *model.named_buffers())
    text = "\n".join(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors)
    return hashlib.sha256(text.encode()).hexdigest()


def _check_quantised(model: nn.Module) -> None:
    """Refuse weights quantised by bitsandbytes: sharded as plain tensors they would lose their scales."""
    for name, parameter in model.named_parameters():
        if type(parameter).__module__.startswith("bitsandbytes."):
            raise SettingsError(
                f"{type(model).__name__}: the parameter {name!r} is quantised ({type(parameter).__name__} of "
                "bitsandbytes) and cannot be sharded. Train the model with DDP, or load it in its own dtype."
            )


def compose(functions: Sequence[Callable[[nn.Module], None]]) -> Callable[[nn.Module], None]:
    """Compose functions of a model into one that calls them in order."""

    def each(model: nn.Module) -> None:
        for function in functions:
            function(model)

    return each
