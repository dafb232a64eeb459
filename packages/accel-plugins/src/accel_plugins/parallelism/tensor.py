"""Tensor parallelism: dividing the layers that a model's plan names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, cast

from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from accel_ops.modules import model_has_dtensor
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "sequence_parallel": SequenceParallel,
}
"""What a plan may say in a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallel:
    """Divides the layers of models along a mesh.

    Args:
        mesh: Of one axis.
    """

    mesh: DeviceMesh

    def __call__(self, model: nn.Module) -> None:
        """Divide a model in place; one that is divided already stays as it is."""
        if not model_has_dtensor(model):
            parallelize_module(model, self.mesh, plan_of(model))

    def validate(self, model: nn.Module) -> None:
        """Refuse a model without a plan.

        Raises:
            SettingsError: There is none, or it cannot be used.
        """
        if not model_has_dtensor(model):
            plan_of(model)


def plan_of(model: nn.Module) -> dict[str, ParallelStyle]:
    """The plan that a model has in its attribute `tp_plan`, as `parallelize_module` takes it.

    Args:
        model: `tp_plan` maps names of modules, in which `*` stands for anything, to a `ParallelStyle` or one
            of `STYLES`.

    Raises:
        SettingsError: There is none, a name fits no module, or a style is not known.
    """
    given = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not isinstance(given, Mapping) or not given:
        raise SettingsError(
            f"{type(model).__name__} has no tp_plan, which says how its layers are divided among the "
            "processes "
            "of tp_size; set it, as in model.tp_plan = "
            "{'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}, "
            "or call torch.distributed.tensor.parallel.parallelize_module before prepare()."
        )
    names = [name for name, _ in model.named_modules() if name]
    plan: dict[str, ParallelStyle] = {}
    for pattern, style in cast("Mapping[str, Any]", given).items():
        if not any(fnmatchcase(name, pattern) for name in names):
            near = get_close_matches(pattern, names, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(names[:20])}."
            raise SettingsError(
                f"{type(model).__name__}.tp_plan names {pattern!r}, and there is no such module; {hint}"
            )
        plan[pattern] = _style(pattern, style)
    return plan


def _style(pattern: str, style: Any) -> ParallelStyle:
    if isinstance(style, ParallelStyle):
        return style
    if not isinstance(style, str) or style not in STYLES:
        near = get_close_matches(str(style), STYLES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {[*STYLES]}."
        raise SettingsError(f"tp_plan[{pattern!r}]={style!r}: no ParallelStyle and none of its names; {hint}")
    return STYLES[style]()


def get_model_tp_size(model: nn.Module) -> int:
    """Among how many processes the layers of a model are divided; 1 where they are whole.

    Example:
        >>> import torch
        >>> get_model_tp_size(torch.nn.Linear(1, 1))
        1
    """
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
            if "tp" in sizes:
                return sizes["tp"]
    return 1
