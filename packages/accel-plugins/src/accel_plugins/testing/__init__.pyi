from accel_plugins.testing.strategy import STRATEGY_CHECKS as STRATEGY_CHECKS
from accel_plugins.testing.strategy import ConformanceError as ConformanceError
from accel_plugins.testing.strategy import StrategySubject as StrategySubject
from accel_plugins.testing.strategy import check_strategy as check_strategy
