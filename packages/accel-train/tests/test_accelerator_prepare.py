"""Sorting the arguments of `prepare`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_plugins.optimizer import AcceleratedOptimizer, AcceleratedScheduler
from accel_train.accelerator import Accelerator
from accel_train.accelerator.prepare import kind_of, sort_arguments


def make(kind):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "models": lambda: model,
        "optimizers": lambda: optimizer,
        "schedulers": lambda: torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "dataloaders": lambda: torch.utils.data.DataLoader([1, 2]),
        "others": object,
    }[kind]()


KINDS = ["models", "optimizers", "schedulers", "dataloaders", "others"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_known_by_its_type(kind):
    assert kind_of(make(kind)) == kind


@given(st.lists(st.sampled_from(KINDS), max_size=12))
def test_any_order_and_number_comes_back_as_given(kinds):
    arguments = [make(kind) for kind in kinds]
    bundle, placements = sort_arguments(arguments, device_placement=None, default=True)
    assert all(a is b for a, b in zip(bundle.in_order(), arguments, strict=True))
    for kind in KINDS:
        assert len(getattr(bundle, kind)) == kinds.count(kind)
    assert len(placements["models"]) == len(bundle.models)


def test_placements_are_sorted_with_their_arguments():
    arguments = [make(kind) for kind in ("dataloaders", "models", "others", "models", "optimizers")]
    bundle, placements = sort_arguments(
        arguments, device_placement=[False, None, None, False, True], default=True
    )
    assert placements["models"] == bundle.placements == [True, False]
    assert placements["dataloaders"] == [False]
    assert placements["optimizers"] == [True]


def test_a_list_of_placements_of_another_length_is_refused():
    with pytest.raises(ValueError, match=r"device_placement=\[True\] has 1 entries for the 2 arguments"):
        sort_arguments([make("models"), make("others")], device_placement=[True], default=True)


def test_what_was_prepared_before_passes_through():
    model, optimizer = make("models"), AcceleratedOptimizer(make("optimizers"))
    bundle, _ = sort_arguments(
        [model, optimizer], device_placement=None, default=True, prepared=[model, optimizer]
    )
    assert bundle.others == [model, optimizer]
    assert not bundle.models


def test_wrappers_of_another_accelerator_are_taken_off():
    optimizer = AcceleratedOptimizer(make("optimizers"))
    scheduler = AcceleratedScheduler(make("schedulers"), optimizer)
    bundle, _ = sort_arguments([optimizer, scheduler], device_placement=None, default=True)
    assert bundle.optimizers == [optimizer.optimizer]
    assert bundle.schedulers == [scheduler.scheduler]


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("prepare_model", "models"),
        ("prepare_optimizer", "optimizers"),
        ("prepare_data_loader", "dataloaders"),
    ],
)
def test_one_object_of_another_kind_is_refused(method, kind):
    with pytest.raises(TypeError, match=f"'a text' cannot be prepared as one of the {kind}"):
        getattr(Accelerator(cpu=True), method)("a text")


def test_any_object_may_be_a_scheduler():
    schedule = SimpleNamespace(step=lambda: None)
    assert Accelerator(cpu=True).prepare_scheduler(schedule).scheduler is schedule


def test_what_is_prepared_is_marked_for_libraries_that_ask():
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = torch.utils.data.DataLoader([1, 2])
    for prepared in Accelerator(cpu=True).prepare(model, optimizer, scheduler, loader):
        assert prepared._is_accelerate_prepared is True
