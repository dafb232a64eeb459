"""Sharded states of models whose parameters are ordinary tensors or DTensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from accel_ops.modules import extract_model_from_parallel
from accel_plugins.dcp.names import parameter_names, plain_name
from accel_plugins.dcp.protocol import StateForm
from accel_state.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from accel_plugins.dcp.protocol import StateAllocator
    from accel_plugins.roles import StateDict


def always_full() -> StateForm:
    """The form of strategies of which every rank has the whole model."""
    return StateForm.WHOLE


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShards:
    """Takes tensors as they are in the model and in the optimizer's state.

    Args:
        form_now: Says what `save_state` writes.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        >>> TensorShards().optimizer_tensors(optimizer, [model])["param_groups"][0]["params"]
        ['weight', 'bias']
    """

    form_now: Callable[[], StateForm] = always_full

    def form(self) -> StateForm:
        """What `save_state` writes now."""
        return self.form_now()

    def model_tensors(self, model: nn.Module) -> StateDict:
        """The model's own tensors."""
        return {plain_name(name): value for name, value in _core(model).state_dict().items()}

    def load_model(self, model: nn.Module, state: StateDict, **options: Any) -> None:
        """Load, under the names that the model's state dict has."""
        core = _core(model)
        names = {plain_name(name): name for name in core.state_dict()}
        core.load_state_dict({names.get(name, name): value for name, value in state.items()}, **options)

    def optimizer_tensors(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> StateDict:
        """The optimizer's own tensors."""
        return named_state(optimizer.state_dict(), parameter_names(optimizer, models))

    def state_allocator(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> StateAllocator:
        """Room that is divided like the parameter if it has its shape; else for the whole, on the CPU."""
        groups = zip(parameter_names(optimizer, models), optimizer.param_groups, strict=True)
        parameters: dict[str, Tensor] = {}
        for names, group in groups:
            parameters |= zip(names, group["params"], strict=True)

        return allocator_like(parameters)

    def load_optimizer(self, optimizer: Optimizer, models: Sequence[nn.Module], state: StateDict) -> None:
        """Load, by the numbers that parameters have in this optimizer."""
        optimizer.load_state_dict(numbered_state(state, parameter_names(optimizer, models)))


def named_state(state: Mapping[str, Any], names: Sequence[Sequence[str]]) -> StateDict:
    """Put names in the place of the numbers that stand for parameters in an optimizer's state dict.

    Args:
        state: What `Optimizer.state_dict` gave.
        names: Of the parameters, group by group.

    Example:
        >>> named_state({"state": {0: {"step": 1}}, "param_groups": [{"lr": 0.5, "params": [0]}]}, [["a"]])
        {'state': {'a': {'step': 1}}, 'param_groups': [{'lr': 0.5, 'params': ['a']}]}
    """
    by_number: dict[int, str] = {}
    for group, own in zip(state["param_groups"], names, strict=True):
        by_number |= zip(group["params"], own, strict=True)
    return {
        **state,
        "state": {by_number[number]: dict(values) for number, values in state["state"].items()},
        "param_groups": [
            {**group, "params": list(own)} for group, own in zip(state["param_groups"], names, strict=True)
        ],
    }


def numbered_state(state: Mapping[str, Any], names: Sequence[Sequence[str]]) -> StateDict:
    """The inverse of `named_state`, also if the names of a group are in another order.

    Args:
        state: With names.
        names: Of the parameters of the optimizer that it is for, group by group.

    Raises:
        CheckpointError: The state is of other parameters.

    Example:
        >>> state = {"state": {"b": {"step": 1}}, "param_groups": [{"params": ["b", "a"]}]}
        >>> numbered_state(state, [["a", "b"]])
        {'state': {1: {'step': 1}}, 'param_groups': [{'params': [0, 1]}]}
    """
    check_groups([group["params"] for group in state["param_groups"]], names)
    numbers: dict[str, int] = {}
    for own in names:
        for name in own:
            numbers.setdefault(name, len(numbers))
    return {
        **state,
        "state": {numbers[name]: values for name, values in state["state"].items() if name in numbers},
        "param_groups": [
            {**group, "params": [numbers[name] for name in own]}
            for group, own in zip(state["param_groups"], names, strict=True)
        ],
    }


def check_groups(saved: Sequence[Sequence[str]], names: Sequence[Sequence[str]]) -> None:
    """Refuse a saved optimizer that has other parameters.

    Args:
        saved: The names in it, group by group.
        names: Of the parameters of the optimizer that it is for.

    Raises:
        CheckpointError: The groups differ in more than order.
    """
    if len(saved) != len(names):
        raise CheckpointError(
            f"The saved optimizer has {len(saved)} parameter group(s), this one has {len(names)}: build it "
            "as in "
            "the run that was saved."
        )
    for place, (then, now) in enumerate(zip(saved, names, strict=True)):
        gone, new = sorted({*then} - {*now}), sorted({*now} - {*then})
        if gone or new:
            only = f"only in the checkpoint {gone[:3]}" if gone else f"only in this optimizer {new[:3]}"
            raise CheckpointError(
                f"Group {place} of the saved optimizer is of other parameters than here: {only}. Build model "
                "and "
                "optimizer as in the run that was saved."
            )


def _core(model: nn.Module) -> nn.Module:
    return extract_model_from_parallel(model, keep_torch_compile=False)


def allocator_like(parameters: Mapping[str, Tensor]) -> StateAllocator:
    """Room that is divided like the parameter of the same name if it has its shape; else for the whole.

    Args:
        parameters: By name.
    """

    def allocate(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        parameter = parameters.get(name)
        if parameter is not None and parameter.shape == shape and shape:
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        return torch.empty(shape, dtype=dtype)

    return allocate
