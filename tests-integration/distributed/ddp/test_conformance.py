"""The strategy `ddp` on several ranks: the public suite, compressed gradients, and its options."""

from __future__ import annotations

import warnings
from dataclasses import replace
from itertools import pairwise
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accel_plugins import ddp
from accel_plugins.ddp import DistributedDataParallelKwargs
from accel_plugins.kwargs import GradScalerKwargs
from accel_plugins.precision import build_precision
from accel_plugins.strategy import BatchSharding, Bundle, Strategy
from accel_plugins.testing import STRATEGY_CHECKS, ConformanceError, StrategySubject, check_strategy
from accel_state.partial_state import PartialState
from harness import distributed

SIZE = 32
CPU = torch.device("cpu")


def make_strategy(options=None, precision=None):
    handlers = {} if options is None else {DistributedDataParallelKwargs: options}
    return ddp.DdpStrategy(
        None, PartialState(cpu=True).runtime, precision or build_precision("no", CPU), handlers
    )


def subject(directory, options=None):
    return StrategySubject(
        make=lambda: make_strategy(options), runtime=PartialState(cpu=True).runtime, directory=directory
    )


def wrap(model, strategy):
    return strategy.wrap(Bundle(models=[model])).models[0]


def make_matrix():
    torch.manual_seed(0)
    return nn.Linear(SIZE, SIZE, bias=False).double()


def backward(model, strategy, rank=None):
    """One sample per rank, so that the averaged gradient is a matrix of rank 2 on two ranks."""
    torch.manual_seed(1 + (dist.get_rank() if rank is None else rank))
    sample = torch.randn(1, SIZE, dtype=torch.float64)
    target = torch.randn(1, SIZE, dtype=torch.float64)
    loss = ((model(sample) - target) ** 2).sum()
    if strategy is None:
        (loss / dist.get_world_size()).backward()
    else:
        strategy.backward(loss, accumulation=1, sync=True)


def exact_gradient():
    model = make_matrix()
    for rank in range(dist.get_world_size()):
        backward(model, None, rank)
    return model.weight.grad


def compressed_gradient(**options):
    """The gradient of the third step: PowerSGD begins to compress in the second or later."""
    strategy = make_strategy(DistributedDataParallelKwargs(**options))
    inner = make_matrix()
    model = wrap(inner, strategy)
    for _ in range(4):
        inner.weight.grad = None
        backward(model, strategy)
    everywhere = [torch.empty_like(inner.weight.grad) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, inner.weight.grad)
    assert all(torch.equal(a, b) for a, b in pairwise(everywhere))
    return inner.weight.grad


@pytest.mark.parametrize("name", STRATEGY_CHECKS)
@distributed(world_size=2)
def test_two_ranks_conform(name, tmp_path):
    STRATEGY_CHECKS[name](subject(tmp_path))


@distributed(world_size=4)
def test_four_ranks_conform(tmp_path):
    check_strategy(subject(tmp_path))


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 1},
        {"find_unused_parameters": True},
        {"broadcast_buffers": False},
        {"comm_hook": "power_sgd", "comm_state_option": {"start_powerSGD_iter": 1000}},
    ],
    ids=lambda options: next(iter(options)),
)
@distributed(world_size=2)
def test_options_that_do_not_approximate_conform(options, tmp_path):
    check_strategy(subject(tmp_path, DistributedDataParallelKwargs(**options)))


STATIC_GRAPH_SYNCS_FIRST = {"gradients_stay_local_without_sync", "backward_passes_its_arguments_on"}


@pytest.mark.parametrize("name", sorted(STRATEGY_CHECKS.keys() - STATIC_GRAPH_SYNCS_FIRST))
@distributed(world_size=2)
def test_a_static_graph_conforms_though_its_first_pass_is_synchronised(name, tmp_path):
    STRATEGY_CHECKS[name](subject(tmp_path, DistributedDataParallelKwargs(static_graph=True)))


@distributed(world_size=2)
def test_a_strategy_that_does_not_synchronise_fails_the_suite(tmp_path):
    runtime = PartialState(cpu=True).runtime

    def make():
        alone = Strategy(None, runtime, build_precision("no", CPU), {})
        alone.sharding = BatchSharding(num_shards=2, shard_index=runtime.topology.rank)
        return alone

    broken = replace(subject(tmp_path), make=make)
    with pytest.raises(
        ConformanceError, match="rank 1: training_equals_one_process: after 4 steps"
    ) as failure:
        check_strategy(broken)
    assert "ranks_start_equal" in str(failure.value)
    assert "gradients_stay_local_without_sync" in str(failure.value)


@pytest.mark.parametrize(("hook", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("place", ["comm_hook", "comm_wrapper"])
@distributed(world_size=2)
def test_gradients_travel_in_half_precision(hook, dtype, place):
    found, right = compressed_gradient(**{place: hook}), exact_gradient()
    assert torch.equal(found, found.to(dtype).double()), "every value is one of the small format"
    assert not torch.equal(found, right)
    torch.testing.assert_close(found, right, rtol=4 * torch.finfo(dtype).eps, atol=1e-2)


@pytest.mark.parametrize("hook", ["power_sgd", "batched_power_sgd"])
@distributed(world_size=2)
def test_power_sgd_has_the_matrix_rank_of_its_options(hook):
    right = exact_gradient()
    assert torch.linalg.matrix_rank(right) == 2
    options = {"start_powerSGD_iter": 2, "min_compression_rate": 1, "matrix_approximation_rank": 2}
    enough = compressed_gradient(comm_hook=hook, comm_state_option=options)
    torch.testing.assert_close(enough, right, rtol=1e-8, atol=1e-8)
    assert torch.linalg.matrix_rank(enough) == 2
    options |= {"matrix_approximation_rank": 1, "use_error_feedback": False}
    too_few = compressed_gradient(comm_hook=hook, comm_state_option=options)
    assert torch.linalg.matrix_rank(too_few) == 1


@pytest.mark.parametrize("hook", ["power_sgd", "batched_power_sgd"])
@distributed(world_size=2)
def test_what_power_sgd_leaves_out_comes_in_later_steps(hook):
    options = {"start_powerSGD_iter": 2, "min_compression_rate": 1, "matrix_approximation_rank": 1}
    strategy = make_strategy(DistributedDataParallelKwargs(comm_hook=hook, comm_state_option=options))
    inner = make_matrix()
    model = wrap(inner, strategy)
    total = torch.zeros_like(inner.weight)
    for _ in range(2 + 8):
        inner.weight.grad = None
        backward(model, strategy)
        total += inner.weight.grad
    right = 10 * exact_gradient()
    one_step = exact_gradient().norm() / right.norm()
    assert (total - right).norm() / right.norm() < 2 * one_step, "errors are fed back, not lost"


@pytest.mark.parametrize("hook", ["power_sgd", "batched_power_sgd"])
@distributed(world_size=2)
def test_a_wrapper_compresses_what_power_sgd_sends(hook):
    options = {"start_powerSGD_iter": 2, "min_compression_rate": 1, "matrix_approximation_rank": 2}
    found = compressed_gradient(comm_hook=hook, comm_wrapper="fp16", comm_state_option=options)
    assert torch.equal(found, found.half().double())
    torch.testing.assert_close(found, exact_gradient(), rtol=2e-2, atol=2e-2)


@distributed(world_size=2)
def test_an_option_that_power_sgd_does_not_know_is_refused():
    options = DistributedDataParallelKwargs(comm_hook="power_sgd", comm_state_option={"rank": 2})
    with pytest.raises(TypeError, match="argument 'rank'"):
        wrap(make_matrix(), make_strategy(options))


@distributed(world_size=2)
def test_buffers_follow_rank_0_unless_switched_off():
    for broadcast in (True, False):
        strategy = make_strategy(DistributedDataParallelKwargs(broadcast_buffers=broadcast))
        norm = nn.BatchNorm1d(1).double()
        model = wrap(norm, strategy)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(torch.tensor([[1.0], [3.0]]).double() * (1 + dist.get_rank()))
            model(torch.zeros(2, 1).double())
        means = [None, None]
        dist.all_gather_object(means, round(norm.running_mean.item(), 6))
        assert means == ([0.18, 0.18] if broadcast else [0.18, 0.36])
        assert type(norm) is nn.BatchNorm1d


@distributed(world_size=2)
def test_parameters_that_a_pass_did_not_use_are_found():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(1, 1), nn.Linear(1, 1)

        def forward(self, x):
            return self.used(x)

    strategy = make_strategy(DistributedDataParallelKwargs(find_unused_parameters=True))
    model = wrap(Half(), strategy)
    for _ in range(3):
        strategy.backward(model(torch.ones(1, 1)).sum(), accumulation=1, sync=True)
    assert model.module.unused.weight.grad is None


@distributed(world_size=2)
def test_join_of_models_that_take_no_part_has_no_effect():
    with mock.patch.object(ddp.logger, "warning") as warning, make_strategy().join([make_matrix()]):
        pass
    assert warning.call_args.args[-1] == ["Linear"]


@distributed(world_size=2)
def test_an_overflow_on_one_rank_skips_the_step_on_all():
    precision = build_precision("fp16", CPU, None, GradScalerKwargs(init_scale=8.0))
    strategy = make_strategy(precision=precision)
    inner = make_matrix().float()
    before = inner.weight.detach().clone()
    optimizer = torch.optim.SGD(inner.parameters(), lr=1.0)
    bundle = precision.convert(Bundle(models=[inner], optimizers=[optimizer]))
    model = strategy.wrap(bundle).models[0]
    factor = float("inf") if dist.get_rank() == 1 else 1.0
    strategy.backward(model(torch.ones(1, SIZE)).sum() * factor, accumulation=1, sync=True)
    assert not strategy.step(optimizer)
    assert precision.scaler.get_scale() == 4.0
    assert torch.equal(inner.weight, before)


@distributed(world_size=2)
def test_a_model_of_lower_precision_trains_in_step():
    precision = build_precision("bf16", CPU)
    strategy = make_strategy(precision=precision)
    inner = make_matrix().float()
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.01)
    bundle = precision.convert(Bundle(models=[inner], optimizers=[optimizer]))
    model = strategy.wrap(bundle).models[0]
    for _ in range(3):
        output = model(torch.randn(2, SIZE) + dist.get_rank())
        assert output.dtype is torch.float32
        strategy.backward(output.square().mean(), accumulation=1, sync=True)
        strategy.step(optimizer)
    everywhere = [torch.empty_like(inner.weight) for _ in range(2)]
    dist.all_gather(everywhere, inner.weight.detach())
    assert torch.equal(*everywhere)
    assert inner.weight.dtype is torch.float32
