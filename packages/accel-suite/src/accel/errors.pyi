# fmt: off
from accel_state.errors import (
    AccelError as AccelError, DistributedOperationException as DistributedOperationException,
    MissingDependencyError as MissingDependencyError, SettingsError as SettingsError,
    StalledCollectiveError as StalledCollectiveError, TrackerError as TrackerError,
    UnsupportedError as UnsupportedError,
)
