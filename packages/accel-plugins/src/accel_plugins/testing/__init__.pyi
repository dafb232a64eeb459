from accel_plugins.testing.precision import PRECISION_CHECKS as PRECISION_CHECKS
from accel_plugins.testing.precision import PrecisionSubject as PrecisionSubject
from accel_plugins.testing.precision import check_precision as check_precision
from accel_plugins.testing.strategy import STRATEGY_CHECKS as STRATEGY_CHECKS
from accel_plugins.testing.strategy import ConformanceError as ConformanceError
from accel_plugins.testing.strategy import StrategySubject as StrategySubject
from accel_plugins.testing.strategy import check_strategy as check_strategy
