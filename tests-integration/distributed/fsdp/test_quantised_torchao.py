"""Frozen weights that torchao quantised are refused by name where they would be sharded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_state.errors import SettingsError
from accel_train import Accelerator
from harness import distributed

torchao = pytest.importorskip("torchao.quantization")


class Adapted(nn.Module):
    """A frozen quantised layer, and what is trained beside it."""

    def __init__(self, config):
        super().__init__()
        self.base = nn.Linear(64, 32, bias=False, dtype=torch.bfloat16).requires_grad_(requires_grad=False)
        torchao.quantize_(self.base, config)
        self.base.weight.requires_grad_(requires_grad=False)
        self.adapter = nn.Linear(64, 32, dtype=torch.bfloat16)

    def forward(self, inputs):
        return self.base(inputs) + self.adapter(inputs)


def config_of(kind):
    if kind == "Float8Tensor":
        return torchao.Float8WeightOnlyConfig()
    if kind == "Int8Tensor":
        return torchao.Int8WeightOnlyConfig()
    formats = pytest.importorskip("torchao.prototype.mx_formats")
    if kind == "NVFP4Tensor":
        return formats.NVFP4WeightOnlyConfig()
    return formats.MXDynamicActivationMXWeightConfig()


@pytest.mark.parametrize("kind", ["Float8Tensor", "Int8Tensor", "NVFP4Tensor", "MXTensor"])
@distributed(world_size=2)
def test_a_weight_that_torchao_quantised_is_refused_by_name(kind):
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    with pytest.raises(
        SettingsError, match=rf"'base.weight' is quantised by torchao \({kind}\).*bitsandbytes"
    ):
        accelerator.prepare(Adapted(config_of(kind)))
