"""Models that bitsandbytes quantises on a GPU, beside the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.gpu

WIDTH = 256
CONFIGS: dict[str, dict[str, Any]] = {
    "8 bits": {"load_in_8bit": True},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bf16"},
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.lm_head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(torch.relu(self.second(torch.relu(self.first(x)))))


def quantized(library: str, options: dict[str, Any], folder: str) -> nn.Module:
    utils = pytest.importorskip(f"{library}.utils")
    with pytest.importorskip(library).init_empty_weights():
        model = Model()
    config = utils.BnbQuantizationConfig(**options)
    return utils.load_and_quantize_model(model, config, weights_location=folder, device_map={"": 0})


@pytest.mark.parametrize("name", CONFIGS)
def test_the_weights_are_quantised_at_once_and_compute_what_the_references_do(
    name: str, tmp_path: Any
) -> None:
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    plain = Model()
    file = tmp_path / "pytorch_model.bin"
    torch.save(plain.state_dict(), file)
    ours = quantized("accel", CONFIGS[name], str(file))
    assert next(ours.first.parameters()).element_size() == 1  # before the first forward
    x = torch.randn(4, WIDTH, device="cuda:0", dtype=torch.float16)
    theirs = quantized("accelerate", CONFIGS[name], str(file))
    with torch.no_grad():
        found, expected = ours(x).float(), theirs(x).float()
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(found.cpu(), plain(x.cpu().float()), rtol=0.1, atol=0.1)
