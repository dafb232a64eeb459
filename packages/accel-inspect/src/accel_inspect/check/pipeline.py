"""Run a rank of a pipeline alone: a copy of the model provides the inputs from other stages."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from accel_inspect.check.recorder import CollectiveRecorder
from accel_inspect.trial import replace_names, wrap_names
from accel_plugins.parallelism.sequence import without_exchange
from accel_plugins.pipeline.engine import Pipeline, loss_in
from accel_plugins.pipeline.stages import Layout, first_tensor
from accel_plugins.pipeline.state import ModelNames, PipelineStates
from accel_plugins.pipeline.strategy import PipelineStrategy


def patch_pipelines(recorder: CollectiveRecorder) -> None:
    """Patch `accel_plugins.pipeline`: only the stages of this rank are cut out, and they run the schedule.

    Evaluations, and the pass by which ranks learn what stages pass on, run on a copy of the full model.
    """
    originals: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()  # of cut models
    copies: WeakKeyDictionary[Pipeline, nn.Module] = WeakKeyDictionary()

    def note_names(real: Any, kind: type[ModelNames], model: nn.Module, layout: Layout) -> ModelNames:
        with recorder.paused():
            originals[model] = copy.deepcopy(model)
        return real(kind, model, layout)

    def cut_and_copy(real: Any, self: PipelineStrategy, model: nn.Module) -> None:
        real(self, model)
        made = self.pipelines[model]
        policy: Any = None if self.full is None else self.full.plugin.mixed_precision_policy
        with recorder.paused():
            copies[made] = copy.deepcopy(originals[model])
            if policy is not None and policy.param_dtype is not None:
                copies[made].to(policy.param_dtype)

    def within_stage(real: Any, *args: Any, **options: Any) -> Any:
        with recorder.having(stage=next((made.rank for made in copies), None)):
            return real(*args, **options)

    def probe(_: Any, self: Any) -> None:
        with recorder.paused(), recorder.having(is_silent=True), without_exchange():
            _learn_boundaries(self, copies[self])

    def run_schedule(real: Any, self: Pipeline, *args: Any, **options: Any) -> Any:
        recorder.record("schedule of the pipeline")
        with recorder.having(stage=self.rank):
            return real(self, *args, **options)

    def run_stage(real: Any, self: Pipeline, stage: Any, received: Tensor | None, index: int) -> Tensor:
        return real(self, stage, received, min(index, self.micro_batches - 1))  # the index is made up

    def evaluate(_: Any, self: Pipeline, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        recorder.record("forward pass of the pipeline")
        with recorder.having(is_silent=True), without_exchange(), torch.no_grad():
            return copies[self].train(self.stages[0].training)(*args, **kwargs)

    def find_owners(_: Any, self: PipelineStates, own: Mapping[Any, Any]) -> dict[Any, tuple[int, Any]]:
        states = {key[1]: value for key, value in own.items() if isinstance(key, tuple)}  # of an optimizer
        used = {key[0] if isinstance(key, tuple) else key for key in own}
        model, names = next(item for item in self.models.items() if used & {*item[1].ranks})
        full = originals[model].state_dict(keep_vars=True)
        has_buffers = not all(isinstance(value, nn.Parameter) for value in own.values())
        found: dict[Any, tuple[int, Any]] = {
            key: (0, value) for key, value in own.items() if key in {*names.state} - {*names.first}
        }
        for name, ranks in names.ranks.items():
            value = full.get(name)
            if value is None or not (isinstance(value, nn.Parameter) or (has_buffers and not states)):
                continue
            for key, like in states.items() or [(None, value)]:
                shape = value.shape if like.dim() else ()
                about = torch.empty(shape, dtype=like.dtype, device="meta")
                found[name if key is None else (name, key)] = ranks[0], about
        return found

    engine = {"probe": probe, "evaluate": evaluate, "train": run_schedule, "run_stage": run_stage}
    wrap_names("accel_plugins.pipeline.engine.Pipeline", **engine)
    wrap_names("accel_plugins.pipeline.strategy.PipelineStrategy", shard_in_place=cut_and_copy)
    wrap_names("accel_plugins.pipeline.strategy", norm_of=within_stage)
    wrap_names("accel_plugins.pipeline.state.ModelNames", of=note_names)
    wrap_names("accel_plugins.pipeline.state.PipelineStates", _find_owners=find_owners)
    wrap_names("accel_plugins.pipeline.state", gather_full_tensor=within_stage)
    replace_names("accel_plugins.pipeline.state", all_gather_objects=lambda obj, group: [obj] * group.size())


def _learn_boundaries(pipe: Any, model: nn.Module) -> None:
    """Learn from a copy of the full model what the stages of a pipeline pass on."""
    layout = pipe.layout
    pipe._boundaries = {}
    handles: list[Any] = []
    for number, (_, end) in enumerate(layout.bounds[:-1]):
        name = layout.names[end - 1]

        def learn(_: Any, __: Any, output: Any, number: int = number, name: str = name) -> None:
            pipe._note_boundary(number, first_tensor(output, name))
            pipe._forms[number + 1] = len(output) if isinstance(output, tuple) else 0

        handles.append(model.get_submodule(name).register_forward_hook(learn))
    args, kwargs = pipe._batch.parts[0]
    output = model(*args, **kwargs)
    for handle in handles:
        handle.remove()
    pipe._form = type(output), loss_in(type(model).__name__, output).dtype
