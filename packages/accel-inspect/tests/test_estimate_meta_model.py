from __future__ import annotations

import fsspec
import pytest
import torch
from torch import nn

from accel_inspect.estimate.meta_model import meta_model, sizes_of, weights_in
from accel_ops.weights.write import save_state_dict
from accel_state.errors import SettingsError


@pytest.fixture
def folder(tmp_path):
    """Weights in several files, with blocks under numbers and a buffer of integers."""
    model = nn.ModuleDict(
        {"embed": nn.Embedding(10, 4), "layers": nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])}
    )
    model.register_buffer("ids", torch.arange(10))
    save_state_dict(model.state_dict(), tmp_path / "weights", max_shard_size=200)
    return tmp_path / "weights"


def test_weight_files_alone_tell_sizes_and_blocks(folder):
    assert len(list(folder.glob("*.safetensors"))) > 1
    model = meta_model(str(folder))
    sizes = sizes_of(model)
    assert (sizes.parameters, sizes.blocks, sizes.buffers) == (40 + 3 * 20, (20, 20, 20), 80)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert weights_in(model, "float16").total == 2 * 100 + 80


def test_weights_in_a_store_tell_the_same(folder):
    files = fsspec.filesystem("memory")
    for path in folder.iterdir():
        files.pipe_file(f"/bucket/weights/{path.name}", path.read_bytes())
    try:
        assert sizes_of(meta_model("memory://bucket/weights")) == sizes_of(meta_model(str(folder)))
    finally:
        files.store.clear()


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("/nowhere/model", None, ["'/nowhere/model'", "no such file"]),
        ("a/b/c", None, ["'a/b/c'"]),
        ("config.json", "{", ["config.json", "cannot be read"]),
        ("config.json", "[]", ["config.json", "not a JSON object"]),
        ("config.json", "{}", ["config.json", "--library_name"]),
        ("empty", None, ["empty", "weight files"]),
    ],
)
def test_what_describes_no_model_is_reported(name, content, parts, tmp_path):
    (tmp_path / "empty").mkdir()
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(SettingsError) as caught:
        meta_model(name if "/" in name else str(tmp_path / name))
    assert [part for part in parts if part not in str(caught.value)] == []


class Block(nn.Linear):
    pass


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(1000, 8)
        self.blocks = nn.ModuleList([Block(8, 8) for _ in range(6)])


def test_blocks_are_the_items_of_lists_or_of_the_classes_that_are_not_split():
    model = Net()
    size = sum(parameter.numel() for parameter in model.blocks[0].parameters())
    assert sizes_of(model).blocks == (size,) * 6
    model._no_split_modules = ["Block"]
    assert sizes_of(model).blocks == (size,) * 6


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("float16", 2), ("int8", 1), ("int4", 0.5)])
def test_weights_are_elements_times_width_and_the_largest_layer_is_named(dtype, width):
    model = Net()
    weights = weights_in(model, dtype)
    assert weights.total == width * sum(map(torch.numel, model.parameters()))
    assert weights.largest == width * model.embed.weight.numel()
    assert weights.layers == ("embed",)
