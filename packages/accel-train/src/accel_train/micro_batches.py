"""Micro-batches as large as fit into the memory of every rank (`AutoMicroBatch`)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel_ops.tree import find_batch_size, slice_tensors
from accel_plugins.strategy import Feature
from accel_state.errors import SettingsError, UnsupportedError
from accel_state.memory import clear_device_cache, should_reduce_batch_size
from accel_state.rng import rng_source
from accel_state.torch_private import TorchDispatchMode, tree_leaves, tree_map

if TYPE_CHECKING:
    from accel_train.accelerator import Accelerator

Batch = TypeVar("Batch")

_OF_PARAMETERS = frozenset({"_allgather_base_", "_reduce_scatter_base_", "allreduce_"})
"""The collectives of FSDP2, whose sizes are those of parameters. Other collectives depend on the samples."""

logger = logging.getLogger(__name__)


@final
class AutoMicroBatch:
    """Cut batches into micro-batches that fit into the memory of every rank; the results stay the same.

    If memory runs out on some ranks, even on one alone, all ranks drop the gradients of this batch, cut it
    into twice as many micro-batches, and go on, also late in a run, at the first long batch. The ranks agree
    once per batch, over the host.

    While the other ranks finish their micro-batches, a rank whose memory ran out takes part in their
    collectives with zeros. It knows them from one sample, which runs forward and backward in the first call.
    The model must communicate alike in each micro-batch: FSDP2, also with replicas, and frozen parts, but no
    sharding of activations.

    A forward pass that failed has run: running statistics of buffers keep what it added. Random numbers are
    those of a batch that began with the smaller micro-batches.

    Args:
        accelerator: The `Accelerator` that has prepared the model.
        model: The prepared model, in one process or under FSDP2.
        micro_batches: Into how many micro-batches the first batch is cut.

    Attributes:
        micro_batches (int): Into how many micro-batches a batch is cut, on all ranks.

    Raises:
        SettingsError: `micro_batches` is not positive, or the accelerator accumulates gradients itself.
        UnsupportedError: The strategy keeps its gradients to itself; or there are several processes, and the
            model is not one of FSDP2, or torch's FSDP2 lacks `reset_iter_state`.

    Example:
        >>> from accel_train import Accelerator
        >>> accelerator = Accelerator(cpu=True)
        >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
        >>> micro = AutoMicroBatch(accelerator, model, micro_batches=2)
        >>> micro.backward(lambda part: model(part).sum() * 0 + part.mean(), torch.arange(8.0).reshape(4, 2))
        tensor(3.5000)
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, micro_batches: int = 1) -> None:
        if micro_batches < 1 or accelerator.gradient_accumulation_steps != 1:
            raise SettingsError(
                f"AutoMicroBatch(micro_batches={micro_batches!r}) with gradient_accumulation_steps="
                f"{accelerator.gradient_accumulation_steps}: it needs at least one micro-batch, and "
                "accumulates the gradients of a batch itself."
            )
        accelerator._parts.strategy.require(Feature.ITEM_COUNTS, "AutoMicroBatch()")
        self.micro_batches = micro_batches
        self._accelerator = accelerator
        self._model: Any = model
        self._recorder = _Recorder()
        self._is_known = accelerator.num_processes == 1
        if not self._is_known and not hasattr(model, "reset_iter_state"):
            raise UnsupportedError(
                f"AutoMicroBatch() of a {type(model).__name__} in {accelerator.num_processes} processes: if "
                "one of them runs out of memory, only FSDP2 (`fsdp_version=2`) can go on, with a torch that "
                f"has FSDPModule.reset_iter_state (this is {torch.__version__})."
            )

    def backward(
        self,
        compute_loss: Callable[[Batch], Tensor],
        batch: Batch,
        *,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> Tensor:
        """Compute the gradients of a batch in place of `accelerator.backward`, on all ranks.

        Args:
            compute_loss: Returns the loss of a micro-batch, 0-d, by the prepared model. It is called several
                times, and must not keep what it computes.
            batch: Nested tensors of this rank, which are cut along their first dimension. A rank with fewer
                samples than there are micro-batches repeats one with a weight of zero.
            reduction: Whether losses are means over the samples of the micro-batch, or their sum (divided by
                what belongs to the whole batch, such as its number of tokens).

        Returns:
            The loss of the batch on this rank, 0-d, without a graph.

        Raises:
            ValueError: There are gradients; call `zero_grad()` before, which sets them to `None`.
            UnsupportedError: Sizes of collectives depend on the samples, as with tensor or sequence
                parallelism.
            torch.OutOfMemoryError: Even one sample does not fit; raised on all ranks.
        """
        if any(parameter.grad is not None for parameter in self._model.parameters()):
            raise ValueError(
                "AutoMicroBatch.backward() needs parameters without gradients, since it drops them where "
                "memory runs out. Call optimizer.zero_grad(), with set_to_none=True, before it."
            )
        if not self._is_known:
            # Record the collectives of one sample.
            device = self._accelerator.device
            devices = [] if device.type == "cpu" else [device]
            with torch.random.fork_rng(devices, device_type=device.type), self._recorder:
                compute_loss(slice_tensors(batch, slice(0, 1))).backward()
            self._drop_gradients()
            self._is_known = True
        runtime = self._accelerator._parts.runtime
        types = ["torch"] if runtime.kind.rng_key is None else ["torch", runtime.kind.rng_key]
        generators = [*map(rng_source, types)]
        while True:
            states = [generator.read() for generator in generators]
            losses, problem = self._attempt(compute_loss, batch, reduction)
            outcome = torch.tensor([problem is not None, find_batch_size(batch)], dtype=torch.int64)
            runtime.collectives.all_reduce(outcome, op="max")
            is_too_large, samples = outcome.tolist()
            if not is_too_large:
                return torch.stack(losses).sum()
            self._drop_gradients()
            where = "another rank" if problem is None else f"this rank ({problem})"
            if self.micro_batches >= samples:
                raise torch.OutOfMemoryError(f"Memory ran out on {where}, with micro-batches of one sample.")
            self.micro_batches = min(2 * self.micro_batches, samples)
            logger.warning(
                "Memory ran out on %s; batches are cut into %d micro-batches.", where, self.micro_batches
            )
            for generator, state in zip(generators, states, strict=True):
                generator.write(state)

    def _attempt(
        self, compute_loss: Callable[[Batch], Tensor], batch: Batch, reduction: str
    ) -> tuple[list[Tensor], str | None]:
        """Run the micro-batches; return their losses, and the error if memory ran out."""
        samples, count = find_batch_size(batch), self.micro_batches
        losses: list[Tensor] = []
        for index in range(count):
            begin, end = samples * index // count, samples * (index + 1) // count
            part = slice_tensors(batch, slice(begin, max(end, begin + 1)))
            weight = (end - begin) / samples if reduction == "mean" else float(end > begin)
            before = self._recorder.issued()
            try:
                losses.append(self._run(compute_loss, part, weight))
            except (RuntimeError, MemoryError) as error:
                if not should_reduce_batch_size(error):
                    raise
                problem = str(error)  # the frames of the error hold the tensors that did not fit
            else:
                if self._recorder.issued() - before != self._recorder.of_one_micro_batch:
                    raise UnsupportedError("AutoMicroBatch: micro-batches differ in their collectives.")
                continue
            if self._accelerator.num_processes > 1:
                self._model.reset_iter_state()
            clear_device_cache(garbage_collection=True)
            self._recorder.replay(before, count - index)
            return losses, problem
        return losses, None

    def _run(self, compute_loss: Callable[[Batch], Tensor], part: Batch, weight: float) -> Tensor:
        loss = compute_loss(part) * weight
        self._accelerator.backward(loss)
        return loss.detach()

    def _drop_gradients(self) -> None:
        for parameter in self._model.parameters():
            parameter.grad = None


class _Recorder(TorchDispatchMode):
    """Record the collectives of a micro-batch, and replay them with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self._collectives: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.of_one_micro_batch: Counter[Any] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record what communicates."""
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # It is dispatched again with the tensors inside.
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        if "c10d" in func.namespace and not name.startswith("wait_tensor"):
            if name not in _OF_PARAMETERS:
                raise UnsupportedError(
                    f"AutoMicroBatch: the model communicates by `{name}`, whose size depends on the samples. "
                    "It supports FSDP2 and its replicas, no other parallelism."
                )
            handle = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
            group: Any = dist.ProcessGroup.unbox(handle)
            # Zeros almost without storage, in place of each tensor.
            blank = tree_map(
                lambda arg: arg.new_zeros(()).expand(arg.shape) if isinstance(arg, Tensor) else arg, args
            )
            tensor = next(leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
            backend = group._get_backend(tensor.device)
            self._collectives.append((func, blank, kwargs, backend))
            self.of_one_micro_batch[backend] += 1
        return func(*args, **kwargs)

    def issued(self) -> Counter[Any]:
        """Return how many collectives this rank has begun, by group."""
        return Counter({group: group._get_sequence_number_for_group() for group in self.of_one_micro_batch})

    def replay(self, before: Counter[Any], micro_batches: int) -> None:
        """Take part in the rest of some micro-batches; the first one began when `before` were issued."""
        done = self.issued() - before
        for operation, blank, kwargs, group in self._collectives * micro_batches:
            if done[group] > 0:  # the order within a group is that of all micro-batches
                done[group] -= 1
                continue
            filled = tree_map(lambda arg: arg.contiguous() if isinstance(arg, Tensor) else arg, blank)
            operation(*filled, **kwargs)[-1].wait()
