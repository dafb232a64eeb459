# fmt: off
from accel_trackers.general import GeneralTracker as GeneralTracker, on_main_process as on_main_process
from accel_trackers.libraries.aim import AimTracker as AimTracker
from accel_trackers.libraries.clearml import ClearMLTracker as ClearMLTracker
from accel_trackers.libraries.comet import CometMLTracker as CometMLTracker
from accel_trackers.libraries.dvclive import DVCLiveTracker as DVCLiveTracker
from accel_trackers.libraries.mlflow import MLflowTracker as MLflowTracker
from accel_trackers.libraries.swanlab import SwanLabTracker as SwanLabTracker
from accel_trackers.libraries.tensorboard import TensorBoardTracker as TensorBoardTracker
from accel_trackers.libraries.trackio import TrackioTracker as TrackioTracker
from accel_trackers.libraries.wandb import WandBTracker as WandBTracker
from accel_trackers.registry import (
    LOGGER_TYPE_TO_CLASS as LOGGER_TYPE_TO_CLASS, filter_trackers as filter_trackers,
    get_available_trackers as get_available_trackers, register_tracker_class as register_tracker_class,
)
