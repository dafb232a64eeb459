"""What users of quantised models report, by the row of the field's list of symptoms."""

from __future__ import annotations

import pytest
import torch

from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.parallelism.config import ParallelismConfig
from accel_quant import BnbQuantizationConfig, load_and_quantize_model
from accel_state.errors import SettingsError
from accel_train import Accelerator
from harness import distributed

pytest.importorskip("bitsandbytes")

KINDS = {
    "8 bit": {"load_in_8bit": True},
    "4 bit": {"load_in_4bit": True},
    "4 bit, double": {"load_in_4bit": True, "bnb_4bit_use_double_quant": True},
}


class Adapted(torch.nn.Module):
    """A quantised layer, and what is trained beside it."""

    def __init__(self):
        super().__init__()
        self.base = torch.nn.Linear(64, 64)
        self.down, self.up = torch.nn.Linear(64, 4, bias=False), torch.nn.Linear(4, 64, bias=False)

    def forward(self, inputs):
        return inputs + self.base(inputs).tanh() + self.up(self.down(inputs))


def make_model(kind):
    torch.manual_seed(0)
    model = torch.nn.Sequential(Adapted(), Adapted(), torch.nn.Linear(64, 8))
    config = BnbQuantizationConfig(
        **KINDS[kind], torch_dtype="fp32", bnb_4bit_compute_dtype="fp32", skip_modules=["down", "up", "2"]
    )
    model = load_and_quantize_model(model, config, device_map={"": "cpu"})
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".down" in name or ".up" in name)
    return model


def prepared(kind, **options):
    model = make_model(kind)
    model.tp_plan = {"0.down": "colwise", "0.up": "rowwise"}
    optimizer = torch.optim.SGD(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1
    )
    return Accelerator(cpu=True, **options).prepare(model, optimizer)


@pytest.mark.parametrize("kind", KINDS)
@distributed(world_size=2)
def test_row_19_a_quantised_model_is_refused_where_its_layers_would_be_cut(kind):
    with pytest.raises(SettingsError, match=r"'0\.base\.weight' is quantised .*cannot be sharded.*DDP"):
        prepared(kind, parallelism_config=ParallelismConfig(tp_size=2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@distributed(world_size=2)
def test_row_19_a_quantised_model_has_the_same_logits_after_it_is_prepared_and_trains(kind, strategy):
    inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    expected = make_model(kind)(inputs).detach()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if strategy == "fsdp2" else None
    model, optimizer = prepared(kind, fsdp_plugin=plugin)
    torch.testing.assert_close(model(inputs).detach(), expected)
    model(inputs).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model(inputs).detach(), expected)
