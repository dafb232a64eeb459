"""The private names of torch are there, and asking for the module of them imports no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from accel_state import torch_private


@pytest.mark.parametrize("name", sorted(torch_private.NAMES))
def test_every_name_is_in_this_torch(name: str) -> None:
    assert getattr(torch_private, name) is not None


def test_a_name_that_is_not_in_the_table_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'tree_walk'"):
        _ = torch_private.tree_walk


def test_the_module_imports_no_torch() -> None:
    code = "import sys, accel_state.torch_private; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_tables_of_a_module_are_its_own() -> None:
    layer = nn.BatchNorm1d(2)
    parameters, buffers, children = torch_private.tables_of(layer)
    assert parameters is torch_private.parameter_table(layer)
    assert [*parameters] == ["weight", "bias"]
    assert [*buffers] == ["running_mean", "running_var", "num_batches_tracked"]
    assert children == {}
    layer.register_buffer("cache", torch.zeros(1), persistent=False)
    assert torch_private.non_persistent_names(layer) == {"cache"}


def test_hooks_on_gradients_move_to_another_tensor_with_their_handles() -> None:
    old, new = (torch.ones(1, requires_grad=True) for _ in range(2))
    handle = old.register_hook(torch.neg)
    torch_private.set_gradient_hooks(new, torch_private.gradient_hooks(old))
    new.sum().backward()
    assert new.grad == -1
    handle.remove()
    new.sum().backward()
    assert new.grad == 0


def test_tensors_cut_within_the_guard_have_versions_of_their_own() -> None:
    guard = torch_private.not_views()
    with guard():
        first, second = torch.zeros(4).split(2)
    first.add_(1)
    assert (torch_private.version_of(first), torch_private.version_of(second)) == (1, 0)
