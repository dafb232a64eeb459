"""Regional compilation: what becomes a region, how often it is compiled, and that names stay."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from accel_ops.modules import (
    compile_regions,
    compile_regions_deepspeed,
    extract_model_from_parallel,
    has_compiled_regions,
    regions,
)

# torch's compiler looks at `.grad` of the inputs of a region, which are results of the region before.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        return self.norm(self.table(x))


class Model(nn.Module):
    def __init__(self, blocks=6):
        super().__init__()
        self.embedding = Embedding()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_repeated_blocks_and_the_larger_parts_around_them_are_regions():
    model = Model()
    assert regions(model) == [model.embedding, *model.blocks]
    sequential = nn.Sequential(nn.Linear(4, 4), Block(), Block())
    assert regions(sequential) == [*sequential][1:]
    nested = nn.ModuleDict({"layers": nn.ModuleList([nn.Sequential(Block(), Block()) for _ in range(2)])})
    assert regions(nested) == [*nested["layers"]], "the outermost repetition"


def test_a_model_without_repetition_is_one_region():
    for model in (nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), Embedding(), Block()):
        assert regions(model) == [model]


def test_blocks_are_compiled_once_for_all_of_them_whatever_is_done_with_the_model():
    model, counter = Model(), CompileCounter()
    compile_regions(model, backend=counter)
    tokens = torch.arange(3)
    model(tokens)
    assert counter.frame_count == 2, "the embedding and the first block"
    for training in (True, False):
        model.train(training)
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                model(tokens)
    assert counter.frame_count <= 2 * 2 * 2


def test_results_gradients_and_names_are_those_of_the_model():
    model = Model()
    plain = copy.deepcopy(model)
    assert compile_regions(model, backend="aot_eager") is model
    tokens = torch.tensor([[1, 4, 2]])
    for one in (model, plain):
        one(tokens).square().sum().backward()
    assert torch.allclose(model(tokens), plain(tokens))
    assert [*model.state_dict()] == [*plain.state_dict()]
    for (name, found), (right_name, right) in zip(
        model.named_parameters(), plain.named_parameters(), strict=True
    ):
        assert name == right_name
        assert torch.allclose(found.grad, right.grad, atol=1e-6)


def test_compiled_regions_are_distinguished_from_others():
    model = Model()
    assert not has_compiled_regions(model)
    compile_regions_deepspeed(model, backend="eager")
    assert has_compiled_regions(model)
    assert has_compiled_regions(nn.Sequential(torch.compile(nn.Linear(1, 1), backend="eager")))
    assert not has_compiled_regions(pickle.loads(pickle.dumps(model)))


def test_a_wrapper_around_compiled_regions_comes_off():
    model = compile_regions(Model(), backend="eager")
    wrapped = nn.DataParallel(model)
    for keep in (True, False):
        assert extract_model_from_parallel(wrapped, keep_torch_compile=keep) is model
