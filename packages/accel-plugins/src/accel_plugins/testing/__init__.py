"""Conformance checks of strategies, for third parties to run on theirs.

A third party tests a strategy in a few lines, on every rank of a process group (or in one process):

    from accel_plugins.testing import StrategySubject, check_strategy

    def test_my_strategy(tmp_path):  # under any test runner with several ranks
        runtime = PartialState(cpu=True).runtime
        check_strategy(StrategySubject(
            make=lambda: MyStrategy(Settings(), runtime, build_precision("no", runtime.device), {}),
            runtime=runtime,
            directory=tmp_path,
        ))

`STRATEGY_CHECKS` maps names to single checks, to run one by one.
"""

from accel_state.lazy import attach

attach(__name__)
