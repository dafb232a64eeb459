"""Remap optimizers from a model's original parameters to those of FSDP1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from accel_plugins.dcp.names import plain_name
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor
    from torch.optim import Optimizer


class ParamRemap:
    """Map from original parameters to FSDP1's, for optimizers prepared with the model or later."""

    def __init__(self) -> None:
        self._successors: Any = WeakIdKeyDictionary()
        self._optimizers: WeakSet[Optimizer] = WeakSet()

    def add(self, root: FullyShardedDataParallel, before: Mapping[str, Tensor], *, flat: bool) -> None:
        """Add a wrapped model.

        Args:
            root: The root FSDP module.
            before: The original parameters by name.
            flat: Whether it has flat parameters only (`use_orig_params=False`).
        """
        now = _flattened(root) if flat else _visible(root)
        for name, parameter in before.items():
            if name in now and now[name] is not parameter:
                self._successors[parameter] = now[name]

    def knows(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer was prepared before."""
        return optimizer in self._optimizers

    def has_successor(self, parameter: Tensor) -> bool:
        """Return whether a parameter was replaced."""
        return parameter in self._successors

    def switch(self, optimizer: Optimizer) -> None:
        """Replace an optimizer's original parameters by those of FSDP1.

        Raises:
            SettingsError: Parameters of one flat parameter are in different groups.
        """
        self._optimizers.add(optimizer)
        owner: dict[int, int] = {}
        for index, group in enumerate(optimizer.param_groups):
            new: dict[int, Tensor] = {}
            for parameter in group["params"]:
                after = self._successors.get(parameter, parameter)
                new[id(after)] = after
            for key in new:
                if owner.setdefault(key, index) != index:
                    raise SettingsError(
                        f"The parameters of one block are in the groups {owner[key]} and {index} of "
                        f"{type(optimizer).__qualname__}, but FSDP1 makes one flat parameter of them; set "
                        "FullyShardedDataParallelPlugin(use_orig_params=True)."
                    )
            group["params"][:] = new.values()


def _visible(root: FullyShardedDataParallel) -> dict[str, Tensor]:
    return {plain_name(name): one for name, one in root.named_parameters(remove_duplicate=False)}


def tied_names(root: FullyShardedDataParallel) -> dict[str, str]:
    """Map the further names of tied weights to the name under which FSDP1 has the weight."""
    found: dict[str, str] = {}
    for prefix, flat in _flat_parameters(root):
        for name, _, inside, first, _, first_inside in flat._shared_param_infos:
            found[prefix + _joined(inside, name)] = prefix + _joined(first_inside, first)
    return found


def _flattened(root: FullyShardedDataParallel) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for prefix, flat in _flat_parameters(root):
        found |= dict.fromkeys((prefix + inner for inner in flat._fqns), flat)
    return found


def _flat_parameters(root: FullyShardedDataParallel) -> Iterator[tuple[str, Any]]:
    """Yield each flat parameter with the name prefix of its module."""
    for name, module in root.named_modules():
        handle: Any = getattr(module, "_handle", None)  # only FSDP modules have one
        if isinstance(module, FullyShardedDataParallel) and handle is not None:
            yield plain_name(f"{name}.") if name else "", handle.flat_param


def _joined(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name
