# fmt: off
from accel_plugins.megatron.data import (
    MegatronLMDummyDataLoader as MegatronLMDummyDataLoader,
    MegatronLMDummyScheduler as MegatronLMDummyScheduler,
)
from accel_plugins.megatron.train_steps import (
    avg_losses_across_data_parallel_group as avg_losses_across_data_parallel_group,
)
from accel_state.libraries import is_megatron_lm_available as is_megatron_lm_available
