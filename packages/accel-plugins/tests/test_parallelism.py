"""The arithmetic of axes, their options, and plans of sharded layers."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from accel_plugins.deepspeed.plugin import DeepSpeedPlugin
from accel_plugins.parallelism.attention import partial_layers
from accel_plugins.parallelism.config import (
    AXES,
    DeepSpeedSequenceParallelConfig,
    ParallelismConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
    TorchTensorParallelPlugin,
)
from accel_plugins.parallelism.context import ContextParallel
from accel_plugins.parallelism.tensor import TensorParallel, get_model_tp_size, plan_of
from accel_plugins.registry import choose
from accel_state.environ import patch_environment
from accel_state.errors import SettingsError, UnsupportedError
from accel_state.libraries import is_torch_version
from accel_state.settings import Settings
from accel_state.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch.distributed.device_mesh import DeviceMesh

SIZES = st.fixed_dictionaries({f"{axis}_size": st.integers(1, 4) for axis in AXES if axis != "sp"}).filter(
    lambda sizes: 1 in {sizes["pp_size"], sizes["cp_size"]}
)


@given(SIZES)
def test_every_process_has_one_place_on_the_axes(sizes: dict[str, int]):
    config = ParallelismConfig(**sizes)  # pyright: ignore[reportArgumentType]
    assert config.total_size == math.prod(sizes.values())
    assert config.data_parallel_size * config.non_data_parallel_size == config.total_size
    assert config.active_mesh_dims == config.dp_dim_names + config.non_dp_dim_names
    assert {*config.active_mesh_dims} == {axis for axis in AXES if config.sizes[axis] > 1}
    assert config.fsdp_dim_names == [
        *(["dp_replicate"] if config.dp_replicate_enabled else []),
        "dp_shard_cp",
    ]
    assert {*config.dp_shard_cp_dim_names} <= {*config.dp_cp_dim_names}
    config.check_world(config.total_size)
    with pytest.raises(SettingsError, match=f"makes {config.total_size} processes, but the world size is"):
        config.check_world(config.total_size + 1)


@given(SIZES)
def test_it_is_written_as_plain_data(sizes: dict[str, int]):
    config = ParallelismConfig(**sizes)  # pyright: ignore[reportArgumentType]
    again = json.loads(json.dumps(config.to_json()))
    assert {name: again[name] for name in sizes} == sizes
    assert "device_mesh" not in again
    section = config.to_settings(Settings()).parallelism
    assert section is not None
    assert {name: getattr(section, name) for name in sizes} == sizes


def test_sizes_come_from_the_environment():
    with patch_environment(PARALLELISM_CONFIG_DP_SHARD_SIZE="2", PARALLELISM_CONFIG_CP_SIZE="2"):
        config = ParallelismConfig(dp_shard_size=4)
    assert config.sizes == {"pp": 1, "dp_replicate": 1, "dp_shard": 4, "cp": 2, "sp": 1, "tp": 1}
    assert config.cp_handler == TorchContextParallelConfig("allgather")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"tp_size": 0}, r"tp_size=0\): expected a whole number"),
        ({"dp_shard_size": True}, "dp_shard_size=True"),
        ({"tp_size": 2, "tp_handler": "fast"}, "expected a TorchTensorParallelConfig"),
        ({"cp_size": 2, "cp_backend": "ring"}, "cp_backend='ring'"),
        ({"ep_size": 0}, r"ep_size=0\): expected a whole number"),
        ({"ep_size": 2}, r"ep_size=2\): expected a divisor of dp_shard_size.* = 1"),
        ({"dp_replicate_size": 2, "dp_shard_size": 3, "ep_size": 2}, "= 3"),
        ({"pp_size": 2, "dp_shard_size": 3, "ep_size": 2}, "= 3"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(fields: dict[str, Any], text: str):
    with pytest.raises(SettingsError, match=text):
        ParallelismConfig(**fields)


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ("cp", "sp", "context and sequence parallelism cannot be combined"),
    ],
)
def test_axes_that_cannot_be_combined_are_refused_in_one_sentence(first: str, second: str, reason: str):
    sizes: dict[str, Any] = {f"{first}_size": 2, f"{second}_size": 2}
    with pytest.raises(SettingsError) as refused:
        ParallelismConfig(dp_shard_size=2, **sizes)
    text = f"ParallelismConfig({first}_size=2, {second}_size=2): {reason}; set one of the two to 1."
    assert str(refused.value) == text


def test_experts_share_ranks_that_other_axes_have():
    config = ParallelismConfig(dp_shard_size=2, tp_size=2, ep_size=4)
    assert config.ep_enabled
    assert (config.total_size, config.data_parallel_size) == (4, 2)
    assert config.to_json()["ep_size"] == 4
    assert repr(config).endswith("tp_size=2, ep_size=4)")
    with patch_environment(PARALLELISM_CONFIG_DP_SHARD_SIZE="2", PARALLELISM_CONFIG_EP_SIZE="2"):
        assert ParallelismConfig().ep_size == 2
    assert not ParallelismConfig().ep_enabled
    assert ParallelismConfig(sp_size=2, ep_size=2).total_size == 2


def test_a_script_may_give_the_options_of_an_axis_whatever_its_size():
    handler = TorchContextParallelConfig("alltoall")
    assert ParallelismConfig(cp_size=1, cp_handler=handler).cp_handler is handler


@pytest.mark.filterwarnings("ignore:Set timeout is now only supported")  # PyTorch 2.9, for fake groups
def test_a_mesh_of_one_axis_has_the_flattened_axes_too(monkeypatch: pytest.MonkeyPatch):
    flattened: dict[str, list[int]] = {}

    def flatten(mesh: DeviceMesh, name: str) -> DeviceMesh:
        flattened[name] = mesh.mesh.tolist()
        return mesh

    monkeypatch.setattr(DeviceMesh, "_flatten", flatten)
    store: Any = FakeStore()
    dist.init_process_group("fake", store=store, rank=0, world_size=3)
    try:
        ParallelismConfig(dp_shard_size=3).build_device_mesh("cpu")
    finally:
        dist.destroy_process_group()
    assert flattened == {name: [0, 1, 2] for name in ("dp", "dp_shard_cp", "dp_cp")}


@pytest.mark.parametrize("at_load", [{"tp_size": 2}, SimpleNamespace(tp_size=2)])
def test_the_tensor_parallel_size_is_that_of_loading(at_load: Any):
    model = nn.Linear(1, 1)
    assert get_model_tp_size(model) is None
    model.config = SimpleNamespace(distributed_config=at_load)  # pyright: ignore[reportAttributeAccessIssue]
    assert get_model_tp_size(model) == 2


def test_a_mesh_needs_a_type_of_device():
    with pytest.raises(SettingsError, match="device_type"):
        ParallelismConfig().get_device_mesh()
    assert ParallelismConfig().get_device_mesh("cpu") is None
    with pytest.raises(ValueError, match="environment variable RANK expected"):  # as torch says it
        ParallelismConfig(tp_size=2).build_device_mesh("cpu")


@pytest.mark.parametrize(
    ("sizes", "mesh"),
    [
        ({}, ()),
        ({"tp_size": 4}, (("tp",), (4,))),
        ({"dp_shard_size": 2, "cp_size": 2, "tp_size": 8}, (("dp_shard", "cp", "tp"), (2, 2, 8))),
        ({"sp_size": 2, "dp_replicate_size": 3}, (("dp_replicate", "sp"), (3, 2))),
    ],
)
def test_the_mesh_of_any_number_of_ranks_can_be_asked_for(sizes: dict[str, int], mesh: Any):
    config = ParallelismConfig(**sizes)  # pyright: ignore[reportArgumentType]
    assert config._get_mesh() == mesh
    config._set_size("tp", 16)
    assert config.tp_size == 16
    assert dict(zip(*config._get_mesh(), strict=True))["tp"] == 16
    with pytest.raises(SettingsError, match="'ep' is none of"):
        config._set_size("ep", 2)


def test_a_library_may_replace_which_axes_are_in_the_mesh(monkeypatch: pytest.MonkeyPatch):
    names = property(lambda config: [])
    monkeypatch.setattr(ParallelismConfig, "non_dp_dim_names", names)  # as axolotl does
    assert ParallelismConfig(dp_shard_size=2, cp_size=2)._get_mesh() == (("dp_shard",), (2,))


def test_sizes_are_validated_against_a_run():
    run = SimpleNamespace(num_processes=4)
    config = ParallelismConfig()
    config._validate_accelerator(run)
    assert config.dp_replicate_size == 4, "without any sizes, every rank is a replica"
    with pytest.raises(SettingsError, match="tp_size=8 makes 8 processes, but the world size is 4"):
        ParallelismConfig(tp_size=8)._validate_accelerator(run)


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: TorchContextParallelConfig("ring"), SettingsError, "cp_comm_strategy='ring'.*'allgather'"),
        (lambda: TorchTensorParallelPlugin(), SettingsError, "at least 2"),
        (lambda: DeepSpeedSequenceParallelConfig(sp_attn_implementation="eager"), SettingsError, "'sdpa'"),
        (
            lambda: DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=False),
            SettingsError,
            "without sp_seq_length",
        ),
    ],
)
def test_options_that_cannot_be_used_are_refused(make: Any, kind: type[Exception], text: str):
    with pytest.raises(kind, match=text):
        make()


def test_overlapped_tensor_parallelism_is_ignored_with_a_warning(caplog: pytest.LogCaptureFixture):
    assert TorchTensorParallelConfig(enable_async_tp=True).enable_async_tp
    assert "enable_async_tp=True) has no effect" in caplog.text


def test_lengths_vary_unless_one_is_given():
    assert DeepSpeedSequenceParallelConfig().sp_seq_length_is_variable
    assert not DeepSpeedSequenceParallelConfig(sp_seq_length=8).sp_seq_length_is_variable


def test_sequences_are_sharded_by_deepspeed_where_it_is_used_and_by_torch_elsewhere():
    settings = ParallelismConfig(sp_size=2).to_settings(Settings())
    topology = Topology(rank=0, world_size=2, local_rank=0, local_world_size=2, launcher="torchrun")
    assert choose(settings, topology, torch.device("cpu")) == "fsdp2"
    with_engine = DeepSpeedPlugin(zero_stage=1).to_settings(settings)
    assert choose(with_engine, topology, torch.device("cpu")) == "deepspeed"


def test_the_backend_of_sequence_parallelism_follows_the_engine_unless_it_is_chosen(
    caplog: pytest.LogCaptureFixture,
):
    config = ParallelismConfig(sp_size=2)
    assert (config.sp_backend, config.sp_handler) == ("deepspeed", DeepSpeedSequenceParallelConfig())
    config.use_torch_sequences()
    assert (config.sp_backend, config.sp_handler) == ("torch", None)
    assert ParallelismConfig(sp_size=2, sp_backend="torch").sp_handler is None
    with pytest.raises(SettingsError, match=r"sp_backend='deepspeed'.*not in use.*deepspeed_plugin"):
        ParallelismConfig(sp_size=2, sp_backend="deepspeed").use_torch_sequences()
    options = DeepSpeedSequenceParallelConfig(sp_seq_length=8)
    ParallelismConfig(sp_size=2, sp_handler=options).use_torch_sequences()
    assert "sp_seq_length=8" in caplog.text
    assert "has no effect without DeepSpeed" in caplog.text
    with pytest.raises(SettingsError, match=r"sp_backend='ring'.*'deepspeed', 'torch'"):
        ParallelismConfig(sp_size=2, sp_backend="ring")


def test_two_sizes_of_one_axis_contradict():
    plugin = TorchTensorParallelPlugin(tp_size=2)
    settings = ParallelismConfig(tp_size=4).to_settings(Settings())
    with pytest.raises(SettingsError, match=r"tp_size=2.*settings have 4"):
        plugin.to_settings(settings)
    section = plugin.to_settings(Settings()).parallelism
    assert section is not None
    assert section.tp_size == 2


def test_a_plan_may_name_styles_or_be_made_of_them():
    model: Any = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
    own = RowwiseParallel()
    model.tp_plan = {"0": "colwise", "1": own}
    plan = plan_of(model)
    assert type(plan["0"]) is ColwiseParallel
    assert plan["1"] is own
    assert get_model_tp_size(model) is None
    model.tp_size = 2  # as transformers says it
    assert get_model_tp_size(model) == 2


def test_a_dora_adapter_is_refused_by_the_name_of_its_layer():
    model: Any = nn.Sequential(nn.Linear(2, 4))
    model.tp_plan = {"0": "colwise"}
    mesh: Any = None
    stage = TensorParallel(mesh=mesh)
    model[0].lora_magnitude_vector = nn.ModuleDict()  # that of peft's LoRA layers, which have no DoRA
    stage.validate(model)
    model[0].lora_magnitude_vector["default"] = nn.Identity()
    with pytest.raises(SettingsError, match=r"Module '0' has a DoRA adapter.*use_dora=False"):
        stage.validate(model)


def test_a_pattern_of_a_plan_matches_names_at_any_depth():
    model: Any = nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict({"up": nn.Linear(2, 4)})])})
    model.tp_plan = {"*.up": "colwise"}
    assert [*plan_of(model)] == ["blocks.0.up"], "torch would match one level and skip the layer"


@pytest.fixture
def fake_mesh() -> Generator[DeviceMesh]:
    """A mesh of two ranks, whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)  # pyright: ignore[reportArgumentType]
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(is_torch_version("<", "2.10"), reason="it needs PyTorch 2.10")
def test_masks_are_left_out_where_causality_says_the_same_and_refused_elsewhere(fake_mesh):
    class Attention(nn.Module):
        def __init__(self, *, is_causal: bool) -> None:
            super().__init__()
            self.is_causal = is_causal

        def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None = None) -> bool:
            return attention_mask is None

    parallel = ContextParallel(mesh=fake_mesh, rotation="allgather")
    tokens = torch.ones(1, 4)
    for causal in (True, False):
        model: Any = nn.ModuleDict({"self_attn": Attention(is_causal=causal)})
        parallel.prepare(model)
        assert not model["self_attn"](torch.ones(1), attention_mask=torch.ones(1)), "not within the context"
        with parallel([tokens], [1], set()):
            assert tokens.shape == (1, 2)
            assert model["self_attn"](torch.ones(1))
            if causal:
                assert model["self_attn"](torch.ones(1), attention_mask=torch.ones(1))
            else:
                with pytest.raises(UnsupportedError, match="a padding mask"):
                    model["self_attn"](torch.ones(1), attention_mask=torch.ones(1))


def test_layers_that_do_not_attend_to_all_tokens_are_named():
    class Layer(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.layer_idx = index

    def layers_of(**config: Any) -> list[str]:
        model: Any = nn.ModuleDict({"layers": nn.ModuleList([Layer(0), Layer(1)])})
        model.config = SimpleNamespace(**config)
        return [str(layer) for layer in partial_layers(model)]

    assert (
        layers_of() == layers_of(sliding_window=None) == layers_of(layer_types=["full_attention"] * 2) == []
    )
    window = "is 'sliding_attention' of 4 tokens"
    assert layers_of(sliding_window=4) == [f"layer 'layers.0' {window}", f"layer 'layers.1' {window}"]
    assert layers_of(sliding_window=4, layer_types=["full_attention", "sliding_attention"]) == [
        f"layer 'layers.1' {window}"
    ]
    assert layers_of(layer_types=["linear_attention", "conv", "moe"]) == [
        "layer 'layers.0' is 'linear_attention'",
        "layer 'layers.1' is 'conv'",
    ]
    assert layers_of(layer_types=["chunked_attention"], attention_chunk_size=8) == [
        "layer 'layers.0' is 'chunked_attention' of 8 tokens"
    ]
    plain, causal = nn.Conv1d(2, 2, 3, padding=1), nn.Conv1d(2, 2, 4, padding=3)
    assert [layer.name for layer in partial_layers(nn.Sequential(plain, causal))] == ["1"]
