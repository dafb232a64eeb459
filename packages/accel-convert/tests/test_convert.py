"""Checkpoints of one format become equal ones of another."""

from __future__ import annotations

import json
import pickle
import warnings

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load, load_file, save_file
from torch import nn

from accel_convert import convert_checkpoint, write
from accel_convert.read import open_checkpoint
from accel_plugins.sharding.folder import read_index
from accel_state.errors import CheckpointError, SettingsError
from accel_train import Accelerator
from accel_train.checkpoint import layout

FORMATS = ["safetensors", "torch", "full", "sharded", "dcp"]
STATES = ["full", "sharded", "dcp"]


class Run:
    """A model with a buffer, whose optimizer has two groups, trained a little."""

    def __init__(self, *, by_name=False, batch_norm=False):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(5, 7), nn.BatchNorm1d(7) if batch_norm else nn.LayerNorm(7), nn.Linear(7, 2)
        )
        model.register_buffer("scale", torch.tensor([0.5, 2.0, 3.0]))
        parameters = [*(model.named_parameters() if by_name else model.parameters())]
        tensors = [entry[1] if by_name else entry for entry in parameters]
        groups = [
            {"params": [entry for entry, tensor in zip(parameters, tensors, strict=True) if tensor.ndim > 1]},
            {
                "params": [
                    entry for entry, tensor in zip(parameters, tensors, strict=True) if tensor.ndim == 1
                ],
                "weight_decay": 0.0,
            },
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.1)
        self.accelerator = Accelerator(cpu=True)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def train(self, seed):
        torch.manual_seed(seed)
        self.accelerator.backward(self.model(torch.randn(4, 5)).square().mean())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self

    def weights(self):
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def weights_of(folder):
    return {name: lazy.full() for name, lazy in open_checkpoint(folder).models[0].items()}


@pytest.fixture
def state(tmp_path):
    """A full state, and the weights in it."""
    run = Run().train(1)
    run.accelerator.save_state(tmp_path / "from")
    return tmp_path / "from", run.weights()


def read_with_torch(folder, form):
    """Read weights without any of our readers."""
    if form == "safetensors":
        return load_file(folder / "model.safetensors")
    if form == "torch":
        return torch.load(folder / "pytorch_model.bin", weights_only=True)
    if form == "full":
        return load_file(folder / "model.safetensors")
    inner = folder / "pytorch_model_fsdp_0" if form == "sharded" else folder
    index = dcp.FileSystemReader(inner).read_metadata()
    read = {
        key: torch.empty(row.size, dtype=row.properties.dtype)
        for key, row in index.state_dict_metadata.items()
        if key.startswith("model.")
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is one process
        dcp.load(read, checkpoint_id=inner, no_dist=True)
    return {key.removeprefix("model."): value for key, value in read.items()}


@pytest.mark.parametrize("first", FORMATS)
def test_every_format_becomes_every_other(state, first, tmp_path):
    folder, wanted = state
    convert_checkpoint(folder, tmp_path / first, to=first)
    assert_same(read_with_torch(tmp_path / first, first), wanted)
    for second in FORMATS:
        done = convert_checkpoint(tmp_path / first, tmp_path / f"{first}-{second}", to=second)
        assert_same(read_with_torch(tmp_path / f"{first}-{second}", second), wanted)
        assert done.num_tensors == len(wanted) + (18 if {first, second} <= {*STATES} else 0)


@pytest.mark.parametrize("journey", [("sharded",), ("sharded", "full"), ("dcp", "sharded"), ("dcp", "full")])
def test_a_run_goes_on_from_a_converted_state_as_from_the_first_one(state, journey, tmp_path):
    folder, _ = state
    for form in journey:
        convert_checkpoint(folder, folder.with_name(form), to=form)
        folder = folder.with_name(form)
    again = Run()
    again.accelerator.load_state(folder)
    assert_same(again.train(2).weights(), Run().train(1).train(2).weights())


def test_the_optimizer_and_the_files_of_a_state_are_its_own(state, tmp_path):
    folder, _ = state
    convert_checkpoint(folder, tmp_path / "sharded", to="sharded")
    convert_checkpoint(tmp_path / "sharded", tmp_path / "full", to="full")
    first, last = (torch.load(path / "optimizer.bin") for path in (folder, tmp_path / "full"))
    assert first["param_groups"] == last["param_groups"]
    assert first["state"].keys() == last["state"].keys()
    for number, values in first["state"].items():
        assert_same(last["state"][number], values)
    assert layout.read_manifest(tmp_path / "full").files.keys() == layout.read_manifest(folder).files.keys()
    name = "random_states_0.pkl"
    assert (tmp_path / "full" / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize("form", [*STATES, "universal"])
def test_a_learning_rate_that_is_a_tensor_is_converted(form, tmp_path):
    model, accelerator = nn.Linear(3, 2), Accelerator(cpu=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.25))
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(1, 3)).sum())
    optimizer.step()
    accelerator.save_state(tmp_path / "from")
    convert_checkpoint(tmp_path / "from", tmp_path / form, to=form)
    convert_checkpoint(tmp_path / form, tmp_path / "last", to="full")
    (group,) = torch.load(tmp_path / "last/optimizer.bin")["param_groups"]
    assert torch.equal(group["lr"], torch.tensor(0.25))


def test_lists_of_tensors_in_an_optimizer_state_are_converted(tmp_path):
    model, accelerator = nn.Linear(3, 2), Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.LBFGS(model.parameters(), max_iter=3))

    def loss():
        optimizer.zero_grad()
        value = model(torch.ones(1, 3)).square().sum()
        accelerator.backward(value)
        return value

    optimizer.step(loss)
    accelerator.save_state(tmp_path / "from")
    convert_checkpoint(tmp_path / "from", tmp_path / "to", to="full")
    first, last = (torch.load(tmp_path / name / "optimizer.bin")["state"][0] for name in ("from", "to"))
    assert first["old_dirs"]
    assert_same(dict(enumerate(last["old_dirs"])), dict(enumerate(first["old_dirs"])))


def test_names_that_an_optimizer_has_are_used_and_doubtful_ones_are_not(tmp_path):
    for by_name in (True, False):
        run = Run(by_name=by_name, batch_norm=True).train(1)
        run.accelerator.save_state(tmp_path / f"{by_name}")
        done = convert_checkpoint(tmp_path / f"{by_name}", tmp_path / f"{by_name}-sharded", to="sharded")
        assert (tmp_path / f"{by_name}-sharded/optimizer_0/.metadata").is_file() == by_name
        assert any("do not match the weights" in phrase for phrase in done.dropped) != by_name
    states = open_checkpoint(tmp_path / "True-sharded").optimizers[0].states
    own = {name: run.optimizer.state[parameter] for name, parameter in run.model.named_parameters()}
    for name, values in own.items():
        assert torch.equal(states[name]["exp_avg"].full(), values["exp_avg"])


def test_weights_sorted_by_another_library_name_no_optimizer(state, tmp_path):
    folder, weights = state
    (folder / "accel_manifest.json").unlink()
    save_file(weights, folder / "model.safetensors")
    done = convert_checkpoint(folder, tmp_path / "to", to="sharded")
    assert [phrase for phrase in done.dropped if "has a different order" in phrase]
    assert not (tmp_path / "to/optimizer_0").exists()
    convert_checkpoint(folder, tmp_path / "full", to="full")  # numbers stay numbers
    assert (tmp_path / "full/optimizer.bin").is_file()


def test_files_of_weights_are_sharded_with_an_index_and_described(state, tmp_path):
    folder, wanted = state
    (folder / "config.json").write_text("{}")
    for form, load_one in (("safetensors", load_file), ("torch", torch.load)):
        to = tmp_path / form
        done = convert_checkpoint(folder, to, to=form, max_shard_size=150)
        shards = [name for name in done.files if "-of-" in name]
        assert len(shards) > 2
        assert_same({k: v for name in shards for k, v in load_one(to / name).items()}, wanted)
        assert (to / "config.json").read_text() == "{}"
        assert "optimizer 0" in done.dropped
        assert_same(weights_of(to), wanted)


def test_tensors_of_any_layout_come_as_they_are(tmp_path):
    base = torch.arange(24.0).view(4, 6)
    weights = {
        "transposed": base.t(),
        "part": base[1:3, 2:5],
        "tied": base,
        "also tied": base,
        "scalar": torch.tensor(3, dtype=torch.int32),
        "empty": torch.empty(0, 3),
        "bfloat16": torch.randn(300, 7).bfloat16(),
        "float8": torch.randn(8).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False]),
        "complex": torch.randn(3, dtype=torch.complex64),
    }
    torch.save({**weights, "note": "no tensor"}, tmp_path / "weights.bin")
    done = convert_checkpoint(tmp_path / "weights.bin", tmp_path / "dcp", to="dcp", max_memory=4 << 20)
    assert done.dropped == ["weights.bin: note, which is no tensor"]
    convert_checkpoint(tmp_path / "dcp", tmp_path / "safe", to="safetensors")
    convert_checkpoint(tmp_path / "weights.bin", tmp_path / "torch", to="torch")
    for found in (
        load_file(tmp_path / "safe/model.safetensors"),
        torch.load(tmp_path / "torch/pytorch_model.bin"),
    ):
        as_bytes = {name: value.contiguous().reshape(-1).view(torch.uint8) for name, value in found.items()}
        wanted = {name: value.contiguous().reshape(-1).view(torch.uint8) for name, value in weights.items()}
        assert_same(as_bytes, wanted)
    tied = torch.load(tmp_path / "torch/pytorch_model.bin")
    assert tied["tied"].data_ptr() == tied["also tied"].data_ptr()
    done = convert_checkpoint(tmp_path / "weights.bin", tmp_path / "untied", to="safetensors")
    assert "also tied, the same tensor as tied" in done.dropped


def test_a_universal_checkpoint_comes_back_as_it_was(state, tmp_path):
    state, _ = state
    convert_checkpoint(state, tmp_path / "universal", to="universal", max_memory="4MB")
    convert_checkpoint(tmp_path / "universal", tmp_path / "sharded", to="sharded")
    first, last = open_checkpoint(state), open_checkpoint(tmp_path / "sharded")
    assert_same(*({name: lazy.full() for name, lazy in source.models[0].items()} for source in (first, last)))
    tag = (tmp_path / "universal" / "latest_universal").read_text()
    engine = torch.load(tmp_path / "universal" / tag / "mp_rank_00_model_states.pt", weights_only=False)
    assert engine["global_steps"] == 1  # one step of the optimizer
    for name, values in first.optimizers[0].states.items():
        found = last.optimizers[0].states[name]
        assert_same(
            *({key: of[key].full() for key in ("exp_avg", "exp_avg_sq", "step")} for of in (found, values))
        )
    (tmp_path / "universal" / "latest_universal").write_text("../state")
    with pytest.raises(CheckpointError, match="is no folder"):
        open_checkpoint(tmp_path / "universal")


def test_a_large_tensor_becomes_several_chunks(tmp_path):
    weight = torch.randn(3000, 500)
    save_file({"weight": weight}, tmp_path / "model.safetensors")
    convert_checkpoint(tmp_path, tmp_path / "to", to="dcp", max_memory="4MiB")
    chunks = read_index(tmp_path / "to").state_dict_metadata["model.weight"].chunks
    assert len(chunks) == 6
    assert_same(read_with_torch(tmp_path / "to", "dcp"), {"weight": weight})


def test_what_was_written_otherwise_is_noticed_and_nothing_stays(state, tmp_path, monkeypatch):
    folder, _ = state
    right = write.write_lazy_safetensors

    def damaging(tensors, sink, chunks_of):
        def zeroed(name, lazy):
            return (
                (begin, rows.zero_() if name == "0.weight" else rows) for begin, rows in chunks_of(name, lazy)
            )

        right(tensors, sink, zeroed)

    monkeypatch.setattr(write, "write_lazy_safetensors", damaging)
    with pytest.raises(CheckpointError, match=r"differs from the source: 0\.weight"):
        convert_checkpoint(folder, tmp_path / "to", to="safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["from"]


def test_files_that_the_manifest_does_not_list_are_not_converted(state, tmp_path):
    folder, weights = state
    others = {name: torch.zeros_like(value) for name, value in weights.items()}
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that there is a single process
        dcp.save({"model": others}, checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)
    save_file(others, folder / "model_1.safetensors")
    torch.save({"state": {}, "param_groups": []}, folder / "optimizer_1.bin")
    report = convert_checkpoint(folder, tmp_path / "to", to="full")
    assert_same(read_with_torch(tmp_path / "to", "full"), weights)
    assert {"model_1.safetensors", "optimizer_1.bin"}.isdisjoint(report.files)


def test_a_dry_run_writes_nothing(state, tmp_path):
    folder, weights = state
    done = convert_checkpoint(folder, tmp_path / "to", to="sharded", dry_run=True)
    assert done.files["pytorch_model_fsdp_0/__0_0.distcp"][0] == len(weights)
    assert not (tmp_path / "to").exists()


class Bomb:
    def __reduce__(self):
        return (open, ("/tmp/accel-bomb", "w"))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "optimizer.bin"])
def test_a_pickle_that_would_run_code_is_refused(state, name, tmp_path):
    folder, _ = state
    if name == "pytorch_model.bin":
        folder = tmp_path / "weights"
        folder.mkdir()
    else:
        (folder / "accel_manifest.json").unlink()
    torch.save({"weight": torch.ones(2), "bomb": Bomb()}, folder / name)
    with pytest.raises(CheckpointError, match="cannot be read"):
        convert_checkpoint(folder, tmp_path / "to", to="dcp")
    assert not (tmp_path / "to").exists()


def test_damaged_and_foreign_folders_are_sentences(state, tmp_path):
    folder, _ = state
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        convert_checkpoint(tmp_path / "nowhere", tmp_path / "to", to="full")
    with pytest.raises(SettingsError, match="already contains files"):
        convert_checkpoint(folder, folder, to="full")
    with pytest.raises(SettingsError, match="formats are safetensors"):
        convert_checkpoint(folder, tmp_path / "to", to="onnx")
    with pytest.raises(SettingsError, match="less than 4 MB"):
        convert_checkpoint(folder, tmp_path / "to", to="full", max_memory="1MB")
    convert_checkpoint(folder, tmp_path / "dcp", to="dcp")
    (tmp_path / "dcp/__0_0.distcp").write_bytes((tmp_path / "dcp/__0_0.distcp").read_bytes()[:400])
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp"):
        convert_checkpoint(tmp_path / "dcp", tmp_path / "to", to="full")
    index = read_index(tmp_path / "dcp")
    key = next(key for key in index.storage_data if key.fqn == "model.0.weight")
    del index.storage_data[key]
    (tmp_path / "dcp/.metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match=r"lacks a part of 'model\.0\.weight'"):
        convert_checkpoint(tmp_path / "dcp", tmp_path / "to", to="full")


def test_a_folder_with_metadata_of_its_own_is_not_megatrons(tmp_path):
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "metadata.json").write_text('{"author": "me"}')
    convert_checkpoint(tmp_path, tmp_path / "to", to="torch")
    assert_same(read_with_torch(tmp_path / "to", "torch"), {"weight": torch.ones(2)})
    assert (tmp_path / "to/metadata.json").is_file()


def test_stores_are_read_and_written(state):
    folder, wanted = state
    files = fsspec.filesystem("memory")
    try:
        convert_checkpoint(folder, "memory://bucket/sharded", to="sharded")
        convert_checkpoint("memory://bucket/sharded", "memory://bucket/full", to="full")
        convert_checkpoint("memory://bucket/full", "memory://bucket/weights", to="safetensors")
        assert_same(load(files.cat_file("/bucket/weights/model.safetensors")), wanted)
        again = Run()
        again.accelerator.load_state("memory://bucket/full")
        assert_same(again.weights(), wanted)
        with pytest.raises(SettingsError, match="already contains files"):
            convert_checkpoint(folder, "memory://bucket/full", to="dcp")
    finally:
        files.store.clear()


def test_an_adapter_needs_its_base(tmp_path):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    adapter.mkdir()
    weight, first, second = torch.randn(6, 4), torch.randn(2, 4), torch.randn(6, 2)
    save_file({"up.weight": weight}, base / "model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    names = {"base_model.model.up.lora_A.weight": first, "base_model.model.up.lora_B.weight": second}
    save_file(names, adapter / "adapter_model.safetensors")
    convert_checkpoint(adapter, tmp_path / "merged", to="safetensors", base=base)
    found = load_file(tmp_path / "merged/model.safetensors")
    torch.testing.assert_close(found["up.weight"], weight + 3 * second @ first)

    with pytest.raises(SettingsError, match="is an adapter: pass its base model"):
        convert_checkpoint(adapter, tmp_path / "new", to="safetensors")
    save_file(
        names | {"base_model.model.down.lora_A.weight": first.clone()}, adapter / "adapter_model.safetensors"
    )
    with pytest.raises(CheckpointError, match="fit no weight of the base: down;"):
        convert_checkpoint(adapter, tmp_path / "new", to="safetensors", base=base)
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    save_file(names, adapter / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="fit no weight of the base: up;"):
        convert_checkpoint(adapter, tmp_path / "new", to="safetensors", base=base)
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"peft_type": "LOHA"}))
    with pytest.raises(CheckpointError, match="not a LoRA adapter; merge it with peft"):
        convert_checkpoint(adapter, tmp_path / "new", to="safetensors", base=base)
