"""Merge a LoRA adapter of peft into the weights of its base: `is_adapter`, `merge_adapter`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from accel_convert.contents import CheckpointContents
from accel_ops.weights.lazy_tensors import LazyTensor, lazy_safetensors
from accel_state.errors import CheckpointError, some_of
from accel_state.files import read_json
from accel_state.remote import AnyPath

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_MAGNITUDE = "magnitude_vector"
_LORA = re.compile(r"(.*)\.lora_(embedding_)?(A|B|magnitude_vector)(?:\.weight)?")


def is_adapter(folder: AnyPath) -> bool:
    """Return whether a folder has an adapter of peft."""
    return (folder / _CONFIG).is_file()


def merge_adapter(folder: AnyPath, base: CheckpointContents) -> CheckpointContents:
    """Return the weights of the base with the adapter merged into them, as `merge_and_unload` does.

    Args:
        folder: A folder written by `save_pretrained` of a peft model.
        base: The checkpoint whose first model the adapter was trained for.

    Raises:
        CheckpointError: The adapter is not a LoRA adapter, or belongs to another base.
    """
    config = read_json(folder / _CONFIG)
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise CheckpointError(f"{str(folder)!r} is not a LoRA adapter; merge it with peft.")
    pairs: dict[str, dict[str, LazyTensor]] = {}
    merged = dict(base.models[0])
    strange: list[str] = []
    embeddings: set[str] = set()
    for key, lazy in lazy_safetensors(folder / _WEIGHTS).items():
        name = key.removeprefix(_PREFIX)
        match = _LORA.fullmatch(name)
        full = name.replace(".base_layer.", ".")
        if match is not None:
            pairs.setdefault(match[1], {})[match[3]] = lazy
            if match[2]:
                embeddings.add(match[1])
        elif full in merged and merged[full].shape == lazy.shape and ".lora_" not in name:
            merged[full] = lazy  # a fully trained module, or a bias
        else:
            strange.append(name)
    for module, pair in pairs.items():
        weight = merged.get(f"{module}.weight")
        transposed = bool(config.get("fan_in_fan_out")) or module in embeddings
        parts = {"A", "B", *([_MAGNITUDE] if config.get("use_dora") else [])}
        if weight is None or pair.keys() != parts or not _fits(weight, pair, transposed=transposed):
            strange.append(module)
            continue
        scale = _scale(module, pair, config)
        merged[f"{module}.weight"] = _merged(weight, pair, scale, transposed=transposed)
    if strange:
        raise CheckpointError(
            f"{str(folder)!r} has parts that fit no weight of the base: {some_of(sorted(strange))}; "
            "merge it with peft, or pass the base that it was trained for."
        )
    return CheckpointContents(
        form=f"LoRA adapter of {len(pairs)} matrices, with {base.form}",
        models=[merged],
        config_files=base.config_files,
        dropped=[*base.dropped, *(f"optimizer {index}" for index in range(len(base.optimizers)))],
    )


def _fits(weight: LazyTensor, pair: Mapping[str, LazyTensor], *, transposed: bool) -> bool:
    """Return whether the product of the pair has the shape of the weight: a matrix, or a convolution's."""
    (rank, *inner), (rows, width, *kernel) = pair["A"].shape, pair["B"].shape
    if width != rank or any(size != 1 for size in kernel):
        return False
    if _MAGNITUDE in pair and (kernel or pair[_MAGNITUDE].shape != (rows,)):
        return False
    return weight.shape == ((*inner, rows) if transposed else (rows, *inner))


def _scale(module: str, pair: Mapping[str, LazyTensor], config: Mapping[str, Any]) -> float:
    patterns: Mapping[str, float] = config.get("alpha_pattern") or {}
    known = (value for key, value in patterns.items() if re.fullmatch(rf"(.*\.)?({key})", module))
    alpha, rank = next(known, config["lora_alpha"]), pair["A"].shape[0]
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _merged(
    weight: LazyTensor, pair: Mapping[str, LazyTensor], scale: float, *, transposed: bool
) -> LazyTensor:
    """Return a weight plus the product of a pair; for DoRA, scale each output to its trained magnitude."""

    def total(begin: int, end: int) -> Tensor:
        rows, first, second = weight.read(begin, end), pair["A"].full(), pair["B"].full()
        dtype = second.dtype
        wide = torch.float32 if dtype.itemsize < 4 else dtype
        first, second = first.flatten(1).to(wide), second.flatten(1).to(wide)
        left, right = (first.T[begin:end], second.T) if transposed else (second[begin:end], first)
        return rows.add_(((left @ right) * scale).to(dtype).view(rows.shape))

    def scaled(begin: int, end: int) -> Tensor:
        lengths = pair[_MAGNITUDE].full()
        if not transposed:
            rows = total(begin, end)
            return rows.mul_((lengths[begin:end] / rows.norm(dim=1).to(lengths.dtype))[:, None])
        full = total(0, weight.shape[0])
        return full[begin:end] * (lengths / full.norm(dim=0).to(lengths.dtype))

    read: Callable[[int, int], Tensor] = scaled if _MAGNITUDE in pair else total
    return LazyTensor(shape=weight.shape, dtype=weight.dtype, read=read)
