"""Unusual models, optimizers and hooks on several ranks: the numbers of one process, or a sentence."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode

from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.parallelism.config import ParallelismConfig
from accel_state.accelerator_state import AcceleratorState
from accel_state.errors import CheckpointWriteError, SettingsError, UnsupportedError
from accel_state.rng import set_seed
from accel_train import Accelerator
from harness import distributed

ROWS = torch.randn(12, 4, generator=torch.Generator().manual_seed(3))
SIZE_BASED = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 1}


def make_accelerator(strategy, *, mixed_precision=None, **plugin):
    options = {}
    if strategy.startswith("fsdp"):
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=int(strategy[-1]), **plugin)
    if strategy == "tp":
        options["parallelism_config"] = ParallelismConfig(tp_size=dist.get_world_size())
    return Accelerator(cpu=True, mixed_precision=mixed_precision, **options)


def make_model(hidden=6):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 2))
    model.tp_plan = {"0": "colwise", "2": "rowwise"}
    return model


def rows_of(accelerator, rows=ROWS):
    """This rank's rows: all of them where ranks share batches."""
    sharding = accelerator._parts.strategy.sharding
    return rows.chunk(sharding.num_shards)[sharding.shard_index]


def loss_of(model, rows):
    return model(rows).square().mean()


def full_state(accelerator, model):
    return accelerator._parts.strategy.states.full_state_dict(model)


def train(accelerator, model, optimizer, *, steps=3, loss=loss_of):
    rows = rows_of(accelerator)
    for _ in range(steps):
        optimizer.zero_grad()
        accelerator.backward(loss(model, rows))
        optimizer.step()
    return full_state(accelerator, model)


def train_alone(model, optimizer, *, steps=3, loss=loss_of):
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model, ROWS).backward()
        optimizer.step()
    return model.state_dict()


def assert_close(actual, expected, tolerance=1e-6):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@distributed(world_size=2)
def test_clipping_counts_all_models_and_what_belongs_to_none(norm_type):
    accelerator = make_accelerator("fsdp2")
    models, alone = ([make_model(), make_model(hidden=5)] for _ in range(2))
    extra, extra_alone = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*models[0].parameters(), *models[1].parameters()], lr=0.1)
    first, second, optimizer = accelerator.prepare(*models, optimizer)
    rows = rows_of(accelerator)
    accelerator.backward(loss_of(first, rows) + 9 * loss_of(second, rows))
    (loss_of(alone[0], ROWS) + 9 * loss_of(alone[1], ROWS)).backward()
    extra.grad, extra_alone.grad = torch.ones(3), torch.ones(3)
    norm = accelerator.clip_grad_norm_([*second.parameters(), extra, *first.parameters()], 0.1, norm_type)
    every = [*alone[1].parameters(), extra_alone, *alone[0].parameters()]
    assert norm.item() == pytest.approx(nn.utils.clip_grad_norm_(every, 0.1, norm_type).item(), rel=1e-5)
    optimizer.step()
    torch.optim.SGD([p for p in every if p is not extra_alone], lr=0.1).step()
    for model, expected in zip((first, second), alone, strict=True):
        assert_close(full_state(accelerator, model), expected.state_dict())
    torch.testing.assert_close(extra.grad, extra_alone.grad)


@distributed(world_size=2)
def test_fsdp1_clips_one_model_at_a_time_and_saves_an_optimizer_of_one(tmp_path):
    accelerator = make_accelerator("fsdp1")
    models = [make_model(), make_model(hidden=5)]
    [optimizer] = together(*models)
    *models, optimizer = accelerator.prepare(*models, optimizer)
    accelerator.backward(sum(loss_of(model, rows_of(accelerator)) for model in models))
    with pytest.raises(SettingsError, match=r"and 4 others. FSDP1 computes the norm of one"):
        accelerator.clip_grad_norm_([p for model in models for p in model.parameters()], 0.1)
    norms = [accelerator.clip_grad_norm_(model.parameters(), 0.1).item() for model in models]
    alone = [make_model(), make_model(hidden=5)]
    sum(loss_of(model, ROWS) for model in alone).backward()
    expected = [nn.utils.clip_grad_norm_(model.parameters(), 0.1).item() for model in alone]
    assert norms == pytest.approx(expected, rel=1e-5)
    with pytest.raises(CheckpointWriteError, match="AdamW trains 2 models, and torch gathers from FSDP1"):
        accelerator.save_state(tmp_path)


@distributed(world_size=3)
def test_a_rank_without_gradients_clips_values():
    accelerator = make_accelerator("fsdp1")
    model, alone = (nn.Linear(4, 1, bias=False) for _ in range(2))
    for each in (model, alone):
        nn.init.ones_(each.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(loss_of(model, rows_of(accelerator)))
    accelerator.clip_grad_value_(model.parameters(), 0.5)
    optimizer.step()
    loss_of(alone, ROWS).backward()
    nn.utils.clip_grad_value_(alone.parameters(), 0.5)
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    assert_close(full_state(accelerator, model), alone.state_dict())


@pytest.mark.parametrize("strategy", ["fsdp2", "tp"])
@distributed(world_size=2)
def test_a_prepared_model_can_be_moved_and_cast(strategy):
    accelerator = make_accelerator(strategy)
    model, alone = make_model(), make_model().double()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert model.to("cpu").to(torch.float64) is model
    rows = ROWS.double()
    accelerator.backward(loss_of(model, rows_of(accelerator, rows)))
    optimizer.step()
    loss_of(alone, rows).backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    assert_close(full_state(accelerator, model), alone.state_dict(), tolerance=1e-12)


@distributed(world_size=4)
def test_ranks_of_a_tensor_parallel_group_draw_the_same_numbers():
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(dp_replicate_size=2, tp_size=2))
    set_seed(7, device_specific=True)
    numbers = accelerator.gather(torch.rand(4)[None])
    assert torch.equal(numbers[0], numbers[1])
    assert torch.equal(numbers[2], numbers[3])
    assert not torch.equal(numbers[0], numbers[2])


class Gathers(TorchDispatchMode):
    """Records the collectives by which DTensors are gathered."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if str(function).startswith("_c10d_functional.all_gather"):
            self.calls.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"dp_shard_size": 2, "tp_size": 2}])
@distributed(world_size=4)
def test_layers_that_parallelize_module_has_sharded_are_not_gathered(sizes):
    if len(sizes) == 1:
        sizes = {"dp_replicate_size": 2, **sizes}
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes))
    mesh = accelerator.torch_device_mesh["tp"]
    model, alone = make_model(), make_model()
    if accelerator.process_index > 1:  # only the values of the first replica count
        nn.init.ones_(model[0].weight)
        nn.init.ones_(model[0].bias)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    with Gathers() as gathers:
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert not gathers.calls
    with warnings.catch_warnings():  # tensor-parallel layers return views; nothing changes them in place here
        warnings.filterwarnings("ignore", message=".*returned a view tensor")
        trained = train(accelerator, model, optimizer)
    assert_close(trained, train_alone(alone, torch.optim.SGD(alone.parameters(), lr=0.1)))


@distributed(world_size=2)
def test_partial_gradients_are_clipped_by_their_sum():
    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
        model.tp_plan = {"0": "sequence_parallel", "1": "colwise", "3": "rowwise"}
        return model

    rows = ROWS[None]  # sequences are sharded within the norm
    alone = make()
    (9 * loss_of(alone, rows)).backward()
    limit = alone[0].weight.grad.abs().median().item()
    nn.utils.clip_grad_value_(alone.parameters(), limit)
    accelerator = make_accelerator("tp")
    model = accelerator.prepare(make())
    accelerator.backward(9 * loss_of(model, rows))
    assert any(placement.is_partial() for placement in model[0].weight.grad.placements)
    accelerator.clip_grad_value_(model.parameters(), limit)
    for own, plain in zip(model.parameters(), alone.parameters(), strict=True):
        gradient = own.grad.full_tensor() if isinstance(own.grad, DTensor) else own.grad
        torch.testing.assert_close(gradient, plain.grad)


def double(parameter):
    parameter.grad.mul_(2)


@pytest.mark.parametrize("strategy", ["fsdp2", "tp"])
@distributed(world_size=2)
def test_hooks_on_parameters_are_called_and_can_be_removed(strategy):
    model, alone = make_model(), make_model()
    for each in (model, alone):
        each[0].weight.register_post_accumulate_grad_hook(double)
        if strategy == "tp":  # which computes with the parameters themselves
            each[0].bias.register_hook(lambda gradient: gradient * 3)
            each[2].bias.register_hook(lambda gradient: gradient * 3)
    handle = model[2].weight.register_post_accumulate_grad_hook(double)
    accelerator = make_accelerator(strategy)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    handle.remove()
    trained = train(accelerator, model, optimizer)
    assert_close(trained, train_alone(alone, torch.optim.SGD(alone.parameters(), lr=0.1)))


@pytest.mark.parametrize(
    ("strategy", "method"),
    [
        ("fsdp1", "register_hook"),
        ("fsdp1", "register_post_accumulate_grad_hook"),
        ("fsdp2", "register_hook"),
    ],
)
@distributed(world_size=2)
def test_hooks_that_would_never_be_called_are_refused_by_their_parameter(strategy, method):
    model = make_model()
    handle = getattr(model[2].bias, method)(double)
    accelerator = make_accelerator(strategy)
    with pytest.raises(SettingsError, match=rf"'2.bias' has a hook \({method}\), which FSDP. would never"):
        accelerator.prepare(model)
    handle.remove()
    accelerator.prepare(model)


@distributed(world_size=2)
def test_optimizers_that_mix_elements_are_refused_where_shards_are_flat():
    accelerator = make_accelerator("fsdp1")
    for make in (torch.optim.LBFGS, torch.optim.Adafactor):
        model = make_model()
        with pytest.raises(SettingsError, match=rf"{make.__name__} computes the update of an element from"):
            accelerator.prepare(model, make(model.parameters()))
    model, alone = make_model(), make_model()
    accelerator = make_accelerator("fsdp1", sharding_strategy="NO_SHARD")
    model, optimizer = accelerator.prepare(model, torch.optim.Adafactor(model.parameters()))
    trained = train(accelerator, model, optimizer)
    assert_close(trained, train_alone(alone, torch.optim.Adafactor(alone.parameters())))


@pytest.mark.parametrize("order", ["together", "model first", "optimizer made last"])
@pytest.mark.parametrize("make", [torch.optim.Adagrad, torch.optim.AdamW])
@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2", "tp"])
@distributed(world_size=2)
def test_state_from_before_prepare_is_sharded(strategy, make, order):
    model = make_model(hidden=6 if strategy == "tp" else 5)
    alone = copy.deepcopy(model)
    optimizer, expected = (make(each.parameters(), lr=0.1) for each in (model, alone))
    if order != "optimizer made last":
        for each, stepped in ((model, optimizer), (alone, expected)):
            loss_of(each, ROWS).backward()
            stepped.step()
    accelerator = make_accelerator(strategy)
    if order == "together":
        model, optimizer = accelerator.prepare(model, optimizer)
    else:
        model = accelerator.prepare(model)
        if order == "optimizer made last":
            optimizer = make(model.parameters(), lr=0.1)
        optimizer = accelerator.prepare(optimizer)
    assert_close(train(accelerator, model, optimizer), train_alone(alone, expected), tolerance=1e-5)


@distributed(world_size=2)
def test_state_from_before_prepare_is_refused_where_parameters_become_one():
    accelerator = make_accelerator("fsdp1", use_orig_params=False, **SIZE_BASED)
    model = make_model()
    early = torch.optim.Adagrad(model.parameters(), lr=0.1)
    text = r"Adagrad has state for parameters that FSDP1 flattens.*use_orig_params=True"
    with pytest.raises(SettingsError, match=text):
        accelerator.prepare(model, early)
    model = accelerator.prepare(model)
    with pytest.raises(SettingsError, match=text):
        accelerator.prepare(early)
    alone = make_model()
    optimizer = accelerator.prepare(torch.optim.Adagrad(model.parameters(), lr=0.1))
    expected = torch.optim.Adagrad(alone.parameters(), lr=0.1)
    assert_close(train(accelerator, model, optimizer), train_alone(alone, expected))


@pytest.mark.parametrize("order", ["together", "model first"])
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_a_model_that_was_compiled_before_is_trained_and_saved_by_fsdp1(tmp_path, use_orig_params, order):
    accelerator = make_accelerator("fsdp1", use_orig_params=use_orig_params, **SIZE_BASED)
    model, alone = make_model(), make_model()
    optimizer, expected = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, alone))
    compiled = torch.compile(model, backend="eager")
    if order == "together":
        prepared, optimizer = accelerator.prepare(compiled, optimizer)
    else:
        prepared = accelerator.prepare(compiled)
        optimizer = accelerator.prepare(optimizer)
    train(accelerator, prepared, optimizer)
    accelerator.save_state(tmp_path)
    train(accelerator, prepared, optimizer)
    accelerator.load_state(tmp_path)
    assert_close(full_state(accelerator, prepared), train_alone(alone, expected), tolerance=1e-5)
    assert_close(train(accelerator, prepared, optimizer), train_alone(alone, expected), tolerance=1e-5)
    torch._dynamo.reset()


class Shared(nn.Module):
    """Calls one module by two names, of which the first is outside of the block that has the second."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), self.first)

    def forward(self, x):
        return self.block(self.first(x))


class Tied(nn.Module):
    """Uses one weight in two blocks."""

    def __init__(self):
        super().__init__()
        self.embed, self.middle, self.head = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(torch.tanh(self.middle(self.embed(x))))


class Attention(nn.Module):
    """Has layers that use the weights of submodules without calling them, in evaluation alone or always."""

    def __init__(self):
        super().__init__()
        self.encode = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
        )
        self.attend, self.out = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 4)

    def forward(self, x):
        x = self.encode(x[:, None] * torch.ones(3, 1))
        return self.out(self.attend(x, x, x, need_weights=False)[0])


class Containers(nn.Module):
    """Uses parameters that are in modules without a forward."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterDict({"in": torch.randn(4, 4), "out": torch.randn(4, 3)})
        self.biases = nn.ParameterList([torch.randn(4), torch.randn(3)])
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        x = torch.tanh(self.linear(x @ self.weights["in"] + self.biases[0]))
        return x @ self.weights["out"] + self.biases[1]


LINEAR_BY_LINEAR = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Linear"]}


@pytest.mark.parametrize("kind", [Shared, Tied, Attention, Containers])
@pytest.mark.parametrize(
    "plugin", [SIZE_BASED, SIZE_BASED | {"activation_checkpointing": True}, LINEAR_BY_LINEAR]
)
@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
@distributed(world_size=2)
def test_parameters_used_outside_of_their_module_train_and_evaluate(strategy, plugin, kind):
    torch.manual_seed(0)
    model = kind()
    alone = copy.deepcopy(model)
    accelerator = make_accelerator(strategy, **plugin)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    expected = torch.optim.SGD(alone.parameters(), lr=0.1)
    warnings.filterwarnings("ignore", message=".*returned a view tensor")  # of the attention, by FSDP2
    for _ in range(2):
        trained = train(accelerator, model, optimizer, steps=2)
        assert_close(trained, train_alone(alone, expected, steps=2))
        model.eval(), alone.eval()
        with torch.no_grad():
            torch.testing.assert_close(model(ROWS), alone(ROWS), rtol=0, atol=1e-6)
        model.train(), alone.train()


@pytest.mark.parametrize("plugin", [{}, SIZE_BASED])
@distributed(world_size=2)
def test_running_statistics_are_computed_as_under_ddp_in_bfloat16(plugin):
    states = []
    for strategy, options in (("ddp", {}), ("fsdp2", plugin)):
        AcceleratorState._reset_state(True)
        accelerator = make_accelerator(strategy, mixed_precision="bf16", **options)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        states.append(train(accelerator, model, optimizer))
    if accelerator.is_main_process:  # whose statistics count
        assert_close(states[1], states[0])


class WithParameter(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.linear, self.extra = (
            nn.Linear(4, 2),
            nn.Parameter(value, requires_grad=value.dtype != torch.int64),
        )


SEVERAL = "has trained parameters of several dtypes in one block: 'extra' in torch."


@pytest.mark.parametrize(
    ("strategy", "shape", "dtype", "text"),
    [
        ("fsdp2", (0, 4), torch.float32, r"'extra' of shape \(0, 4\) has no dim or no elements"),
        ("fsdp2", (2, 2), torch.complex64, SEVERAL + "complex64"),
        ("fsdp2", (2, 2), torch.float64, SEVERAL + "float64"),
        ("fsdp1", (), torch.float32, "scalar parameters. Change extra"),
    ],
)
@distributed(world_size=2)
def test_parameters_that_cannot_be_sharded_are_named(strategy, shape, dtype, text):
    accelerator = make_accelerator(strategy)
    with pytest.raises(ValueError, match=text):
        accelerator.prepare(WithParameter(torch.ones(shape, dtype=dtype)))


@distributed(world_size=2)
def test_a_frozen_parameter_may_have_another_dtype_and_16_bits_become_32():
    for precision, dtype, trained in (("no", torch.bfloat16, False), ("bf16", torch.bfloat16, True)):
        AcceleratorState._reset_state(True)
        model = WithParameter(torch.ones(2, 2, dtype=dtype))
        model.extra.requires_grad_(trained)
        model = make_accelerator("fsdp2", mixed_precision=precision).prepare(model)
        assert model.extra.dtype == (torch.float32 if trained else dtype)


def search(accelerator, model, rows, make=torch.optim.LBFGS):
    """Two steps of an optimizer that calls the model several times a step."""
    optimizer = make(model.parameters(), lr=0.1, max_iter=3)
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, rows)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return model


class Normalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm = make_model(), nn.LayerNorm(2)
        self.tp_plan = {"body.0": "colwise", "body.2": "rowwise"}

    def forward(self, x):
        return self.norm(self.body(x))


@distributed(world_size=2)
def test_optimizers_work_on_dtensors_or_say_what_torch_lacks():
    accelerator = make_accelerator("tp")
    found = full_state(accelerator, search(accelerator, make_model(), ROWS))
    assert_close(found, search(None, make_model(), ROWS).state_dict())
    with pytest.raises(UnsupportedError, match=r"LBFGS cannot step on sharded parameters: aten\.cat"):
        search(accelerator, Normalized(), ROWS)
    AcceleratorState._reset_state(True)
    accelerator = make_accelerator("fsdp2")
    with pytest.raises(UnsupportedError, match="LBFGS cannot step on sharded parameters: Cannot flatten"):
        search(accelerator, make_model(hidden=5), ROWS)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.Adafactor(model.parameters()))
    with pytest.raises(UnsupportedError, match="Adafactor cannot step on sharded parameters: aten"):
        train(accelerator, model, optimizer)


@distributed(world_size=2)
def test_8_bit_optimizers_say_which_states_cannot_be_sharded_or_saved(tmp_path):
    Adam8bit = pytest.importorskip("bitsandbytes").optim.Adam8bit  # noqa: N806 - a class

    accelerator = make_accelerator("fsdp2")
    model = make_model()
    model, optimizer = accelerator.prepare(model, Adam8bit(model.parameters()))
    with pytest.raises(
        UnsupportedError, match="Adam8bit cannot step on sharded parameters: Operator bitsand"
    ):
        train(accelerator, model, optimizer)
    AcceleratorState._reset_state(True)
    accelerator = make_accelerator("fsdp1")
    model, alone = make_model(), make_model()
    model, optimizer = accelerator.prepare(model, Adam8bit(model.parameters()))
    assert_close(train(accelerator, model, optimizer), train_alone(alone, Adam8bit(alone.parameters())))
    with pytest.raises(CheckpointWriteError, match="Adam8bit keeps '__bnb_optimizer_quant_state__' for this"):
        accelerator.save_state(tmp_path / "state")
    accelerator.save_model(model, tmp_path / "model")


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
@distributed(world_size=2)
def test_an_average_made_before_prepare_follows_the_model(strategy):
    update = get_ema_multi_avg_fn(0.9)
    model, alone = make_model(), make_model()
    average, expected = (AveragedModel(each, multi_avg_fn=update) for each in (model, alone))
    accelerator = make_accelerator(strategy)
    optimizer, plain = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone))
    model, average, optimizer = accelerator.prepare(model, average, optimizer)
    for _ in range(3):
        train(accelerator, model, optimizer, steps=1)
        average.update_parameters(model)
        train_alone(alone, plain, steps=1)
        expected.update_parameters(alone)
    assert_close(full_state(accelerator, average), expected.state_dict())
    torch.testing.assert_close(average(ROWS), expected(ROWS))
    if strategy == "fsdp2":
        for copied in (copy.deepcopy, AveragedModel):
            with pytest.raises(UnsupportedError, match=r"is sharded by FSDP2 and cannot be copied\. Make"):
                copied(accelerator.unwrap_model(model))


@pytest.mark.parametrize("blocks", [None, ["GPT2Block"]])
@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
@distributed(world_size=2)
def test_an_unwrapped_model_generates(strategy, blocks):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 20, "n_positions": 32}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=1)).eval()
    tokens = torch.tensor([[3, 4, 5 + dist.get_rank()]])
    options = {"max_new_tokens": 4 + 2 * dist.get_rank(), "do_sample": False, "pad_token_id": 1}
    expected = copy.deepcopy(model).generate(tokens, **options)
    plugin = blocks and {
        "auto_wrap_policy": "transformer_based_wrap",
        "transformer_cls_names_to_wrap": blocks,
    }
    accelerator = make_accelerator(strategy, **plugin or {})
    model = accelerator.prepare(model)
    for each in (accelerator.unwrap_model(model), model):
        assert torch.equal(each.generate(tokens, **options), expected)


def by_kind(model):
    """Two optimizers, each of a part of every block's parameters."""
    weights, biases = ([p for p in model.parameters() if (p.ndim == 2) is matrix] for matrix in (True, False))
    return [torch.optim.AdamW(weights, lr=0.01, eps=1e-3), torch.optim.Adagrad(biases, lr=0.1)]


def together(first, second):
    groups = [{"params": [*first.parameters()]}, {"params": [*second.parameters()], "lr": 0.02}]
    return [torch.optim.AdamW(groups, lr=0.01, eps=1e-3)]


@distributed(world_size=2)
def test_an_optimizer_of_a_part_of_a_flat_parameter_is_refused():
    text = r"has 2 of the 4 parameters of one block, of which FSDP1 makes one flat.*use_orig_params=True"
    for order in ("together", "model first"):
        AcceleratorState._reset_state(True)
        accelerator = make_accelerator("fsdp1", use_orig_params=False)
        model = make_model()
        weights = torch.optim.SGD([model[0].weight, model[2].weight], lr=0.1)
        biases = torch.optim.SGD([model[0].bias, model[2].bias], lr=0.1)
        objects = [weights, biases]
        if order == "together":
            objects.insert(0, model)
        else:
            model = accelerator.prepare(model)
        with pytest.raises(SettingsError, match=text):
            accelerator.prepare(*objects)


PLUGINS = [
    {"state_dict_type": "FULL_STATE_DICT"},
    {"state_dict_type": "SHARDED_STATE_DICT", **SIZE_BASED},
]


@pytest.mark.parametrize("plugin", PLUGINS, ids=["full", "sharded"])
@pytest.mark.parametrize(("strategy", "make"), [("fsdp1", by_kind), ("fsdp2", by_kind), ("fsdp2", together)])
@distributed(world_size=3)
def test_several_models_or_optimizers_go_on_from_a_checkpoint(strategy, make, plugin, tmp_path):
    sizes = [5] if make is by_kind else [5, 7]
    alone = [make_model(size) for size in sizes]
    expected = make(*alone)

    def prepare():
        AcceleratorState._reset_state(True)
        accelerator = make_accelerator(strategy, **plugin)
        models = [make_model(size) for size in sizes]
        objects = accelerator.prepare(*models, *make(*models))
        return accelerator, objects[: len(sizes)], objects[len(sizes) :]

    def step(models, optimizers, rows):
        sum(loss_of(model, rows) for model in models).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    accelerator, models, optimizers = prepare()
    for _ in range(2):
        step(models, optimizers, rows_of(accelerator))
        step(alone, expected, ROWS)
    accelerator.save_state(tmp_path / "state")
    accelerator, models, optimizers = prepare()
    accelerator.load_state(tmp_path / "state")
    step(models, optimizers, rows_of(accelerator))
    step(alone, expected, ROWS)
    for model, plain in zip(models, alone, strict=True):
        assert_close(full_state(accelerator, model), plain.state_dict())
