"""Find layers, masks and packed samples that attention over sharded sequences does not support."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from accel_state.errors import SettingsError
from accel_state.frozen import frozen

_UNLIMITED = {"full_attention", "attention", "moe", "mlp"}  # the last two mix no tokens
_SPANS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


@frozen
class PartialLayer:
    """A layer that does not attend to all earlier tokens.

    Args:
        name: Name of its module.
        kind: Such as `"sliding_attention"`, as in `layer_types` of transformers' configurations.
        span: Number of tokens in its window or chunk; `None` for layers that are no attention.
        longest: Number of tokens of the longest sequence, from the configuration; `None` if unknown.
    """

    name: str
    kind: str
    span: int | None
    longest: int | None

    def __str__(self) -> str:
        span = f" of {self.span} tokens" if self.span is not None else ""
        return f"layer {self.name!r} is {self.kind!r}{span}"


def partial_layers(model: nn.Module) -> Iterator[PartialLayer]:
    """Yield the layers of a model that do not attend to all earlier tokens.

    These are named in `layer_types` or `sliding_window` of a transformers configuration, or are causal
    convolutions, as in state-space layers.

    Example:
        >>> [layer.kind for layer in partial_layers(nn.Conv1d(4, 4, kernel_size=3, padding=2))]
        ['causal convolution']
    """
    text = text_config(model)
    longest = getattr(text, "max_position_embeddings", None)
    names = {
        module.layer_idx: name
        for name, module in model.named_modules()
        if isinstance(getattr(module, "layer_idx", None), int) and getattr(module, "config", text) is text
    }
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        is_windowed = getattr(text, "sliding_window", None) is not None
        kinds = ["sliding_attention"] * (len(names) or 1) if is_windowed else []
    for index, kind in enumerate(kinds):
        if kind not in _UNLIMITED:
            span = getattr(text, _SPANS[kind], None) if kind in _SPANS else None
            yield PartialLayer(name=names.get(index, str(index)), kind=kind, span=span, longest=longest)
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv1d) and module.padding == (module.kernel_size[0] - 1,) != (0,):
            yield PartialLayer(name=name, kind="causal convolution", span=None, longest=None)


def check_layers(model: nn.Module, setting: str, *, limited: frozenset[str] = frozenset()) -> None:
    """Check that every layer attends to all earlier tokens.

    Args:
        model: The model; a window as long as `max_position_embeddings` does not count.
        setting: Named in the message.
        limited: Kinds of windows that are not checked.
    """
    for layer in partial_layers(model):
        if layer.kind in limited:
            continue
        if layer.span is None:
            raise SettingsError(
                f"{setting}: {layer}, which would see only one shard of each sequence and not the "
                "tokens before it. Train this model without sharding its sequences."
            )
        if layer.longest is None or layer.span < layer.longest:
            raise SettingsError(
                f"{setting}: {layer}, but attention over sharded sequences has no masks, and would see all "
                "of a sequence. Train this model without sharding its sequences, or, if none is longer than "
                f"{layer.span}, set config.max_position_embeddings={layer.span} (it is {layer.longest})."
            )


def text_config(model: nn.Module) -> Any:
    """Return the configuration of a model of transformers that is about text; `None` for other models."""
    configs = (module.config for module in model.modules() if hasattr(module, "config"))
    config: Any = next(configs, None)
    return getattr(config, "get_text_config", lambda: config)()


def has_padding_before_tokens(mask: Tensor) -> Tensor:
    """Return whether a mask of shape [rows, length] has zeros before ones, as a scalar tensor."""
    return ((mask[:, 1:] != 0) & (mask[:, :-1] == 0)).any()


def packs_samples(positions: Tensor) -> Tensor:
    """Return whether positions of shape [..., length] restart within a sequence, as a scalar tensor."""
    return ((positions[..., 1:-1] == 0) & (positions[..., 2:] == 1)).any()
