"""Run the user's script in the processes of `accel doctor`, with a recorder at the objects of `prepare`."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from accel_inspect.check.outputs import RedirectedFiles, keep_outputs, redirect, unchanged
from accel_inspect.doctor.record import ONE, PLAIN, RunRecord
from accel_inspect.doctor.recorder import TrainingRecorder
from accel_inspect.trial import RankTask, replace_names, run_script
from accel_train import Accelerator, observing
from accel_train.data.adapter import PreparedLoader
from accel_train.data.shards import BatchSamplerShard, Draw, IterableDatasetShard
from accel_train.step import LocalSGD

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
    real_iter, iterate = DataLoader.__iter__, BatchSamplerShard.iterate

    def iter_recorded(self: Any) -> Iterator[Any]:
        if recorder.is_reading or isinstance(self, PreparedLoader):
            return real_iter(self)
        return recorder.batches(self, lambda: real_iter(self))

    def iterate_recorded(self: Any, draw: Draw) -> Iterator[Iterator[list[int]]]:
        return recorder.plan_epoch(iterate, self, draw)

    replace_names("torch.utils.data.DataLoader", __iter__=iter_recorded)
    replace_names("accel_train.data.shards.BatchSamplerShard", iterate=iterate_recorded)
    if not recorder.joins:
        return
    # A process that stands for all ranks reads streams in batches of all ranks, without a dispatcher.
    preparing: Any = import_module("accel_train.data.prepare")
    prepare, plan_of = preparing.prepare_data_loader, IterableDatasetShard.plan

    def prepare_data_loader(*args: Any, **kwargs: Any) -> Any:
        return prepare(*args, **{**kwargs, "dispatch_batches": False})

    def plan_of_all(self: Any) -> Any:
        plan = plan_of.__get__(self)
        pads = self.even_batches and not plan.drop_last
        return replace(plan, num_processes=1, process_index=0, rows=plan.stride, pads=pads)

    replace_names("accel_train.accelerator.prepare", prepare_data_loader=prepare_data_loader)
    replace_names("accel_train.data.shards.IterableDatasetShard", plan=property(plan_of_all))


def _record_accelerators(recorder: TrainingRecorder) -> None:
    """Record backward passes, what is gathered, and what is saved, by the public methods of `Accelerator`."""
    backward, enter = Accelerator.backward, LocalSGD.__enter__

    @functools.wraps(backward)
    def backward_recorded(self: Any, loss: Any, **kwargs: Any) -> None:
        recorder.record_backward(loss, kwargs.get("num_items"))
        backward(self, loss, **kwargs)
        recorder.end_backward()

    def recorded(function: Callable[..., Any], *, is_metric: bool) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            recorder.record_gathered(result, is_metric=is_metric)
            return result

        return call

    def enter_recorded(self: LocalSGD) -> LocalSGD:
        recorder.record.differs_by = "LocalSGD averages models instead of gradients"
        return enter(self)

    def save_state(self: Any, *args: Any, **options: Any) -> str:
        return recorder.save_state(self, *args, **options)

    def load_state(self: Any, *args: Any, **options: Any) -> None:
        recorder.load_state(self, *args, **options)

    replace_names(
        "accel_train.Accelerator",
        backward=backward_recorded,
        gather=recorded(Accelerator.gather, is_metric=False),
        gather_for_metrics=recorded(Accelerator.gather_for_metrics, is_metric=True),
        save_state=save_state,
        load_state=load_state,
        has_checkpoint=property(lambda _: recorder.resumes),
    )
    LocalSGD.__enter__ = enter_recorded


def _record_torch(recorder: TrainingRecorder) -> None:
    """Record steps of all optimizers, and clipping."""
    clip = torch.nn.utils.clip_grad_norm_

    @functools.wraps(clip)
    def clip_recorded(*args: Any, **kwargs: Any) -> Any:
        recorder.record_clipping()
        return clip(*args, **kwargs)

    register_optimizer_step_pre_hook(recorder.before_step)
    register_optimizer_step_post_hook(recorder.after_step)
    replace_names("torch.nn.utils", clip_grad_norm_=clip_recorded)


def _redirect_weights(files: RedirectedFiles) -> None:
    """Redirect what torch and safetensors open by themselves, and not by `open`."""
    redirect(torch, "save", unchanged, files.written)
    redirect(torch, "load", files.read)
    redirect(import_module("safetensors.torch"), "serialize_file", unchanged, files.written)
    for name in ("safetensors", "safetensors.torch", "transformers.modeling_utils"):
        if name in sys.modules:
            redirect(sys.modules[name], "safe_open", files.read)


def _switch_dropout_off() -> None:
    """Switch dropout off: the masks of a rank are not those of its part of a global batch."""
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"):
        replace_names("torch.nn.functional", **{name: lambda input, *_, **__: input})  # noqa: A006 - torch's name
    attention = functional.scaled_dot_product_attention

    @functools.wraps(attention)
    def without_dropout(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if len(args) > 1:
            args = (args[0], 0.0, *args[2:])
        if "dropout_p" in kwargs:
            kwargs["dropout_p"] = 0.0
        return attention(query, key, value, *args, **kwargs)

    replace_names("torch.nn.functional", scaled_dot_product_attention=without_dropout)


def _record_batch_norms(recorder: TrainingRecorder) -> None:
    """Record BatchNorms; a process that stands for all ranks normalises the rows of each rank by themselves.

    A `SyncBatchNorm` has a forward of its own.
    """
    forward = nn.BatchNorm1d.forward  # of all three classes

    @functools.wraps(forward)
    def forward_recorded(self: Any, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        shards = recorder.record.shards if recorder.joins and self.training else 1
        if shards == 1 or len(input) % shards:
            if self.training:
                recorder.record_norm(self, input)
            return forward(self, input)
        first, *following = input.chunk(shards)
        normalised = [forward(self, first)]
        running = [self.running_mean, self.running_var, self.num_batches_tracked]
        averages = [(average, average.clone()) for average in running if average is not None]
        normalised += [forward(self, part) for part in following]
        for average, of_first in averages:  # ranks keep the averages of rank 0
            average.data.copy_(of_first)  # as BatchNorm's own change, it is none for autograd
        return torch.cat(normalised)

    for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        kind.forward = forward_recorded
