"""A state dict that safetensors can write: contiguous tensors that share no memory."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from torch import Tensor

from accel_ops.weights.tensors import tensor_memory

if TYPE_CHECKING:
    from collections.abc import Mapping

_log = logging.getLogger(__name__)


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Remove aliases and make every tensor contiguous.

    A tensor under two names is kept under the first; loading ties it again. Different parts of one storage
    (the halves of a fused weight) are all kept, each in memory of its own.

    Args:
        state_dict: Name to tensor; values that are no tensors stay as they are.

    Example:
        >>> import torch
        >>> weight = torch.ones(2, 2)
        >>> list(clean_state_dict_for_safetensors({"a": weight, "b": weight}))
        ['a']
    """
    cleaned: dict[str, Any] = {}
    first: dict[object, str] = {}
    dropped: list[str] = []
    storages: set[object] = set()
    for name, value in state_dict.items():
        if not isinstance(value, Tensor) or value.is_meta:
            cleaned[name] = value
            continue
        memory = tensor_memory(value)
        storage, same = memory[0], (memory, value.dtype)
        if value.numel() and same in first:
            dropped.append(f"{name} (kept as {first[same]})")
            continue
        first[same] = name
        apart = value if storage not in storages else value.clone()
        storages.add(storage)
        cleaned[name] = apart.contiguous()
    if dropped:
        _log.warning("Weights under a second name are saved once: %s.", ", ".join(dropped))
    return cleaned
