"""A batch for a model of transformers, and its loss; only shapes matter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from accel_state.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn


def _ids(batch: int, length: int) -> Tensor:
    return torch.ones(batch, length, dtype=torch.int64)


def _pixels(config: Any, batch: int) -> Tensor:
    size = getattr(config, "image_size", 224)
    height, width = (size, size) if isinstance(size, int) else size
    return torch.ones(batch, getattr(config, "num_channels", 3), height, width)


INPUTS: Mapping[str, Callable[[Any, int, int], Tensor]] = {
    "input_ids": lambda _, batch, length: _ids(batch, length),
    "pixel_values": lambda config, batch, _: _pixels(config, batch),
    "input_values": lambda _, batch, length: torch.ones(batch, length),
    "input_features": lambda config, batch, length: torch.ones(batch, config.num_mel_bins, length),
}
"""The inputs to make, by the name of a model's main input."""

# By what the name of a model's class ends in, whether there is a label for each token or for each sample.
_LABELS = {
    "ForCausalLM": True,
    "LMHeadModel": True,
    "ForMaskedLM": True,
    "ForPreTraining": True,
    "ForTokenClassification": True,
    "ForConditionalGeneration": True,
    "ForSequenceClassification": False,
    "ForImageClassification": False,
}


def passes_of_batch(batch: int, length: int) -> Callable[[nn.Module], tuple[Any, ...]]:
    """Make the function that runs a model on a batch.

    Args:
        batch: Batch size.
        length: Sequence length, in tokens or frames.

    Returns:
        A function for `moments_of`; like most scripts it holds on to all that the model returns. It raises
        `UnsupportedError` for a model with inputs of another kind.
    """

    def run(model: Any) -> tuple[Any, ...]:
        main: str = getattr(model, "main_input_name", "") or ""
        if main not in INPUTS:
            raise UnsupportedError(
                f"{type(model).__name__} takes {main!r} as its input; passes can be estimated for "
                f"{', '.join(INPUTS)}. Leave --batch_size out."
            )
        keywords = {main: INPUTS[main](model.config, batch, length)}
        if getattr(model.config, "is_encoder_decoder", False):
            keywords["decoder_input_ids"] = _ids(batch, length)
        for_tokens = next((_LABELS[end] for end in _LABELS if type(model).__name__.endswith(end)), None)
        if for_tokens is not None:
            keywords["labels"] = torch.ones((batch, length) if for_tokens else (batch,), dtype=torch.int64)
        output = model(**keywords)
        loss = output[0].float().mean() if for_tokens is None else output.loss
        return loss, output

    return run
