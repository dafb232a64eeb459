"""Checkpoints into models: every form, every map, every way it can be wrong."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel_bigmodel import (
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accel_bigmodel.sources import local_checkpoint
from accel_ops.weights.read import load_state_dict
from accel_ops.weights.tensors import find_tied_parameters
from accel_ops.weights.write import save_state_dict
from accel_state.errors import (
    AccelError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointWriteError,
    SettingsError,
    UnsupportedError,
)

MAPS = {
    "all cpu": {"": "cpu"},
    "all disk": {"": "disk"},
    "blocks on disk": {"embed": "cpu", "gain": "cpu", "blocks": "disk", "head": "cpu"},
    "mixed": {
        "embed": "disk",
        "gain": "disk",
        "blocks.0": "cpu",
        "blocks.1": "disk",
        "blocks.2": "cpu",
        "head": "disk",
    },
    "inside a block": {"": "cpu", "blocks.1.first": "disk", "blocks.1.scale": "disk", "blocks.2": "disk"},
}


@pytest.fixture(params=["safetensors", "bin"])
def checkpoint(request, toy, tmp_path):
    folder = tmp_path / "checkpoint"
    save_state_dict(
        toy.state_dict(), folder, max_shard_size=900, safe_serialization=request.param == "safetensors"
    )
    assert len(list(folder.glob("*.index.json"))) == 1
    return folder


def skeleton(toy_class):
    with init_empty_weights():
        return toy_class().eval()


@pytest.mark.parametrize("kind", MAPS)
@pytest.mark.parametrize("force_hooks", [False, True])
def test_a_model_gives_the_same_under_every_map(
    checkpoint, toy, toy_class, tokens, tmp_path, kind, force_hooks
):
    model = load_checkpoint_and_dispatch(
        skeleton(toy_class),
        checkpoint,
        device_map=MAPS[kind],
        offload_folder=tmp_path / "offload",
        force_hooks=force_hooks,
        strict=True,
    )
    for _ in range(2):
        assert torch.allclose(model(tokens), toy(tokens), atol=1e-6)
    assert model.hf_device_map == MAPS[kind]


@pytest.mark.parametrize("kind", MAPS)
@pytest.mark.parametrize("main_device", ["cpu", pytest.param(0, marks=pytest.mark.gpu)])
def test_every_map_is_streamed_to_the_main_device(toy, tokens, tmp_path, kind, main_device):
    expected = toy(tokens)
    model = dispatch_model(toy, MAPS[kind], main_device=main_device, offload_dir=tmp_path)
    for _ in range(3):
        assert torch.allclose(model(tokens).cpu(), expected, atol=1e-5)


@pytest.mark.parametrize("form", ["folder", "index", "one file", "custom index"])
def test_every_form_of_a_checkpoint_is_found(toy, toy_class, tmp_path, form):
    save_state_dict(toy.state_dict(), tmp_path, max_shard_size="1MB" if form == "one file" else 900)
    place = {
        "folder": tmp_path,
        "index": tmp_path / "model.safetensors.index.json",
        "one file": tmp_path / "model.safetensors",
        "custom index": tmp_path,
    }[form]
    if form == "custom index":
        (tmp_path / "model.safetensors.index.json").rename(tmp_path / "mine.index.json")
    model = skeleton(toy_class)
    load_checkpoint_in_model(model, place)
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in toy.state_dict().items())


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("names", [("a", "z"), ("z", "a")])
@pytest.mark.parametrize("plan", [None, {"": "cpu"}, {"": "disk"}])
@pytest.mark.parametrize("stale", [torch.full((2, 2), -9.0), torch.full((3,), -9.0)])
def test_the_index_decides_which_file_a_tensor_comes_from(tmp_path, suffix, names, plan, stale):
    def write(tensors, path):
        save_file(tensors, path) if suffix == "safetensors" else torch.save(tensors, path)

    first, overlay = (f"{name}.{suffix}" for name in names)
    write({"0.weight": torch.full((2, 2), 1.0), "1.weight": stale}, tmp_path / first)
    write({"1.weight": torch.full((2, 2), 2.0)}, tmp_path / overlay)
    table = {"0.weight": first, "1.weight": overlay}
    (tmp_path / f"m.{suffix}.index.json").write_text(json.dumps({"weight_map": table}))
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model = load_checkpoint_and_dispatch(model, tmp_path, plan, offload_folder=tmp_path / "off", strict=True)
    assert torch.equal(model(torch.ones(1, 2)), torch.full((1, 2), 8.0))


def test_a_tensor_that_the_index_misplaces_or_lacks_is_still_found(tmp_path):
    source = nn.Linear(2, 2)
    save_file({"weight": source.weight.detach()}, tmp_path / "a.safetensors")
    save_file({"bias": source.bias.detach()}, tmp_path / "b.safetensors")
    table = {"weight": "b.safetensors", "head": "a.safetensors"}
    (tmp_path / "m.index.json").write_text(json.dumps({"weight_map": table}))
    model = nn.Linear(2, 2)
    load_checkpoint_in_model(model, tmp_path, strict=True)
    assert all(torch.equal(value, source.state_dict()[name]) for name, value in model.state_dict().items())


def test_a_load_in_two_steps_is_that_in_one(checkpoint, toy, toy_class, tokens, tmp_path):
    model, plan = skeleton(toy_class), MAPS["mixed"]
    load_checkpoint_in_model(model, checkpoint, device_map=plan, offload_folder=tmp_path / "off")
    model = dispatch_model(model, plan, offload_dir=tmp_path / "off")
    assert torch.allclose(model(tokens), toy(tokens), atol=1e-6)


def test_weights_go_into_the_tensors_that_the_model_has(checkpoint, toy, toy_class):
    model = toy_class()
    before = {name: (id(tensor), tensor.data_ptr()) for name, tensor in model.named_parameters()}
    load_checkpoint_in_model(model, checkpoint)
    assert before == {name: (id(tensor), tensor.data_ptr()) for name, tensor in model.named_parameters()}
    assert torch.equal(model.gain, toy.gain)


def test_a041_ties_hold_whichever_name_the_checkpoint_has(toy, toy_class, tokens, tmp_path):
    for kept, dropped in (("embed", "head"), ("head", "embed")):
        state = {name: value for name, value in toy.state_dict().items() if name != f"{dropped}.weight"}
        assert f"{kept}.weight" in state
        save_state_dict(state, tmp_path / kept)
        for kind, plan in MAPS.items():
            model = load_checkpoint_and_dispatch(
                skeleton(toy_class), tmp_path / kept, device_map=plan, strict=True
            )
            assert torch.allclose(model(tokens), toy(tokens), atol=1e-6), (kept, kind)
            if plan.get("embed") == "cpu":
                assert find_tied_parameters(model) == [["embed.weight", "head.weight"]]


TIED_MAPS = [
    {"embed": "disk", "gain": "cpu", "blocks": "cpu", "head": "cpu"},
    {"embed": "cpu", "gain": "cpu", "blocks": "cpu", "head": "disk"},
    {"embed": "disk", "gain": "cpu", "blocks": "cpu", "head": "disk"},
    {"": "cpu", "head": "disk"},
    {"": "disk", "head": "cpu"},
]


@pytest.mark.parametrize("plan", TIED_MAPS)
@pytest.mark.parametrize("names", ["embed", "head", "both"])
@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("start", ["empty", "random"])
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_tied_weights_are_loaded_wherever_a_map_sends_their_names(
    toy, toy_class, tokens, tmp_path, plan, names, suffix, start, dtype
):
    dropped = {"embed": "head.weight", "head": "embed.weight"}.get(names)
    state = {name: value.clone() for name, value in toy.state_dict().items() if name != dropped}
    path = tmp_path / f"model.{suffix}"
    save_file(state, path) if suffix == "safetensors" else torch.save(state, path)
    model = skeleton(toy_class) if start == "empty" else toy_class().eval()
    model = load_checkpoint_and_dispatch(
        model, path, plan, offload_folder=tmp_path / "off", dtype=dtype, strict=True
    )
    expected = toy.to(dtype)(tokens)
    for _ in range(2):
        assert torch.allclose(model(tokens), expected, atol=1e-6)


@pytest.mark.parametrize("first", ["cpu", "disk"])
@pytest.mark.parametrize("names", ["0", "2", "both"])
@pytest.mark.parametrize("start", ["empty", "random"])
@pytest.mark.parametrize("buffers", [False, True])
def test_a_module_under_two_names_runs_wherever_a_map_sends_them(tmp_path, first, names, start, buffers):
    def build():
        shared = nn.BatchNorm1d(4)
        return nn.Sequential(shared, nn.Linear(4, 4), shared).eval()

    source, inputs = build(), torch.randn(2, 4)
    source[0].running_mean.fill_(0.5)
    dropped = {"0": "2.", "2": "0."}.get(names, "none")
    state = {name: value for name, value in source.state_dict().items() if not name.startswith(dropped)}
    save_file({name: value.clone() for name, value in state.items()}, tmp_path / "m.safetensors")
    with init_empty_weights() if start == "empty" else contextlib.nullcontext():
        model = build()
    plan = {"0": first, "1": "cpu", "2": "disk" if first == "cpu" else "cpu"}
    model = load_checkpoint_and_dispatch(
        model, tmp_path, plan, offload_folder=tmp_path / "off", strict=True, offload_buffers=buffers
    )
    for _ in range(2):
        assert torch.allclose(model(inputs), source(inputs), atol=1e-6)


def test_weights_that_are_offloaded_already_are_not_left_as_they_are(tmp_path):
    plan = {"0": "cpu", "1": "disk"}
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    save_file(other.state_dict(), tmp_path / "m.safetensors")
    x = torch.randn(3, 2)
    dispatch_model(model, plan, offload_dir=tmp_path / "first")
    with pytest.raises(SettingsError, match=r"1\.weight, 1\.bias are offloaded, and would keep their values"):
        load_checkpoint_in_model(model, tmp_path, plan, offload_folder=tmp_path / "second")
    load_checkpoint_in_model(model, tmp_path)
    torch.testing.assert_close(model(x), other(x))


def test_a041_a_weight_that_is_not_materialised_is_never_random(toy, toy_class, tmp_path, caplog):
    state = {name: value for name, value in toy.state_dict().items() if name != "head.weight"}
    save_state_dict(state, tmp_path)
    with init_empty_weights():
        model = toy_class()
        model.head.weight = nn.Parameter(torch.empty(11, 8))  # the tie is forgotten
    with caplog.at_level(logging.WARNING), pytest.raises(SettingsError, match=r"head\.weight have no values"):
        load_checkpoint_and_dispatch(model, tmp_path, device_map={"": "cpu"})
    assert "missing from the checkpoint: head.weight" in caplog.text


def test_a037_disk_weights_are_read_in_place(toy, toy_class, tokens, tmp_path):
    save_state_dict(toy.state_dict(), tmp_path / "ck", max_shard_size=900)
    model = load_checkpoint_and_dispatch(
        skeleton(toy_class), tmp_path / "ck", device_map={"": "disk"}, offload_folder=tmp_path / "off"
    )
    assert torch.allclose(model(tokens), toy(tokens), atol=1e-6)
    assert not list(tmp_path.rglob("*.dat"))
    load_checkpoint_in_model(
        skeleton(toy_class), tmp_path / "ck", device_map={"": "disk"}, offload_folder=tmp_path / "off"
    )
    index = json.loads((tmp_path / "off" / "index.json").read_text())
    assert index["gain"]["safetensors_file"].startswith(str(tmp_path / "ck"))
    assert not list(tmp_path.rglob("*.dat"))


def test_cpu_weights_are_mapped(toy, toy_class, tmp_path):
    save_state_dict(toy.state_dict(), tmp_path)
    model = load_checkpoint_and_dispatch(skeleton(toy_class), tmp_path, device_map={"": "cpu"}, report=True)
    assert set(model.load_report.nbytes) == {"map"}
    assert model.load_report.nbytes["map"] == sum(t.nbytes for t in toy.parameters()) + sum(
        t.nbytes for t in toy.buffers()
    )


@pytest.mark.parametrize("kind", ["all cpu", "mixed", "no map"])
@pytest.mark.parametrize("how", ["spilled", "in memory"])
def test_a_bin_file_may_be_overwritten_once_it_is_loaded(toy, toy_class, tokens, tmp_path, kind, how):
    path = tmp_path / "pytorch_model.bin"
    torch.save(toy.state_dict(), path)
    model = skeleton(toy_class)
    load_checkpoint_in_model(
        model,
        path,
        device_map=MAPS.get(kind),
        offload_folder=tmp_path / "offload",
        offload_state_dict=how == "spilled",
    )
    path.write_bytes(bytes(path.stat().st_size))  # as cp does, which keeps the file and its mappings
    for name, tensor in model.state_dict().items():
        assert tensor.is_meta or torch.equal(tensor, toy.state_dict()[name])
    if kind == "mixed":
        model = dispatch_model(model, MAPS[kind], offload_dir=tmp_path / "offload")
        assert torch.allclose(model(tokens), toy(tokens), atol=1e-6)
        return
    model.gain.data.add_(1)
    torch.save(model.state_dict(), path)
    assert torch.equal(torch.load(path)["gain"], toy.gain + 1)


def test_entries_of_a_bin_file_that_are_no_tensors_are_named_and_skipped(tmp_path, caplog):
    source = nn.Linear(2, 2)
    torch.save(
        {**source.state_dict(), "epoch": 3, "_extra_state": None, "args": {"lr": 1}}, tmp_path / "c.bin"
    )
    model = nn.Linear(2, 2)
    load_checkpoint_in_model(model, tmp_path / "c.bin")
    assert torch.equal(model.weight, source.weight)
    assert "epoch, _extra_state, args" in caplog.text
    assert "c.bin" in caplog.text


@pytest.mark.parametrize("key", ["model", "state_dict", "module"])
def test_a_bin_file_whose_weights_are_in_a_table_names_the_table(tmp_path, key):
    torch.save({key: nn.Linear(2, 2).state_dict(), "epoch": 3}, tmp_path / "c.bin")
    with pytest.raises(CheckpointError, match=rf"c\.bin' .* under {key!r}"):
        load_checkpoint_in_model(nn.Linear(2, 2), tmp_path / "c.bin")


def test_a_load_is_reported(toy, toy_class, tmp_path, caplog):
    save_state_dict(toy.state_dict(), tmp_path, max_shard_size=900)
    plan = {"embed": "cpu", "gain": "cpu", "blocks": "disk", "head": "cpu"}
    with caplog.at_level(logging.INFO):
        model = load_checkpoint_and_dispatch(
            skeleton(toy_class), tmp_path, device_map=plan, dtype=torch.float64, report=True
        )
    report = model.load_report
    assert set(report.nbytes) == {"cast", "in place", "map"}
    toy.double()
    assert sum(report.nbytes.values()) == sum(t.nbytes for t in (*toy.parameters(), *toy.buffers()))
    assert str(report) in caplog.text


@pytest.mark.parametrize("dtype", [torch.bfloat16, "float16"])
def test_weights_are_cast_except_those_kept(toy, toy_class, tmp_path, dtype):
    save_state_dict(toy.state_dict(), tmp_path)
    model = skeleton(toy_class)
    load_checkpoint_in_model(
        model, tmp_path, device_map={"": "cpu"}, dtype=dtype, keep_in_fp32_modules=["norm"]
    )
    wanted = getattr(torch, str(dtype).removeprefix("torch."))
    assert model.blocks[0].first.weight.dtype == wanted
    assert model.blocks[0].norm.weight.dtype == torch.float32
    assert model.blocks[0].norm.num_batches_tracked.dtype == torch.int64
    assert torch.equal(model.gain, toy.gain.to(wanted))


def test_complex_weights_stay_trainable_and_integers_are_not(tmp_path):
    values = {"complex": torch.ones(2, dtype=torch.complex64), "integer": torch.ones(2, dtype=torch.int64)}
    save_file(values, tmp_path / "model.safetensors")
    dtypes = {"complex": torch.complex64, "integer": torch.float32}
    model = nn.ParameterDict(
        {name: torch.empty(2, dtype=dtype, device="meta") for name, dtype in dtypes.items()}
    )
    load_checkpoint_in_model(model, tmp_path, device_map={"": "cpu"})
    assert [model[name].requires_grad for name in values] == [True, False]


def test_modules_are_kept_in_float32_by_whole_components_of_their_names(tmp_path):
    model = nn.ModuleDict({name: nn.ModuleDict({"norm": nn.Linear(2, 2)}) for name in ("wo", "word", "two")})
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    for kept, expected in (
        (["wo"], ["wo"]),
        (["two.norm"], ["two"]),
        (["norm"], ["two", "wo", "word"]),
        (["wo.norm.weight", "wo.norm.bias"], ["wo"]),
        (["o.norm", ""], []),
    ):
        empty = copy.deepcopy(model).to("meta")
        load_checkpoint_in_model(
            empty, tmp_path, device_map={"": "cpu"}, dtype=torch.bfloat16, keep_in_fp32_modules=kept
        )
        wide = {
            name.partition(".")[0] for name, value in empty.named_parameters() if value.dtype.itemsize == 4
        }
        assert sorted(wide) == expected


@pytest.mark.parametrize("plan", ["all disk", "mixed"])
def test_disk_weights_are_cast_as_they_come(toy, toy_class, tokens, tmp_path, plan):
    save_state_dict(toy.half().state_dict(), tmp_path)
    model = load_checkpoint_and_dispatch(
        skeleton(toy_class), tmp_path, device_map=MAPS[plan], dtype="float32"
    )
    assert torch.allclose(model(tokens), toy.float()(tokens), atol=1e-6)


def test_what_cannot_be_mapped_goes_to_temporary_files_when_asked(toy, toy_class, tokens, tmp_path):
    save_state_dict(toy.state_dict(), tmp_path)
    model = skeleton(toy_class)
    load_checkpoint_in_model(
        model, tmp_path, device_map={"": "cpu"}, dtype=torch.float64, offload_state_dict=True
    )
    assert torch.equal(model.gain, toy.gain.double())
    assert torch.allclose(model.double()(tokens), toy.double()(tokens))


@pytest.mark.parametrize("kind", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_a_map_is_made_when_asked(toy, toy_class, tokens, tmp_path, kind):
    save_state_dict(toy.state_dict(), tmp_path)
    model = load_checkpoint_and_dispatch(
        skeleton(toy_class),
        tmp_path,
        device_map=kind,
        max_memory={"cpu": 2400},
        no_split_module_classes=["Block"],
        offload_folder=tmp_path / "off",
    )
    assert set(model.hf_device_map.values()) == {"cpu", "disk"}
    assert torch.allclose(model(tokens), toy(tokens), atol=1e-6)
    with pytest.raises(SettingsError, match="device_map is 'automatic'"):
        load_checkpoint_and_dispatch(skeleton(toy_class), tmp_path, device_map="automatic")


def test_a_weight_whose_name_is_too_long_for_a_file_is_named(tmp_path):
    model = nn.ModuleDict({"n" * 300: nn.Linear(2, 2, bias=False)})
    with pytest.raises(CheckpointWriteError, match=r"could not write the weight 'nnn.*: File name too long"):
        dispatch_model(model, {"": "disk"}, offload_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_thousands_of_names_that_do_not_fit_make_no_endless_message(tmp_path):
    many = 3_000
    save_state_dict({f"of_file_{number}": torch.zeros(1) for number in range(many)}, tmp_path)
    model = torch.nn.Module()
    for number in range(many):
        model.register_buffer(f"of_model_{number}", torch.zeros(1))
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint_in_model(model, tmp_path, strict=True)
    text = str(raised.value)
    assert "missing from the checkpoint: of_model_0, of_model_1, " in text
    assert text.count(f" and {many - 20} more") == 2
    assert len(text) < 2000


def test_names_and_shapes_that_do_not_fit_are_listed(toy, toy_class, tmp_path, caplog):
    state = dict(toy.state_dict())
    state["stray"] = torch.zeros(1)
    del state["blocks.1.scale"]
    save_state_dict(state, tmp_path / "names")
    with pytest.raises(
        CheckpointError, match=r"missing .*: blocks\.1\.scale; unexpected .*: stray"
    ) as raised:
        load_checkpoint_in_model(skeleton(toy_class), tmp_path / "names", strict=True)
    assert isinstance(raised.value, RuntimeError)  # as in Accelerate
    with caplog.at_level(logging.WARNING):
        load_checkpoint_in_model(skeleton(toy_class), tmp_path / "names")
    assert "blocks.1.scale" in caplog.text
    assert "stray" in caplog.text
    state["gain"] = torch.zeros(3)
    state["head.weight"] = torch.zeros(2, 2)
    save_state_dict(state, tmp_path / "shapes")
    model = toy_class()
    before = model.embed.weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"gain \(\[3\] in the checkpoint, \[8\] in the model\), head"):
        load_checkpoint_in_model(model, tmp_path / "shapes")
    assert torch.equal(model.embed.weight, before)  # nothing was touched


def test_a_damaged_shard_is_named_before_anything_changes(toy, toy_class, tmp_path):
    save_state_dict(toy.state_dict(), tmp_path, max_shard_size=900)
    last = max(tmp_path.glob("*.safetensors"))
    last.write_bytes(last.read_bytes()[:-4])
    model = toy_class()
    before = model.embed.weight.detach().clone()
    with pytest.raises(CheckpointError, match=f"{last.name}.* truncated or damaged"):
        load_checkpoint_in_model(model, tmp_path)
    assert torch.equal(model.embed.weight, before)


def test_a_map_with_a_hole_is_refused_by_name(toy, toy_class, tmp_path):
    save_state_dict(toy.state_dict(), tmp_path)
    with pytest.raises(SettingsError, match="has no device for gain"):
        load_checkpoint_in_model(
            skeleton(toy_class), tmp_path, device_map={"embed": 0, "blocks": 0, "head": 0}
        )


def test_the_disk_needs_a_place(toy, toy_class, tmp_path):
    save_state_dict(toy.state_dict(), tmp_path / "safe")
    save_state_dict(toy.state_dict(), tmp_path / "bin", safe_serialization=False)
    with pytest.raises(SettingsError, match="pass offload_folder"):
        load_checkpoint_in_model(skeleton(toy_class), tmp_path / "safe", device_map={"": "disk"})
    with pytest.raises(SettingsError, match=r"'pytorch_model.bin', which cannot be read in place"):
        load_checkpoint_and_dispatch(skeleton(toy_class), tmp_path / "bin", device_map={"": "disk"})
    with pytest.raises(SettingsError, match="pass offload_dir"):
        dispatch_model(toy, {"": "disk"})


def test_what_a_bin_file_gives_an_accelerator_is_reported_as_copied(toy, toy_class, tmp_path, monkeypatch):
    monkeypatch.setattr("accel_bigmodel.load._HOST_TYPES", ("meta",))
    save_state_dict(toy.state_dict(), tmp_path, safe_serialization=False)
    model = load_checkpoint_and_dispatch(skeleton(toy_class), tmp_path, device_map={"": "cpu"}, report=True)
    assert set(model.load_report.nbytes) == {"copy"}
    assert torch.equal(model.gain, toy.gain)


def test_8bit_offload_is_refused_by_name(toy_class, tmp_path):
    with pytest.raises(UnsupportedError, match=r"offload_8bit_bnb=True: .* load_and_quantize_model"):
        load_checkpoint_in_model(skeleton(toy_class), tmp_path, offload_8bit_bnb=True)


def test_a_broadcast_needs_a_process_group(toy_class, tmp_path):
    with pytest.raises(SettingsError, match="needs a process group"):
        load_checkpoint_in_model(skeleton(toy_class), tmp_path, broadcast_from_rank0=True)


@pytest.mark.parametrize("name", ["model", "Model-0.5B", "opt-1.3b-instruct", "v1.safetensor"])
def test_a_hub_id_is_found_in_the_local_cache(toy, tmp_path, monkeypatch, name):
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    revision = "0" * 40
    repo = tmp_path / f"models--some--{name}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(revision)
    save_state_dict(toy.state_dict(), repo / "snapshots" / revision)
    assert str(tmp_path) == hub.constants.HF_HUB_CACHE
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download",
        lambda name, **kwargs: hub._snapshot_download.snapshot_download(name, cache_dir=tmp_path, **kwargs),
    )
    found = local_checkpoint(f"some/{name}")
    assert (found / "model.safetensors").is_file()


@pytest.mark.parametrize("name", ["nowhere", "a.safetensors", "a.bin", "a.pt", "a.pth", "a.index.json"])
def test_a_path_that_is_nothing_is_reported(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / name, f"some/{name}" if "." in name else f"./{name}"):
        with pytest.raises(FileNotFoundError, match="neither a file nor a folder"):
            load_checkpoint_in_model(nn.Linear(1, 1), path)


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_on_windows_a_loaded_file_is_not_kept_open(toy, toy_class, tokens, tmp_path, monkeypatch, dtype):
    """Windows neither replaces nor deletes mapped files. Here, a mapped file shows what overwrites it."""
    monkeypatch.setattr("accel_state.platforms.SYSTEM", "win32")
    monkeypatch.delattr("os.preadv")
    save_state_dict(toy.state_dict(), tmp_path / "ck")
    path = tmp_path / "ck" / "model.safetensors"
    spilled = []
    monkeypatch.setattr("tempfile.TemporaryDirectory", lambda **_: spilled.append(1))
    model = load_checkpoint_and_dispatch(
        skeleton(toy_class), tmp_path / "ck", {"": "cpu"}, dtype=dtype, offload_state_dict=True, report=True
    )
    found = load_state_dict(path)
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.allclose(model(tokens), toy.to(dtype)(tokens), atol=1e-6)
    assert torch.allclose(found["gain"].to(dtype), toy.gain)
    assert not spilled
    assert sum(model.load_report.nbytes.values()) > 0


def test_weight_files_of_other_names_are_named_where_none_is_chosen(tmp_path):
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "mine.bin")
    with pytest.raises(CheckpointError, match=r"found mine\.bin: pass the file itself"):
        load_checkpoint_in_model(nn.Linear(2, 2), tmp_path)


def test_a_checkpoint_with_an_unknown_scheme_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for load in (load_checkpoint_in_model, load_checkpoint_and_dispatch):
        with pytest.raises(SettingsError, match=r"checkpoint='nowhere://run': fsspec has no file system"):
            load(nn.Linear(1, 1), "nowhere://run")


def test_integers_and_shards_of_other_types_come_as_they_are(tmp_path):
    class Quantised(nn.Module):
        def __init__(self):
            super().__init__()
            self.packed = nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)

    save_file({"packed": torch.arange(4, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    with init_empty_weights():
        model = Quantised()
    load_checkpoint_in_model(model, tmp_path, device_map={"": "cpu"}, dtype="float16")
    assert model.packed.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "content", [{"weight_map": {}}, {}, {"metadata": {"total_size": 0}, "weight_map": {}}]
)
def test_an_index_that_names_no_tensor_is_refused(toy, tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="names no tensor"):
        load_checkpoint_in_model(toy, tmp_path)


def test_names_in_messages_are_few_and_short(tmp_path):
    model = nn.Linear(2, 2)
    stray = {f"{'x' * 3000}.{index}": torch.ones(1) for index in range(200)}
    save_file({**model.state_dict(), **stray}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointMismatchError, match="and 180 more") as caught:
        load_checkpoint_in_model(model, tmp_path, strict=True)
    assert len(str(caught.value)) < 3000
    shards = {name: f"{name[-9:]}.safetensors" for name in stray}
    (tmp_path / "x.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(CheckpointError, match=r"names absent files.*and 190 more") as caught:
        load_checkpoint_in_model(model, tmp_path / "x.safetensors.index.json")
    assert len(str(caught.value)) < 3000


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F33", "shape": [2], "data_offsets": [0, 1]},
        {"dtype": "D" * 3000, "shape": [2], "data_offsets": [0, 1]},
    ],
)
def test_names_of_damaged_files_are_short(tmp_path, entry):
    header = json.dumps({"x" * 5000: entry}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"a")
    (tmp_path / "x.index.json").write_text(json.dumps({"weight_map": {"w": "../" + "y" * 3000}}))
    calls = [
        lambda: load_checkpoint_in_model(nn.Linear(2, 2), path),
        lambda: load_checkpoint_in_model(nn.Linear(2, 2), tmp_path / "x.index.json"),
        lambda: load_checkpoint_and_dispatch(nn.Linear(2, 2), path, {"a" * 3000: "b" * 3000}),
        lambda: infer_auto_device_map(nn.Linear(2, 2), {"z" * 3000: 1}),
        lambda: infer_auto_device_map(nn.Linear(2, 2), {0: "z" * 3000}),
    ]
    for call in calls:
        with pytest.raises(AccelError) as caught:
            call()
        assert len(str(caught.value)) < 1000


def test_weights_that_a_model_does_not_use_are_warned_of_by_name(tmp_path, caplog):
    model = nn.Linear(2, 2)
    save_file({**model.state_dict(), "stray": torch.ones(1)}, tmp_path / "model.safetensors")
    load_checkpoint_in_model(model, tmp_path)
    assert "Some weights of the checkpoint were not used when loading the model: stray." in caplog.text
    assert "missing" not in caplog.text


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("case", ["one is missing", "other names", "tied"])
def test_values_of_the_model_that_a_map_sends_to_the_disk_are_kept_without_a_checkpoint(
    tmp_path, suffix, case
):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    if case == "tied":
        model[2].weight = model[1].weight
    inputs = torch.randn(2, 4)
    expected = model(inputs)
    state = dict(model.state_dict())
    del state["1.bias"]
    if case == "tied":
        del state["2.weight"]
    if case == "other names":
        state = {f"model.{name}": value for name, value in state.items()}
    path = tmp_path / f"model.{suffix}"
    save_file(state, path) if suffix == "safetensors" else torch.save(state, path)
    plan = {"0": "cpu", "1": "disk", "2": "disk"}
    loaded = load_checkpoint_and_dispatch(copy.deepcopy(model), path, plan, offload_folder=tmp_path / "off")
    assert torch.equal(loaded(inputs), expected)
    assert loaded[1].weight.is_meta
    with pytest.raises(SettingsError, match="offload_folder"):
        load_checkpoint_and_dispatch(copy.deepcopy(model), path, plan)


def test_buffers_that_a_checkpoint_lacks_go_to_the_disk_with_their_module(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    model[1].running_mean.fill_(0.5)
    inputs = torch.randn(2, 4)
    expected = model(inputs)
    state = {name: value for name, value in model.state_dict().items() if name != "1.running_mean"}
    save_file(state, tmp_path / "model.safetensors")
    loaded = load_checkpoint_and_dispatch(
        model, tmp_path, {"": "disk"}, offload_folder=tmp_path / "off", offload_buffers=True
    )
    assert loaded[1].running_mean.is_meta
    assert torch.equal(loaded(inputs), expected)


def test_what_rank_0_sends_goes_to_temporary_files_when_asked(tmp_path):
    source = nn.Linear(64, 64)
    save_state_dict(source.state_dict(), tmp_path)
    rendezvous = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=0, world_size=1)
    try:
        model = nn.Linear(64, 64, device="meta")
        load_checkpoint_in_model(
            model, tmp_path, {"": "cpu"}, offload_state_dict=True, broadcast_from_rank0=True
        )
    finally:
        torch.distributed.destroy_process_group()
    assert torch.equal(model.weight, source.weight)
    mappings = [line.split() for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()]
    (file,) = (
        row[5]
        for row in mappings
        if int(row[0].split("-")[0], 16) <= model.weight.data_ptr() < int(row[0].split("-")[1], 16)
    )
    assert file.endswith("weight.dat")


def test_a_checkpoint_of_the_hub_of_which_a_part_is_cached_is_fetched(toy, tmp_path, monkeypatch):
    pytest.importorskip("huggingface_hub")
    cached = tmp_path / "cached"
    save_state_dict(toy.state_dict(), cached, max_shard_size=900)
    max(cached.glob("*.safetensors")).unlink()
    save_state_dict(toy.state_dict(), tmp_path / "fetched")
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download",
        lambda name, local_files_only=False, **_: str(
            tmp_path / ("cached" if local_files_only else "fetched")
        ),
    )
    assert local_checkpoint("some/model") == tmp_path / "fetched"
