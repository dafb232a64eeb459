# fmt: off
from accel_state.progress import tqdm as tqdm
