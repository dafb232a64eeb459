"""ZeRO stage 3: gather parameters that it has sharded, and mark modules that it gathers as one."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from accel_plugins.deepspeed.library import ds_module
from accel_state.did_you_mean import did_you_mean
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from torch import nn


def is_sharded(parameter: torch.Tensor) -> bool:
    """Return whether stage 3 has sharded a parameter."""
    return "ds_id" in vars(parameter)


@contextmanager
def GatheredParameters(  # noqa: N802 - the documented name
    params: torch.Tensor | Iterable[torch.Tensor],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Generator[None]:
    """Gather parameters that DeepSpeed's stage 3 has sharded, within the block. A collective over all ranks.

    Parameters that are not sharded are unchanged.

    Args:
        params: One or several parameters.
        modifier_rank: The rank whose changes are broadcast at the end; `None` if nothing is changed.
        fwd_module: The module that uses another one's parameters in its forward pass.
        enabled: Whether to gather; if false, do nothing.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> with GatheredParameters(weight, modifier_rank=0):
        ...     weight.data += 1
        >>> weight.tolist()
        [1.0, 1.0]
    """
    several = [params] if isinstance(params, torch.Tensor) else [*params]
    sharded = [one for one in several if is_sharded(one)]
    if not enabled or not sharded:
        yield
        return
    gather = ds_module("runtime.zero").GatheredParameters
    with gather(sharded, modifier_rank=modifier_rank, fwd_module=fwd_module):
        yield


def find_classes(model: nn.Module, names: str) -> list[type[nn.Module]]:
    """Find the classes of a model's modules by their names, separated by commas.

    Example:
        >>> import torch
        >>> find_classes(torch.nn.Sequential(torch.nn.Linear(1, 1)), "Linear")
        [<class 'torch.nn.modules.linear.Linear'>]
    """
    classes = {type(module).__name__: type(module) for module in model.modules()}
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in classes:
            hint = did_you_mean(name, classes, f"it has {', '.join(sorted(classes))}.")
            raise SettingsError(
                f"DeepSpeedPlugin(transformer_moe_cls_names={names!r}): {type(model).__name__} has no "
                f"module of the class {name!r}; {hint}"
            )
    return [classes[name] for name in wanted]
