"""Memory besides weights: activations, measured on the meta device, and the key-value cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Bytes that a declared batch and length take, by module.

    Attributes:
        activations: Module name to the bytes in use while it runs; a device needs the largest of its modules.
        cache: Module name to the bytes that stay as long as the generation lasts; a device needs their sum.

    Example:
        >>> Workload(cache={"layers.0": 100}).per_layer(["embed", "layers.0.attention", "layers.0.mlp"])
        ([0, 100, 0], [0, 0, 0])
    """

    activations: Mapping[str, int] = field(default_factory=dict[str, int])
    cache: Mapping[str, int] = field(default_factory=dict[str, int])

    def per_layer(self, names: Sequence[str]) -> tuple[list[int], list[int]]:
        """Give each layer its cache, and its activations; what a module has goes to its first layer.

        Raises:
            SettingsError: The workload names no module of the model.
        """
        cache, active = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
        first: dict[str, str] = {}
        for name in names:
            prefix = name
            while prefix:
                first.setdefault(prefix, name)
                prefix = prefix.rpartition(".")[0]
            first.setdefault("", name)
        for table, source in ((cache, self.cache), (active, self.activations)):
            for module, size in source.items():
                layer = _layer_above(module, table) or first.get(module)
                if layer is None:
                    raise SettingsError(f"the workload names {module!r}, which is no module of the model")
                table[layer] = table[layer] + size if table is cache else max(table[layer], size)
        return list(cache.values()), list(active.values())


def measure_activations(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, int]:
    """Run a model on the meta device, and note what each module receives and gives.

    Nothing is computed and no weight is touched. An operation without a rule for the meta device fails; its
    error is passed on.

    Args:
        model: The model, on any device.
        *args: Inputs of its forward; tensors count by shape and type alone.
        **kwargs: More of them.

    Returns:
        Module name to the bytes of its inputs and outputs together.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Linear(8, 1))
        >>> measure_activations(model, torch.empty(3, 2))
        {'0': 120, '1': 108, '': 36}
    """
    sizes: dict[str, int] = {}
    handles: list[Any] = []
    for name, module in model.named_modules():

        def record(_: nn.Module, arguments: Any, keywords: Any, output: Any, name: str = name) -> None:
            size = _bytes_of((arguments, keywords)) + _bytes_of(output)
            sizes[name] = max(sizes.get(name, 0), size)

        handles.append(module.register_forward_hook(record, with_kwargs=True))
    tensors = {
        name: tensor.to("meta") for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }
    try:
        with torch.no_grad():
            functional_call(model, tensors, tree_map(_to_meta, args), tree_map(_to_meta, kwargs))
    finally:
        for handle in handles:
            handle.remove()
    return sizes


def kv_cache(
    layers: Sequence[str],
    *,
    batch_size: int,
    sequence_length: int,
    num_key_value_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float16,
) -> dict[str, int]:
    """Return the bytes of a key-value cache: 2 x batch x length x heads x head size.

    Args:
        layers: Names of the layers that have one.
        batch_size: Sequences at a time.
        sequence_length: Prompt and generated tokens together.
        num_key_value_heads: Heads that are cached (fewer than query heads with grouped attention).
        head_dim: Elements per head.
        dtype: The cache's element type.

    Example:
        >>> kv_cache(["layers.0"], batch_size=1, sequence_length=10, num_key_value_heads=2, head_dim=4)
        {'layers.0': 320}
    """
    size = 2 * batch_size * sequence_length * num_key_value_heads * head_dim * dtype.itemsize
    return dict.fromkeys(layers, size)


def _layer_above(module: str, layers: Mapping[str, int]) -> str | None:
    prefix = module
    while prefix:
        if prefix in layers:
            return prefix
        prefix = prefix.rpartition(".")[0]
    return "" if "" in layers else None


def _bytes_of(data: Any) -> int:
    return sum(leaf.numel() * leaf.itemsize for leaf in tree_leaves(data) if isinstance(leaf, torch.Tensor))


def _to_meta(leaf: Any) -> Any:
    return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf
