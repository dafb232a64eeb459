"""States of real runs are converted, and runs go on from them; memory stays below the limit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from accel_convert import convert_checkpoint
from accel_convert.read import open_checkpoint
from accel_state.accelerator_state import AcceleratorState, GradientState
from accel_state.errors import SettingsError
from harness import distributed
from harness.engines import deepspeed_process
from harness.small_llama import make_llama
from train.test_load_memory import resident
from train.test_resharding import Net, build, train, whole


@distributed(world_size=2)
def save_on_two(strategy: str, folder: Path) -> None:
    """Save a state, and what is in it by the strategy's own account."""
    run = build(strategy)
    train(run, save_to=folder / "state")
    weights = whole(run)
    moments = run[0]._parts.strategy.states.full_optimizer_state(run[2].optimizer, [run[1]])
    if run[0].is_main_process:
        torch.save((weights, moments), folder / "right.pt")
    run[0].wait_for_everyone()
    run[0].free_memory()


@distributed(world_size=2)
def save_with_deepspeed(strategy: str, folder: Path) -> None:
    """Save a state and weights of DeepSpeed's engine."""
    with deepspeed_process():
        run = build(strategy)
        train(run, save_to=folder / "state")
        weights = whole(run)
        if run[0].is_main_process:
            torch.save(weights, folder / "right.pt")
        run[0].wait_for_everyone()
        run[0].free_memory()


@distributed(world_size=2)
def go_on_with_fsdp2(folder: Path) -> None:
    run = build("fsdp2")
    run[0].load_state(folder / "converted")
    train(run)
    state = whole(run)
    if run[0].is_main_process:
        torch.save(state, folder / "end.pt")
    run[0].wait_for_everyone()


def go_on_with_one(folder: Path) -> dict[str, torch.Tensor]:
    try:
        run = build("single")
        run[0].load_state(folder)
        train(run)
        return whole(run)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def assert_same(found: dict, wanted: dict) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(torch.as_tensor(found[name]), torch.as_tensor(wanted[name])) for name in wanted)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2", "tp"])
def test_shards_become_a_full_state_with_their_values_and_go_on(strategy: str, tmp_path: Path) -> None:
    save_on_two(strategy=strategy, folder=tmp_path)
    convert_checkpoint(tmp_path / "state", tmp_path / "full", to="full")
    weights, moments = torch.load(tmp_path / "right.pt")
    assert_same(load_file(tmp_path / "full/model.safetensors"), weights)
    saved = torch.load(tmp_path / "full/optimizer.bin")
    assert saved["state"].keys() == moments["state"].keys()
    for number, values in moments["state"].items():
        assert_same(saved["state"][number], values)
    assert_same(go_on_with_one(tmp_path / "full"), go_on_with_one(tmp_path / "state"))


@pytest.mark.parametrize(
    "strategy",
    ["zero3", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("zero0", "zero1", "zero2"))],
)
def test_states_of_deepspeed_become_full_ones_with_their_values_and_go_on(
    strategy: str, tmp_path: Path
) -> None:
    save_with_deepspeed(strategy=strategy, folder=tmp_path)
    report = convert_checkpoint(tmp_path / "state", tmp_path / "full", to="full")
    assert report.dropped == []
    assert_same(load_file(tmp_path / "full/model.safetensors"), torch.load(tmp_path / "right.pt"))
    assert_same(go_on_with_one(tmp_path / "full"), go_on_with_one(tmp_path / "state"))
    convert_checkpoint(tmp_path / "state/pytorch_model", tmp_path / "weights", to="safetensors")
    assert_same(load_file(tmp_path / "weights/model.safetensors"), torch.load(tmp_path / "right.pt"))


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
def test_universal_checkpoints_of_deepspeed_have_the_values_of_their_source(
    strategy: str, tmp_path: Path
) -> None:
    save_with_deepspeed(strategy=strategy, folder=tmp_path)
    words = ["-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    folders = ["--input_folder", tmp_path / "state/pytorch_model", "--output_folder", tmp_path / "universal"]
    environ = {**os.environ, "DS_ACCELERATOR": "cpu"}
    subprocess.run([sys.executable, *words, *folders], env=environ, check=True, capture_output=True)
    for name, source in (("first", "state/pytorch_model"), ("second", "universal")):
        assert convert_checkpoint(tmp_path / source, tmp_path / name, to="full").dropped == []
    found, wanted = (load_file(tmp_path / name / "model.safetensors") for name in ("second", "first"))
    assert_same(found, wanted)
    found, wanted = (torch.load(tmp_path / name / "optimizer.bin") for name in ("second", "first"))
    assert found["state"].keys() == wanted["state"].keys()
    for number, values in wanted["state"].items():
        assert_same(found["state"][number], values)
    assert [group["params"] for group in found["param_groups"]] == [
        group["params"] for group in wanted["param_groups"]
    ]


@distributed(world_size=2)
def load_universal(strategy: str, folder: Path) -> None:
    """Let DeepSpeed's engine load a universal checkpoint; save what it then has, and train on."""
    with deepspeed_process():
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        run = build(strategy)
        accelerator, engine = run[:2]
        engine._config.load_universal_checkpoint = True
        path, _ = engine.load_checkpoint(str(folder / "universal"))
        assert path is not None
        weights = {name: safe_get_full_fp32_param(value) for name, value in engine.module.named_parameters()}
        moments = {
            name: {key: safe_get_full_optimizer_state(value, key) for key in ("exp_avg", "exp_avg_sq")}
            for name, value in engine.module.named_parameters()
        }
        rates = [(group["lr"], group["weight_decay"]) for group in engine.optimizer.param_groups]
        if accelerator.is_main_process:
            torch.save((weights, moments, rates), folder / "found.pt")
        accelerator.wait_for_everyone()
        train(run)
        accelerator.free_memory()


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_an_engine_of_deepspeed_loads_what_was_converted_to_universal(strategy: str, tmp_path: Path) -> None:
    save_on_two(strategy="fsdp2", folder=tmp_path)
    convert_checkpoint(tmp_path / "state", tmp_path / "universal", to="universal")
    load_universal(strategy=strategy, folder=tmp_path)
    weights, moments = torch.load(tmp_path / "right.pt")
    found, states, rates = torch.load(tmp_path / "found.pt")
    assert_same(found, {name: value for name, value in weights.items() if name != "scale"})
    order = sorted(Net().named_parameters(), key=lambda item: item[1].ndim == 1)  # that of the groups
    for number, (name, _) in enumerate(order):
        assert_same(states[name], {key: moments["state"][number][key] for key in states[name]})
    wanted = [(group["lr"], group["weight_decay"]) for group in moments["param_groups"]]
    assert rates == (wanted if strategy == "zero2" else [wanted[0]] * 2), "ZeRO 3 gives all the first group's"


def test_a_universal_checkpoint_needs_the_state_of_adam_by_name(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(SettingsError, match="it has no optimizer"):
        convert_checkpoint(tmp_path / "model.safetensors", tmp_path / "universal", to="universal")


def test_a_full_state_becomes_shards_that_fsdp2_loads(tmp_path: Path) -> None:
    save_on_two(strategy="ddp", folder=tmp_path)
    convert_checkpoint(tmp_path / "state", tmp_path / "converted", to="sharded")
    go_on_with_fsdp2(folder=tmp_path)
    right = go_on_with_one(tmp_path / "state")
    found = torch.load(tmp_path / "end.pt")
    assert found.keys() == right.keys()
    for name, value in right.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


def test_transformers_loads_what_was_converted_from_its_own_and_back(tmp_path: Path) -> None:
    model = make_llama()
    model.save_pretrained(tmp_path / "first", max_shard_size="4KB")
    for form, folder in (("dcp", "second"), ("sharded", "third"), ("full", "fourth"), ("torch", "fifth")):
        convert_checkpoint(tmp_path / "first", tmp_path / folder, to=form)
        to = tmp_path / f"{folder}-safetensors"
        convert_checkpoint(tmp_path / folder, to, to="safetensors", max_shard_size="4KB")
        assert (to / "model.safetensors.index.json").is_file()
        if not (to / "config.json").exists():
            model.config.save_pretrained(to)
        loaded = AutoModelForCausalLM.from_pretrained(to)
        assert_same(loaded.state_dict(), model.state_dict())


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of the process from /proc")
@distributed(world_size=1)
def test_memory_stays_below_the_limit(tmp_path: Path) -> None:
    limit, slack = 8 << 20, 12 << 20
    save_file({"w": torch.randn(64, 64)}, tmp_path / "model.safetensors")
    forms = ("sharded", "full", "torch", "dcp", "safetensors")
    for name, weights in (("small", {"a": torch.randn(9, 9)}), ("large", None)):
        first = tmp_path / name / "first"
        first.mkdir(parents=True)
        made = {f"{i}": torch.randn(2048, 2048) for i in range(6)} if weights is None else weights
        save_file(made, first / "model.safetensors")
        wanted = {key: value.double().sum().item() for key, value in made.items()}
        del made
        before = resident(restart=True)
        for form in forms:
            convert_checkpoint(first, tmp_path / name / form, to=form, max_memory=limit)
            first = tmp_path / name / form
        peak = resident() - before
    assert peak < limit + slack, f"{peak / 1e6} MB"
    found = {key: lazy.full().double().sum().item() for key, lazy in open_checkpoint(first).models[0].items()}
    assert found == wanted
