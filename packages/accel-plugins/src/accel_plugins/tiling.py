"""Tiling for long sequences: losses that never materialise all logits, and an MLP in tiles.

Both work without parallelism, and with any that keeps each sequence on one rank.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional

from accel_ops.modules import replaced_attributes, wrap_forward
from accel_plugins.fsdp.blocks import checkpoint_function
from accel_state.errors import SettingsError, UnsupportedError
from accel_state.frozen import frozen
from accel_state.torch_private import active_fake_mode, compute_local_shape_and_global_offset


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    chunk_size: int = 1024,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """Compute the cross-entropy of a linear head, `chunk_size` rows of logits at a time.

    Gradients are computed with the loss, as Liger's fused loss does (https://arxiv.org/abs/2410.10989): the
    backward pass only scales them, once. They and the loss are accumulated in float32 at least; autocast
    applies to the products of matrices.

    Args:
        hidden: Hidden states of shape `(…, hidden_size)`, floating. With a weight that tensor parallelism
            shards by rows, a replicated `DTensor`.
        weight: The weight of the head, of shape `(vocabulary, hidden_size)`.
        labels: The class of each row, of shape `(…)`, int64.
        chunk_size: Rows of logits in memory at a time.
        bias: The bias of the head, of shape `(vocabulary,)`.
        ignore_index: The label of rows that do not count.
        label_smoothing: As for `torch.nn.functional.cross_entropy`.
        logit_scale: Factor of the logits.
        logit_softcap: Logits become `cap * tanh(logits / cap)`, after they were scaled.
        reduction: `"mean"` over the rows that count, or `"sum"`.

    Returns:
        A scalar, float32, or float64 for float64 hidden states.

    Raises:
        ValueError: Shapes do not fit, or `chunk_size` is less than 1.
        UnsupportedError: The weight is sharded in another way, as by FSDP outside of the module's forward.

    Example:
        >>> hidden, weight, labels = torch.randn(2, 5, 4), torch.randn(7, 4), torch.randint(7, (2, 5))
        >>> loss = chunked_cross_entropy(hidden, weight, labels, chunk_size=3)
        >>> plain = torch.nn.functional.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten())
        >>> torch.testing.assert_close(loss, plain)
    """
    task = _Task(
        name="chunked_cross_entropy",
        chunk_size=chunk_size,
        ignore_index=ignore_index,
        smoothing=label_smoothing,
        scale=logit_scale,
        softcap=logit_softcap,
    )
    inputs, task = _local_inputs(hidden, weight, labels, bias, task)
    total: Any = _SummedLoss.apply(*inputs, task)
    return total if reduction == "sum" else total / (labels != ignore_index).sum()


def chunked_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    chunk_size: int = 1024,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities and entropies of a linear head, `chunk_size` rows of logits at a time.

    The backward pass computes the logits again, chunk by chunk. Dtypes are as for `chunked_cross_entropy`.

    Args:
        hidden: Hidden states of shape `(…, hidden_size)`, floating. With a weight that tensor parallelism
            shards by rows, a replicated `DTensor`.
        weight: The weight of the head, of shape `(vocabulary, hidden_size)`.
        labels: The class of each row, of shape `(…)`, int64.
        chunk_size: Rows of logits in memory at a time.
        bias: The bias of the head, of shape `(vocabulary,)`.
        ignore_index: The label of rows that do not count: both values are 0 there, without gradients.
        logit_scale: Factor of the logits, such as 1 / temperature.
        logit_softcap: Logits become `cap * tanh(logits / cap)`, after they were scaled.

    Returns:
        The logarithm of the probability of each label, and the entropy of each row's distribution in nats,
        both of the shape of the labels, float32, or float64 for float64 hidden states.

    Raises:
        ValueError: Shapes do not fit, or `chunk_size` is less than 1.
        UnsupportedError: The weight is sharded in another way, as by FSDP outside of the module's forward.

    Example:
        >>> hidden, weight, labels = torch.randn(2, 5, 4), torch.randn(7, 4), torch.randint(7, (2, 5))
        >>> log_probs, entropy = chunked_log_probs(hidden, weight, labels, chunk_size=3)
        >>> plain = torch.distributions.Categorical(logits=hidden @ weight.T)
        >>> torch.testing.assert_close(log_probs, plain.log_prob(labels))
        >>> torch.testing.assert_close(entropy, plain.entropy())
    """
    task = _Task(
        name="chunked_log_probs",
        chunk_size=chunk_size,
        ignore_index=ignore_index,
        scale=logit_scale,
        softcap=logit_softcap,
    )
    inputs, task = _local_inputs(hidden, weight, labels, bias, task)
    values: Any = _LogProbs.apply(*inputs, task)
    return values


def _local_inputs(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, task: _Task
) -> tuple[tuple[Tensor, Tensor, Tensor | None, Tensor], _Task]:
    """Return the rows and this rank's part of the head, and the task with what depends on them."""
    if hidden.shape[:-1] != labels.shape or hidden.shape[-1] != weight.shape[-1] or task.chunk_size < 1:
        raise ValueError(
            f"{task.name}: hidden states of shape {tuple(hidden.shape)}, a weight of "
            f"{tuple(weight.shape)}, labels of {tuple(labels.shape)} and chunk_size={task.chunk_size!r}; "
            "expected (…, hidden_size), (vocabulary, hidden_size), (…) and at least 1."
        )
    vocabulary, group, first = len(weight), None, 0
    if isinstance(weight, DTensor):
        mesh, placements = weight.device_mesh, weight.placements
        if mesh.ndim > 1 or placements[0] not in {Shard(0), Replicate()} or not isinstance(hidden, DTensor):
            raise UnsupportedError(
                f"{task.name}: the weight is sharded by {placements}. Call it within the forward "
                "of the module that holds the weight, where FSDP gathers it; with a weight of tensor "
                "parallelism, give the hidden states as a replicated DTensor of the same mesh."
            )
        if placements[0] == Shard(0):
            group = mesh.get_group()
            first = compute_local_shape_and_global_offset(weight.shape, mesh, placements)[1][0]
        # Each rank has the gradient through its rows of the weight.
        hidden = hidden.to_local(grad_placements=[Partial()] if group is not None else None)
        weight = weight.to_local()
        bias = bias.to_local() if isinstance(bias, DTensor) else bias
    device = hidden.device.type
    casts = torch.is_autocast_enabled(device) and hidden.dtype is not torch.float64
    task = replace(
        task,
        vocabulary=vocabulary,
        group=group,
        first=first,
        dtype=torch.get_autocast_dtype(device) if casts else hidden.dtype,
        needs_gradients=torch.is_grad_enabled(),
    )
    return (hidden.reshape(-1, hidden.shape[-1]), weight, bias, labels), task


@frozen
class _Task:
    """The options of a loss; this rank has the rows of the weight from `first` on, its group the others."""

    name: str
    chunk_size: int
    ignore_index: int
    scale: float
    softcap: float | None
    smoothing: float = 0.0
    vocabulary: int = 0
    group: dist.ProcessGroup | None = None
    first: int = 0
    dtype: torch.dtype = torch.float32
    needs_gradients: bool = False

    def reduce(self, values: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """All-reduce over the ranks that share the vocabulary."""
        if self.group is not None:
            dist.all_reduce(values, op=op, group=self.group)
        return values

    def scale_and_cap(self, logits: Tensor) -> Tensor | None:
        """Scale and cap logits in place; return the slope of the cap."""
        if self.scale != 1:
            logits *= self.scale
        if self.softcap is None:
            return None
        logits.div_(self.softcap).tanh_()
        slope = 1 - logits**2
        logits *= self.softcap
        return slope

    def index(self, labels: Tensor, columns: int) -> tuple[Tensor, Tensor]:
        """Return the column of each label among those of this rank, and whether it is one that counts."""
        counts = labels != self.ignore_index
        index = torch.where(counts, labels, self.first) - self.first
        if self.group is None:
            return index[:, None], counts[:, None]
        is_local = counts & (index >= 0) & (index < columns)
        return torch.where(is_local, index, 0)[:, None], is_local[:, None]


class _SummedLoss(torch.autograd.Function):
    """The sum of losses of rows of shape `(rows, hidden_size)`; gradients are computed with it."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] - as torch documents it
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, task: _Task
    ) -> Tensor:
        exact, labels = torch.promote_types(hidden.dtype, torch.float32), labels.reshape(-1)
        total = hidden.new_zeros((), dtype=exact)
        wanted = [task.needs_gradients and needed for needed in ctx.needs_input_grad[:3]]
        of_hidden = torch.empty_like(hidden) if wanted[0] else None
        of_weight = torch.zeros_like(weight, dtype=exact) if wanted[1] else None
        of_bias = torch.zeros_like(bias, dtype=exact) if wanted[2] and bias is not None else None
        with torch.autocast(hidden.device.type, enabled=False):
            matrix, offsets = weight.to(task.dtype), None if bias is None else bias.to(task.dtype)
            for start in range(0, len(hidden), task.chunk_size):
                rows = slice(start, start + task.chunk_size)
                inputs = hidden[rows].to(task.dtype)
                logits = functional.linear(inputs, matrix, offsets)
                loss, gradient = _loss_and_gradient(logits.to(exact), labels[rows], task)
                total += loss
                if of_bias is not None:
                    of_bias += gradient.sum(0)
                gradient = gradient.to(task.dtype)
                if of_hidden is not None:
                    of_hidden[rows] = gradient @ matrix
                if of_weight is not None:
                    _add_product(of_weight, gradient.T, inputs)
        ctx.gradients, ctx.dtypes = (of_hidden, of_weight, of_bias), (hidden.dtype, weight.dtype, exact)
        ctx.has_labels = (labels != task.ignore_index).any()
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride] - as torch documents it
        # Released here, so that autograd takes the gradients over without a copy.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError(
                "chunked_cross_entropy has one backward pass, which takes over its gradients, whatever "
                "retain_graph says."
            )
        # Without a label a mean is 0 / 0, and the gradient that arrives is infinite; torch's own is 0 then.
        grad = torch.where(ctx.has_labels, grad, 0)
        scaled = [
            None if gradient is None else gradient.mul_(grad).to(dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        ]
        return *scaled, None, None


def _loss_and_gradient(logits: Tensor, labels: Tensor, task: _Task) -> tuple[Tensor, Tensor]:
    """Return the summed loss and its gradient with respect to the logits, whose memory is reused.

    Args:
        logits: Of shape `(rows, vocabulary of this rank)`.
        labels: Of shape `(rows,)`.
        task: The options.
    """
    # 1. Scale and cap.
    slope = task.scale_and_cap(logits)
    # 2. The logit of each label, from the rank that has it.
    counts = labels != task.ignore_index
    index, is_local = task.index(labels, logits.shape[1])
    target = task.reduce((logits.gather(1, index) * is_local)[:, 0])
    # 3. The loss, by the largest logit and the sum of exponentials.
    largest = task.reduce(logits.amax(1), dist.ReduceOp.MAX)
    loss = largest - (1 - task.smoothing) * target
    if task.smoothing:
        loss -= task.smoothing / task.vocabulary * task.reduce(logits.sum(1))
    exponentials = logits.sub_(largest[:, None]).exp_()
    total = task.reduce(exponentials.sum(1))
    loss += total.log()
    # 4. The gradient: probabilities less the (smoothed) labels.
    gradient = exponentials.div_(total[:, None])
    if task.smoothing:
        gradient -= task.smoothing / task.vocabulary
    gradient.scatter_add_(1, index, (task.smoothing - 1) * is_local.to(gradient.dtype))
    gradient *= counts[:, None]
    if slope is not None:
        gradient *= slope
    if task.scale != 1:
        gradient *= task.scale
    return torch.where(counts, loss, 0).sum(), gradient


class _LogProbs(torch.autograd.Function):
    """Log-probabilities and entropies of rows of shape `(rows, hidden_size)`; logits are recomputed."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] - as torch documents it
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, task: _Task
    ) -> tuple[Tensor, Tensor]:
        exact, shape, labels = (
            torch.promote_types(hidden.dtype, torch.float32),
            labels.shape,
            labels.reshape(-1),
        )
        # The results are no views, on which FSDP2 could not rely.
        results = hidden.new_empty(shape, dtype=exact), hidden.new_empty(shape, dtype=exact)
        log_probs, entropies = (result.view(-1) for result in results)
        normalizers = torch.empty_like(log_probs)  # the logarithms of the sums of exponentials
        with torch.autocast(hidden.device.type, enabled=False):
            matrix, offsets = weight.to(task.dtype), None if bias is None else bias.to(task.dtype)
            for start in range(0, len(hidden), task.chunk_size):
                rows = slice(start, start + task.chunk_size)
                inputs, counts = hidden[rows].to(task.dtype), labels[rows] != task.ignore_index
                logits = functional.linear(inputs, matrix, offsets).to(exact)
                task.scale_and_cap(logits)
                index, is_local = task.index(labels[rows], logits.shape[1])
                target = task.reduce((logits.gather(1, index) * is_local)[:, 0])
                largest = task.reduce(logits.amax(1), dist.ReduceOp.MAX)[:, None]
                exponentials = (logits - largest).exp_()
                # The expected logit, for the entropy; a logit of minus infinity has no part in it.
                expected = torch.where(exponentials > 0, logits, 0).mul_(exponentials).sum(1)
                total, expected = task.reduce(torch.stack([exponentials.sum(1), expected]))
                normalizers[rows] = total.log() + largest[:, 0]
                log_probs[rows] = torch.where(counts, target - normalizers[rows], 0)
                entropies[rows] = torch.where(counts, normalizers[rows] - expected / total, 0)
        ctx.task = task
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, labels, normalizers, results[1])
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - as torch documents it
        ctx: Any, of_log_probs: Tensor | None, of_entropies: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, normalizers, entropies = ctx.saved_tensors
        entropies = entropies.view(-1)
        of_log_probs = None if of_log_probs is None else of_log_probs.reshape(-1)
        of_entropies = None if of_entropies is None else of_entropies.reshape(-1)
        task, exact, wanted = ctx.task, normalizers.dtype, ctx.needs_input_grad
        of_hidden = torch.empty_like(hidden) if wanted[0] else None
        of_weight = torch.zeros_like(weight, dtype=exact) if wanted[1] else None
        of_bias = torch.zeros_like(bias, dtype=exact) if wanted[2] else None
        with torch.autocast(hidden.device.type, enabled=False):
            matrix, offsets = weight.to(task.dtype), None if bias is None else bias.to(task.dtype)
            for start in range(0, len(hidden), task.chunk_size):
                rows = slice(start, start + task.chunk_size)
                inputs, counts = hidden[rows].to(task.dtype), (labels[rows] != task.ignore_index)[:, None]
                logits = functional.linear(inputs, matrix, offsets).to(exact)
                slope = task.scale_and_cap(logits)
                index, is_local = task.index(labels[rows], logits.shape[1])
                logs = logits.sub_(normalizers[rows, None])
                gradient = torch.zeros_like(logs)
                if of_entropies is not None:
                    scaled = of_entropies[rows, None] * counts
                    gradient -= scaled * torch.where(logs.isneginf(), 0, logs + entropies[rows, None])
                probabilities = logs.exp_()
                if of_log_probs is not None:
                    gradient -= of_log_probs[rows, None] * counts
                gradient *= probabilities
                if of_log_probs is not None:
                    gradient.scatter_add_(1, index, of_log_probs[rows, None] * is_local)
                if slope is not None:
                    gradient *= slope
                gradient *= task.scale
                if of_bias is not None:
                    of_bias += gradient.sum(0)
                gradient = gradient.to(task.dtype)
                if of_hidden is not None:
                    of_hidden[rows] = gradient @ matrix
                if of_weight is not None:
                    _add_product(of_weight, gradient.T, inputs)
        gradients: Any = ((of_hidden, hidden), (of_weight, weight), (of_bias, bias))
        return *(None if value is None else value.to(like.dtype) for value, like in gradients), None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype is total.dtype:
        total.addmm_(left, right)  # without a copy of the product
    else:
        total += left @ right


def tiled_mlp(mlp: Callable[[Tensor], Tensor], hidden: Tensor, *, tile_size: int) -> Tensor:
    """Apply a module to tiles of the sequence; the backward pass recomputes each tile.

    Gradients of parameters are as if the module were called once, and hooks of DDP and FSDP run once.

    Args:
        mlp: A module or function that processes tokens independently.
        hidden: Hidden states of shape `(…, sequence, hidden_size)`.
        tile_size: Tokens per tile, at least 1.

    Returns:
        The output, whose shape is that of the hidden states except for the last dim.

    Example:
        >>> mlp = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
        >>> hidden = torch.randn(2, 10, 4)
        >>> torch.testing.assert_close(tiled_mlp(mlp, hidden, tile_size=3), mlp(hidden))
    """
    tiles = hidden.split(tile_size, dim=-2)
    if len(tiles) == 1:
        return mlp(hidden)

    def apply(tile: Tensor) -> Tensor:
        return mlp(tile.contiguous())  # a copy that is not saved

    if not torch.is_grad_enabled():
        return torch.cat([apply(tile) for tile in tiles], dim=-2)
    module = mlp if isinstance(mlp, nn.Module) else getattr(mlp, "__self__", nn.Identity())
    recompute_later = checkpoint_function(module)
    return torch.cat([recompute_later(apply, tile) for tile in tiles], dim=-2)


def tile_mlps(model: nn.Module, tile_size: int) -> None:
    """Tile the MLPs of a model's blocks in place, without renaming or replacing modules.

    Raises:
        UnsupportedError: The blocks have no MLP, or one that does not process tokens independently.
    """
    name, option = type(model).__qualname__, f"mlp_tile_size={tile_size!r}"
    mlps = {path: part for path, part in model.named_modules() if _MLP.search(path)}
    if not mlps:
        raise UnsupportedError(
            f"{option}: {name} has no blocks with a module 'mlp', 'feed_forward' or 'ffn'. Leave it out, and "
            "call accel_plugins.tiling.tiled_mlp in the model's own forward."
        )

    def tiled(forward: Callable[..., Any], self: nn.Module, hidden: Tensor) -> Tensor:
        return tiled_mlp(MethodType(forward, self), hidden, tile_size=tile_size)

    for path, mlp in mlps.items():
        parts = {part.rpartition(".")[2] for part, _ in mlp.named_modules()}
        required = [p for p in inspect.signature(mlp.forward).parameters.values() if p.default is p.empty]
        reason = ""
        if parts & {"experts", "gate", "router"}:
            reason = "sends tokens to experts, whose balance is that of all tokens"
        elif len([p for p in required if p.kind is p.POSITIONAL_OR_KEYWORD]) != 1:
            reason = "takes more than hidden states"
        if reason:
            raise UnsupportedError(f"{option}: {path!r} of {name} {reason}. Leave it out.")
        wrap_forward(mlp, tiled)


_MLP = re.compile(r"(?:^|\.)\d+\.(?:mlp|feed_forward|ffn)$")


def chunk_loss(model: nn.Module, chunk_size: int) -> None:
    """Patch a causal language model of transformers to compute its training loss in chunks.

    With labels, in training, the output has no logits; without them, and in evaluation, it is unchanged. The
    head computes the loss within its own forward, where FSDP has gathered its weight.

    Raises:
        UnsupportedError: The model's loss is not the next-token loss of a linear head.
    """
    setting, name = f"loss_chunk_size={chunk_size!r}", type(model).__qualname__
    causal: Any = next((part for part in model.modules() if "loss_type" in vars(part)), None)
    if causal is None or causal.config.is_encoder_decoder:
        raise UnsupportedError(
            f"{setting}: {name} is not a causal language model of transformers. Leave it out, and call "
            "accel_plugins.tiling.chunked_cross_entropy in the model's own forward."
        )
    head, reason = causal.get_output_embeddings(), ""
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        reason = f"its head is {type(head).__qualname__}, not Linear"
    elif getattr(causal.loss_function, "__name__", "") != "ForCausalLMLoss":
        reason = f"it has the loss function {causal.loss_function!r}, not that of the next token"
    if reason:
        raise UnsupportedError(f"{setting} with {name}: {reason}. Leave it out.")
    wrap_forward(head, _call_head)
    wrap_forward(causal, partial(_call_model, chunk_size))


_PROBE = (-3.0, 0.5, 2.0, 40.0)
"""Logits that replace those of the head, to detect how the model processes them."""


@dataclass(slots=True)
class _LossRequest:
    """One call of a model with labels: the inputs from which the head computes the loss, and the loss."""

    model: Any
    chunk_size: int
    labels: Tensor
    shift_labels: Tensor | None
    ignore_index: int
    loss: Tensor | None = None
    targets: Tensor | None = None

    def compute(self, head: Any, hidden: Tensor) -> Tensor:
        """Compute the sum of losses; return a few logits in place of all."""
        targets = self.shift_labels
        if targets is None:
            targets = functional.pad(self.labels, (0, 1), value=self.ignore_index)[..., 1:]
        self.targets = targets.to(hidden.device)
        weight, states = head.weight, hidden
        if isinstance(weight, DTensor) and not isinstance(hidden, DTensor):  # transformers' own plan
            states = DTensor.from_local(hidden, weight.device_mesh, [Replicate()], run_check=False)
        scale, cap = _scale_and_cap(self.model)
        self.loss = chunked_cross_entropy(
            states,
            weight,
            self.targets,
            chunk_size=self.chunk_size,
            bias=head.bias,
            ignore_index=self.ignore_index,
            logit_scale=scale,
            logit_softcap=cap,
            reduction="sum",
        )
        local = hidden.to_local() if isinstance(hidden, DTensor) else hidden
        probe = local.new_tensor(_PROBE, dtype=torch.float32).expand(*local.shape[:-1], -1)
        if isinstance(hidden, DTensor):  # as the hooks of the head expect it
            return DTensor.from_local(probe, hidden.device_mesh, [Replicate()], run_check=False)
        return probe

    def take(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Act as the model's loss function: divide the sum by the number of labels."""
        del vocab_size, options
        problem = None
        if self.loss is None or self.targets is None or logits.shape[-1:] != (len(_PROBE),):
            problem = "does not compute its logits with its head alone"
        elif labels is not self.labels or shift_labels is not self.shift_labels:
            problem = "changes its labels before the loss"
        elif ignore_index != self.ignore_index:
            problem = "has its own ignore_index"
        elif "_loss_is_probed" not in vars(self.model) and active_fake_mode() is None:
            scale, cap = _scale_and_cap(self.model)
            expected = torch.tensor(_PROBE, device="cpu") * scale
            expected = expected if cap is None else cap * torch.tanh(expected / cap)
            found = logits.reshape(-1, len(_PROBE))[0].float().cpu()
            if torch.allclose(found, expected, rtol=2e-2):  # bfloat16 has three digits
                vars(self.model)["_loss_is_probed"] = True
            else:
                problem = "changes its logits in a way that its configuration does not describe"
        if problem is not None or self.loss is None or self.targets is None:
            raise UnsupportedError(
                f"loss_chunk_size={self.chunk_size!r}: {type(self.model).__qualname__} {problem}, so its "
                "loss cannot be computed in chunks. Leave it out."
            )
        count = (self.targets != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
        return self.loss / (count.to(self.loss.device) if isinstance(count, Tensor) else count)


_request: ContextVar[_LossRequest | None] = ContextVar("loss request", default=None)


def _call_head(forward: Callable[..., Any], head: nn.Module, hidden: Tensor) -> Tensor:
    request = _request.get()
    return forward(head, hidden) if request is None else request.compute(head, hidden)


def _call_model(chunk_size: int, forward: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    labels = inspect.signature(forward).bind(model, *args, **kwargs).arguments.get("labels")
    if labels is None or not (model.training and torch.is_grad_enabled()):
        return forward(model, *args, **kwargs)
    ignore_index = kwargs.get("ignore_index", -100)
    request = _LossRequest(model, chunk_size, labels, kwargs.get("shift_labels"), ignore_index)
    token = _request.set(request)
    try:
        with replaced_attributes(model, {"_loss_function": request.take}):
            outputs = forward(model, *args, **kwargs)
    finally:
        _request.reset(token)
    if request.loss is None:
        name = type(model).__qualname__
        raise SettingsError(f"loss_chunk_size={chunk_size!r}: {name} did not call its head. Leave it out.")
    if isinstance(outputs, tuple):
        return outputs[0], *outputs[2:]
    outputs.logits = None
    return outputs


def _scale_and_cap(model: Any) -> tuple[float, float | None]:
    """Return a model's factor of the logits, and the limit at which they are capped."""
    config = model.config.get_text_config()
    scale, divisor = (getattr(config, name, None) or 1.0 for name in ("logit_scale", "logits_scaling"))
    return scale / divisor, getattr(config, "final_logit_softcapping", None)
