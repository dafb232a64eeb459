"""`accel estimate-memory`: show the memory of a model's weights, and of its training by strategy."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from accel_cli.output import Table, show, working
from accel_inspect.arguments import AXIS_NAMES
from accel_inspect.estimate.memory import (
    KINDS,
    MASTER,
    OPTIMIZERS,
    STRATEGIES,
    DeviceShare,
    Estimate,
    TrainingSetup,
    estimate,
    estimate_axes,
    fits,
)
from accel_inspect.estimate.meta_model import Weights, meta_model, shares_of, sizes_of, weights_in
from accel_inspect.estimate.trace import moments_of
from accel_ops.weights.layout import convert_bytes
from accel_plugins.parallelism.config import ParallelismConfig
from accel_plugins.tiling import chunk_loss, tile_mlps
from accel_state.errors import SettingsError, UnsupportedError


def run(options: Namespace) -> int:
    """Print the memory of a model."""
    memory, host = options.memory, options.host_memory
    with working(f"estimating {options.model_name!r}"):
        model = meta_model(
            options.model_name, library=options.library_name, trust_remote_code=options.trust_remote_code
        )
        weights = {dtype: weights_in(model, dtype) for dtype in dict.fromkeys(options.dtypes)}
        share = _share_of_axes(model, options, options.num_devices or 1)
        setup = _training_setup(model, options)
        per_machine = min(options.devices_per_machine, setup.devices)
        names = [*STRATEGIES][1:]
        if setup.devices == 1:
            names = ["one device", "FSDP2, offloaded", "ZeRO-2, offloaded", "ZeRO-3, offloaded"]
        if setup.optimizer != "adam":  # as DeepSpeed's estimates are
            names = [name for name in names if not name.startswith("ZeRO")]
        estimates = [estimate(name, setup) for name in names]
        if share is not None:
            estimates.append(estimate_axes(setup, share))
    if options.json:
        show(_as_json(weights, estimates))
        return 0
    show(_weights_table(options.model_name, weights, setup), "")
    verdicts = {
        needed.strategy: "fits" if fits(needed, memory, host, per_machine) else "too large"
        for needed in (estimates if memory else ())
    }
    show(_training_table(estimates, setup, verdicts, options))
    if not options.quiet:
        notes = ["The driver, kernels and fragmentation take more: plan with 90 % of a device's memory."]
        if options.batch_size is None:
            notes.append("Activations are not included: add --batch_size and --sequence_length.")
        if options.mixed_precision == "fp8":
            notes.append("FP8 multiplies matrices in 8 bits and stores the same tensors as bf16.")
        show("", *notes)
    return 0


_CHECKPOINTING = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
"""The methods of transformers models that enable activation checkpointing, current name first."""


def _training_setup(model: Any, options: Namespace) -> TrainingSetup:
    """Return the training run, with the memory peaks of its passes if there is a batch size."""
    is_mixed = options.mixed_precision != "no"
    setup = TrainingSetup(
        sizes=sizes_of(model),
        devices=options.num_devices or 1,
        width=2 if is_mixed else 4,
        optimizer=options.optimizer,
    )
    if options.batch_size is None:
        if options.loss_chunk_size or options.mlp_tile_size:
            raise SettingsError("arguments --loss_chunk_size, --mlp_tile_size: add --batch_size.")
        return setup
    if options.mlp_tile_size:
        tile_mlps(model, options.mlp_tile_size)
    if options.loss_chunk_size:
        chunk_loss(model, options.loss_chunk_size)
    if not hasattr(model, "config"):
        raise UnsupportedError(
            f"argument --batch_size: {options.model_name!r} has no transformers configuration, which "
            "the passes need. Remove --batch_size."
        )
    enable = next((getattr(model, name) for name in _CHECKPOINTING if hasattr(model, name)), None)
    is_supported = getattr(model, "supports_gradient_checkpointing", False)
    if options.gradient_checkpointing and is_supported and enable is not None:
        enable({"use_reentrant": False, "preserve_rng_state": False})
        model.config.use_cache = False
    passes = passes_of_batch(options.batch_size, options.sequence_length)
    try:
        moments = moments_of(model.train(), passes, dtype=torch.bfloat16 if is_mixed else None)
    except (RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedError(
            f"argument --batch_size: the passes of {type(model).__name__} cannot run on fake tensors "
            f"({str(error).splitlines()[0]}). Remove --batch_size."
        ) from None
    return replace(setup, moments=moments)


def _share_of_axes(model: nn.Module, options: Namespace, devices: int) -> DeviceShare | None:
    """Return the largest share of a device along the axes; FSDP2 shards over devices that no axis takes."""
    asked = {f"{axis}_size": getattr(options, f"parallelism_config_{axis}_size") for axis in AXIS_NAMES}
    if not any(asked.values()):
        return None
    sizes: dict[str, Any] = {name: size or 1 for name, size in asked.items()}
    without_experts: dict[str, Any] = {**sizes, "ep_size": 1}
    along = ParallelismConfig(**without_experts).total_size
    if asked["dp_shard_size"] is None and devices % along == 0:
        sizes["dp_shard_size"] = devices // along
    config = ParallelismConfig(**sizes)
    config.check_world(devices)
    return max(shares_of(model, config), key=lambda share: share.sizes.parameters + share.experts)


_LABELS_OF_TOKENS = (
    "ForCausalLM",
    "LMHeadModel",
    "ForMaskedLM",
    "ForPreTraining",
    "ForTokenClassification",
    "ForConditionalGeneration",
)
_LABELS_OF_SAMPLES = ("ForSequenceClassification", "ForImageClassification")


def passes_of_batch(batch: int, length: int) -> Callable[[nn.Module], tuple[Any, ...]]:
    """Create a function that runs a model on a batch.

    Args:
        batch: Batch size.
        length: Sequence length, in tokens or frames.

    Returns:
        A function for `moments_of`; like most scripts, it keeps all outputs of the model alive. It raises
        `UnsupportedError` for a model with unknown inputs.
    """
    ids = partial(torch.ones, dtype=torch.int64)

    def run(model: Any) -> tuple[Any, ...]:
        config, main = model.config, getattr(model, "main_input_name", "")
        if main == "input_ids":
            inputs = ids(batch, length)
        elif main == "input_values":
            inputs = torch.ones(batch, length)
        elif main == "input_features":
            inputs = torch.ones(batch, config.num_mel_bins, length)
        elif main == "pixel_values":
            size = getattr(config, "image_size", 224)
            height, width = (size, size) if isinstance(size, int) else size
            inputs = torch.ones(batch, getattr(config, "num_channels", 3), height, width)
        else:
            raise UnsupportedError(
                f"the model takes {main!r}, for which passes cannot be estimated. Remove --batch_size."
            )
        keywords = {main: inputs}
        if getattr(config, "is_encoder_decoder", False):
            keywords["decoder_input_ids"] = ids(batch, length)
        name = type(model).__name__
        if name.endswith(_LABELS_OF_TOKENS):
            keywords["labels"] = ids(batch, length)
        elif name.endswith(_LABELS_OF_SAMPLES):
            keywords["labels"] = ids(batch)
        output = model(**keywords)
        return output.loss if "labels" in keywords else output[0].float().mean(), output

    return run


_TRAINED_BYTES = {"float32": 16, "float16": 18}
"""Bytes per element in training: weights, gradients and Adam's moments. Under mixed precision weights and
gradients are float32, too, with a copy in half precision."""


def _weights_table(name: str, weights: dict[str, Weights], setup: TrainingSetup) -> Table:
    sizes = setup.sizes
    untrained = MASTER * (sizes.parameters - sizes.trainable)
    trained = {
        dtype: convert_bytes(width * sizes.trainable + untrained) for dtype, width in _TRAINED_BYTES.items()
    }
    return Table(
        title=f"{name}: {sizes.parameters:,} parameters",
        head=("dtype", "largest layer", "total size", "training with Adam"),
        rows=tuple(
            (dtype, convert_bytes(of_dtype.largest), convert_bytes(of_dtype.total), trained.get(dtype, "-"))
            for dtype, of_dtype in weights.items()
        ),
    )


def _training_table(
    estimates: list[Estimate], setup: TrainingSetup, verdicts: dict[str, str], options: Namespace
) -> Table:
    batch = ""
    if options.batch_size is not None:
        batch = f", {options.batch_size} x {options.sequence_length} tokens each"
    rows: list[tuple[str, ...]] = []
    for needed in estimates:
        parts = (*(needed.parts[kind] for kind in KINDS), needed.host)
        shown = (convert_bytes(part) if part else "-" for part in parts)
        verdict = (verdicts[needed.strategy],) if verdicts else ()
        rows.append((needed.strategy, convert_bytes(needed.device), *shown, *verdict))
    return Table(
        title=f"training with {OPTIMIZERS[setup.optimizer]} on {setup.devices} device(s), precision "
        f"{options.mixed_precision}{batch}",
        head=("strategy", "device", *KINDS, "host", *(("verdict",) if verdicts else ())),
        rows=tuple(rows),
    )


def _as_json(weights: dict[str, Weights], estimates: list[Estimate]) -> str:
    facts = {
        "weights": {
            dtype: {"total": sizes.total, "largest layer": sizes.largest, "layers": list(sizes.layers)}
            for dtype, sizes in weights.items()
        },
        "training": {
            needed.strategy: {"device": needed.device, "host": needed.host, "parts": dict(needed.parts)}
            for needed in estimates
        },
    }
    return json.dumps(facts, indent=2)
