"""FP8 on a GPU, which computes it: training, saving and resuming with each library that is installed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from accel_plugins.fp8.recipe import AORecipeKwargs, TERecipeKwargs
from accel_plugins.fp8.te import convert_model, has_transformer_engine_layers
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_state.accelerator_state import AcceleratorState
from accel_state.devices import check_cuda_fp8_capability
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
    model = torch.nn.Sequential(*[part for layer in layers for part in (layer, torch.nn.LayerNorm(WIDTH))])
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


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.LayerNorm(4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, inputs):
        return inputs + self.down(torch.nn.functional.gelu(self.norm(self.up(inputs))))


def train_sharded(handlers, version, *, recompute):
    """Losses in one process whose model is sharded; an evaluation is between the steps."""
    AcceleratorState._reset_state(reset_partial_state=True)
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=version,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
            activation_checkpointing=recompute,
        )
        accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=handlers, fsdp_plugin=plugin)
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[Block() for _ in range(3)])
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        losses = train(accelerator, model, optimizer, 5)
        with torch.no_grad():
            losses.append(model.eval()(torch.ones(16, WIDTH, device=accelerator.device)).sum().item())
        return losses + train(accelerator, model.train(), optimizer, 5)
    finally:
        dist.destroy_process_group()
        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("name", LIBRARIES)
def test_blocks_that_are_recomputed_train_as_those_that_are_not(name, version):
    handlers = handlers_for(name)
    expected = train_sharded(handlers, version, recompute=False)
    found = train_sharded(handlers, version, recompute=True)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_layers_are_given_back():
    handlers_for("TE")
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH)).cuda()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    convert_model(model)
    assert has_transformer_engine_layers(model)
    convert_model(model, to_transformer_engine=False)
    assert not has_transformer_engine_layers(model)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
