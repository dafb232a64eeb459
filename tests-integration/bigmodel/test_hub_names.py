"""Models that transformers 5 converts while it loads them: names of the Hub on every way in and out."""

from __future__ import annotations

import copy
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, conversion_mapping
from transformers.models.auto import modeling_auto

from accel_bigmodel import init_empty_weights, load_checkpoint_and_dispatch, load_checkpoint_in_model
from accel_ops.weights.hub_names import to_hub
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_state.errors import CheckpointMismatchError, SettingsError
from accel_train import Accelerator
from harness import distributed

FEW = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
TWO = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k", "depth", "n_layer")
ONE = ("n_group", "topk_group")
LISTS = ("layer_types", "mlp_layer_types", "layers_block_type", "attn_type_list", "mlp_only_layers")
QUICK = (
    ("qwen3_moe", "Qwen3MoeForCausalLM"),
    ("mixtral", "MixtralForCausalLM"),
    ("ernie4_5_moe", "Ernie4_5_MoeForCausalLM"),
    ("phimoe", "PhimoeForCausalLM"),
    ("llava", "LlavaForConditionalGeneration"),
    ("qwen2_vl", "Qwen2VLForConditionalGeneration"),
    ("gpt_neox", "GPTNeoXForCausalLM"),
    ("detr", "DetrForObjectDetection"),
)


def shrink(config: Any, by: int) -> Any:
    """Make a configuration tiny: two layers, four experts, all widths divided by the same number."""
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            shrink(value, by)
    for name, value in list(vars(config).items()):
        if name in LISTS and isinstance(value, list):
            setattr(config, name, value[:2])
        if isinstance(value, bool) or not isinstance(value, int):
            continue
        most = next((most for names, most in ((FEW, 4), (TWO, 2), (ONE, 1)) if name in names), value)
        if name.endswith("_layers"):
            most = 2
        elif "token_id" in name or name.endswith("_index"):
            most = 5
        elif "vocab" in name:
            most = 64
        elif value >= 256 and ("size" in name or "dim" in name or name in ("d_model", "d_ff", "width")):
            most = value if "image" in name or "patch" in name or "position" in name else value // by
        if most < value:
            setattr(config, name, most)
    return config


def make(kind: str, name: str) -> Any:
    """Return a function that builds a tiny model; `None` if no such configuration builds one."""
    cls = getattr(transformers, name)
    for by in (16, 8, 4):
        try:
            config = shrink(CONFIG_MAPPING[kind](), by)
            config.validate()
            with torch.device("meta"):
                model = cls(copy.deepcopy(config))
        except Exception:  # noqa: BLE001 - whatever a model says of such sizes
            continue
        if sum(parameter.numel() for parameter in model.parameters()) < 60e6:
            return lambda: cls(copy.deepcopy(config)).eval()
    return None


def every_kind() -> list[tuple[str, str]]:
    """Return every model type with a conversion, with one class, and each class with its own."""
    conversion_mapping.get_checkpoint_conversion_mapping("")
    converted = conversion_mapping._checkpoint_conversion_mapping_cache
    classes: dict[str, set[str]] = defaultdict(set)
    for table in (name for name in dir(modeling_auto) if name.endswith("_MAPPING_NAMES")):
        for kind, names in getattr(modeling_auto, table).items():
            classes[kind] |= {name for name in (names if isinstance(names, tuple) else [names]) if name}
    found: list[tuple[str, str]] = []
    for kind, names in classes.items():
        own = [name for name in names if hasattr(transformers, name) and not name.endswith("Config")]
        first = sorted(own, key=lambda name: ("CausalLM" not in name and "Conditional" not in name, name))
        found += [(kind, name) for name in first[:1] if kind in converted and "shieldgemma" not in kind]
        found += [(kind, name) for name in first if name in converted and "shieldgemma" not in kind]
    return sorted(set(found))


def differences(make_model: Any, folder: Path) -> str:
    """Return what differs: files from those of `save_pretrained`, loaded tensors from the saved ones."""
    torch.manual_seed(0)
    model = make_model()
    model.save_pretrained(folder / "theirs")
    Accelerator(cpu=True).save_model(model, folder / "ours")
    theirs, ours = (sorted((folder / name).glob("*.safetensors")) for name in ("theirs", "ours"))
    if [file.read_bytes() for file in theirs] != [file.read_bytes() for file in ours]:
        return "files"
    for device in ("cpu", "disk"):
        with init_empty_weights():
            loaded = make_model()
        loaded.tie_weights()
        load_checkpoint_and_dispatch(
            loaded, folder / "ours", {"": device}, offload_folder=folder / "disk", strict=True
        )
        state = Accelerator(cpu=True).get_state_dict(loaded)
        for name, tensor in model.state_dict().items():
            if not torch.equal(tensor, state[name]):
                return f"{name} on {device}"
    return ""


def check_all(kinds: Any) -> int:
    wrong, checked = {}, 0
    for kind, name in kinds:
        make_model = make(kind, name)
        if make_model is not None:
            checked += 1
            with tempfile.TemporaryDirectory() as folder:
                found = differences(make_model, Path(folder))
            if found:
                wrong[name] = found
    assert wrong == {}
    return checked


def test_files_are_those_of_save_pretrained_and_load_again() -> None:
    assert check_all(QUICK) == len(QUICK)


@pytest.mark.thorough
def test_every_model_with_a_conversion() -> None:
    assert check_all(every_kind()) > 150


def tiny_moe() -> Any:
    torch.manual_seed(0)
    return make("qwen3_moe", "Qwen3MoeForCausalLM")()


def test_a_dispatched_model_computes_the_same(tmp_path: Path) -> None:
    model, tokens = tiny_moe(), torch.arange(12).view(2, 6)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3  # the experts of a layer are in several files
    expected = model(tokens).logits
    for device_map in (None, {"": "cpu"}, {"": "disk"}, {"model": "disk", "lm_head": "cpu"}):
        with init_empty_weights():
            loaded = tiny_moe()
        load_checkpoint_and_dispatch(loaded, tmp_path, device_map, offload_folder=tmp_path / "disk")
        loaded.model.rotary_emb = model.model.rotary_emb  # not in any file
        assert torch.equal(loaded(tokens).logits, expected), device_map


def test_a_loaded_model_is_saved_as_it_was_and_names_of_the_model_stay_possible(tmp_path: Path) -> None:
    model = tiny_moe()
    model.save_pretrained(tmp_path / "theirs")
    with init_empty_weights():
        loaded = tiny_moe()
    load_checkpoint_in_model(loaded, tmp_path / "theirs")
    loaded.save_pretrained(tmp_path / "again")
    first, again = (tmp_path / name / "model.safetensors" for name in ("theirs", "again"))
    assert first.read_bytes() == again.read_bytes()
    accelerator = Accelerator(cpu=True)
    accelerator.save_model(model, tmp_path / "model", names="model")
    from safetensors.torch import load_file

    assert load_file(tmp_path / "model" / "model.safetensors").keys() == model.state_dict().keys()
    load_checkpoint_in_model(loaded, tmp_path / "model", strict=True)
    named = dict(accelerator.named_full_parameters(model))
    assert named.keys() == load_file(first).keys()
    assert all(torch.equal(named[name], tensor) for name, tensor in load_file(first).items())
    assert dict(accelerator.named_full_parameters(model, names="model")).keys() == model.state_dict().keys()
    with pytest.raises(SettingsError, match="names='files'"):
        accelerator.save_model(model, tmp_path, names="files")  # type: ignore[arg-type]


def test_experts_that_do_not_fit_are_refused_before_anything_changes(tmp_path: Path) -> None:
    model = tiny_moe()
    accelerator = Accelerator(cpu=True)
    accelerator.save_model(model, tmp_path)
    from safetensors.torch import load_file, save_file

    state = load_file(tmp_path / "model.safetensors")
    state["model.layers.1.mlp.experts.2.up_proj.weight"] = torch.zeros(3, 3)
    save_file(state, tmp_path / "model.safetensors")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointMismatchError, match=r"experts.*cannot be converted for Qwen3Moe"):
        load_checkpoint_in_model(model, tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_layer_is_converted_when_its_last_tensor_has_come() -> None:
    model = tiny_moe()
    state = model.state_dict()
    asked: list[str] = []

    def parts() -> Iterator[dict[str, torch.Tensor]]:
        for name, tensor in state.items():
            asked.append(name)
            yield {name: tensor}

    for part in to_hub(model, state, parts()):
        for name in part:
            layer = name.partition(".experts.")[0] + ".experts."
            if layer in name:
                assert asked[-1].startswith(layer)


def test_tensors_keep_the_order_of_the_model() -> None:
    model = tiny_moe()
    state = model.state_dict()
    named = [name for part in to_hub(model, state, [state]) for name in part]
    unchanged = [name for name in named if name in state]
    assert unchanged == [name for name in state if name in unchanged]
    layers = [name.split(".")[2] for name in named if ".experts." in name]
    assert layers == sorted(layers)


@distributed(world_size=2)
def test_sharded_models_load_and_save_names_of_the_hub(tmp_path: Path) -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen3MoeDecoderLayer"],
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    full = tiny_moe()
    folder = tmp_path / "hub"
    full.save_pretrained(folder, is_main_process=dist.get_rank() == 0)
    accelerator.wait_for_everyone()
    other = tiny_moe()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    model = accelerator.prepare(other)
    load_checkpoint_in_model(model, folder, strict=True)
    tokens = torch.arange(12).view(2, 6)
    assert torch.equal(model(tokens).logits, full(tokens).logits)
    fresh = accelerator.prepare(tiny_moe())  # never loaded: its conversion is that of its class
    for index, trained in enumerate((model, fresh)):
        accelerator.save_model(trained, tmp_path / f"saved-{index}")
        accelerator.wait_for_everyone()
        saved = tmp_path / f"saved-{index}" / "model.safetensors"
        assert saved.read_bytes() == (folder / "model.safetensors").read_bytes()
    named = {name for name, _ in accelerator.named_full_parameters(fresh)}
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in named
