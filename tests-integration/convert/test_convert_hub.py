"""Checkpoints of models that transformers 5 converts while it loads them: names of the Hub, and back."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from accel_cli.main import main
from accel_convert import convert_checkpoint
from accel_convert.read import open_checkpoint
from accel_plugins.parallelism.config import ParallelismConfig
from accel_state.errors import CheckpointError, SettingsError
from accel_train import Accelerator
from bigmodel.test_hub_names import QUICK, every_kind, make
from harness import distributed
from train.test_load_memory import resident

TOKENS = torch.arange(12).view(2, 6)


def make_mixtral(**options: Any) -> MixtralForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    return MixtralForCausalLM(MixtralConfig(**{**sizes, **heads, "max_position_embeddings": 32, **options}))


def assert_same_files(found: Path, wanted: Path) -> None:
    names = sorted(path.name for path in wanted.glob("*.safetensors"))
    assert sorted(path.name for path in found.glob("*.safetensors")) == names
    assert all((found / name).read_bytes() == (wanted / name).read_bytes() for name in names)


def check_kind(kind: str, name: str, folder: Path) -> bool:
    """Compare what is converted to names of the Hub with `save_pretrained`, and what is converted back."""
    make_model = make(kind, name)
    if make_model is None:
        return False
    torch.manual_seed(0)
    model = make_model()
    model.save_pretrained(folder / "theirs")
    try:
        config = AutoConfig.from_pretrained(folder / "theirs")
    except (ValueError, StrictDataclassError):
        return False  # a shrunk configuration that transformers does not read
    with torch.device("meta"):
        state = type(model)(config).state_dict()
    if any(state[name].shape != tensor.shape for name, tensor in model.state_dict().items()):
        return False  # or reads as another one
    accelerator = Accelerator(cpu=True)
    accelerator.save_model(model, folder / "ours", names="model")
    convert_checkpoint(folder / "ours", folder / "hub", to="safetensors", base=folder / "theirs")
    assert_same_files(folder / "hub", folder / "theirs")
    convert_checkpoint(folder / "theirs", folder / "back", to="dcp", base=folder / "theirs")
    state = model.state_dict()
    found = {name: lazy.full() for name, lazy in open_checkpoint(folder / "back").models[0].items()}
    assert state.keys() - found.keys() <= model.all_tied_weights_keys.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in found.items())
    return True


@pytest.mark.parametrize(("kind", "name"), QUICK)
def test_files_are_those_of_save_pretrained(kind: str, name: str, tmp_path: Path) -> None:
    assert check_kind(kind, name, tmp_path)


@pytest.mark.thorough
def test_files_of_every_model_with_a_conversion_are_those_of_save_pretrained(tmp_path: Path) -> None:
    wrong, checked = {}, 0
    for index, (kind, name) in enumerate(every_kind()):
        try:
            checked += check_kind(kind, name, tmp_path / f"{index}")
        except (AssertionError, CheckpointError) as error:
            wrong[name] = str(error)[:300]
    assert wrong == {}
    assert checked > 150


def train_a_step(accelerator: Accelerator) -> tuple[Any, Any]:
    model = make_mixtral()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    tokens = TOKENS[dist.get_rank() :][:1]
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # of views, under FSDP2 with TP
        loss = model(input_ids=tokens, labels=tokens).loss
    accelerator.backward(loss)
    optimizer.step()
    return model, optimizer


LAYOUTS = (
    {"dp_shard_size": 2},
    {"tp_size": 2},
    {"dp_shard_size": 2, "ep_size": 2},
    {"tp_size": 2, "ep_size": 2},
)


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
@distributed(world_size=2)
def test_a_sharded_state_gets_the_names_of_the_hub_and_training_starts_from_them(
    sizes: dict[str, int], tmp_path: Path
) -> None:
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes))
    model, _ = train_a_step(accelerator)
    accelerator.save_state(tmp_path / "state", flush=False)
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        trained = make_mixtral()
        trained.load_state_dict(state)
        trained.save_pretrained(tmp_path / "theirs")
        convert_checkpoint(tmp_path / "state", tmp_path / "hub", to="safetensors", base=tmp_path / "theirs")
        assert_same_files(tmp_path / "hub", tmp_path / "theirs")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hub")
        assert torch.equal(loaded(TOKENS).logits, trained(TOKENS).logits)
        convert_checkpoint(tmp_path / "hub", tmp_path / "start", to="sharded", base=tmp_path / "hub")
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    other = make_mixtral()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other = accelerator.prepare(other)
    accelerator.load_state(tmp_path / "start")
    found = accelerator.get_state_dict(other)
    if accelerator.is_main_process:
        assert found.keys() == state.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_the_command_writes_names_of_the_hub(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_mixtral(tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "theirs")
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model)
    accelerator.save_state(tmp_path / "state")
    folders = [str(tmp_path / name) for name in ("state", "hub", "theirs")]
    words = ["convert-checkpoint", *folders[:2], "--to", "safetensors", "--base", folders[2]]
    assert main(words) == 0
    assert "wrote and compared" in capsys.readouterr().out
    assert_same_files(tmp_path / "hub", tmp_path / "theirs")
    assert json.loads((tmp_path / "hub/config.json").read_text())["architectures"] == ["MixtralForCausalLM"]


def test_names_of_the_hub_stay_and_another_model_is_refused(tmp_path: Path) -> None:
    make_mixtral().save_pretrained(tmp_path / "theirs")
    state = load_file(tmp_path / "theirs/model.safetensors")
    convert_checkpoint(tmp_path / "theirs", tmp_path / "same", to="safetensors", base=tmp_path / "theirs")
    assert_same_files(tmp_path / "same", tmp_path / "theirs")
    with pytest.raises(SettingsError, match="has no configuration of transformers"):
        convert_checkpoint(tmp_path / "theirs", tmp_path / "to", to="dcp", base=tmp_path)
    for options, message in (
        ({"num_hidden_layers": 3}, r"lacks model\.layers\.2.*MixtralForCausalLM"),
        ({"vocab_size": 40}, r"another shape of .*lm_head"),
        ({"num_local_experts": 3}, r"another shape of .*experts"),
    ):
        make_mixtral(**options).config.save_pretrained(tmp_path / "other")
        config = json.loads((tmp_path / "other/config.json").read_text())
        (tmp_path / "other/config.json").write_text(
            json.dumps({**config, "architectures": ["MixtralForCausalLM"]})
        )
        with pytest.raises(CheckpointError, match=message):
            convert_checkpoint(tmp_path / "theirs", tmp_path / "to", to="dcp", base=tmp_path / "other")
    (tmp_path / "other/config.json").write_text(json.dumps({**config, "architectures": None}))
    with pytest.raises(SettingsError, match="architectures=None"):
        convert_checkpoint(tmp_path / "theirs", tmp_path / "to", to="dcp", base=tmp_path / "other")
    state["more"] = torch.ones(1)
    save_file(state, tmp_path / "theirs/model.safetensors")
    done = convert_checkpoint(tmp_path / "theirs", tmp_path / "less", to="dcp", base=tmp_path / "theirs")
    assert "more, which the model does not have" in done.dropped
    del state["more"], state["model.layers.1.block_sparse_moe.experts.2.w1.weight"]
    save_file(state, tmp_path / "theirs/model.safetensors")
    with pytest.raises(CheckpointError, match=r"experts.*cannot be converted for MixtralForCausalLM"):
        convert_checkpoint(tmp_path / "theirs", tmp_path / "to", to="dcp", base=tmp_path / "theirs")


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of the process from /proc")
@distributed(world_size=1)
def test_memory_stays_below_the_limit(tmp_path: Path) -> None:
    limit, slack, peaks = 8 << 20, 12 << 20, []
    for options in ({}, {"hidden_size": 512, "intermediate_size": 512, "num_local_experts": 32}):
        folder = tmp_path / f"{len(peaks)}"
        model = make_mixtral(**options)
        model.save_pretrained(folder / "theirs")
        del model
        before = resident(restart=True)
        convert_checkpoint(
            folder / "theirs", folder / "dcp", to="dcp", base=folder / "theirs", max_memory=limit
        )
        convert_checkpoint(
            folder / "dcp", folder / "hub", to="safetensors", base=folder / "theirs", max_memory=limit
        )
        peaks.append(resident() - before)
        assert_same_files(folder / "hub", folder / "theirs")
    layer = 32 * 3 * 512 * 512 * 4
    assert peaks[-1] < limit + slack < layer, f"{peaks[-1] / 1e6} MB"
