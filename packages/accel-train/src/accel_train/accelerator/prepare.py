"""Prepare models, optimizers, loaders and schedulers, unwrap and release them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, TypeVarTuple, overload

from accel_ops.modules import extract_model_from_parallel
from accel_state.memory import release_memory
from accel_train.accelerator.facet import Facet
from accel_train.prepare.sort import sort_arguments, sort_one
from accel_train.prepare.stages import Request, has_device_map, run_stages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import DataLoader

    from accel_plugins.kwargs.run import DataLoaderConfiguration
    from accel_state.labels import RNGType
    from accel_train.data.prepared import PreparedLoader
    from accel_train.optimizer import AcceleratedOptimizer
    from accel_train.scheduler import AcceleratedScheduler, StepPer

A = TypeVar("A")
B = TypeVar("B")
M = TypeVar("M", bound="nn.Module")
More = TypeVarTuple("More")
Placement: TypeAlias = "Sequence[bool | None] | None"


class PrepareFacet(Facet):
    """`prepare`, and what undoes it."""

    __slots__ = ()

    @overload
    def prepare(self, first: Optimizer, /, *, device_placement: Placement = ...) -> AcceleratedOptimizer: ...
    @overload
    def prepare(self, first: DataLoader[Any], /, *, device_placement: Placement = ...) -> PreparedLoader: ...
    @overload
    def prepare(  # pyright: ignore[reportOverlappingOverload] - what is prepared is no LRScheduler
        self, first: LRScheduler, /, *, device_placement: Placement = ...
    ) -> AcceleratedScheduler: ...
    @overload
    def prepare(
        self, first: Optimizer, second: DataLoader[Any], /, *, device_placement: Placement = ...
    ) -> tuple[AcceleratedOptimizer, PreparedLoader]: ...
    @overload
    def prepare(  # pyright: ignore[reportOverlappingOverload] - what is prepared is no LRScheduler
        self, first: Optimizer, second: LRScheduler, /, *, device_placement: Placement = ...
    ) -> tuple[AcceleratedOptimizer, AcceleratedScheduler]: ...
    @overload
    def prepare(
        self, first: DataLoader[Any], second: DataLoader[Any], /, *, device_placement: Placement = ...
    ) -> tuple[PreparedLoader, PreparedLoader]: ...
    @overload
    def prepare(
        self, first: M, second: Optimizer, /, *, device_placement: Placement = ...
    ) -> tuple[M, AcceleratedOptimizer]: ...
    @overload
    def prepare(
        self, first: M, second: DataLoader[Any], /, *, device_placement: Placement = ...
    ) -> tuple[M, PreparedLoader]: ...
    @overload
    def prepare(
        self, first: M, second: Optimizer, third: DataLoader[Any], /, *, device_placement: Placement = ...
    ) -> tuple[M, AcceleratedOptimizer, PreparedLoader]: ...
    @overload
    def prepare(  # pyright: ignore[reportOverlappingOverload] - what is prepared is no LRScheduler
        self, first: M, second: Optimizer, third: LRScheduler, /, *, device_placement: Placement = ...
    ) -> tuple[M, AcceleratedOptimizer, AcceleratedScheduler]: ...
    @overload
    def prepare(
        self,
        first: M,
        second: DataLoader[Any],
        third: DataLoader[Any],
        /,
        *,
        device_placement: Placement = ...,
    ) -> tuple[M, PreparedLoader, PreparedLoader]: ...
    @overload
    def prepare(
        self,
        first: M,
        second: Optimizer,
        third: DataLoader[Any],
        fourth: DataLoader[Any],
        /,
        *,
        device_placement: Placement = ...,
    ) -> tuple[M, AcceleratedOptimizer, PreparedLoader, PreparedLoader]: ...
    @overload
    def prepare(  # pyright: ignore[reportOverlappingOverload] - what is prepared is no LRScheduler
        self,
        first: M,
        second: Optimizer,
        third: DataLoader[Any],
        fourth: LRScheduler,
        /,
        *,
        device_placement: Placement = ...,
    ) -> tuple[M, AcceleratedOptimizer, PreparedLoader, AcceleratedScheduler]: ...
    @overload
    def prepare(  # pyright: ignore[reportOverlappingOverload] - what is prepared is no LRScheduler
        self,
        first: M,
        second: Optimizer,
        third: DataLoader[Any],
        fourth: DataLoader[Any],
        fifth: LRScheduler,
        /,
        *,
        device_placement: Placement = ...,
    ) -> tuple[M, AcceleratedOptimizer, PreparedLoader, PreparedLoader, AcceleratedScheduler]: ...
    @overload
    def prepare(self, first: A, /, *, device_placement: Placement = ...) -> A: ...
    @overload
    def prepare(
        self, first: A, second: B, /, *more: *More, device_placement: Placement = ...
    ) -> tuple[A, B, *More]: ...
    @overload
    def prepare(self, *args: Any, device_placement: Placement = ...) -> Any: ...
    def prepare(  # pyright: ignore[reportInconsistentOverload] - any number of arguments, as `More`
        self, *args: Any, device_placement: Sequence[bool | None] | None = None
    ) -> Any:
        """Prepare objects for this run: move and wrap models, shard what the strategy shards.

        Args:
            *args: Models, optimizers, data loaders and schedulers, in any order and number. Anything else,
                and what this accelerator has prepared before, is returned as it is.
            device_placement: For every argument, whether it may be moved to the device; `None`, also in the
                list, means what `Accelerator(device_placement=…)` says.

        Returns:
            The prepared objects in the order of the arguments; not a tuple if there is one argument only.

        Raises:
            ValueError: `device_placement` has another length than the arguments.
            UnsupportedError: The strategy cannot train what it was given, such as a model that is spread over
                several devices and processes.

        Example:
            >>> import torch
            >>> from accel_train import Accelerator
            >>> model = torch.nn.Linear(2, 1)
            >>> model, optimizer = Accelerator(cpu=True).prepare(model, torch.optim.SGD(model.parameters()))
            >>> type(optimizer).__name__
            'AcceleratedOptimizer'
        """
        parts = self._parts
        bundle, placements = sort_arguments(
            args,
            device_placement=device_placement,
            default=parts.device_placement,
            prepared=parts.prepared,
        )
        results = run_stages(bundle, Request(parts=parts, placements=placements)).in_order()
        return results[0] if len(results) == 1 else tuple(results)

    def prepare_model(
        self,
        model: M,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> M:
        """Prepare one model.

        Args:
            model: The model.
            device_placement: Whether it may be moved to the device; the accelerator's default if `None`.
            evaluation_mode: The model is not trained: it is moved to the device, gets its precision, and is
                wrapped only if it cannot run otherwise.
        """
        return self._prepare_one("models", model, device_placement, evaluation=evaluation_mode)

    def prepare_optimizer(
        self,
        optimizer: Optimizer,
        device_placement: bool | None = None,
    ) -> AcceleratedOptimizer:
        """Prepare one optimizer; `device_placement` says whether its state follows its parameters."""
        return self._prepare_one("optimizers", optimizer, device_placement)

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> PreparedLoader:
        """Prepare one data loader.

        Args:
            data_loader: A PyTorch `DataLoader`.
            device_placement: Whether it moves batches to the device; the accelerator's default if `None`.
            slice_fn_for_dispatch: How a loader that reads on the main process alone cuts a batch for the
                others.
        """
        return self._prepare_one("dataloaders", data_loader, device_placement, slice_fn=slice_fn_for_dispatch)

    def prepare_scheduler(
        self, scheduler: LRScheduler, *, step_per: StepPer | None = None
    ) -> AcceleratedScheduler:
        """Prepare one learning rate scheduler; it follows the optimizer that it was made for.

        Args:
            scheduler: The scheduler.
            step_per: What one step of it stands for; what `Accelerator(step_scheduler_per=…)` says if `None`.
        """
        return self._prepare_one("schedulers", scheduler, None, step_per=step_per)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Return whether a device map has spread a model, or a part of it, over several devices.

        One process runs such a model; several cannot train it.

        Args:
            model: Any model.
        """
        return has_device_map(model)

    def unwrap_model(
        self,
        model: M,
        keep_fp32_wrapper: bool = True,
        keep_torch_compile: bool = True,
    ) -> M:
        """Return a model as it was before `prepare`.

        Args:
            model: A prepared model; any other is returned as it is.
            keep_fp32_wrapper: Whether its forward keeps computing in mixed precision.
            keep_torch_compile: Whether it stays compiled if it is.
        """
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    def free_memory(self, *objects: Any) -> list[Any]:
        """Release all prepared objects and their memory.

        Args:
            *objects: Further objects of the caller to release.

        Returns:
            As many `None` as there were objects, to be assigned to the caller's names for them.

        Example:
            >>> from accel_train import Accelerator
            >>> model, optimizer = "a model", "an optimizer"
            >>> model, optimizer = Accelerator(cpu=True).free_memory(model, optimizer)
            >>> model is optimizer is None
            True
        """
        release = self._parts.strategy.release
        if release is not None:
            release()
        self._parts.prepared.clear()
        self._parts.synchronizer.step = 0
        self._parts.items.close()
        return release_memory(*objects)

    def clear(self, *objects: Any) -> list[Any]:
        """The same as `free_memory`."""
        return self.free_memory(*objects)

    @property
    def device_placement(self) -> bool:
        """Whether `prepare` moves objects to the device by default."""
        return self._parts.device_placement

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """How loaders are prepared."""
        return self._parts.dataloading

    @property
    def rng_types(self) -> Sequence[str | RNGType]:
        """Which sources of randomness loaders synchronise between processes at their beginning."""
        return self._parts.rng_types

    @property
    def split_batches(self) -> bool:
        """Whether each batch of a loader is sharded across ranks."""
        return self._parts.dataloading.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether the main process reads all batches; `None` means for iterable datasets only."""
        return self._parts.dataloading.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether every process gets the same number of samples; loaders prepared later follow a change."""
        return self._parts.dataloading.even_batches

    @even_batches.setter
    def even_batches(self, even_batches: bool) -> None:
        self._parts.dataloading.even_batches = even_batches

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether shuffling is drawn from a seed and the epoch alone."""
        return self._parts.dataloading.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied to the device without waiting."""
        return self._parts.dataloading.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether loaders become torchdata's `StatefulDataLoader`."""
        return self._parts.dataloading.use_stateful_dataloader

    @property
    def _models(self) -> list[nn.Module]:
        return self._parts.prepared.models

    @property
    def _optimizers(self) -> list[AcceleratedOptimizer]:
        return self._parts.prepared.optimizers

    @property
    def _schedulers(self) -> list[AcceleratedScheduler]:
        return self._parts.prepared.schedulers

    @property
    def _dataloaders(self) -> list[Any]:
        return self._parts.prepared.dataloaders

    def _prepare_one(self, kind: str, something: Any, placement: bool | None, **request: Any) -> Any:
        parts = self._parts
        if something in parts.prepared:
            return something
        move = parts.device_placement if placement is None else placement
        bundle, placements = sort_one(kind, something, move=move)
        return run_stages(bundle, Request(parts=parts, placements=placements, **request)).in_order()[0]
