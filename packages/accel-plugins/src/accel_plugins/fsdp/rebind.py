"""Optimizers whose parameters FSDP1 has put into flat ones."""

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
    """Knows which parameter took the place of which, also for optimizers that are prepared later."""

    def __init__(self) -> None:
        self._successors: Any = WeakIdKeyDictionary()
        self._optimizers: WeakSet[Optimizer] = WeakSet()

    def add(self, root: FullyShardedDataParallel, before: Mapping[str, Tensor], *, flat: bool) -> None:
        """Remember a model.

        Args:
            root: Wrapped.
            before: The parameters that it had, by name.
            flat: Whether it has flat parameters only.
        """
        now = _flattened(root) if flat else _visible(root)
        for name, parameter in before.items():
            if name in now and now[name] is not parameter:
                self._successors[parameter] = now[name]

    def knows(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer was prepared before."""
        return optimizer in self._optimizers

    def has_successor(self, parameter: Tensor) -> bool:
        """Whether another parameter took the place of one."""
        return parameter in self._successors

    def switch(self, optimizer: Optimizer) -> None:
        """Let an optimizer go on with the parameters that took the place of its own.

        Raises:
            SettingsError: Parameters of one flat parameter are in different groups.
        """
        self._optimizers.add(optimizer)
        owner: dict[int, int] = {}
        for place, group in enumerate(optimizer.param_groups):
            new: dict[int, Tensor] = {}
            for parameter in group["params"]:
                after = self._successors.get(parameter, parameter)
                new[id(after)] = after
            for key in new:
                if owner.setdefault(key, place) != place:
                    raise SettingsError(
                        f"The parameters of one block are in the groups {owner[key]} and {place} of "
                        f"{type(optimizer).__qualname__}, but FSDP1 makes one flat parameter of them; set "
                        "FullyShardedDataParallelPlugin(use_orig_params=True)."
                    )
            group["params"][:] = new.values()


def _visible(root: FullyShardedDataParallel) -> dict[str, Tensor]:
    return {plain_name(name): one for name, one in root.named_parameters(remove_duplicate=False)}


def tied_names(root: FullyShardedDataParallel) -> dict[str, str]:
    """Further names of tied weights, each to the name under which FSDP1 keeps the weight."""
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
    """Every flat parameter, with what comes before the names of the parameters in it."""
    for name, module in root.named_modules():
        handle: Any = getattr(module, "_handle", None)  # of FSDP alone
        if isinstance(module, FullyShardedDataParallel) and handle is not None:
            yield plain_name(f"{name}.") if name else "", handle.flat_param


def _joined(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name
