from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_cli.commands.estimate.memory import (
    HEADROOM,
    STRATEGIES,
    Estimate,
    MemoryPeak,
    ModelSizes,
    TrainingSetup,
    candidates,
    config_of,
    devices_needed,
    estimate,
    fits,
    suggest,
)

GB = 10**9
BILLION = ModelSizes(parameters=GB, trainable=GB, blocks=(GB // 10,) * 9, largest=GB // 10)


def jobs():
    block = st.integers(1, 10**7)
    return st.builds(
        lambda blocks, rest, devices, width, activations: TrainingSetup(
            sizes=ModelSizes(
                parameters=sum(blocks) + rest,
                trainable=sum(blocks) + rest,
                blocks=tuple(blocks),
                largest=rest,
            ),
            devices=devices,
            width=width,
            moments=(
                MemoryPeak(activations=activations, casts=activations // 3),
                MemoryPeak(activations=activations // 4, gradients=(sum(blocks) + rest) // 2),
                MemoryPeak(gradients=sum(blocks) + rest),
            ),
        ),
        st.lists(block, max_size=6),
        st.integers(1, 10**7),
        st.integers(2, 512),
        st.sampled_from((2, 4)),
        st.integers(0, 10**9),
    )


def test_the_bytes_of_each_element_are_those_of_the_textbook():
    """Adam in float32: 4 for the weight, 4 for the gradient, 8 for the moments, and what the step takes."""
    parts = estimate("one device", TrainingSetup(sizes=BILLION)).parts
    assert parts == {
        "parameters": 4 * GB, "gradients": 4 * GB, "optimizer": 8 * GB, "communication": 0, "working": 4 * GB,
    }  # fmt: skip


def test_zero_takes_what_its_authors_say():
    """16 bytes an element in mixed precision: 2 + 2 + 12, of which stages 1, 2 and 3 divide the last parts.

    Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", figure 1.
    DeepSpeed has the gradients of the shard twice at times.
    """
    job = TrainingSetup(sizes=BILLION, devices=64, width=2)

    def states(strategy):
        parts = estimate(strategy, job).parts
        return (parts["parameters"] + parts["gradients"] + parts["optimizer"]) / GB

    assert states("ZeRO-1") == pytest.approx(2 + 2 + 12 / 64, rel=0.02)
    assert states("ZeRO-2") == pytest.approx(2 + (2 + 12) / 64, rel=0.02)
    assert states("ZeRO-3") == pytest.approx((2 + 2 + 12) / 64)


@given(jobs())
def test_more_devices_never_take_more_of_each(job):
    for name in STRATEGIES:
        now, then = estimate(name, job), estimate(name, replace(job, devices=2 * job.devices))
        assert then.device <= now.device
        assert then.host <= now.host


@given(jobs())
def test_every_part_is_there_and_none_is_negative(job):
    for name in STRATEGIES:
        one = estimate(name, job)
        assert set(one.parts) == {"parameters", "gradients", "optimizer", "communication", "working"}
        assert min(one.parts.values()) >= 0
        assert one.host >= 0
        assert one.device == sum(one.parts.values())


@given(jobs())
def test_larger_activations_never_take_less(job):
    larger = replace(job, moments=tuple(replace(one, activations=2 * one.activations) for one in job.moments))
    for name in STRATEGIES:
        assert estimate(name, larger).device >= estimate(name, job).device


@given(jobs())
def test_offloading_takes_less_of_the_device_and_something_of_the_host(job):
    for name in ("FSDP2", "ZeRO-2", "ZeRO-3"):
        here, away = estimate(name, job), estimate(f"{name}, offloaded", job)
        passing = job.width * job.sizes.largest if name == "ZeRO-2" else 0  # gradients on their way
        assert away.device <= here.device + passing
        assert away.host > 0


@given(jobs(), st.integers(10**6, 10**12))
def test_a_suggestion_fits_and_nothing_faster_does(job, memory):
    again = replace(job, moments=tuple(replace(one, activations=one.activations // 4) for one in job.moments))
    found = suggest(job, again, memory)
    order = candidates(job.devices)
    place = len(order) if found is None else order.index((found.estimate.strategy, found.checkpointing))
    if found is not None:
        assert fits(found.estimate, memory)
        assert found.config["num_processes"] == job.devices
    for strategy, checkpointing in order[:place]:
        assert not fits(estimate(strategy, again if checkpointing else job), memory, None, 8)


@given(jobs(), st.integers(10**6, 10**12))
def test_the_number_of_devices_that_is_named_is_the_smallest_power_of_two(job, memory):
    needed = devices_needed(job, memory)
    if needed is None:
        assert not fits(estimate("FSDP2", replace(job, devices=65536)), memory)
        return
    assert fits(estimate("FSDP2", replace(job, devices=needed)), memory)
    if needed > 1:
        assert not fits(estimate("FSDP2", replace(job, devices=needed // 2)), memory)


def test_what_is_offloaded_has_to_fit_into_the_host_that_several_devices_share():
    one = Estimate(strategy="FSDP2, offloaded", parts={"working": 10}, host=100)
    assert fits(one, 100)
    assert fits(one, 100, int(800 / HEADROOM) + 1, 8)
    assert not fits(one, 100, 800, 8)


def test_a_suggested_config_has_the_documented_keys():
    config = config_of(
        "FSDP2, offloaded", TrainingSetup(sizes=BILLION, devices=8, width=2), checkpointing=True
    )
    assert config == {
        "distributed_type": "FSDP",
        "mixed_precision": "bf16",
        "num_processes": 8,
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": True,
            "fsdp_offload_params": True,
            "fsdp_activation_checkpointing": True,
        },
    }


def test_ranks_of_megatron_that_share_sequences_have_a_part_of_the_activations_each():
    """And the same weights; the distributed optimizer shards its state over them, too."""
    job = TrainingSetup(
        sizes=BILLION, devices=8, moments=(MemoryPeak(activations=80 * GB),), tensor=2, at_once=False
    )
    shared = replace(job, context=4)
    for name in ("Megatron", "Megatron, distributed optimizer"):
        alone, found = estimate(name, job).parts, estimate(name, shared).parts
        assert (alone.pop("working"), found.pop("working")) == (40 * GB, 10 * GB)
        assert found == alone
