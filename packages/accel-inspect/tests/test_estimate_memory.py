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
    estimate,
    fits,
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


def test_what_is_offloaded_has_to_fit_into_the_host_that_several_devices_share():
    offloaded = Estimate(strategy="FSDP2, offloaded", parts={"working": 10}, host=100)
    assert fits(offloaded, 100)
    assert fits(offloaded, 100, int(800 / HEADROOM) + 1, 8)
    assert not fits(offloaded, 100, 800, 8)
