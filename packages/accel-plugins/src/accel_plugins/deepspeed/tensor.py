"""Weights of layers that DeepSpeed's AutoTP has split over tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class SplitLayers:
    """The layers of a model that AutoTP has split; none without AutoTP."""

    def __init__(self, module: nn.Module) -> None:
        self._layers: dict[int, list[Any]] = {}  # by the id of each parameter, all of its layer
        for layer in module.modules():
            parameters = [*layer.parameters(recurse=False)]
            if any(getattr(parameter, "ds_is_replaced_module", False) for parameter in parameters):
                self._layers |= {id(parameter): parameters for parameter in parameters}

    def __contains__(self, value: Any) -> bool:
        return id(value) in self._layers

    @contextmanager
    def whole(self, value: Any, part: Tensor | None = None) -> Generator[None]:
        """Gather a parameter within the block, or a `part` of its shape. A collective over the ranks.

        DeepSpeed's own context splits anew at the end, into memory that its optimizer does not step.
        """
        layer = self._layers.get(id(value), [])
        shards = [parameter.data for parameter in layer]
        try:
            if layer and part is not None:
                value.data = part
            if layer:
                layer[0].gather_params(layer)
            yield
        finally:
            for parameter, shard in zip(layer, shards, strict=True):
                parameter.data = shard

    def shard(self, value: Any, full: Tensor) -> Tensor:
        """Return this rank's part of a full tensor of a parameter. A collective, as `whole`."""
        if value not in self:
            return full
        layer = self._layers[id(value)]
        with self.whole(value):
            value.data = full.to(value.device)
            layer[0]._tp_partition(layer)
            return value.data
