"""The train steps by type of model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_plugins.megatron.bert_step import BertTrainStep
from accel_plugins.megatron.t5_step import T5TrainStep
from accel_plugins.megatron.train_steps import AbstractTrainStep, GPTTrainStep
from accel_state.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

_TRAIN_STEPS: dict[str, Callable[..., AbstractTrainStep]] = {
    "bert": BertTrainStep,
    "gpt": GPTTrainStep,
    "t5": T5TrainStep,
}


def train_step_of(plugin: Any, context: Any) -> AbstractTrainStep:
    """Make the train step of a run.

    Args:
        plugin: May have a class of its own; `megatron_lm_default_args` says which one else.
        context: Has `state` and `device`; train steps get it as `accelerator`.
    """
    own, args = plugin.custom_train_step_class, plugin.namespace()
    if own is not None:
        return own(context, args, **(plugin.custom_train_step_kwargs or {}))
    if args.model_type_name not in _TRAIN_STEPS:
        raise UnsupportedError(
            f"There is no train step for a model of the type {args.model_type_name!r}: give MegatronLMPlugin "
            "a custom_train_step_class."
        )
    return _TRAIN_STEPS[args.model_type_name](context, args)
