"""Communication hooks of torch by their documented names; imported when one is registered."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accel_state.errors import SettingsError
from accel_state.labels import DDPCommunicationHookType as Hook

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor
    from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage] - documented
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
    from torch.nn.parallel import DistributedDataParallel


def register(
    model: DistributedDataParallel, hook: Hook, wrapper: Hook, power_sgd_options: Mapping[str, Any] | None
) -> None:
    """Register a communication hook with a wrapped model that has none yet.

    A wrapper `FP16` or `BF16` compresses the hook's messages further.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    functions: dict[Hook, Callable[..., Any]] = {
        Hook.NO: default_hooks.allreduce_hook,
        Hook.FP16: default_hooks.fp16_compress_hook,
        Hook.BF16: default_hooks.bf16_compress_hook,
        Hook.POWER_SGD: powerSGD_hook.powerSGD_hook,
        # torch refuses annotations that are strings; a lambda has none.
        Hook.BATCHED_POWER_SGD: lambda state, bucket: batched_power_sgd_hook(state, bucket),  # noqa: PLW0108
    }
    wrappers: dict[Hook, Callable[..., Any]] = {
        Hook.FP16: default_hooks.fp16_compress_wrapper,
        Hook.BF16: default_hooks.bf16_compress_wrapper,
    }
    function = functions[hook]
    if wrapper is not Hook.NO:
        function = wrappers[wrapper](function)
    state: Any = model.process_group
    if power_sgd_options is not None:
        try:
            state = powerSGD_hook.PowerSGDState(**{"process_group": state, **power_sgd_options})
        except TypeError as error:
            raise SettingsError(
                f"DistributedDataParallelKwargs(comm_state_option={power_sgd_options!r}): {error}."
            ) from None
    model.register_comm_hook(state, function)


logger = logging.getLogger(__name__)


def batched_power_sgd_hook(state: PowerSGDState, bucket: GradBucket) -> Any:
    """Average a bucket of gradients as a square matrix of low rank.

    In place of torch's `batched_powerSGD_hook`, which fails in its first compressed step since
    `_orthogonalize` takes batches of matrices (https://github.com/pytorch/pytorch/pull/75157). Algorithm:
    Vogels, Karimireddy, Jaggi, *PowerSGD: Practical Low-Rank Gradient Compression for Distributed
    Optimization*, 2019, https://arxiv.org/abs/1905.13727.

    Returns:
        A future with the averaged gradients.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    if state.iter < state.start_powerSGD_iter:
        state.maybe_increase_iter(bucket)
        return default_hooks.allreduce_hook(state.process_group, bucket)  # pyright: ignore[reportArgumentType] - None is the default group
    buffer, index = bucket.buffer(), bucket.index()
    matrix = _square(buffer)
    if state.use_error_feedback and index in state.error_dict:
        matrix += state.error_dict[index]
    left, right = _factors(state, index, matrix, buffer.dtype)
    approximation = left @ right.T
    if state.use_error_feedback:
        state.error_dict[index] = matrix - approximation
    if state.warm_start:
        state.q_memory_dict[index] = right
    _count(state, bucket, matrix.shape[0])
    state.maybe_increase_iter(bucket)
    buffer.copy_(approximation.flatten()[: buffer.numel()])
    future = torch.futures.Future(devices=None if buffer.device.type == "cpu" else [buffer.device])
    future.set_result(buffer)
    return future


def _square(buffer: Tensor) -> Tensor:
    """Return the values as a zero-padded square matrix, in a dtype that can be orthogonalised."""
    side = math.ceil(math.sqrt(buffer.numel()))
    dtype = torch.promote_types(buffer.dtype, torch.float32)
    matrix = torch.zeros(side * side, dtype=dtype, device=buffer.device)
    matrix[: buffer.numel()] = buffer
    return matrix.view(side, side)


def _factors(state: PowerSGDState, index: int, matrix: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Do one power iteration: P and Q such that P Qᵀ approximates the mean of the ranks' matrices."""
    guess = state.q_memory_dict.get(index) if state.warm_start else None
    if guess is None:
        guess = _random(state, matrix)
    left = torch.linalg.qr(_sum(state, matrix @ torch.linalg.qr(guess).Q, dtype)).Q
    right = _sum(state, matrix.T @ left, dtype) / dist.get_world_size(state.process_group)
    return left, right


def _random(state: PowerSGDState, matrix: Tensor) -> Tensor:
    """Draw normally distributed columns, the same on every rank and new in every step."""
    generator = torch.Generator().manual_seed(int(state.rng.randint(1_000_000_000)))
    rank = min(state.matrix_approximation_rank, matrix.shape[0])
    columns = torch.randn(matrix.shape[0], rank, generator=generator, dtype=matrix.dtype)
    return columns.to(matrix.device)


def _sum(state: PowerSGDState, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """All-reduce a sum in the dtype of the gradients."""
    sent = tensor.to(dtype).contiguous()
    dist.all_reduce(sent, group=state.process_group)
    return sent.to(tensor.dtype)


def _count(state: PowerSGDState, bucket: GradBucket, side: int) -> None:
    state.total_numel_before_compression += bucket.buffer().numel()
    state.total_numel_after_compression += 2 * side * min(state.matrix_approximation_rank, side)
    if bucket.is_last() and state.iter >= state.next_stats_report:
        rate, before, after = state.compression_stats()
        logger.info("PowerSGD sent %d of %d gradients so far, 1/%.1f of them.", after, before, rate)
        state.next_stats_report = state.iter + state.compression_stats_logging_frequency
