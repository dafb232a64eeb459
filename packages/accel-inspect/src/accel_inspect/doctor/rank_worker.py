"""Run the user's script in the processes of `accel doctor`, with a recorder at the objects of `prepare`."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from accel_inspect.check.outputs import keep_outputs, redirect, unchanged
from accel_inspect.doctor.record import ONE, PLAIN, RunRecord
from accel_inspect.doctor.recorder import TrainingRecorder
from accel_inspect.trial import RankTask, replace_names, run_script, wrap_names
from accel_train import observing
from accel_train.data.shards import IterableDatasetShard

_SEED = 0
"""The seed of every process: a script that sets none is comparable, too."""


def main(task: RankTask) -> RunRecord:
    """Run the script in one process, and return its record."""
    observing.observer = recorder = TrainingRecorder(task)
    if task.run in {ONE, PLAIN}:  # whatever the script and the settings ask for
        replace_names(
            "accel_train.accelerator.build", choose=lambda *_: "single", select_strategy=lambda *_: None
        )
        replace_names("accel_train.accelerator", find_plugins=lambda *_: {})
    if recorder.joins:
        _read_streams_of_all()
    wrap_names("torch.utils.data.DataLoader", __iter__=recorder.iterate)
    wrap_names("accel_train.data.shards.BatchSamplerShard", iterate=recorder.plan_epoch)
    saving = {"save_state": recorder.save_state, "load_state": recorder.load_state}
    gathering = dict.fromkeys(("gather", "gather_for_metrics"), recorder.gather)
    wrap_names("accel_train.Accelerator", backward=recorder.backward, **gathering, **saving)
    replace_names("accel_train.Accelerator", has_checkpoint=property(lambda _: recorder.resumes))
    wrap_names("accel_train.step.LocalSGD", __enter__=recorder.average_models)
    wrap_names("torch.nn.utils", clip_grad_norm_=recorder.clip)
    register_optimizer_step_pre_hook(recorder.before_step)
    register_optimizer_step_post_hook(recorder.after_step)
    for kind in ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d"):  # a SyncBatchNorm has a forward of its own
        wrap_names(f"torch.nn.{kind}", forward=recorder.normalise)
    _switch_dropout_off()
    torch.compiler.set_stance("force_eager")  # compiled code would call the recorder's hooks
    # What torch and safetensors open by themselves, and not by `open`.
    files = keep_outputs(task)
    redirect("torch", "save", unchanged, files.written)
    redirect("torch", "load", files.read)
    redirect("safetensors.torch", "serialize_file", unchanged, files.written)
    for name in ("safetensors", "safetensors.torch", "transformers.modeling_utils"):
        if name in sys.modules:
            redirect(name, "safe_open", files.read)
    random.seed(_SEED)
    torch.manual_seed(_SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(_SEED)
    return recorder.finish(run_script(task))


def _read_streams_of_all() -> None:
    """Read streams in batches of all ranks, without a dispatcher: this process stands for all of them."""
    plan_of = IterableDatasetShard.plan

    def prepare(real: Any, *args: Any, **options: Any) -> Any:
        return real(*args, **{**options, "dispatch_batches": False})

    def plan_of_all(self: Any) -> Any:
        plan = plan_of.__get__(self)
        pads = self.even_batches and not plan.drop_last
        return replace(plan, num_processes=1, process_index=0, rows=plan.stride, pads=pads)

    wrap_names("accel_train.accelerator.prepare", prepare_data_loader=prepare)
    replace_names("accel_train.data.shards.IterableDatasetShard", plan=property(plan_of_all))


def _switch_dropout_off() -> None:
    """Switch dropout off: the masks of a rank are not those of its part of a global batch."""
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"):
        replace_names("torch.nn.functional", **{name: lambda input, *_, **__: input})  # noqa: A006 - torch's name

    def attend(real: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
        args = (*args[:1], *(0.0 for _ in args[1:2]), *args[2:])
        if "dropout_p" in options:
            options["dropout_p"] = 0.0
        return real(query, key, value, *args, **options)

    wrap_names("torch.nn.functional", scaled_dot_product_attention=attend)
