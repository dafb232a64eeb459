"""Meta models: parameters on the meta device, ties kept, no compiler."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from torch import nn

from accel_bigmodel import init_empty_weights, init_on_device


def test_parameters_are_empty_and_buffers_are_real():
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(model[1].running_var, torch.ones(4))
    assert model[0].weight.requires_grad
    assert not nn.Linear(2, 2).weight.is_meta


def test_buffers_are_empty_too_when_asked():
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("outside", OUTSIDE)
            self.register_buffer("inside", torch.arange(3))

    with init_empty_weights(include_buffers=True):
        model = nn.Sequential(nn.BatchNorm1d(4), Module())
    assert all(buffer.is_meta for buffer in model.buffers())


OUTSIDE = torch.zeros(2)


def test_weights_land_on_the_named_device():
    with init_on_device("meta"):
        assert nn.Linear(2, 2).weight.is_meta
    with init_on_device(torch.device("cpu")):
        layer = nn.Linear(2, 2)
    assert layer.weight.std() > 0


def test_a_parameter_registered_twice_stays_tied():
    with init_empty_weights():
        shared = nn.Parameter(torch.ones(3))
        model = nn.Module()
        model.a, model.b = nn.Module(), nn.Module()
        model.a.weight = shared
        model.b.weight = shared
        first, second = nn.Linear(3, 3), nn.Linear(3, 3)
        second.weight = first.weight
    assert model.a.weight is model.b.weight
    assert model.a.weight.is_meta
    assert first.weight is second.weight


def test_a_parameter_class_keeps_its_attributes():
    class Tagged(nn.Parameter):
        def __new__(cls, data, requires_grad=True, tag=None):
            made = torch.Tensor._make_subclass(cls, data, requires_grad)
            made.tag = tag
            return made

    with init_empty_weights():
        model = nn.Module()
        model.weight = Tagged(torch.ones(2), requires_grad=False, tag="mine")
    assert type(model.weight) is Tagged
    assert (model.weight.tag, model.weight.is_meta, model.weight.requires_grad) == ("mine", True, False)


def test_another_thread_builds_real_models_meanwhile():
    made = []
    with init_empty_weights():
        thread = threading.Thread(target=lambda: made.append(nn.Linear(3, 3)))
        thread.start()
        thread.join()
    assert not made[0].weight.is_meta
    assert made[0].weight.std() > 0


def test_fills_of_real_tensors_still_happen():
    with init_empty_weights():
        real = torch.empty(1000)
        nn.init.normal_(real)
        other = nn.init.orthogonal_(torch.empty(4, 4))
        filled = torch.empty(3).fill_(2)
    assert 0.5 < real.std() < 2
    assert torch.allclose(other @ other.T, torch.eye(4), atol=1e-5)
    assert torch.equal(filled, torch.full((3,), 2.0))


def test_everything_is_as_before_after_an_error():
    originals = {name: getattr(nn.init, name) for name in ("orthogonal_", "eye_")}
    with pytest.raises(RuntimeError, match="on purpose"), init_empty_weights():
        raise RuntimeError("on purpose")
    assert originals == {name: getattr(nn.init, name) for name in originals}
    assert not nn.Linear(2, 2).weight.is_meta


def test_a_meta_model_imports_nothing_of_the_compiler():
    program = """
        import sys
        import torch
        from torch import nn

        before = set(sys.modules)
        from accel_bigmodel.empty import init_empty_weights

        for include_buffers in (False, True):
            with init_empty_weights(include_buffers=include_buffers):
                model = nn.Sequential(
                    nn.TransformerEncoderLayer(16, 2), nn.LSTM(4, 4), nn.Conv2d(2, 2, 3), nn.Embedding(3, 3)
                )
                for name, fill in list(vars(nn.init).items()):
                    if name.endswith("_") and not name.startswith("_"):
                        extra = {"constant_": (1.0,), "sparse_": (0.1,)}.get(name, ())
                        fill(model[2].weight if name == "dirac_" else nn.Linear(4, 4).weight, *extra)
                weight = model[3].weight
                weight.data.normal_(0.0, 0.02)
                weight.data.uniform_()
                weight.data[1].zero_()
                with torch.no_grad():
                    weight.random_().exponential_().geometric_(0.5).cauchy_().log_normal_().bernoulli_()
                    weight.mul_(2).add_(1).clamp_(0, 1).copy_(torch.ones(3, 3))
            new = {".".join(name.split(".")[:2]) for name in set(sys.modules) - before}
            assert "sympy" not in sys.modules, ("sympy", include_buffers)
            assert not new & {"torch._dynamo", "torch._inductor", "torch.fx"}, (new, include_buffers)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_attributes_of_a_parameter_come_with_it_to_the_meta_device():
    class Marked(nn.Module):
        def __init__(self):
            super().__init__()
            weight = nn.Parameter(torch.ones(2))
            weight.no_weight_decay = True
            self.weight = weight

    with init_empty_weights():
        model = Marked()
    assert model.weight.is_meta
    assert model.weight.no_weight_decay is True


@pytest.mark.parametrize("include_buffers", [False, True])
def test_lazy_modules_stay_uninitialised_until_their_first_forward(include_buffers):
    with init_empty_weights(include_buffers=include_buffers):
        model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.Linear(3, 2))
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to("meta")(torch.empty(4, 5, device="meta"))
    assert [tuple(p.shape) for p in model.parameters()] == [(3, 5), (3,), (3,), (3,), (2, 3), (2,)]
    assert all(parameter.is_meta for parameter in model.parameters())
