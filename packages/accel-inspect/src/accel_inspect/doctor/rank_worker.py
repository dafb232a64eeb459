"""Run the user's script in the processes of `accel doctor`, with a recorder at the objects of `prepare`."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from accel_inspect.check.outputs import RedirectedFiles, keep_outputs, redirect, unchanged
from accel_inspect.doctor.record import ONE, PLAIN, RunRecord
from accel_inspect.doctor.recorder import TrainingRecorder
from accel_inspect.trial import RankTask, replace_names, run_script, wrap_names
from accel_train import observing
from accel_train.data.adapter import PreparedLoader
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
    _record_loaders(recorder)
    _record_accelerators(recorder)
    _record_torch(recorder)
    _switch_dropout_off()
    _record_batch_norms(recorder)
    torch.compiler.set_stance("force_eager")  # compiled code would call the recorder's hooks
    _redirect_weights(keep_outputs(task))
    random.seed(_SEED)
    torch.manual_seed(_SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(_SEED)
    return recorder.finish(run_script(task))


def _record_loaders(recorder: TrainingRecorder) -> None:
    """Record what loaders that are not prepared yield, and end all passes early."""

    def iterate(real: Any, loader: Any) -> Iterator[Any]:
        if recorder.is_reading or isinstance(loader, PreparedLoader):
            return real(loader)
        return recorder.batches(loader, lambda: real(loader))

    wrap_names("torch.utils.data.DataLoader", __iter__=iterate)
    wrap_names("accel_train.data.shards.BatchSamplerShard", iterate=recorder.plan_epoch)
    if not recorder.joins:
        return
    # A process that stands for all ranks reads streams in batches of all ranks, without a dispatcher.
    plan_of = IterableDatasetShard.plan

    def prepare(real: Any, *args: Any, **options: Any) -> Any:
        return real(*args, **{**options, "dispatch_batches": False})

    def plan_of_all(self: Any) -> Any:
        plan = plan_of.__get__(self)
        pads = self.even_batches and not plan.drop_last
        return replace(plan, num_processes=1, process_index=0, rows=plan.stride, pads=pads)

    wrap_names("accel_train.accelerator.prepare", prepare_data_loader=prepare)
    replace_names("accel_train.data.shards.IterableDatasetShard", plan=property(plan_of_all))


def _record_accelerators(recorder: TrainingRecorder) -> None:
    """Record backward passes, what is gathered, and what is saved, by the public methods of `Accelerator`."""

    def backward(real: Any, accelerator: Any, loss: Any, **options: Any) -> None:
        recorder.record_backward(loss, options.get("num_items"))
        real(accelerator, loss, **options)
        recorder.end_backward()

    def gather(real: Any, *args: Any, **options: Any) -> Any:
        result = real(*args, **options)
        recorder.record_gathered(result, is_metric=real.__name__ == "gather_for_metrics")
        return result

    def enter(real: Any, averaging: Any) -> Any:
        recorder.record.differs_by = "LocalSGD averages models instead of gradients"
        return real(averaging)

    saving = {"save_state": recorder.save_state, "load_state": recorder.load_state}
    gathering = dict.fromkeys(("gather", "gather_for_metrics"), gather)
    wrap_names("accel_train.Accelerator", backward=backward, **gathering, **saving)
    replace_names("accel_train.Accelerator", has_checkpoint=property(lambda _: recorder.resumes))
    wrap_names("accel_train.step.LocalSGD", __enter__=enter)


def _record_torch(recorder: TrainingRecorder) -> None:
    """Record steps of all optimizers, and clipping."""

    def clip(real: Any, *args: Any, **options: Any) -> Any:
        recorder.record_clipping()
        return real(*args, **options)

    register_optimizer_step_pre_hook(recorder.before_step)
    register_optimizer_step_post_hook(recorder.after_step)
    wrap_names("torch.nn.utils", clip_grad_norm_=clip)


def _redirect_weights(files: RedirectedFiles) -> None:
    """Redirect what torch and safetensors open by themselves, and not by `open`."""
    redirect("torch", "save", unchanged, files.written)
    redirect("torch", "load", files.read)
    redirect("safetensors.torch", "serialize_file", unchanged, files.written)
    for name in ("safetensors", "safetensors.torch", "transformers.modeling_utils"):
        if name in sys.modules:
            redirect(name, "safe_open", files.read)


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


def _record_batch_norms(recorder: TrainingRecorder) -> None:
    """Record BatchNorms; a process that stands for all ranks normalises the rows of each rank by themselves.

    A `SyncBatchNorm` has a forward of its own.
    """

    def forward(real: Any, self: Any, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        shards = recorder.record.shards if recorder.joins and self.training else 1
        if shards == 1 or len(input) % shards:
            if self.training:
                recorder.record_norm(self, input)
            return real(self, input)
        first, *following = input.chunk(shards)
        normalised = [real(self, first)]
        running = [self.running_mean, self.running_var, self.num_batches_tracked]
        averages = [(average, average.clone()) for average in running if average is not None]
        normalised += [real(self, part) for part in following]
        for average, of_first in averages:  # ranks keep the averages of rank 0
            average.data.copy_(of_first)  # as BatchNorm's own change, it is none for autograd
        return torch.cat(normalised)

    for kind in ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d"):
        wrap_names(f"torch.nn.{kind}", forward=forward)
