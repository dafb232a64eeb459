"""Estimate training memory by strategy, in closed form.

The optimizer is Adam, with two moments and master weights in float32; or an optimizer of `accel.optimizers`,
under strategies that use the script's optimizer. Each strategy cites the source of its numbers; the tests
measure the memory of one process, DDP, FSDP2 and ZeRO, including offload, on the CPU, where device and host
share memory. Memory that exists only with accelerators is not measured: pinned memory, which drivers round
up, and shards that are on the device temporarily before they are gathered or copied to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field, replace
from functools import partial

from accel_state.frozen import frozen

MASTER = 4
"""Bytes per element of the master weights, and of their gradients."""

ADAM = 8
"""Bytes of Adam's two moments per element."""

MOMENTUM = 4
"""Bytes of Muon's momentum per element of a matrix."""

OPTIMIZERS: Mapping[str, str] = {"adam": "Adam", "muon": "Muon", "host_adamw": "HostAdamW"}
"""The optimizers by the value of `--optimizer`."""


@frozen
class Buckets:
    """DeepSpeed's buckets, in elements, and their defaults (https://www.deepspeed.ai/docs/config-json)."""

    reduce: int = 500_000_000  # reduce_bucket_size: allocated in full for any model
    prefetch: int = 50_000_000  # stage3_prefetch_bucket_size: as one flat tensor
    live: int = 1_000_000_000  # stage3_max_live_parameters: gathered at a time


@frozen
class ModelSizes:
    """The size of a model, in elements; a tied parameter counts once."""

    parameters: int
    trainable: int
    blocks: tuple[int, ...] = ()  # each that FSDP gathers separately
    largest: int = 0  # the largest parameter with a gradient
    buffers: int = 0  # bytes
    matrices: int = 0  # the trainable parameters that Muon (not AdamW) updates
    matrix: int = 0  # the largest of these matrices

    @property
    def outside(self) -> int:
        """The elements outside of blocks."""
        return self.parameters - sum(self.blocks)

    @property
    def block(self) -> int:
        """The elements of the largest block."""
        return max(self.blocks, default=0)


@frozen
class MemoryPeak:
    """The memory at a point of the passes: bytes of activations and casts, elements of complete gradients."""

    activations: int = 0
    casts: int = 0
    gradients: int = 0


@frozen
class DeviceShare:
    """The shard of one device along several axes, before FSDP2 shards it; `name` is that of its row."""

    name: str
    sizes: ModelSizes  # its pipeline stage, its part of tensor-parallel layers, and its experts
    shards: int = 1  # devices over which FSDP2 shards
    experts: int = 0  # elements of experts of other devices: sharded, but never gathered on this device
    sequence: int = 1  # shards of each sequence


@frozen
class TrainingSetup:
    """A training run."""

    sizes: ModelSizes
    devices: int = 1
    width: int = 4  # bytes of an element in the computation: 2 under mixed precision
    moments: tuple[MemoryPeak, ...] = ()  # of one micro-batch; by default only its end, with gradients only
    buckets: Buckets = field(default_factory=Buckets)
    optimizer: str = "adam"  # one of `OPTIMIZERS`; DeepSpeed uses Adam

    @property
    def passes(self) -> tuple[MemoryPeak, ...]:
        """The memory peaks, at least one."""
        return self.moments or (MemoryPeak(gradients=self.sizes.trainable),)

    def state(self, shards: int = 1, experts: int = 0) -> tuple[int, int]:
        """Return the bytes of the optimizer's state of a shard, on the device and on the host.

        HostAdamW keeps master weights and moments on the host, with a pinned buffer for each gradient.
        `experts` are elements of experts of other devices among the sharded ones.
        """
        trained, matrices = self.sizes.trainable + experts, self.sizes.matrices + experts
        if self.optimizer == "host_adamw":
            return 0, (MASTER + ADAM + MASTER) * _ceil(trained, shards)
        if self.optimizer == "muon":
            return ADAM * _ceil(trained - matrices, shards) + MOMENTUM * _ceil(matrices, shards), 0
        return ADAM * _ceil(trained, shards), 0

    def step(self, shards: int = 1) -> int:
        """Return the bytes of temporaries of an optimizer step.

        Adam divides by the root of its second moment: one copy of all weights (`torch.optim.adamw`, foreach,
        as on accelerators). Muon does so for parameters that AdamW updates, and then has five copies of a
        full matrix in bfloat16.
        """
        if self.optimizer == "host_adamw":
            return 0
        if self.optimizer == "muon":
            rest = MASTER * _ceil(self.sizes.trainable - self.sizes.matrices, shards)
            return max(rest, 5 * 2 * self.sizes.matrix)
        return MASTER * _ceil(self.sizes.trainable, shards)


@frozen
class Estimate:
    """The memory of a strategy, in bytes: the peak of a device, by kind, and host memory per device."""

    strategy: str
    parts: Mapping[str, int] = field(default_factory=dict[str, int])
    host: int = 0

    @property
    def device(self) -> int:
        """The peak of one device."""
        return sum(self.parts.values())


def estimate(strategy: str, setup: TrainingSetup) -> Estimate:
    """Estimate the memory of training under a strategy.

    Example:
        >>> setup = TrainingSetup(sizes=ModelSizes(parameters=1000, trainable=1000), devices=4)
        >>> estimate("DDP", setup).device, estimate("FSDP2", setup).parts["optimizer"]
        (24000, 2000)
    """
    return _named(strategy, (STRATEGIES.get(strategy) or VARIANTS[strategy])(setup))


def _named(strategy: str, parts: Parts) -> Estimate:
    return Estimate(strategy=strategy, parts=dict(zip(KINDS, parts[0], strict=True)), host=parts[1])


KINDS = ("parameters", "gradients", "optimizer", "communication", "working")
"""The kinds of memory in an estimate."""

Parts = tuple[tuple[int, int, int, int, int], int]
"""The bytes of each kind on the device, and those on the host."""


def _replicated(setup: TrainingSetup, *, buckets: int) -> Parts:
    """Replicated training. DDP's reducer has a second copy of the gradients, in its buckets."""
    sizes = setup.sizes
    passes = [(MASTER * peak.gradients, peak.activations + peak.casts) for peak in setup.passes]
    gradients, working = max((*passes, (MASTER * sizes.trainable, setup.step())), key=sum)
    (optimizer, host), weights = setup.state(), MASTER * sizes.parameters + sizes.buffers
    return (weights, gradients, optimizer, buckets * MASTER * sizes.trainable, working), host


def estimate_axes(setup: TrainingSetup, share: DeviceShare) -> Estimate:
    """Estimate the memory of the device with the largest peak, along several axes.

    Activations are those of one micro-batch, divided by the shards of a sequence. Tensor parallelism shards
    only activations inside of layers, which is not counted. Under 1F1B the first of N pipeline stages holds
    N micro-batches of its layers, as many activations as one device with all layers.
    """
    ratio = share.sizes.trainable / setup.sizes.trainable if setup.sizes.trainable else 0
    moments = tuple(
        MemoryPeak(
            activations=moment.activations // share.sequence,
            casts=int(moment.casts * ratio),
            gradients=int(moment.gradients * ratio),
        )
        for moment in setup.passes
    )
    own = replace(setup, sizes=share.sizes, devices=share.shards, moments=moments)
    if share.shards == 1:
        return _named(share.name, _replicated(own, buckets=0))
    return _named(share.name, _fsdp2(own, keep=False, offload=False, experts=share.experts))


def _fsdp2(setup: TrainingSetup, *, keep: bool, offload: bool, experts: int = 0) -> Parts:
    """FSDP2: a shard of the state, and the gathered parameters.

    The parameters outside of blocks stay gathered for both passes, and their gradients are reduced at the
    end. One block is in use and the next one is prefetched; the backward pass adds the gradients of the
    block and the gradients that are still being reduced (`torch.distributed.fsdp`, FSDPParamGroup).
    """
    sizes, width = setup.sizes, setup.width
    shard = _ceil(sizes.trainable + experts, setup.devices)
    parameters = MASTER * _ceil(sizes.parameters + experts, setup.devices)
    optimizer, host = setup.state(setup.devices, experts)
    blocks = sum(sizes.blocks)

    def at(moment: MemoryPeak) -> tuple[int, int, int]:
        """Return the bytes of gradients, of gathered or reduced tensors, and of activations."""
        outside = min(moment.gradients, sizes.outside)
        finished = min(moment.gradients, blocks)
        waiting = min(blocks, blocks - finished + sizes.block)
        gathered = sizes.outside + (waiting if keep else min(2 * sizes.block, waiting))
        reducing = outside + _reducing(sizes.blocks, finished)
        done = 0 if offload else MASTER * _ceil(moment.gradients, setup.devices)
        return done, width * (gathered + reducing), moment.activations

    top = max((at(moment) for moment in setup.passes), key=sum)
    stepping = (0, 0, 0) if offload else (MASTER * shard, 0, setup.step(setup.devices))
    gradients, communication, working = max(top, stepping, key=sum)
    if offload:
        host += parameters + optimizer + MASTER * shard
        parameters = optimizer = 0
    return (parameters + sizes.buffers, gradients, optimizer, communication, working), host


def _reducing(blocks: tuple[int, ...], finished: int) -> int:
    """Return the elements of gradients of blocks that are not yet reduced to a shard.

    Complete gradients of a block are copied to the input of its reduce-scatter, which stays alive while the
    gradients of the block before it are computed.
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
    setup: TrainingSetup, *, stage: int, optimizer_offloaded: bool = False, weights_offloaded: bool = False
) -> Parts:
    """DeepSpeed: weights in the precision of the computation, and float32 master weights of a shard.

    The passes add the reduce bucket. Stages 1 and 2 hold the gradients of the shard twice, as computed and
    as a flat tensor; stage 1 also all other gradients. Stage 3 holds the gradients of the shard, the
    gathered parameters, and another bucket, in which gradients are reordered or weights are gathered. The
    step copies gradients to float32 (`deepspeed.runtime.zero`, stage_1_and_2.py and stage3.py).

    An offloaded optimizer has the master weights, the moments and float32 gradients on the host, with a
    buffer for updated weights or, in stage 3, for gradients in the precision of the computation. DeepSpeed's
    Adam needs no temporaries.
    """
    sizes, width, buckets = setup.sizes, setup.width, setup.buckets
    shard = _ceil(sizes.trainable, setup.devices)
    weights = width * (_ceil(sizes.parameters, setup.devices) if stage == 3 else sizes.parameters)
    optimizer = (MASTER + ADAM) * shard
    bucket = width * buckets.reduce
    gather_buffer = gathered = passing = 0
    if stage == 3:
        gather_buffer = width * shard
        sorting, arriving = min(buckets.reduce, sizes.trainable), min(buckets.prefetch, sizes.parameters)
        gathered = width * (min(buckets.live, sizes.parameters) + max(sorting, arriving))
    elif optimizer_offloaded:
        passing = width * sizes.largest

    def gradients_at(elements: int) -> int:
        """Return the bytes of gradients on the device when so many elements are complete."""
        of_shard, unsharded = width * min(elements, shard), width * elements if stage == 1 else 0
        if optimizer_offloaded:
            return unsharded
        return gather_buffer if stage == 3 else of_shard + (unsharded or of_shard)

    in_passes = bucket + gathered + passing
    peaks = [(gradients_at(peak.gradients), in_passes, peak.activations) for peak in setup.passes]
    if not optimizer_offloaded:
        step = setup.step(setup.devices)
        peaks.append((MASTER * shard + gather_buffer, bucket if stage == 3 else 0, step))
    gradients, communication, working = max(peaks, key=sum)
    host = 0
    if weights_offloaded:
        host, weights = weights, 0
    if optimizer_offloaded:
        host += optimizer + MASTER * shard + width * shard + passing
        optimizer = 0
    return (weights + sizes.buffers, gradients, optimizer, communication, working), host


def _ceil(elements: int, devices: int) -> int:
    return -(-elements // devices)


STRATEGIES: Mapping[str, Callable[[TrainingSetup], Parts]] = {
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
"""The strategies, from fast to slow and from much to little device memory."""

VARIANTS: Mapping[str, Callable[[TrainingSetup], Parts]] = {
    "DDP, gradients in buckets": partial(_replicated, buckets=0),
    "ZeRO-1, offloaded": partial(_zero, stage=1, optimizer_offloaded=True),
    "ZeRO-3, optimizer offloaded": partial(_zero, stage=3, optimizer_offloaded=True),
    "ZeRO-3, weights offloaded": partial(_zero, stage=3, weights_offloaded=True),
}
"""Further strategies, on request."""

HEADROOM = 0.9
"""The usable fraction of a device's memory; driver, kernels and fragmentation take the other tenth."""


def fits(needed: Estimate, memory: int, host: int | None = None, per_machine: int = 1) -> bool:
    """Return whether an estimate fits into a device, and a host that several devices share, if it matters.

    Example:
        >>> fits(Estimate(strategy="DDP", parts={"parameters": 90}), 100)
        True
    """
    offloaded = needed.host * per_machine
    fits_host = not offloaded or host is None or offloaded <= HEADROOM * host
    return needed.device <= HEADROOM * memory and fits_host
