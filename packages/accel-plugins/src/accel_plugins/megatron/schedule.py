"""megatron-core's schedule of learning rate and weight decay, in place of `MegatronLMDummyScheduler`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_plugins.megatron.library import core
from accel_plugins.megatron.megatron_args import scheduler_arguments

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.optim import Optimizer

    from accel_plugins.megatron.dummy import MegatronLMDummyScheduler
    from accel_plugins.megatron.plugin import MegatronLMPlugin


class MegatronSchedule:
    """A schedule that the engine advances by the samples of every optimizer step.

    Args:
        plugin: Describes the schedule; the sizes of batches and the optimizer are entered already.
        placeholder: What was prepared.
        optimizer: The optimizer of PyTorch, whose parameter groups are set.
    """

    def __init__(
        self, plugin: MegatronLMPlugin, placeholder: MegatronLMDummyScheduler, optimizer: Optimizer
    ) -> None:
        plugin.set_scheduler_args(placeholder)
        args = plugin.megatron_lm_default_args
        schedule = core("optimizer_param_scheduler").OptimizerParamScheduler
        for group in optimizer.param_groups:
            group["max_lr"] = group["lr"]
            if group["weight_decay"] == 0.0:
                group["wd_mult"] = 0.0
        self.optimizer = optimizer
        self.schedule = schedule(
            optimizer,
            **scheduler_arguments(args),
            use_checkpoint_opt_param_scheduler=True,
            override_opt_param_scheduler=False,
        )
        self._samples = args["global_batch_size"]

    def step(self) -> None:
        """Advance by the samples of one optimizer step."""
        self.schedule.step(self._samples)

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of every parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the samples so far, and the arguments."""
        return self.schedule.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume."""
        self.schedule.num_steps = 0
        self.schedule.load_state_dict(dict(state))
