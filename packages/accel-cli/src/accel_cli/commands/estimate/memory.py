"""What training takes on each device, by strategy: arithmetic on numbers of elements, nothing else.

Training is with Adam, whose two moments are float32, as are the weights that it changes. Where the numbers
of a strategy come from is said at each; the tests measure what one process, DDP, FSDP2 and ZeRO take, also
offloaded: on the CPU, where device and host are one memory. What only accelerators have is not measured:
pinned memory, which drivers round up, and shards that are on the device for a moment on their way to be
gathered or to the host.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MASTER = 4
"""Bytes of an element of the weights that the optimizer changes, and of their gradients."""

ADAM = 8
"""Bytes of Adam's two moments of an element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """What DeepSpeed sets aside, in elements: keys of `zero_optimization` and their defaults.

    See https://www.deepspeed.ai/docs/config-json.

    Args:
        reduce: `reduce_bucket_size`, for gradients on their way. All of it is allocated, whatever the model.
        live: `stage3_max_live_parameters`, gathered at a time; those that are needed again soon stay.
        prefetch: `stage3_prefetch_bucket_size`, which arrive at a time, in a row.
    """

    reduce: int = 500_000_000
    prefetch: int = 50_000_000
    live: int = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A model, in elements.

    Args:
        parameters: All of them, a tied one once.
        trainable: Those that get gradients.
        blocks: Those of each block that sharding gathers on its own.
        largest: Those of the largest parameter that gets gradients.
        buffers: What is no parameter, in bytes.
    """

    parameters: int
    trainable: int
    blocks: tuple[int, ...] = ()
    largest: int = 0
    buffers: int = 0

    @property
    def rest(self) -> int:
        """The elements outside of blocks."""
        return self.parameters - sum(self.blocks)

    @property
    def block(self) -> int:
        """The elements of the largest block."""
        return max(self.blocks, default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What is alive at one moment of a forward and backward pass, beside the weights themselves.

    Args:
        activations: Bytes of inputs, results and whatever the backward pass will need.
        casts: Bytes of weights in the precision of the computation.
        gradients: Elements of the gradients that are complete.
    """

    activations: int = 0
    casts: int = 0
    gradients: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training run.

    Args:
        sizes: The model.
        devices: How many devices share the work.
        width: Bytes of an element in the computation: 2 under mixed precision, else 4.
        moments: The passes of one micro-batch; by default their end alone, with nothing but gradients.
        at_once: Whether the optimizer changes all weights at once, which takes as much memory again as they
            do. PyTorch does so on accelerators.
        buckets: Of DeepSpeed.
    """

    sizes: Sizes
    devices: int = 1
    width: int = 4
    moments: tuple[Moment, ...] = ()
    at_once: bool = True
    buckets: Buckets = field(default_factory=Buckets)

    @property
    def passes(self) -> tuple[Moment, ...]:
        """The moments, at least one."""
        return self.moments or (Moment(gradients=self.sizes.trainable),)

    def step(self, shards: int = 1, *, flat: bool = False) -> int:
        """Bytes that the optimizer takes for itself while it changes the weights.

        Args:
            shards: Into how many shards they are divided.
            flat: Whether all weights are one tensor.

        Adam divides by the root of its second moment: one copy of all (`torch.optim.adamw`, foreach) or two
        of the largest.
        """
        if self.at_once:
            return MASTER * _ceil(self.sizes.trainable, shards)
        return 2 * MASTER * _ceil(self.sizes.trainable if flat else self.sizes.largest, shards)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a strategy takes, in bytes.

    Args:
        strategy: Its name, of `STRATEGIES`.
        parts: What a device holds when it holds most, by kind.
        host: Main memory for each device.
    """

    strategy: str
    parts: Mapping[str, int] = field(default_factory=dict[str, int])
    host: int = 0

    @property
    def device(self) -> int:
        """The peak of one device."""
        return sum(self.parts.values())


def estimate(strategy: str, job: Job) -> Estimate:
    """Say what training takes under a strategy.

    Args:
        strategy: A name of `STRATEGIES` or `VARIANTS`.
        job: The run.

    Example:
        >>> job = Job(sizes=Sizes(parameters=1000, trainable=1000), devices=4)
        >>> estimate("DDP", job).device, estimate("FSDP2", job).parts["optimizer"]
        (24000, 2000)
    """
    parts, host = (STRATEGIES.get(strategy) or VARIANTS[strategy])(job)
    return Estimate(strategy=strategy, parts=parts, host=host)


Parts = tuple[dict[str, int], int]


def _replicated(job: Job, *, buckets: int) -> Parts:
    """Everything everywhere. DDP's reducer holds the gradients once more, in its buckets."""
    sizes = job.sizes
    top = max(job.passes, key=lambda one: one.activations + one.casts + MASTER * one.gradients)
    in_passes = top.activations + top.casts + MASTER * top.gradients
    in_step = MASTER * sizes.trainable + job.step()
    gradients, working = (
        (MASTER * top.gradients, top.activations + top.casts)
        if in_passes >= in_step
        else (MASTER * sizes.trainable, job.step())
    )
    return {
        "parameters": MASTER * sizes.parameters + sizes.buffers,
        "gradients": gradients,
        "optimizer": ADAM * sizes.trainable,
        "communication": buckets * MASTER * sizes.trainable,
        "working": working,
    }, 0


def _fsdp2(job: Job, *, keep: bool, offload: bool) -> Parts:
    """A shard of everything, and what is gathered.

    The parameters outside of blocks stay gathered for both passes, and their gradients wait for the end. Of
    the blocks, one is in use and the next one is on its way; in the backward pass there are, besides, its
    gradients and what is still being reduced (`torch.distributed.fsdp`, FSDPParamGroup).
    """
    sizes, width = job.sizes, job.width
    shard = _ceil(sizes.trainable, job.devices)
    parameters = MASTER * _ceil(sizes.parameters, job.devices)
    optimizer = ADAM * shard
    blocks = sum(sizes.blocks)

    def at(moment: Moment) -> tuple[int, int, int]:
        """Gradients, what is gathered or being reduced, and the rest."""
        outside = min(moment.gradients, sizes.rest)
        finished = min(moment.gradients, blocks)
        waiting = min(blocks, blocks - finished + sizes.block)
        gathered = sizes.rest + (waiting if keep else min(2 * sizes.block, waiting))
        reducing = outside + _reducing(sizes.blocks, finished)
        done = 0 if offload else MASTER * _ceil(moment.gradients, job.devices)
        return done, width * (gathered + reducing), moment.activations

    top = max((at(moment) for moment in job.passes), key=sum)
    stepping = (0, 0, 0) if offload else (MASTER * shard, 0, job.step(job.devices))
    gradients, communication, working = max(top, stepping, key=sum)
    resident = {"parameters": parameters, "optimizer": optimizer}
    host = sum(resident.values()) + MASTER * shard if offload else 0
    return {
        "parameters": (0 if offload else parameters) + sizes.buffers,
        "gradients": gradients,
        "optimizer": 0 if offload else optimizer,
        "communication": communication,
        "working": working,
    }, host


def _reducing(blocks: tuple[int, ...], finished: int) -> int:
    """The gradients of blocks that are not a shard yet, in elements.

    When those of a block are complete they are copied to where they are reduced, and stay there while those
    of the block before it come into being.

    Args:
        blocks: The elements of each.
        finished: How many gradients are complete; those of the last block come first.
    """
    sent = 0
    for block in reversed(blocks):
        if finished < block:
            break
        finished -= block
        if not finished:
            return 2 * block
        sent = block
    return sent + finished


def _zero(
    job: Job, *, stage: int, optimizer_offloaded: bool = False, weights_offloaded: bool = False
) -> Parts:
    """DeepSpeed: weights in the precision of the computation, and float32 copies of a shard of them.

    In the passes there is, besides, the bucket. Stages 1 and 2 have the gradients of the shard twice, as they
    came and in a row, and stage 1 all others, too. Stage 3 has room for those of the shard, what is
    gathered, and another bucket, in which gradients are put in order or weights arrive. In the step
    gradients are copied to float32 (`deepspeed.runtime.zero`, stage_1_and_2.py and stage3.py).

    Where the optimizer is offloaded, so are the copies, the moments, and gradients in float32; beside them
    there is room for weights on their way back or, in stage 3, for gradients as they came. DeepSpeed's own
    Adam takes nothing for itself.
    """
    sizes, width, buckets = job.sizes, job.width, job.buckets
    shard = _ceil(sizes.trainable, job.devices)
    weights = width * (_ceil(sizes.parameters, job.devices) if stage == 3 else sizes.parameters)
    optimizer = (MASTER + ADAM) * shard
    bucket = width * buckets.reduce
    gather_buffer = width * shard if stage == 3 else 0
    sorting = width * min(buckets.reduce, sizes.trainable) if stage == 3 else 0
    gathered = width * min(buckets.live, sizes.parameters) if stage == 3 else 0
    arriving = width * min(buckets.prefetch, sizes.parameters) if stage == 3 else 0
    passing = width * sizes.largest if stage < 3 and optimizer_offloaded else 0

    def at(moment: Moment) -> tuple[int, int, int]:
        """Gradients, what communicates, and the rest."""
        mine = width * min(moment.gradients, shard)
        all_of_them = width * moment.gradients if stage == 1 else 0
        found = gather_buffer if stage == 3 else mine + (all_of_them or mine)
        communication = bucket + gathered + max(sorting, arriving) + passing
        return all_of_them if optimizer_offloaded else found, communication, moment.activations

    stepping = (MASTER * shard + gather_buffer, bucket if stage == 3 else 0, job.step(job.devices, flat=True))
    passes = [at(moment) for moment in job.passes]
    gradients, communication, working = max(passes if optimizer_offloaded else [*passes, stepping], key=sum)
    on_device = {
        "parameters": (0 if weights_offloaded else weights) + sizes.buffers,
        "gradients": gradients,
        "optimizer": 0 if optimizer_offloaded else optimizer,
        "communication": communication,
        "working": working,
    }
    host = (
        optimizer + MASTER * shard + (gather_buffer or width * shard) + passing if optimizer_offloaded else 0
    )
    return on_device, host + (weights if weights_offloaded else 0)


def _ceil(elements: int, devices: int) -> int:
    return -(-elements // devices)


STRATEGIES: Mapping[str, Callable[[Job], Parts]] = {
    "one device": partial(_replicated, buckets=0),
    "DDP": partial(_replicated, buckets=1),
    "ZeRO-1": partial(_zero, stage=1),
    "ZeRO-2": partial(_zero, stage=2),
    "FSDP2, gathered once": partial(_fsdp2, keep=True, offload=False),
    "ZeRO-3": partial(_zero, stage=3),
    "FSDP2": partial(_fsdp2, keep=False, offload=False),
    "ZeRO-2, offloaded": partial(_zero, stage=2, optimizer_offloaded=True),
    "ZeRO-3, offloaded": partial(_zero, stage=3, optimizer_offloaded=True, weights_offloaded=True),
    "FSDP2, offloaded": partial(_fsdp2, keep=False, offload=True),
}
"""The strategies; those further down take less of a device and more time."""

VARIANTS: Mapping[str, Callable[[Job], Parts]] = {
    "DDP, gradients in buckets": partial(_replicated, buckets=0),
    "ZeRO-1, offloaded": partial(_zero, stage=1, optimizer_offloaded=True),
    "ZeRO-3, optimizer offloaded": partial(_zero, stage=3, optimizer_offloaded=True),
    "ZeRO-3, weights offloaded": partial(_zero, stage=3, weights_offloaded=True),
}
"""What a script may ask for besides."""
