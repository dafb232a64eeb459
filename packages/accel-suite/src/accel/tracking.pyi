# fmt: off
from accel_trackers.aim import AimTracker as AimTracker
from accel_trackers.clearml import ClearMLTracker as ClearMLTracker
from accel_trackers.dvclive import DVCLiveTracker as DVCLiveTracker
from accel_trackers.general import GeneralTracker as GeneralTracker, on_main_process as on_main_process
from accel_trackers.mlflow import MLflowTracker as MLflowTracker
from accel_trackers.project_runs import (
    CometMLTracker as CometMLTracker, SwanLabTracker as SwanLabTracker, TrackioTracker as TrackioTracker,
    WandBTracker as WandBTracker,
)
from accel_trackers.registry import (
    LOGGER_TYPE_TO_CLASS as LOGGER_TYPE_TO_CLASS, filter_trackers as filter_trackers,
    get_available_trackers as get_available_trackers, register_tracker_class as register_tracker_class,
)
from accel_trackers.tensorboard import TensorBoardTracker as TensorBoardTracker
