"""`AutoMicroBatch` finds micro-batches that fit, also where memory runs out on one rank alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import mse_loss

from accel_ops.tree import full_tensor
from accel_plugins.deepspeed.plugin import DeepSpeedPlugin
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.parallelism.config import ParallelismConfig
from accel_state.errors import SettingsError, UnsupportedError
from accel_train import Accelerator, AutoMicroBatch
from harness import distributed

ROWS, WIDTH, STEPS = 8, 6, 3
needs_reset = pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="this torch's FSDP2 cannot go on after an error"
)


class Narrow(torch.autograd.Function):
    """Return its input; raise the error of a device whose memory holds a number of rows."""

    @staticmethod
    def forward(ctx, inputs, forward_rows, backward_rows):
        ctx.rows = backward_rows
        _check(inputs, forward_rows)
        return inputs.clone()

    @staticmethod
    def backward(ctx, grad):
        _check(grad, ctx.rows)
        return grad, None, None


def _check(tensor, rows):
    if len(tensor) > rows:
        raise torch.OutOfMemoryError("CUDA out of memory.")


class Block(nn.Module):
    """A layer that runs out of memory with more than some rows."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.0)
        self.forward_rows = self.backward_rows = 10**6

    def forward(self, inputs):
        outputs = torch.tanh(self.linear(self.drop(inputs)))
        return Narrow.apply(outputs, self.forward_rows, self.backward_rows)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3)), nn.Linear(WIDTH, 2)).double()


def batch_of(step, ranks):
    generator = torch.Generator().manual_seed(step)
    sizes = {"x": WIDTH, "y": 2}
    return {
        name: torch.randn(ROWS * ranks, size, generator=generator).double() for name, size in sizes.items()
    }


def rows_of(accelerator, step):
    mine = slice(ROWS * accelerator.process_index, ROWS * (accelerator.process_index + 1))
    return {name: tensor[mine] for name, tensor in batch_of(step, accelerator.num_processes).items()}


def train_alone(ranks, steps=STEPS):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        batch = batch_of(step, ranks)
        loss = mse_loss(model(batch["x"]), batch["y"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def prepared(parallelism=None):
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=parallelism)
    model = make_model()
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))


def check_training(accelerator, model, optimizer, reduction="mean"):
    micro = AutoMicroBatch(accelerator, model)
    right, losses = train_alone(accelerator.num_processes)
    rows = ROWS if reduction == "sum" else 1

    def compute_loss(part):
        return mse_loss(model(part["x"]), part["y"]) * (len(part["x"]) / rows if reduction == "sum" else 1)

    for step in range(STEPS):
        loss = micro.backward(compute_loss, rows_of(accelerator, step), reduction=reduction)
        optimizer.step()
        optimizer.zero_grad()
        assert accelerator.reduce(loss, "mean").item() == pytest.approx(losses[step], rel=1e-12)
    for mine, theirs in zip(model.parameters(), right.parameters(), strict=True):
        torch.testing.assert_close(full_tensor(mine), theirs, rtol=1e-10, atol=1e-12)
    return micro


@needs_reset
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("layer", [0, 2])
@distributed(world_size=2)
def test_one_rank_runs_out_of_memory(direction, layer):
    accelerator, model, optimizer = prepared()
    if accelerator.process_index == 1:
        setattr(model[layer], f"{direction}_rows", 3)
    micro = check_training(accelerator, model, optimizer)
    assert micro.micro_batches == 4  # of two rows


@needs_reset
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@distributed(world_size=4)
def test_ranks_of_two_replicas_run_out_at_different_places(reduction):
    accelerator, model, optimizer = prepared(ParallelismConfig(dp_replicate_size=2, dp_shard_size=2))
    if accelerator.process_index == 0:
        model[1].backward_rows = 5
    if accelerator.process_index == 3:
        model[2].forward_rows = 1
    micro = check_training(accelerator, model, optimizer, reduction)
    assert micro.micro_batches == ROWS


@needs_reset
@distributed(world_size=2)
def test_memory_runs_out_late_in_a_batch_and_in_a_run():
    accelerator, model, optimizer = prepared()
    micro = AutoMicroBatch(accelerator, model, micro_batches=2)
    parts = []

    def compute_loss(part):
        parts.append(len(part["x"]))
        if accelerator.process_index == 0 and len(parts) == 6:  # the second part of the third batch
            raise MemoryError
        return mse_loss(model(part["x"]), part["y"])

    right, _ = train_alone(2)
    for step in range(STEPS):
        micro.backward(compute_loss, rows_of(accelerator, step))
        optimizer.step()
        optimizer.zero_grad()
    assert micro.micro_batches == 4
    assert parts == [1, 4, 4, 4, 4, 4, *([4] if accelerator.process_index else []), 2, 2, 2, 2]
    for mine, theirs in zip(model.parameters(), right.parameters(), strict=True):
        torch.testing.assert_close(full_tensor(mine), theirs, rtol=1e-10, atol=1e-12)


@needs_reset
@distributed(world_size=2)
def test_random_numbers_are_those_of_smaller_micro_batches_from_the_start():
    def gradients(start, rows):
        accelerator, model, _ = prepared()
        for block in model[:3]:
            block.drop.p = 0.5
        if accelerator.process_index == 0:
            model[2].forward_rows = rows
        micro = AutoMicroBatch(accelerator, model, micro_batches=start)
        torch.manual_seed(7)
        micro.backward(lambda part: mse_loss(model(part["x"]), part["y"]), rows_of(accelerator, 0))
        assert micro.micro_batches == 4
        return [full_tensor(parameter.grad) for parameter in model.parameters()]

    for one, other in zip(gradients(1, 2), gradients(4, ROWS), strict=True):
        assert torch.equal(one, other)


@needs_reset
@distributed(world_size=2)
def test_a_rank_with_fewer_samples_takes_part():
    accelerator, model, _ = prepared()
    micro = AutoMicroBatch(accelerator, model, micro_batches=4)
    batch = rows_of(accelerator, 0)
    if accelerator.process_index == 1:
        batch = {name: tensor[:3] for name, tensor in batch.items()}
    micro.backward(lambda part: mse_loss(model(part["x"]), part["y"]), batch)
    right = make_model()
    whole = batch_of(0, 2)
    for rows in (slice(0, ROWS), slice(ROWS, ROWS + 3)):
        (mse_loss(right(whole["x"][rows]), whole["y"][rows]) / 2).backward()
    for mine, theirs in zip(model.parameters(), right.parameters(), strict=True):
        torch.testing.assert_close(full_tensor(mine.grad), theirs.grad, rtol=1e-10, atol=1e-12)


@needs_reset
@distributed(world_size=2)
def test_too_little_memory_for_one_sample_ends_all_ranks():
    accelerator, model, _ = prepared()
    micro = AutoMicroBatch(accelerator, model)
    calls = []

    def compute_loss(part):
        calls.append(part)
        if accelerator.process_index == 1 and len(calls) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return mse_loss(model(part["x"]), part["y"])

    where = "this rank .CUDA out" if accelerator.process_index else "another rank"
    with pytest.raises(torch.OutOfMemoryError, match=f"{where}.*one sample"):
        micro.backward(compute_loss, rows_of(accelerator, 0))


@distributed(world_size=1)
def test_an_engine_with_gradients_of_its_own_is_refused_by_name():
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin())
    with pytest.raises(UnsupportedError, match=r"AutoMicroBatch\(\)"):
        AutoMicroBatch(accelerator, make_model())


def tensor_parallel(dp_shard_size):
    axes = ParallelismConfig(dp_shard_size=dp_shard_size, tp_size=2)
    accelerator = Accelerator(cpu=True, parallelism_config=axes)
    model = nn.Sequential()
    model.up, model.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    model.tp_plan = {"up": "colwise", "down": "rowwise"}
    return accelerator, accelerator.prepare(model)


@needs_reset
@distributed(world_size=2)
def test_what_cannot_be_joined_is_refused_by_name():
    with pytest.raises(UnsupportedError, match="only FSDP2"):
        AutoMicroBatch(*tensor_parallel(dp_shard_size=1))


@needs_reset
@distributed(world_size=4)
def test_activations_shared_between_ranks_are_refused_by_name():
    accelerator, model = tensor_parallel(dp_shard_size=2)
    micro = AutoMicroBatch(accelerator, model)
    with pytest.raises(UnsupportedError, match=r"communicates by `.*`, whose size depends on the samples"):
        micro.backward(lambda part: model(part).sum(), torch.ones(4, WIDTH))


def test_one_process_and_wrong_arguments():
    accelerator = Accelerator(cpu=True)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    model[1].forward_rows = 3
    assert check_training(accelerator, model, optimizer).micro_batches == 4
    micro = AutoMicroBatch(accelerator, model)
    next(model.parameters()).grad = torch.ones_like(next(model.parameters()))
    with pytest.raises(ValueError, match="without gradients"):
        micro.backward(lambda part: part.sum(), torch.ones(2))
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="not memory"):
        micro.backward(lambda part: _fail(), torch.ones(2))
    with pytest.raises(SettingsError, match="micro_batches=0"):
        AutoMicroBatch(accelerator, model, micro_batches=0)
    with pytest.raises(SettingsError, match="gradient_accumulation_steps=2"):
        AutoMicroBatch(Accelerator(cpu=True, gradient_accumulation_steps=2), model)


def _fail():
    raise RuntimeError("not memory")
