"""Fully qualified names of parameters, without the prefixes of wrappers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from accel_ops.modules import extract_model_from_parallel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

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

    Args:
        optimizer: The optimizer.
        models: Models that may own the parameters, wrapped or not. If several own some, names begin with
            the model's index; a parameter of none of them is named by its group and position.

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
