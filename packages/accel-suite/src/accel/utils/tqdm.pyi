# fmt: off
from accel_state.logging import tqdm as tqdm
