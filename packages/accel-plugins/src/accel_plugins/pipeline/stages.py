"""Stages of a pipeline: split a model's modules in call order, and keep those of this rank.

A stage runs the model's own `forward`, with all arguments of the micro-batch. Modules of other stages are
replaced with placeholders: the last module before a stage returns the received activation, and the first
module after it ends the forward pass. Masks, positions and all else that the model computes between its
modules are thus computed on every rank, and no model is traced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from accel_plugins.parallelism.config import TorchPipelineParallelConfig
from accel_state.errors import SettingsError, did_you_mean
from accel_state.frozen import frozen

if TYPE_CHECKING:
    from accel_plugins.pipeline.engine import Pipeline


@frozen
class Layout:
    """The modules of a model in call order, and their assignment to stages and ranks.

    Args:
        names: Names of the modules.
        bounds: For each stage, the indices of its first module and of the first module after it.
        ranks: For each stage, its rank in the pipeline.
    """

    names: tuple[str, ...]
    bounds: tuple[tuple[int, int], ...]
    ranks: tuple[int, ...]

    def rank_of(self, module: int) -> int:
        """Return the pipeline rank of a module."""
        return next(
            rank for (first, end), rank in zip(self.bounds, self.ranks, strict=True) if first <= module < end
        )


def lay_out(model: nn.Module, config: TorchPipelineParallelConfig, size: int) -> Layout:
    """Plan the stages of a model over `size` ranks; refuse a model that cannot be cut so."""
    kind = type(model).__name__
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise SettingsError(
            f"{kind} has an encoder, whose output every layer of its decoder reads, and a stage of a "
            "pipeline passes one activation to the next: use dp_shard_size instead of pp_size."
        )
    # The modules that pass the activation on are the largest list of modules, and the modules around it.
    lists = [part for part in model.modules() if isinstance(part, (nn.ModuleList, nn.Sequential))]
    names = [*_units(model, "", max(lists, key=_numel, default=None))]
    per_rank = config.pp_stages_per_rank or 1
    count = size * per_rank
    if len(names) < count:
        raise SettingsError(
            f"{kind} has {len(names)} modules in a row ({', '.join(names[:8])}), and a pipeline of "
            f"{size} ranks with {per_rank} of its stages each needs {count}: choose a smaller pp_size."
        )
    if config.pp_split_points is None:
        starts = balance(_sizes(model, names), count)
    else:
        points, about = config.pp_split_points, f"pp_split_points={[*config.pp_split_points]!r}"
        for point in points:
            if point not in names:
                hint = did_you_mean(point, names, f"it has {', '.join(names[:20])}.", cutoff=0.4)
                raise SettingsError(
                    f"{about}: {kind} has no module {point!r} that stages may begin with; {hint}"
                )
        starts = [0, *(names.index(point) for point in points)]
        if len(starts) != count or starts != sorted({*starts}):
            raise SettingsError(
                f"{about}: {count} stages begin with {count - 1} modules behind the first ({names[0]!r}), in "
                "the order of the model."
            )
    ranks = [stage % size for stage in range(count)]
    if config.pp_schedule == "ZBVZeroBubble":  # the second half of the stages has the ranks in reverse
        ranks = [min(stage, count - 1 - stage) for stage in range(count)]
    bounds = tuple(zip(starts, [*starts[1:], len(names)], strict=True))
    return Layout(names=tuple(names), bounds=bounds, ranks=tuple(ranks))


def _units(module: nn.Module, prefix: str, main: nn.Module | None) -> Iterator[str]:
    """Yield the names of the modules of a list and around it, in registration order.

    What has no parameters is on every rank.
    """
    for name, child in module.named_children():
        if _numel(child) == 0:
            continue
        is_row = isinstance(child, (nn.ModuleList, nn.Sequential))
        if is_row or any(part is main for part in child.modules()):
            yield from _units(child, f"{prefix}{name}.", main)
        else:
            yield f"{prefix}{name}"


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _sizes(model: nn.Module, names: Sequence[str]) -> list[int]:
    """Return the numbers of elements of modules; tied parameters count once, in the first."""
    seen: set[int] = set()
    sizes: list[int] = []
    for name in names:
        own = {id(p): p.numel() for p in model.get_submodule(name).parameters() if id(p) not in seen}
        seen |= own.keys()
        sizes.append(sum(own.values()))
    return sizes


def balance(sizes: Sequence[int], count: int) -> list[int]:
    """Split a sequence into `count` parts so that the largest sum is smallest; return where each begins."""
    total = [0, *accumulate(sizes)]

    @cache
    def best(end: int, parts: int) -> tuple[int, int]:
        """Return the smallest possible largest part of the first `end`, and where the last part starts."""
        if parts == 1:
            return total[end], 0
        starts = range(parts - 1, end)
        return min((max(best(start, parts - 1)[0], total[end] - total[start]), start) for start in starts)

    starts, end = list[int](), len(sizes)
    for parts in range(count, 0, -1):
        end = best(end, parts)[1]
        starts.insert(0, end)
    return starts


class Leave(BaseException):
    """Ends the forward pass of a stage after its last module; no error, and always caught."""


class RemoteModule(nn.Module):
    """Placeholder for another stage's module: returns the received activation, or ends the forward pass."""

    def __init__(self, module: nn.Module, position: int, pipeline: Pipeline) -> None:
        super().__init__()
        plain = (bool, int, float, str, type(None))  # such as the type of attention of a layer
        own = {key: value for key, value in vars(module).items() if isinstance(value, plain)}
        vars(self).update({key: value for key, value in own.items() if not key.startswith("_")})
        self.training = module.training
        self.replaced, self._position, self._pipeline = type(module), position, pipeline

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the activation that the stage received, in the structure that the module returns."""
        del args, kwargs
        return self._pipeline.skipped(self._position, self.replaced)

    def _get_name(self) -> str:
        return f"Remote:{self.replaced.__name__}"


class Stage(nn.Module):
    """Consecutive modules of the model, and their call for one micro-batch."""

    def __init__(self, pipeline: Pipeline, index: int, first: int, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.units = nn.ModuleList(modules)
        self.index = index
        self.first = first
        self.end = first + len(modules)
        self.is_last = index == len(pipeline.layout.bounds) - 1  # it computes the loss
        self._pipeline = pipeline

    def forward(self, *received: Tensor, index: Tensor) -> Tensor:
        """Compute micro-batch number `index`: return the activation, or the loss with one element."""
        return self._pipeline.run_stage(self, received[0] if received else None, int(index))


def first_tensor(output: Any, name: str) -> Tensor:
    """Return the activation in a module's output: a tensor, or the first of a tuple of None."""
    if isinstance(output, Tensor):
        return output
    values = cast("tuple[Any, ...]", output if isinstance(output, tuple) else ())
    if values and isinstance(values[0], Tensor) and all(value is None for value in values[1:]):
        return values[0]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    what = f"{len(tensors)} tensors" if tensors else f"a {type(output).__name__}"
    raise SettingsError(
        f"A stage ends with the module {name!r}, which returns {what}, and stages pass one tensor: choose "
        "pp_split_points behind modules that return one."
    )
