"""The file names of weights. Nothing else knows them."""

from __future__ import annotations

MODEL_NAME = "pytorch_model"
SAFE_MODEL_NAME = "model"
WEIGHTS_NAME = f"{MODEL_NAME}.bin"
WEIGHTS_PATTERN_NAME = "pytorch_model{suffix}.bin"
WEIGHTS_INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
SAFE_WEIGHTS_NAME = f"{SAFE_MODEL_NAME}.safetensors"
SAFE_WEIGHTS_PATTERN_NAME = "model{suffix}.safetensors"
SAFE_WEIGHTS_INDEX_NAME = f"{SAFE_WEIGHTS_NAME}.index.json"

SAFETENSORS_SUFFIX = ".safetensors"
INDEX_SUFFIX = ".index.json"
OFFLOAD_INDEX_NAME = "index.json"


def shard_suffix(position: int, count: int) -> str:
    """Say what a pattern's `{suffix}` is for one shard, e.g. `-00002-of-00005`.

    Args:
        position: Which shard, from 0.
        count: How many there are; the only one has no suffix.

    Example:
        >>> SAFE_WEIGHTS_PATTERN_NAME.format(suffix=shard_suffix(1, 5))
        'model-00002-of-00005.safetensors'
    """
    return f"-{position + 1:05d}-of-{count:05d}" if count > 1 else ""
