"""FP8 on a GPU, which computes it: training, saving and resuming with each library that is installed."""

from __future__ import annotations

import pytest
import torch

from accel_plugins.fp8.te import convert_model, has_transformer_engine_layers
from accel_plugins.kwargs.fp8 import AORecipeKwargs, TERecipeKwargs
from accel_state.accelerator_state import AcceleratorState
from accel_state.devices.probes import check_cuda_fp8_capability
from accel_train import Accelerator

pytestmark = pytest.mark.gpu

LIBRARIES = {"AO": ("torchao", AORecipeKwargs), "TE": ("transformer_engine", TERecipeKwargs)}
WIDTH = 128


def handlers_for(name):
    library, kind = LIBRARIES[name]
    pytest.importorskip(library)
    if not check_cuda_fp8_capability():
        pytest.skip("this GPU does not compute in FP8")
    return [kind()]


def prepared(precision, handlers):
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(mixed_precision=precision, kwargs_handlers=handlers)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    model = torch.nn.Sequential(*[part for one in layers for part in (one, torch.nn.LayerNorm(WIDTH))])
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def train(accelerator, model, optimizer, steps):
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        inputs = torch.randn(64, WIDTH, generator=generator).to(accelerator.device)
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.roll(1, dims=1))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", LIBRARIES)
def test_losses_are_those_of_bf16_and_resuming_goes_on(name, tmp_path):
    handlers = handlers_for(name)
    expected = train(*prepared("bf16", []), 20)
    accelerator, model, optimizer = prepared("fp8", handlers)
    assert accelerator.fp8_backend == name
    losses = train(accelerator, model, optimizer, 20)
    torch.testing.assert_close(losses, expected, rtol=0.05, atol=0)
    accelerator.save_state(tmp_path)
    further = train(accelerator, model, optimizer, 5)
    accelerator.load_state(tmp_path)
    torch.testing.assert_close(train(accelerator, model, optimizer, 5), further, rtol=1e-2, atol=0)
    with torch.no_grad():
        assert model.eval()(torch.ones(16, WIDTH, device=accelerator.device)).isfinite().all()


def test_layers_are_given_back():
    handlers_for("TE")
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH)).cuda()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    convert_model(model)
    assert has_transformer_engine_layers(model)
    convert_model(model, to_transformer_engine=False)
    assert not has_transformer_engine_layers(model)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
