"""The fields of the FSDP plugin, and which modules are sharded on their own."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    StateDictType,
)

from accel_plugins.fsdp.blocks import (
    blocks,
    checkpoint_activations,
    fsdp2_prepare_auto_wrap_policy,
    recomputed,
)
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin, disable_fsdp_ram_efficient_loading
from accel_state.environ import patch_environment, read
from accel_state.errors import SettingsError
from accel_state.libraries import is_torch_version
from accel_state.settings import Settings


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 7, bias=False)


def make(**fields: Any) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(**{"fsdp_version": 2, **fields})


def test_without_a_word_it_is_version_1_with_full_states():
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 1
    assert plugin.sharding_strategy is ShardingStrategy.FULL_SHARD
    assert plugin.state_dict_type is StateDictType.FULL_STATE_DICT
    assert plugin.state_dict_config.rank0_only
    assert plugin.cpu_offload == CPUOffload(offload_params=False)
    assert plugin.backward_prefetch is None


def test_arguments_come_before_the_environment():
    variables = {
        "FSDP_VERSION": "2",
        "FSDP_OFFLOAD_PARAMS": "true",
        "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP",
        "FSDP_MIN_NUM_PARAMS": "100",
        "FSDP_RESHARD_AFTER_FORWARD": "false",
        "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
        "FSDP_ACTIVATION_CHECKPOINTING": "true",
    }
    with patch_environment(**variables):
        plugin = FullyShardedDataParallelPlugin(min_num_params=5)
    assert plugin.fsdp_version == 2
    assert isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    assert plugin.auto_wrap_policy == "size_based_wrap"
    assert plugin.min_num_params == 5
    assert plugin.reshard_after_forward is False
    assert plugin.state_dict_type is StateDictType.FULL_STATE_DICT
    assert plugin.activation_checkpointing is True


@pytest.mark.parametrize(
    ("given", "strategy", "reshard"),
    [
        ("FULL_SHARD", ShardingStrategy.FULL_SHARD, True),
        ("shard_grad_op", ShardingStrategy.SHARD_GRAD_OP, False),
        ("2", ShardingStrategy.SHARD_GRAD_OP, False),
        (ShardingStrategy.FULL_SHARD, ShardingStrategy.FULL_SHARD, True),
    ],
)
def test_a_strategy_of_version_1_says_what_version_2_does(given: Any, strategy: Any, reshard: bool):
    for version in (1, 2):
        plugin = make(fsdp_version=version, sharding_strategy=given)
        assert plugin.sharding_strategy is strategy
        assert plugin.reshard_after_forward is reshard


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"fsdp_version": 3}, r"fsdp_version=3\): expected 1 or 2"),
        ({"sharding_strategy": "FULL_SHRAD"}, r"'FULL_SHRAD'.*did you mean 'FULL_SHARD'"),
        ({"sharding_strategy": "HYBRID_SHARD"}, r"dp_replicate_size"),
        ({"auto_wrap_policy": "transformer_based"}, r"one of .'transformer_based_wrap'"),
        ({"auto_wrap_policy": 3}, r"auto_wrap_policy=3\): expected a function"),
        ({"state_dict_type": "LOCAL_STATE_DICT"}, r"SHARDED_STATE_DICT"),
        ({"mixed_precision_policy": {"param_dtype": "bf17"}}, r"'bf17'.*no such dtype"),
        (
            {"mixed_precision_policy": MixedPrecision()},
            r"expected a MixedPrecisionPolicy with fsdp_version=2",
        ),
        ({"cpu_offload": CPUOffload()}, r"expected True, False or a CPUOffloadPolicy"),
        ({"param_init_fn": len}, r"cpu_ram_efficient_loading"),
        ({"activation_checkpointing": "yes"}, r"activation_checkpointing='yes'\): expected True or False"),
        (
            {"activation_checkpointing": True, "activation_checkpointing_modules": "Layer"},
            r"activation_checkpointing_modules='Layer'\): expected a list",
        ),
        (
            {"activation_checkpointing_modules": ["Layer"]},
            r"None, or a list with activation_checkpointing=True",
        ),
        ({"activation_checkpointing_every": 2}, r"1, or more with activation_checkpointing=True"),
        ({"activation_checkpointing": True, "activation_checkpointing_every": 0}, r"every=0"),
        ({"min_num_params": -1, "auto_wrap_policy": "size_based_wrap"}, r"min_num_params=-1"),
        ({"cpu_ram_efficient_loading": True, "sync_module_states": False}, r"sync_module_states"),
    ],
    ids=str,
)
def test_a_field_that_cannot_be_used_is_refused(fields: dict[str, Any], text: str):
    with pytest.raises(SettingsError, match=text):
        make(**fields)


def test_what_only_version_1_knows_is_named_in_version_2(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        make(use_orig_params=False, backward_prefetch="BACKWARD_PRE", limit_all_gathers=True)
    assert [record.getMessage() for record in caplog.records] == [
        "FullyShardedDataParallelPlugin(use_orig_params=False) has no effect with fsdp_version=2."
    ]


@pytest.mark.parametrize(
    ("fields", "policy"),
    [
        ({"transformer_cls_names_to_wrap": ["Block"]}, "'transformer_based_wrap'"),
        ({"min_num_params": 5, "auto_wrap_policy": "transformer_based_wrap"}, "'size_based_wrap'"),
        ({"min_num_params": 5, "auto_wrap_policy": "size_based_wrap"}, None),
        ({"transformer_cls_names_to_wrap": ["Block"], "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}, None),
    ],
    ids=str,
)
def test_what_only_another_policy_knows_is_named(
    fields: dict[str, Any], policy: str | None, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING):
        make(**fields)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (policy is not None)
    assert all(f"has no effect without auto_wrap_policy={policy}" in message for message in messages)


def test_version_1_finds_its_prefetching():
    assert (
        make(fsdp_version=1, backward_prefetch="backward_pre").backward_prefetch
        is BackwardPrefetch.BACKWARD_PRE
    )


@pytest.mark.skipif(is_torch_version("<", "2.15"), reason="older versions reduce in param_dtype")
def test_a_policy_without_the_dtype_of_reduction_is_passed_on_with_a_notice(caplog):
    for given in ({"reduce_dtype": torch.float32, "param_dtype": torch.bfloat16}, {}):
        policy = MixedPrecisionPolicy(**given)
        assert make(mixed_precision_policy=policy).mixed_precision_policy == policy
    assert not caplog.text
    for _ in range(2):
        policy = MixedPrecisionPolicy(param_dtype=torch.float16)
        assert make(mixed_precision_policy=policy).mixed_precision_policy == policy
    assert caplog.text.count("older versions in torch.float16: set reduce_dtype") == 1


def test_a_precision_is_a_policy_unless_there_is_one():
    plugin = make()
    plugin.set_mixed_precision("no")
    assert plugin.mixed_precision_policy is None
    plugin.set_mixed_precision("bf16")
    wanted = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert plugin.mixed_precision_policy == wanted
    plugin.set_mixed_precision("fp16")
    assert plugin.mixed_precision_policy == wanted
    plugin.set_mixed_precision("fp16", override=True)
    assert plugin.mixed_precision_policy.param_dtype is torch.float16
    first = make(fsdp_version=1)
    first.set_mixed_precision("bf16", buffer_autocast=True)
    assert first.mixed_precision_policy == MixedPrecision(
        param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.float32
    )


def test_another_type_of_states_brings_its_own_configuration():
    plugin = make(fsdp_version=1)
    plugin.set_state_dict_type("SHARDED_STATE_DICT")
    assert type(plugin.state_dict_config).__name__ == "ShardedStateDictConfig"
    assert type(plugin.optim_state_dict_config).__name__ == "ShardedOptimStateDictConfig"


def test_the_settings_learn_the_version():
    assert make().to_settings(Settings()).fsdp.fsdp_version == 2  # pyright: ignore[reportOptionalMemberAccess]
    assert isinstance(make().cpu_offload, OffloadPolicy)


def test_other_libraries_hear_that_rank_0_reads():
    with patch_environment(ACCELERATE_USE_FSDP="false", FSDP_CPU_RAM_EFFICIENT_LOADING="false"):
        make(cpu_ram_efficient_loading=True)
        assert read()["ACCELERATE_USE_FSDP"] == read()["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "true"
        disable_fsdp_ram_efficient_loading()
        assert read()["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "false"


def chosen(model: nn.Module, plugin: FullyShardedDataParallelPlugin) -> set[str]:
    names = {id(module): name for name, module in model.named_modules()}
    units = blocks(model, fsdp2_prepare_auto_wrap_policy(plugin, model), set())
    assert units[-1] is model
    return {names[id(module)] for module in units[:-1]}


def test_blocks_are_chosen_by_class_by_size_or_by_a_function():
    by_class = make(auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_cls_names_to_wrap=["Block"])
    assert chosen(Model(), by_class) == {"blocks.0", "blocks.1"}
    by_size = make(auto_wrap_policy="size_based_wrap", min_num_params=20)
    assert chosen(Model(), by_size) == {"embed", "blocks.0.inner", "blocks.1.inner", "head"}
    by_function = make(auto_wrap_policy=lambda module: isinstance(module, nn.Embedding))
    assert chosen(Model(), by_function) == {"embed"}
    assert chosen(Model(), make()) == set()


def test_a_model_may_name_its_blocks():
    model = Model()
    model._no_split_modules = ["Block", "Other"]  # pyright: ignore[reportAttributeAccessIssue]
    assert chosen(model, make(auto_wrap_policy="transformer_based_wrap")) == {"blocks.0", "blocks.1"}
    with pytest.raises(SettingsError, match="_no_split_modules"):
        chosen(Model(), make(auto_wrap_policy="transformer_based_wrap"))
    misspelt = make(auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Blocks"])
    with pytest.raises(SettingsError, match=r"'Blocks'; did you mean 'Block'"):
        chosen(Model(), misspelt)


@pytest.mark.parametrize("version", [1, 2])
def test_classes_of_one_name_are_all_chosen(version):
    parts = [Block(), type("Block", (nn.Linear,), {})(2, 2), nn.Linear(2, 2)]
    model = nn.ModuleList(parts)
    plugin = make(
        fsdp_version=version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
    )
    plugin.set_auto_wrap_policy(model)
    policy: Any = plugin.auto_wrap_policy
    more = {"recurse": False, "nonwrapped_numel": 0} if version == 1 else {}
    assert [policy(part, **more) for part in parts] == [True, True, False]


def test_what_shares_a_parameter_with_its_surroundings_is_left_to_them():
    model = Model()
    model.head.weight = model.embed.weight
    plugin = make(auto_wrap_policy="size_based_wrap", min_num_params=1)
    assert chosen(model, plugin) == {"blocks.0.inner", "blocks.1.inner"}


def test_a_policy_becomes_the_function_of_its_version():
    model = Model()
    for version in (1, 2):
        plugin = make(
            fsdp_version=version,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap="Block",
        )
        plugin.set_auto_wrap_policy(model)
        policy: Any = plugin.auto_wrap_policy
        selected = policy(model.blocks[0]) if version == 2 else policy(model.blocks[0], False, 1)
        assert selected


@pytest.mark.parametrize(("recompute", "offload"), [(True, False), (False, True), (True, True)])
def test_a_copy_of_a_checkpointed_module_computes_with_its_own_weights(recompute: bool, offload: bool):
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())
    checkpoint_activations(module, recompute=recompute, offload=offload)
    twin = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    inputs = torch.ones(1, 2)
    assert not twin(inputs).any()
    assert module(inputs).any()
    twin(inputs).sum().backward()
    assert twin[0].weight.grad is not None
    assert module[0].weight.grad is None
    assert type(pickle.loads(pickle.dumps(module))) is torch.nn.Sequential


class Counted(torch.nn.Linear):
    calls = 0

    def forward(self, inputs):
        self.calls += 1
        return super().forward(inputs)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.mlp = Counted(2, 2), torch.nn.Sequential(Counted(2, 2))

    def forward(self, inputs):
        return self.mlp(self.attention(inputs))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ["0", "1", "2", "3", "4"]),
        ({"activation_checkpointing_every": 2}, ["0", "2", "4"]),
        ({"activation_checkpointing_modules": ["Sequential"]}, [f"{i}.mlp" for i in range(5)]),
        (
            {"activation_checkpointing_modules": [r".*attention"], "activation_checkpointing_every": 3},
            ["0.attention", "3.attention"],
        ),
    ],
)
def test_what_recomputes_its_activations_is_selected_by_name_class_and_number(fields, expected):
    class Layers(torch.nn.Sequential):
        pass

    model = Layers(*(Layer() for _ in range(5)))
    plugin = make(activation_checkpointing=True, **fields)
    names = {id(module): name for name, module in model.named_modules()}
    assert [names[id(module)] for module in recomputed(model, plugin, [*model])] == expected
    for module in recomputed(model, plugin, [*model]):
        checkpoint_activations(module)
    output = model(torch.ones(3, 2, requires_grad=True))
    linears = {name: module for name, module in model.named_modules() if isinstance(module, Counted)}
    assert all(module.calls == 1 for module in linears.values())
    output.sum().backward()
    again = [name for name, module in linears.items() if module.calls == 2]
    assert again == [name for name in linears if any(f"{name}.".startswith(f"{one}.") for one in expected)]


def test_a_name_that_selects_nothing_is_named():
    plugin = make(activation_checkpointing=True, activation_checkpointing_modules=["Layr"])
    with pytest.raises(SettingsError, match=r"no module of a class 'Layr'.*did you mean 'Layer'"):
        recomputed(torch.nn.Sequential(Layer()), plugin, [])


def test_what_a_launcher_exports_without_a_use_is_not_named(caplog: pytest.LogCaptureFixture):
    variables = {"FSDP_MIN_NUM_PARAMS": "100000000", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
    with patch_environment(**variables), caplog.at_level(logging.WARNING):
        assert FullyShardedDataParallelPlugin(fsdp_version=2).min_num_params == 100_000_000
    assert not caplog.records
