"""The file names of weights. Nothing else knows them."""

from __future__ import annotations

MODEL_NAME = "pytorch_model"
"""The stem of a model's `.bin` files."""
SAFE_MODEL_NAME = "model"
"""The stem of a model's safetensors files."""
WEIGHTS_NAME = f"{MODEL_NAME}.bin"
"""A whole model in one `.bin` file."""
WEIGHTS_PATTERN_NAME = "pytorch_model{suffix}.bin"
"""A shard of a model in `.bin` files; the suffix is as `-00001-of-00005`."""
WEIGHTS_INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
"""The index of `.bin` shards: which file has which tensor."""
SAFE_WEIGHTS_NAME = f"{SAFE_MODEL_NAME}.safetensors"
"""A whole model in one safetensors file."""
SAFE_WEIGHTS_PATTERN_NAME = "model{suffix}.safetensors"
"""A shard of a model in safetensors files; the suffix is as `-00001-of-00005`."""
SAFE_WEIGHTS_INDEX_NAME = f"{SAFE_WEIGHTS_NAME}.index.json"
"""The index of safetensors shards: which file has which tensor."""

SAFETENSORS_SUFFIX = ".safetensors"
INDEX_SUFFIX = ".index.json"
OFFLOAD_INDEX_NAME = "index.json"


def shard_suffix(position: int, count: int) -> str:
    """Say what a pattern's `{suffix}` is for one shard, e.g. `-00002-of-00005`.

    Example:
        >>> SAFE_WEIGHTS_PATTERN_NAME.format(suffix=shard_suffix(1, 5))
        'model-00002-of-00005.safetensors'
    """
    return f"-{position + 1:05d}-of-{count:05d}" if count > 1 else ""
