"""The strategy `fsdp1` on several ranks: the public suite, flat parameters, local files, and its options."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from accel_plugins.fsdp import fsdp1
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.precision import build_precision
from accel_plugins.strategy import Bundle
from accel_plugins.testing import STRATEGY_CHECKS, StrategySubject
from accel_state.environ import patch_environment
from accel_state.errors import SettingsError
from accel_state.partial_state import PartialState
from harness import distributed

# They look at gradients of single parameters, of which FSDP1 shows this rank's flat part.
LOOK_AT_GRADIENTS = {"gradients_stay_local_without_sync", "backward_passes_its_arguments_on"}
NOT_OFFERED = {"ranks_may_run_out_of_batches", "a_model_may_stay_where_it_is"}
IN_FLOAT32 = ("clipping_by_norm_equals_one_process", "guarded_steps_are_skipped")  # as FSDP1 computes norms
CHECKS = sorted(STRATEGY_CHECKS.keys() - LOOK_AT_GRADIENTS - NOT_OFFERED - {*IN_FLOAT32})
BLOCKS = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 1}


def make_strategy(**plugin):
    runtime = PartialState(cpu=True).runtime
    chosen = FullyShardedDataParallelPlugin(fsdp_version=1, **plugin)
    precision = build_precision("no", runtime.device)
    return fsdp1.Fsdp1Strategy(None, runtime, precision, {FullyShardedDataParallelPlugin: chosen})


def subject(directory, **plugin):
    return StrategySubject(
        make=lambda: make_strategy(**plugin), runtime=PartialState(cpu=True).runtime, directory=directory
    )


def run(names, tmp_path, **plugin):
    for name in names:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        dist.barrier()
        STRATEGY_CHECKS[name](subject(folder, **plugin))


@distributed(world_size=2)
def test_two_ranks_conform(tmp_path):
    run(CHECKS, tmp_path)
    for name in IN_FLOAT32:
        STRATEGY_CHECKS[name](replace(subject(tmp_path), dtype=torch.float32, tolerance=1e-6))


@pytest.mark.parametrize(
    "plugin",
    [
        BLOCKS | {"sharding_strategy": "SHARD_GRAD_OP", "backward_prefetch": "BACKWARD_PRE"},
        BLOCKS
        | {"forward_prefetch": True, "limit_all_gathers": False, "state_dict_type": "SHARDED_STATE_DICT"},
        BLOCKS | {"activation_checkpointing": True},
        BLOCKS | {"activation_checkpointing_offload": True},
        {"state_dict_type": "LOCAL_STATE_DICT"},
        {"sharding_strategy": "NO_SHARD"},
    ],
    ids=lambda plugin: "+".join(plugin),
)
@distributed(world_size=2)
def test_options_conform(plugin, tmp_path):
    run(
        ["training_equals_one_process", "micro_batches_equal_one_batch", "saved_state_is_loaded"],
        tmp_path,
        **plugin,
    )


@distributed(world_size=4)
def test_four_ranks_of_two_hosts_conform_under_hybrid_sharding(tmp_path):
    with patch_environment(LOCAL_RANK=dist.get_rank() % 2, LOCAL_WORLD_SIZE=2):
        PartialState._reset_state()
        run(
            ["training_equals_one_process", "saved_state_is_loaded"],
            tmp_path,
            sharding_strategy="HYBRID_SHARD",
        )


@distributed(world_size=2)
def test_optimizers_go_on_with_flat_parameters(tmp_path):
    run(
        ["training_equals_one_process", "micro_batches_equal_one_batch", "saved_state_is_loaded"],
        tmp_path,
        use_orig_params=False,
        **BLOCKS,
    )


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def wrap(strategy, model, *optimizers):
    bundle = Bundle(models=[model], optimizers=optimizers)
    strategy.check(bundle)
    return strategy.wrap(bundle).models[0]


@distributed(world_size=2)
def test_groups_that_cut_through_a_flat_parameter_are_refused():
    model = make_model()
    groups = [{"params": [p for p in model.parameters() if p.ndim == n]} for n in (1, 2)]
    with pytest.raises(
        SettingsError, match=r"Group 0 of SGD has 2 of the 4 parameters.*use_orig_params=True"
    ):
        wrap(make_strategy(use_orig_params=False), model, torch.optim.SGD(groups, lr=0.1))


@distributed(world_size=2)
def test_blocks_compute_their_activations_again():
    calls = []

    class Counting(nn.Linear):
        def forward(self, input):  # noqa: A002 - as Linear
            calls.append(self)
            return super().forward(input)

    for option, number in (("activation_checkpointing", 4), ("activation_checkpointing_offload", 2)):
        for policy in (BLOCKS, {}):  # without blocks, the model is one
            calls.clear()
            model = nn.Sequential(Counting(4, 6), nn.Tanh(), Counting(6, 2))
            wrapped = wrap(make_strategy(**{option: True}, **policy), model)
            wrapped(torch.ones(3, 4)).sum().backward()
            assert len(calls) == number
            assert all(parameter.grad is not None for parameter in wrapped.parameters() if parameter.numel())


@distributed(world_size=2)
def test_ignored_modules_stay_whole():
    model = wrap(make_strategy(ignored_modules=r"\d*2"), make_model())
    assert model.module[2].weight.shape == (2, 6)
    assert model.module[0].weight.numel() < 24
    with pytest.raises(SettingsError, match=r"ignored_modules='head' matches no module name"):
        wrap(make_strategy(ignored_modules="head"), make_model())


@distributed(world_size=2)
def test_only_rank_0_needs_values():
    model = make_model()
    if dist.get_rank() == 1:
        model = model.to("meta")
    with patch_environment(ACCELERATE_USE_FSDP="true", FSDP_CPU_RAM_EFFICIENT_LOADING="true"):
        strategy = make_strategy(cpu_ram_efficient_loading=True)
    wrapped = wrap(strategy, model, torch.optim.SGD(model.parameters(), lr=0.1))
    state = strategy.states.full_state_dict(wrapped)
    assert all(torch.equal(value, state[name]) for name, value in make_model().state_dict().items())


@distributed(world_size=2)
def test_what_cannot_be_done_is_said():
    strategy = make_strategy()
    model = wrap(strategy, make_model())
    assert isinstance(model, FullyShardedDataParallel)
    with pytest.raises(SettingsError, match=r"given 1 of the 4 parameters of a model, and 0 others"):
        strategy.clip_grad_norm([next(model.parameters())], 1.0)
    foreign = torch.optim.SGD(make_model().parameters(), lr=0.1)
    with pytest.raises(SettingsError, match=r"4 of the 4 parameters of SGD.*belong to no model"):
        wrap(strategy, make_model(), foreign)
    late = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy.check(Bundle(optimizers=[late]))


@distributed(world_size=2)
def test_a_second_strategy_refuses_a_model_that_was_unwrapped():
    strategy, model = make_strategy(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    bundle = Bundle(models=[model])
    wrapped = strategy.wrap(bundle).models[0]
    with pytest.raises(SettingsError, match=r"taken out of its FSDP1 wrapper.*not that of unwrap_model"):
        make_strategy().check(Bundle(models=[strategy.unwrap(wrapped)]))
    make_strategy().check(Bundle(models=[wrapped]))
