"""Merge a LoRA adapter of peft into the weights of its base: `is_adapter`, `merge_adapter`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from accel_ops.weights.lazy_tensors import LazyTensor, lazy_safetensors
from accel_state.errors import CheckpointError, some_of
from accel_state.files import read_json
from accel_state.remote import AnyPath
from accel_train.convert.contents import CheckpointContents

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_LORA = re.compile(r"(.*)\.lora_(embedding_)?([AB])(?:\.weight)?")


def is_adapter(folder: AnyPath) -> bool:
    """Return whether a folder has an adapter of peft."""
    return (folder / _CONFIG).is_file()


def merge_adapter(folder: AnyPath, base: CheckpointContents) -> CheckpointContents:
    """Return the weights of the base with the adapter merged into them, as `merge_and_unload` does.

    Args:
        folder: What `save_pretrained` of a peft model wrote.
        base: The checkpoint whose first model the adapter was trained for.

    Raises:
        CheckpointError: The adapter is not of LoRA on matrices, or not of that base.
    """
    config = _read_config(folder)
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
            merged[full] = lazy  # a module that was trained in full, or a bias
        else:
            strange.append(name)
    for module, pair in pairs.items():
        weight = merged.get(f"{module}.weight")
        transposed = bool(config.get("fan_in_fan_out")) or module in embeddings
        if weight is None or pair.keys() != {"A", "B"} or not _fits(weight, pair, transposed=transposed):
            strange.append(module)
            continue
        merged[f"{module}.weight"] = _sum(weight, pair, _scale(module, pair, config), transposed=transposed)
    if strange:
        raise CheckpointError(
            f"{str(folder)!r} has parts that are not of a matrix of the base: {some_of(sorted(strange))}; "
            "merge it with peft, or pass the base that it was trained for."
        )
    return CheckpointContents(
        form=f"LoRA adapter of {len(pairs)} matrices, with {base.form}",
        models=[merged],
        config_files=base.config_files,
        dropped=[*base.dropped, *(f"optimizer {index}" for index in range(len(base.optimizers)))],
    )


def _read_config(folder: AnyPath) -> Mapping[str, Any]:
    config = read_json(folder / _CONFIG)
    if not isinstance(config, dict) or config.get("peft_type") != "LORA" or config.get("use_dora"):
        raise CheckpointError(f"{str(folder)!r} is no adapter of LoRA without DoRA; merge it with peft.")
    return config


def _fits(weight: LazyTensor, pair: Mapping[str, LazyTensor], *, transposed: bool) -> bool:
    """Return whether the product of the pair has the shape of the weight."""
    first, second = pair["A"].shape, pair["B"].shape
    if not len(first) == len(second) == 2 or first[0] != second[1]:
        return False
    return weight.shape == ((first[1], second[0]) if transposed else (second[0], first[1]))


def _scale(module: str, pair: Mapping[str, LazyTensor], config: Mapping[str, Any]) -> float:
    patterns: Mapping[str, float] = config.get("alpha_pattern") or {}
    known = (value for key, value in patterns.items() if re.fullmatch(rf"(.*\.)?({key})", module))
    alpha, rank = next(known, config["lora_alpha"]), pair["A"].shape[0]
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _sum(weight: LazyTensor, pair: Mapping[str, LazyTensor], scale: float, *, transposed: bool) -> LazyTensor:
    read: Callable[[int, int], Tensor] = weight.read

    def merged(begin: int, end: int) -> Tensor:
        rows, first, second = read(begin, end), pair["A"].full(), pair["B"].full()
        dtype = second.dtype
        wide = torch.float32 if dtype.itemsize < 4 else dtype
        left, right = (first.T[begin:end], second.T) if transposed else (second[begin:end], first)
        return rows.add_(((left.to(wide) @ right.to(wide)) * scale).to(dtype))

    return LazyTensor(shape=weight.shape, dtype=weight.dtype, read=merged)
