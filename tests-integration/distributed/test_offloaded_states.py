"""States on the host: what needs them is refused until they are back, and DeepSpeed moves its own.

That memory is freed, and that a step gives the same bits, is shown in `simulated/test_offloaded_states.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accel_plugins.deepspeed.plugin import DeepSpeedPlugin
from accel_state.errors import SettingsError, UnsupportedError
from accel_train import Accelerator
from harness import distributed
from harness.engines import deepspeed_process

INPUTS = torch.arange(6.0).view(2, 3)


def started(**options: Any) -> tuple[Accelerator, nn.Module, Any]:
    accelerator = Accelerator(cpu=True, **options)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(INPUTS, batch_size=2)
    model, optimizer, _ = accelerator.prepare(model, optimizer, loader)
    return accelerator, model, optimizer


def step(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> float:
    loss = model(INPUTS).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def test_what_needs_parameters_is_refused() -> None:
    accelerator, model, optimizer = started()
    step(accelerator, model, optimizer)
    source = accelerator.weight_source(track_changes=True)
    right = dict(source)
    accelerator.offload_states()
    missing = r"needs states that offload_states\(\) has moved.*reload_states\(\)"
    for use in (
        lambda: model(INPUTS),
        lambda: accelerator.unwrap_model(model)[2](torch.ones(4)),
        lambda: accelerator.backward(torch.ones(1, requires_grad=True)),
        lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0),
        lambda: accelerator.save_state("folder"),
        lambda: accelerator.load_state("folder"),
        lambda: accelerator.save_model(model, "folder"),
        lambda: accelerator.get_state_dict(model),
        lambda: accelerator.named_full_parameters(),
        lambda: [*source],
        lambda: [*source.changes()],
        optimizer.step,
    ):
        with pytest.raises(RuntimeError, match=missing):
            use()
    assert len(source.metadata()) == len(right)
    accelerator.log({})  # what needs no states works
    accelerator.offload_states(["parameters"])  # is there already
    accelerator.reload_states()
    accelerator.reload_states()
    assert not [*source.changes()]
    step(accelerator, model, optimizer)


def test_each_kind_refuses_what_needs_it_and_nothing_else() -> None:
    accelerator, model, optimizer = started()
    accelerator.offload_states(["optimizer"])
    accelerator.backward(model(INPUTS).sum())
    assert dict(accelerator.named_full_parameters())
    with pytest.raises(RuntimeError, match=r"optimizer.step\(\) needs .* \(optimizer\)"):
        optimizer.step()
    accelerator.offload_states(["gradients"])
    accelerator.reload_states(["optimizer"])
    model(INPUTS)
    for use in (optimizer.step, optimizer.zero_grad, lambda: accelerator.backward(model(INPUTS).sum())):
        with pytest.raises(RuntimeError, match=r"\(gradients\)"):
            use()
    accelerator.reload_states()
    optimizer.step()
    optimizer.zero_grad()


def test_another_word_is_refused_and_free_memory_ends_it() -> None:
    accelerator, model, _ = started()
    for include in (["params"], "parameters"):
        with pytest.raises(SettingsError, match="expected some of parameters, gradients, optimizer"):
            accelerator.offload_states(include)  # pyright: ignore[reportArgumentType]
        with pytest.raises(SettingsError, match="expected some of"):
            accelerator.reload_states(include)  # pyright: ignore[reportArgumentType]
    accelerator.offload_states()
    accelerator.free_memory()
    accelerator.unwrap_model(model)
    other = accelerator.prepare(nn.Linear(1, 1))
    accelerator.backward(other(torch.ones(1)).sum())


def test_a_model_compiled_in_place_is_refused() -> None:
    accelerator, model, _ = started()
    model.compile(backend="eager")
    model(INPUTS)
    accelerator.offload_states()
    with pytest.raises(RuntimeError, match="a call of Sequential needs states"):
        model(INPUTS)
    accelerator.reload_states()
    model(INPUTS)


@pytest.mark.parametrize(
    ("stage", "precision"),
    [
        pytest.param(1, "no", marks=pytest.mark.thorough),
        (2, "bf16"),
        pytest.param(2, "no", marks=pytest.mark.thorough),
    ],
)
@distributed(world_size=2)
def test_deepspeed_moves_its_own(stage: int, precision: Any) -> None:
    losses: list[list[float]] = []
    with deepspeed_process():
        for away in (False, True):
            plugin = DeepSpeedPlugin(zero_stage=stage)
            accelerator, model, optimizer = started(deepspeed_plugin=plugin, mixed_precision=precision)
            found: list[float] = []
            for _ in range(4):
                dtype = next(model.parameters()).dtype
                loss = model(INPUTS.to(dtype)).float().square().mean()
                accelerator.backward(loss)
                if away:
                    with pytest.raises(
                        UnsupportedError, match=r"between backward\(\) and optimizer.step\(\)"
                    ):
                        accelerator.offload_states()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
                if away:
                    accelerator.offload_states()
                    with pytest.raises(UnsupportedError, match=r"without \['gradients', 'optimizer'\]"):
                        accelerator.reload_states(["parameters"])
                    with pytest.raises(RuntimeError, match="needs states"):
                        model(INPUTS.to(dtype))
                    accelerator.reload_states()
            losses.append(found)
            accelerator.free_memory()
    assert losses[0] == losses[1]


@pytest.mark.parametrize("stage", [0, 3])
@distributed(world_size=2)
def test_deepspeed_without_such_methods_is_refused(stage: int) -> None:
    with deepspeed_process():
        accelerator, _, _ = started(deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage))
        wanted = "OFFLOADED_STATES" if stage == 0 else "supported only for DeepSpeed FusedAdam"
        with pytest.raises(UnsupportedError, match=wanted):
            accelerator.offload_states()
