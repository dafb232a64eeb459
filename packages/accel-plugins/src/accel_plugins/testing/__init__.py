"""Conformance checks of strategies and precision policies, for third parties to run on their own.

A third party tests a strategy in a few lines, on every rank of a process group (or in one process):

    from accel_plugins.testing import StrategySubject, check_strategy

    def test_my_strategy(tmp_path):  # under any test runner with several ranks
        runtime = PartialState(cpu=True).runtime
        check_strategy(StrategySubject(
            make=lambda: my_package.build(Settings(), runtime, build_precision("no", runtime.device), {}),
            runtime=runtime,
            directory=tmp_path,
        ))

`STRATEGY_CHECKS` and `PRECISION_CHECKS` hold the single checks by name, to be run one by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_plugins.testing.precision import PRECISION_CHECKS as PRECISION_CHECKS
    from accel_plugins.testing.precision import PrecisionSubject as PrecisionSubject
    from accel_plugins.testing.precision import check_precision as check_precision
    from accel_plugins.testing.problem import ConformanceError as ConformanceError
    from accel_plugins.testing.strategy import STRATEGY_CHECKS as STRATEGY_CHECKS
    from accel_plugins.testing.strategy import StrategySubject as StrategySubject
    from accel_plugins.testing.strategy import check_strategy as check_strategy

__all__ = [
    "PRECISION_CHECKS",
    "STRATEGY_CHECKS",
    "ConformanceError",
    "PrecisionSubject",
    "StrategySubject",
    "check_precision",
    "check_strategy",
]

__getattr__, __dir__ = attach(
    __name__,
    {
        "ConformanceError": "accel_plugins.testing.problem",
        "PRECISION_CHECKS": "accel_plugins.testing.precision",
        "PrecisionSubject": "accel_plugins.testing.precision",
        "STRATEGY_CHECKS": "accel_plugins.testing.strategy",
        "StrategySubject": "accel_plugins.testing.strategy",
        "check_precision": "accel_plugins.testing.precision",
        "check_strategy": "accel_plugins.testing.strategy",
    },
)
