"""Muon with AdamW for the rest, in one process: torch's own updates, groups, state."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from accel_plugins.deepspeed.config import HfDeepSpeedConfig
from accel_plugins.deepspeed.strategy import check_request
from accel_plugins.optimizers.host_adamw import HostAdamW
from accel_plugins.optimizers.muon import Muon
from accel_plugins.precision import LossScaling
from accel_plugins.strategy import Bundle
from accel_state.errors import SettingsError

ADJUSTMENTS = [None, "original", "match_rms_adamw"]  # `spectral_unclamped` is newer than torch 2.9


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 4))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, 6, 4))


def step(model, optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


@pytest.mark.parametrize("adjust", ADJUSTMENTS)
@pytest.mark.parametrize("nesterov", [True, False])
def test_updates_are_bit_for_bit_those_of_torch(adjust, nesterov):
    options = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.2, "ns_steps": 3}
    options |= {"nesterov": nesterov, "adjust_lr_fn": adjust}
    ours, torchs = make_model(), make_model()
    optimizer = Muon(ours, **options, adamw={"lr": 0.01, "betas": (0.8, 0.9)})
    matrices = [torchs[1].weight, torchs[3].weight]
    rest = [p for p in torchs.parameters() if all(p is not matrix for matrix in matrices)]
    muon = torch.optim.Muon(matrices, **options)
    adamw = torch.optim.AdamW(rest, lr=0.01, betas=(0.8, 0.9))
    for seed in range(3):
        step(ours, optimizer, seed)
        step(torchs, muon, seed)
        adamw.step()
    for one, other in zip(ours.parameters(), torchs.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_stack_of_matrices_is_updated_matrix_by_matrix():
    experts = Experts()
    alone = [nn.Parameter(matrix.clone()) for matrix in experts.weight.detach()]
    optimizer, torchs = Muon(experts, lr=0.1), torch.optim.Muon(alone, lr=0.1)
    for seed in range(3):
        gradient = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(seed))
        experts.weight.grad = gradient
        for matrix, part in zip(alone, gradient, strict=True):
            matrix.grad = part
        optimizer.step()
        torchs.step()
    assert torch.equal(experts.weight, torch.stack([*alone]))


def test_a_model_is_split_by_what_its_parameters_are():
    model = nn.ModuleDict(
        {
            "embedding": nn.Embedding(5, 4),
            "conv": nn.Conv1d(4, 4, 3),
            "linear": nn.Linear(4, 4),
            "experts": Experts(),
            "head": nn.Linear(4, 5),
        }
    )
    model["experts"].bias = nn.Parameter(torch.zeros(3, 4))
    model["frozen"] = nn.Linear(4, 4).requires_grad_(False)
    optimizer = Muon(model, exclude=["head.*"])
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    split = {g["algorithm"]: [names[id(p)] for p in g["params"]] for g in optimizer.param_groups}
    assert split == {
        "muon": ["linear.weight", "experts.weight"],
        "adamw": [
            "embedding.weight",
            "conv.weight",
            "conv.bias",
            "linear.bias",
            "experts.bias",
            "head.weight",
            "head.bias",
        ],
    }


def test_scaled_losses_give_the_updates_of_plain_ones_and_an_overflow_gives_none():
    scaling = LossScaling(torch.amp.GradScaler("cpu", init_scale=2.0**10))
    model, other = make_model(), make_model()
    optimizer, plain = Muon(model), Muon(other)
    tokens = torch.arange(7)
    for step in range(3):
        scaling.scale(model(tokens).square().mean() * (float("inf") if step == 1 else 1)).backward()
        assert bool(scaling.step(optimizer)) == (step != 1)
        optimizer.zero_grad()
        if step != 1:
            other(tokens).square().mean().backward()
            plain.step()
            plain.zero_grad()
    for one, right in zip(model.parameters(), other.parameters(), strict=True):
        # The updates do not depend on the size of gradients; the moments do.
        key = "momentum_buffer" if "momentum_buffer" in plain.state[right] else "exp_avg"
        torch.testing.assert_close(optimizer.state[one][key], plain.state[right][key], rtol=1e-2, atol=1e-6)


def test_groups_are_split_by_dims_and_keep_their_options():
    model = make_model()
    optimizer = Muon(
        [
            {"params": model[1].parameters(), "lr": 0.5},
            {"params": model[3].parameters(), "algorithm": "adamw", "weight_decay": 0.0},
        ]
    )
    seen = [(g["algorithm"], g["lr"], g["weight_decay"], len(g["params"])) for g in optimizer.param_groups]
    assert seen == [("muon", 0.5, 0.1, 1), ("adamw", 0.5, 0.01, 1), ("adamw", 0.001, 0.0, 2)]


def test_what_cannot_be_is_refused():
    model = make_model()
    with pytest.raises(SettingsError, match=r"\['haed\.\*'\] match no trained parameter of Sequential"):
        Muon(model, exclude=["haed.*"])
    with pytest.raises(SettingsError, match="pass the model instead"):
        Muon(model.parameters(), exclude=["head.*"])
    with pytest.raises(SettingsError, match=r"shape \(10,\), which is not a matrix"):
        Muon([{"params": model[1].bias, "algorithm": "muon"}])
    with pytest.raises(SettingsError, match="'algorithm': 'sgd'"):
        Muon([{"params": model[1].bias, "algorithm": "sgd"}])
    with pytest.raises(ValueError, match="Learning rate"):
        Muon(model, lr=-1)
    with pytest.raises(TypeError, match="momentum"):
        Muon(model, adamw={"momentum": 0.9})


@pytest.mark.parametrize("copied", ["state dict", "deepcopy", "pickle"])
def test_training_goes_on_from_a_copy(copied):
    model = make_model()
    optimizer = Muon(model, lr=0.02)
    step(model, optimizer, 0)
    if copied == "pickle":
        again, other = pickle.loads(pickle.dumps((model, optimizer)))
    elif copied == "deepcopy":
        again, other = copy.deepcopy((model, optimizer))
    else:
        again = copy.deepcopy(model)
        other = Muon(again)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(model, optimizer, 1)
    step(again, other, 1)
    for one, same in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, same)
    extra = nn.Parameter(torch.zeros(2, 2))
    other.add_param_group({"params": [extra]})
    assert other.param_groups[-1]["algorithm"] == "muon"


def test_a_schedule_and_a_closure_work():
    model = make_model()
    optimizer = Muon(model, lr=0.1, adamw={"lr": 0.01})
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def closure():
        loss = model(torch.arange(7)).pow(2).sum()
        loss.backward()
        return loss

    before = model[1].weight.detach().clone()
    assert optimizer.step(closure) > 0
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.005]
    assert not torch.equal(model[1].weight, before)


@pytest.mark.parametrize("make", [Muon, HostAdamW])
def test_deepspeed_refuses_what_needs_parameters_as_they_are(make):
    model = make_model()
    bundle = Bundle(models=[model], optimizers=[make(model.parameters())])
    with pytest.raises(SettingsError, match="DeepSpeed steps flat partitions"):
        check_request(HfDeepSpeedConfig({}), bundle, trains=False)
