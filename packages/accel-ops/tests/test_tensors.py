"""Tensors of modules by name, and those that are tied."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_ops.weights.tensors import (
    check_tied_parameters_in_config,
    find_tied_parameters,
    get_non_persistent_buffers,
    named_module_tensors,
    retie_parameters,
)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.body = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def test_tied_parameters_are_found_on_the_meta_device_too():
    for model in (Tied(), Tied().to("meta")):
        retie_parameters(model, [])
        model.head.weight = model.embed.weight
        assert find_tied_parameters(model) == [["embed.weight", "head.weight"]]
    assert find_tied_parameters(nn.Linear(2, 2)) == []


@pytest.mark.parametrize("loaded", ["embed", "head"])
def test_retying_takes_the_name_that_has_values(loaded):
    model = Tied().to("meta")
    values = torch.ones(5, 3)
    getattr(model, loaded).weight = nn.Parameter(values)
    retie_parameters(model, [["embed.weight", "head.weight"]])
    assert model.embed.weight is model.head.weight
    assert torch.equal(model.embed.weight, values)


def test_a_configuration_tells_whether_weights_should_be_tied():
    class Config:
        tie_word_embeddings = True

    model = Tied()
    model.config = Config()
    assert not check_tied_parameters_in_config(model)
    model.get_output_embeddings = lambda: model.head
    assert check_tied_parameters_in_config(model)
    Config.tie_word_embeddings = False
    assert not check_tied_parameters_in_config(model)


def test_module_tensors_come_by_name_parameters_first():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[0].register_buffer("cache", torch.zeros(1), persistent=False)
    names = [name for name, _ in named_module_tensors(model, recurse=True, remove_non_persistent=True)]
    assert names == [*list(model.state_dict())[:2], "1.weight", "1.bias", *list(model.state_dict())[2:5]]
    assert "0.cache" in dict(named_module_tensors(model, recurse=True))
    assert get_non_persistent_buffers(model, recurse=True, fqns=True) == {"0.cache"}
    assert get_non_persistent_buffers(model, recurse=True) == {"cache"}
    assert get_non_persistent_buffers(model) == set()
    assert dict(named_module_tensors(model)) == {}
