"""Our own implementations pass the public suites, and broken ones do not."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from accel_plugins.precision import build_precision
from accel_plugins.strategy import Strategy
from accel_plugins.testing import (
    STRATEGY_CHECKS,
    ConformanceError,
    StrategySubject,
    check_strategy,
)
from accel_state.runtime import Runtime

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from accel_plugins.strategy import Bundle

CPU = torch.device("cpu")


def make_single() -> Strategy:
    return make(Strategy)


def make(kind: type[Strategy]) -> Strategy:
    return kind(cast("Any", None), Runtime(), build_precision("no", CPU), {})


def subject(directory: Path, make: Callable[[], Strategy] = make_single) -> StrategySubject:
    return StrategySubject(make=make, runtime=Runtime(), directory=directory)


@pytest.mark.parametrize("name", STRATEGY_CHECKS)
def test_one_process_conforms(name: str, tmp_path: Path):
    STRATEGY_CHECKS[name](subject(tmp_path))


class Forgetful(Strategy):
    def backward(self, loss: Any, *, accumulation: int, sync: bool, **kwargs: Any) -> None:
        loss.backward(**kwargs)


class Copying(Strategy):
    def wrap(self, bundle: Bundle, *, evaluation: bool = False) -> Bundle:
        return replace(bundle, models=[Around(model) for model in bundle.models])


class Around(torch.nn.Module):
    def __init__(self, inside: torch.nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, *args: Any) -> Any:
        return self.inside(*args)


def test_a_strategy_that_does_not_divide_by_the_accumulation_fails(tmp_path: Path):
    with pytest.raises(
        ConformanceError,
        match="rank 0: micro_batches_equal_one_batch: with 2 micro-batches: Tensor",
    ):
        check_strategy(subject(tmp_path, lambda: make(Forgetful)))


def test_a_strategy_that_does_not_unwrap_fails(tmp_path: Path):
    with pytest.raises(ConformanceError, match=r"unwrap\(wrap\(model\)\) is not the model"):
        check_strategy(subject(tmp_path, lambda: make(Copying)))


def test_only_declared_features_are_checked(tmp_path: Path):
    check_strategy(subject(tmp_path, lambda: make(NoClipping)))


class NoClipping(Strategy):
    features = frozenset()

    def clip_grad_value(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError
