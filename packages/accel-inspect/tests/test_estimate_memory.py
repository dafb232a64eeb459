from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_inspect.estimate.memory import (
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


def setups():
    block = st.integers(1, 10**7)
    return st.builds(
        lambda blocks, outside, devices, width, activations: TrainingSetup(
            sizes=ModelSizes(
                parameters=sum(blocks) + outside,
                trainable=sum(blocks) + outside,
                blocks=tuple(blocks),
                largest=outside,
            ),
            devices=devices,
            width=width,
            moments=(
                MemoryPeak(activations=activations, casts=activations // 3),
                MemoryPeak(activations=activations // 4, gradients=(sum(blocks) + outside) // 2),
                MemoryPeak(gradients=sum(blocks) + outside),
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
    setup = TrainingSetup(sizes=BILLION, devices=64, width=2)

    def states(strategy):
        parts = estimate(strategy, setup).parts
        return (parts["parameters"] + parts["gradients"] + parts["optimizer"]) / GB

    assert states("ZeRO-1") == pytest.approx(2 + 2 + 12 / 64, rel=0.02)
    assert states("ZeRO-2") == pytest.approx(2 + (2 + 12) / 64, rel=0.02)
    assert states("ZeRO-3") == pytest.approx((2 + 2 + 12) / 64)


@given(setups())
def test_more_devices_never_take_more_of_each(setup):
    for name in STRATEGIES:
        now, then = estimate(name, setup), estimate(name, replace(setup, devices=2 * setup.devices))
        assert then.device <= now.device
        assert then.host <= now.host


@given(setups())
def test_every_part_is_there_and_none_is_negative(setup):
    for name in STRATEGIES:
        needed = estimate(name, setup)
        assert set(needed.parts) == {"parameters", "gradients", "optimizer", "communication", "working"}
        assert min(needed.parts.values()) >= 0
        assert needed.host >= 0
        assert needed.device == sum(needed.parts.values())


@given(setups())
def test_larger_activations_never_take_less(setup):
    moments = tuple(replace(moment, activations=2 * moment.activations) for moment in setup.moments)
    larger = replace(setup, moments=moments)
    for name in STRATEGIES:
        assert estimate(name, larger).device >= estimate(name, setup).device


@given(setups())
def test_offloading_takes_less_of_the_device_and_something_of_the_host(setup):
    for name in ("FSDP2", "ZeRO-2", "ZeRO-3"):
        on_device, offloaded = estimate(name, setup), estimate(f"{name}, offloaded", setup)
        passing = setup.width * setup.sizes.largest if name == "ZeRO-2" else 0  # gradients on their way
        assert offloaded.device <= on_device.device + passing
        assert offloaded.host > 0


@given(setups(), st.integers(10**6, 10**12))
def test_a_suggestion_fits_and_nothing_faster_does(setup, memory):
    moments = tuple(replace(moment, activations=moment.activations // 4) for moment in setup.moments)
    checkpointed = replace(setup, moments=moments)
    suggestion = suggest(setup, checkpointed, memory)
    order = candidates(setup.devices)
    position = len(order)
    if suggestion is not None:
        position = order.index((suggestion.estimate.strategy, suggestion.checkpointing))
        assert fits(suggestion.estimate, memory)
        assert suggestion.config["num_processes"] == setup.devices
    for strategy, checkpointing in order[:position]:
        assert not fits(estimate(strategy, checkpointed if checkpointing else setup), memory, None, 8)


@given(setups(), st.integers(10**6, 10**12))
def test_the_number_of_devices_that_is_named_is_the_smallest_power_of_two(setup, memory):
    needed = devices_needed(setup, memory)
    if needed is None:
        assert not fits(estimate("FSDP2", replace(setup, devices=65536)), memory)
        return
    assert fits(estimate("FSDP2", replace(setup, devices=needed)), memory)
    if needed > 1:
        assert not fits(estimate("FSDP2", replace(setup, devices=needed // 2)), memory)


def test_what_is_offloaded_has_to_fit_into_the_host_that_several_devices_share():
    offloaded = Estimate(strategy="FSDP2, offloaded", parts={"working": 10}, host=100)
    assert fits(offloaded, 100)
    assert fits(offloaded, 100, int(800 / HEADROOM) + 1, 8)
    assert not fits(offloaded, 100, 800, 8)


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
    setup = TrainingSetup(
        sizes=BILLION, devices=8, moments=(MemoryPeak(activations=80 * GB),), tensor=2, at_once=False
    )
    shared = replace(setup, context=4)
    for name in ("Megatron", "Megatron, distributed optimizer"):
        alone, of_shared = estimate(name, setup).parts, estimate(name, shared).parts
        assert (alone.pop("working"), of_shared.pop("working")) == (40 * GB, 10 * GB)
        assert of_shared == alone
