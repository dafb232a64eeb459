# fmt: off
from accel_bigmodel.device_map import generate_device_map as generate_device_map
from accel_bigmodel.pipeline import (
    build_pipeline as build_pipeline, find_pippy_batch_size as find_pippy_batch_size,
    pippy_forward as pippy_forward, prepare_pippy as prepare_pippy,
)
