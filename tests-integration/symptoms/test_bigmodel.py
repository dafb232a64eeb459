"""What users of models larger than memory report, by the row of the field's list of symptoms."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from accel import load_checkpoint_in_model
from accel.utils import get_max_memory
from accel_state.errors import CheckpointError

FREE = 50 << 30


@pytest.mark.parametrize("is_integrated", [0, 1])
def test_row_3_memory_of_an_integrated_gpu_is_counted_once(monkeypatch, is_integrated):
    """There is no such GPU here: what torch says of one is put in its place."""
    properties = SimpleNamespace(is_integrated=is_integrated)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (FREE, 2 * FREE))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch, "ones", lambda *shape, device: torch.zeros(shape))
    memory = get_max_memory()
    assert memory[0] == FREE
    assert ("cpu" in memory) is (not is_integrated)


def test_row_3_memory_of_an_apple_gpu_is_counted_once(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    assert list(get_max_memory()) == [0]


@pytest.mark.parametrize("elsewhere", ["../outside.safetensors", "a/../../outside.safetensors", "absolute"])
def test_row_24_an_index_that_names_files_outside_of_its_folder_is_refused(tmp_path, elsewhere):
    model = torch.nn.Linear(2, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    outside = tmp_path / "outside.safetensors"
    save_file({name: value + 1 for name, value in before.items()}, outside)
    (tmp_path / "model" / "a").mkdir(parents=True)
    shard = str(outside) if elsewhere == "absolute" else elsewhere
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(before, shard)}))
    for checkpoint in (index, index.parent):
        with pytest.raises(CheckpointError, match="outside its folder; refused as unsafe"):
            load_checkpoint_in_model(model, checkpoint)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
