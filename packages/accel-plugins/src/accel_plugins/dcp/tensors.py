"""Sharded states of models whose parameters are plain tensors or DTensors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from accel_ops.modules import extract_model_from_parallel
from accel_plugins.dcp.protocol import StateForm
from accel_state.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from accel_plugins.dcp.protocol import StateAllocator
    from accel_plugins.roles import StateDict


def allocator_like(parameters: Mapping[str, Tensor]) -> StateAllocator:
    """Return an allocator of tensors sharded like the parameter of the same name and shape, else full."""

    def allocate(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        parameter = parameters.get(name)
        if parameter is not None and parameter.shape == shape and shape:
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        return torch.empty(shape, dtype=dtype)

    return allocate


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShards:
    """State dicts with the tensors of the model and of the optimizer as they are.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        >>> TensorShards().optimizer_tensors(optimizer, [model])["param_groups"][0]["params"]
        ['weight', 'bias']
    """

    form_now: Callable[[], StateForm] = lambda: StateForm.FULL
    allocator_like: Callable[[Mapping[str, Tensor]], StateAllocator] = allocator_like

    def form(self) -> StateForm:
        """Return the form that `save_state` writes."""
        return self.form_now()

    def model_tensors(self, model: nn.Module) -> StateDict:
        """Return the state dict of the model; tied weights are one object."""
        state = _core(model).state_dict(keep_vars=True)
        detached = {
            id(value): value.detach() if isinstance(value, torch.Tensor) else value
            for value in state.values()
        }
        return {plain_name(name): detached[id(value)] for name, value in state.items()}

    def load_model(self, model: nn.Module, state: StateDict, **options: Any) -> None:
        """Load a state dict of the layout of `model_tensors`."""
        core = _core(model)
        names = {plain_name(name): name for name in core.state_dict()}
        core.load_state_dict({names.get(name, name): value for name, value in state.items()}, **options)

    def optimizer_tensors(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> StateDict:
        """Return the state dict of the optimizer, with parameters by name."""
        return named_state(optimizer.state_dict(), parameter_names(optimizer, models))

    def state_allocator(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> StateAllocator:
        """Allocate tensors as `allocator_like` does for the parameters."""
        groups = zip(parameter_names(optimizer, models), optimizer.param_groups, strict=True)
        parameters: dict[str, Tensor] = {}
        for names, group in groups:
            parameters |= zip(names, group["params"], strict=True)

        return self.allocator_like(parameters)

    def load_optimizer(self, optimizer: Optimizer, models: Sequence[nn.Module], state: StateDict) -> None:
        """Load a state dict of the layout of `optimizer_tensors`."""
        optimizer.load_state_dict(numbered_state(state, parameter_names(optimizer, models)))


def named_state(state: Mapping[str, Any], names: Sequence[Sequence[str]]) -> StateDict:
    """Replace the parameter indices of an optimizer's state dict by names.

    Example:
        >>> named_state({"state": {0: {"step": 1}}, "param_groups": [{"lr": 0.5, "params": [0]}]}, [["a"]])
        {'state': {'a': {'step': 1}}, 'param_groups': [{'lr': 0.5, 'params': ['a']}]}
    """
    by_number: dict[int, str] = {}
    for group, group_names in zip(state["param_groups"], names, strict=True):
        by_number |= zip(group["params"], group_names, strict=True)
    return {
        **state,
        "state": {by_number[number]: dict(values) for number, values in state["state"].items()},
        "param_groups": [
            {**group, "params": list(group_names)}
            for group, group_names in zip(state["param_groups"], names, strict=True)
        ],
    }


def numbered_state(state: Mapping[str, Any], names: Sequence[Sequence[str]]) -> StateDict:
    """Replace the names of `named_state` by parameter indices; the order within a group may differ.

    Example:
        >>> state = {"state": {"b": {"step": 1}}, "param_groups": [{"params": ["b", "a"]}]}
        >>> numbered_state(state, [["a", "b"]])
        {'state': {1: {'step': 1}}, 'param_groups': [{'params': [0, 1]}]}
    """
    check_groups([group["params"] for group in state["param_groups"]], names)
    return renumbered(state, names)


def renumbered(state: Mapping[str, Any], names: Sequence[Sequence[str]]) -> StateDict:
    """Do so with groups that are checked."""
    numbers: dict[str, int] = {}
    for group_names in names:
        for name in group_names:
            numbers.setdefault(name, len(numbers))
    return {
        **state,
        "state": {numbers[name]: values for name, values in state["state"].items() if name in numbers},
        "param_groups": [
            {**group, "params": [numbers[name] for name in group_names]}
            for group, group_names in zip(state["param_groups"], names, strict=True)
        ],
    }


def check_groups(saved: Sequence[Sequence[str]], names: Sequence[Sequence[str]]) -> None:
    """Check that a saved optimizer has the parameters of the loading one."""
    if len(saved) != len(names):
        raise CheckpointError(
            f"The saved optimizer has {len(saved)} parameter group(s), this run's has {len(names)}: build "
            "the optimizer as in the run that was saved."
        )
    for index, (then, now) in enumerate(zip(saved, names, strict=True)):
        gone, new = sorted({*then} - {*now}), sorted({*now} - {*then})
        if gone or new:
            only = f"only in the checkpoint {gone[:3]}" if gone else f"only in this optimizer {new[:3]}"
            raise CheckpointError(
                f"Group {index} of the saved optimizer has other parameters than this optimizer: {only}. "
                "Build the model and the optimizer as in the run that was saved."
            )


def _core(model: nn.Module) -> nn.Module:
    return extract_model_from_parallel(model, keep_torch_compile=False)


# The prefixes of FSDP1, of activation checkpointing and of compiled modules.
_LAYERS = re.compile(r"(?:^|(?<=\.))(?:_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")


def plain_name(name: str) -> str:
    """Remove the prefixes of wrappers from a parameter's name.

    Example:
        >>> plain_name("layers.0._checkpoint_wrapped_module.weight")
        'layers.0.weight'
    """
    return _LAYERS.sub("", name)


def parameter_names(optimizer: Optimizer, models: Sequence[nn.Module]) -> list[list[str]]:
    """Return the names of an optimizer's parameters, group by group.

    If several models own some, names begin with the model's index; a parameter of none of them is named by
    its group and position.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> parameter_names(torch.optim.SGD(model.parameters()), [model])
        [['weight', 'bias']]
    """
    owners: dict[int, tuple[int, str]] = {}
    for number, model in enumerate(models):
        inside = extract_model_from_parallel(model, keep_torch_compile=False)
        for name, parameter in inside.named_parameters(remove_duplicate=False):
            owners.setdefault(id(parameter), (number, plain_name(name)))
    groups: list[list[Tensor]] = [group["params"] for group in optimizer.param_groups]
    numbers = {owners[id(one)][0] for group in groups for one in group if id(one) in owners}
    named: list[list[str]] = []
    for index, group in enumerate(groups):
        named.append([])
        for position, parameter in enumerate(group):
            number, name = owners.get(id(parameter), (-1, f"param_groups.{index}.{position}"))
            named[-1].append(f"{number}.{name}" if number >= 0 and len(numbers) > 1 else name)
    return named
