"""`accel estimate-memory`: show the memory of a model's weights, and of its training by strategy."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from accel_bigmodel.device_map import infer_auto_device_map
from accel_bigmodel.explanation import Explanation, explain
from accel_cli.output import Table, show, working
from accel_inspect.arguments import AXIS_NAMES
from accel_inspect.estimate.megatron import stage_elements
from accel_inspect.estimate.memory import (
    MASTER,
    MEGATRON,
    OPTIMIZERS,
    STRATEGIES,
    Estimate,
    MemoryPeak,
    Suggestion,
    TrainingSetup,
    devices_needed,
    estimate,
    estimate_axes,
    fits,
    suggest,
)
from accel_inspect.estimate.meta_model import Weights, meta_model, shares_of, sizes_of, weights_in
from accel_inspect.estimate.trace import moments_of
from accel_ops.weights.layout import convert_bytes
from accel_plugins.megatron.checks import data_parallel_size
from accel_plugins.parallelism.config import ParallelismConfig
from accel_plugins.tiling import chunk_loss, tile_mlps
from accel_state.errors import SettingsError, UnsupportedError

KINDS = ("parameters", "gradients", "optimizer", "communication", "working")
"""The kinds of memory in an estimate."""


def run(options: Namespace) -> int:
    """Print the memory of a model."""
    # 1. Estimate.
    memory, host = options.memory, options.host_memory
    with working(f"estimating {options.model_name!r}"):
        model = meta_model(
            options.model_name, library=options.library_name, trust_remote_code=options.trust_remote_code
        )
        weights = {dtype: weights_in(model, dtype) for dtype in dict.fromkeys(options.dtypes)}
        setup, checkpointed = _training_setups(model, options)
        shown = checkpointed if options.gradient_checkpointing else setup
        names = tuple(STRATEGIES)[1:]
        if setup.devices == 1:
            names = ("one device", "FSDP2, offloaded", "ZeRO-2, offloaded", "ZeRO-3, offloaded")
        if setup.optimizer != "adam":  # as DeepSpeed's estimates are
            names = tuple(name for name in names if not name.startswith("ZeRO"))
        estimates = [estimate(name, shown) for name in names + (MEGATRON if setup.on_rank else ())]
        if shown.share is not None:
            estimates.append(estimate_axes(shown, shown.share))
        suggestion = placement = None
        if memory is not None:
            per_machine = options.devices_per_machine
            suggestion = suggest(setup, checkpointed, memory, host=host, per_machine=per_machine)
            placement = _placement(model, memory, setup.devices)
    # 2. Show.
    if options.json:
        show(_as_json(weights, estimates, suggestion))
        return 0
    show(_weights_table(options.model_name, weights, setup), "")
    show(_training_table(estimates, setup, memory, host, options))
    if memory is not None:
        show(
            "",
            *_advice(suggestion, checkpointed, memory, options.mixed_precision),
            "",
            f"inference in float16:\n{placement}",
        )
    if not options.quiet:
        show("", *_notes(options))
    return 0


def _training_setups(model: nn.Module, options: Namespace) -> tuple[TrainingSetup, TrainingSetup]:
    """Return the run without and with activation checkpointing."""
    width = 4 if options.mixed_precision == "no" else 2
    sizes = sizes_of(model)
    devices = options.num_devices or 1
    sizes_of_megatron = (
        options.megatron_lm_tp_degree,
        options.megatron_lm_pp_degree,
        options.megatron_lm_context_parallel_size,
    )
    tensor, pipeline, context = (size or 1 for size in sizes_of_megatron)
    on_rank = 0
    if any(sizes_of_megatron) and options.optimizer != "adam":
        raise SettingsError(f"argument --optimizer is {options.optimizer!r}: Megatron uses its own Adam.")
    if any(sizes_of_megatron):
        data_parallel_size(tensor, pipeline, context, devices)
        on_rank = max(stage_elements(model, tensor, pipeline, context))
    asked = {f"{axis}_size": getattr(options, f"parallelism_config_{axis}_size") for axis in AXIS_NAMES}
    share = None
    if any(asked.values()):
        config = _axes_of({name: size or 1 for name, size in asked.items()}, devices, asked["dp_shard_size"])
        share = max(shares_of(model, config), key=lambda share: share.sizes.parameters + share.experts)
    setup = TrainingSetup(
        sizes=sizes,
        devices=devices,
        width=width,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        on_rank=on_rank,
        share=share,
        optimizer=options.optimizer,
    )
    tiles = {name: getattr(options, name) for name in ("loss_chunk_size", "mlp_tile_size")}
    if options.batch_size is None:
        for name in (name for name, size in tiles.items() if size is not None):
            raise SettingsError(f"argument --{name} only affects activations: add --batch_size.")
        return setup, setup
    if tiles["mlp_tile_size"] is not None:
        tile_mlps(model, tiles["mlp_tile_size"])
    if tiles["loss_chunk_size"] is not None:
        chunk_loss(model, tiles["loss_chunk_size"])
    plain = _trace(model, options)
    checkpointed = _trace(model, options, checkpointing=True) or plain
    return replace(setup, moments=plain), replace(setup, moments=checkpointed)


def _axes_of(sizes: Mapping[str, Any], devices: int, dp_shard: int | None) -> ParallelismConfig:
    """Return the axes; FSDP2 shards over the remaining devices, unless `dp_shard` is set."""
    options: dict[str, Any] = {**sizes, "dp_shard_size": dp_shard or 1, "ep_size": 1}
    along = ParallelismConfig(**options).total_size
    if dp_shard is None and devices % along == 0:
        options["dp_shard_size"] = devices // along
    config = ParallelismConfig(**{**options, "ep_size": sizes["ep_size"]})
    config.check_world(devices)
    return config


_CHECKPOINTING = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
"""The methods of transformers models that enable activation checkpointing, current name first."""


def _trace(model: Any, options: Namespace, *, checkpointing: bool = False) -> tuple[MemoryPeak, ...]:
    """Return the memory peaks of the passes; none if the model does not support activation checkpointing."""
    if not hasattr(model, "config"):
        raise UnsupportedError(
            f"argument --batch_size: {options.model_name!r} has no transformers configuration, which "
            "the passes need. Remove --batch_size."
        )
    if checkpointing:
        enable = next((getattr(model, name) for name in _CHECKPOINTING if hasattr(model, name)), None)
        if enable is None or not getattr(model, "supports_gradient_checkpointing", False):
            return ()
        enable({"use_reentrant": False, "preserve_rng_state": False})
        model.config.use_cache = False
    dtype = None if options.mixed_precision == "no" else torch.bfloat16
    passes = passes_of_batch(options.batch_size, options.sequence_length)
    try:
        return moments_of(model.train(), passes, dtype=dtype)
    except (RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedError(
            f"argument --batch_size: the passes of {type(model).__name__} cannot run on fake tensors "
            f"({str(error).splitlines()[0]}). Remove --batch_size."
        ) from None


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
"""The inputs to create, by the name of a model's main input."""

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
"""Whether there is a label per token rather than per sample, by suffix of a model's class name."""


def passes_of_batch(batch: int, length: int) -> Callable[[nn.Module], tuple[Any, ...]]:
    """Create a function that runs a model on a batch.

    Args:
        batch: Batch size.
        length: Sequence length, in tokens or frames.

    Returns:
        A function for `moments_of`; like most scripts, it keeps all outputs of the model alive. It raises
        `UnsupportedError` for a model with unknown inputs.
    """

    def run(model: Any) -> tuple[Any, ...]:
        main: str = getattr(model, "main_input_name", "") or ""
        if main not in INPUTS:
            raise UnsupportedError(
                f"{type(model).__name__} takes {main!r} as its input, but passes can be estimated only for "
                f"{', '.join(INPUTS)}. Remove --batch_size."
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


def _weights_table(name: str, weights: dict[str, Weights], setup: TrainingSetup) -> Table:
    trainable = setup.sizes.trainable
    untrained = MASTER * (setup.sizes.parameters - trainable)
    rows = tuple(
        (
            dtype,
            convert_bytes(sizes.largest),
            convert_bytes(sizes.total),
            convert_bytes(_TRAINED_BYTES[dtype] * trainable + untrained) if _TRAINED_BYTES[dtype] else "-",
        )
        for dtype, sizes in weights.items()
    )
    return Table(
        title=f"{name}: {setup.sizes.parameters:,} parameters",
        head=("dtype", "largest layer", "total size", "training with Adam"),
        rows=rows,
    )


_TRAINED_BYTES = {"float32": 16, "float16": 18, "int8": 0, "int4": 0}
"""Bytes per element in training: weights, gradients and Adam's moments. Under mixed precision weights and
gradients are float32, too, with a copy in half precision."""


def _training_table(
    estimates: list[Estimate], setup: TrainingSetup, memory: int | None, host: int | None, options: Namespace
) -> Table:
    per_machine = min(options.devices_per_machine, setup.devices)

    def row(needed: Estimate) -> tuple[str, ...]:
        fit = () if memory is None else ("fits" if fits(needed, memory, host, per_machine) else "too large",)
        parts = (convert_bytes(needed.parts[kind]) if needed.parts[kind] else "-" for kind in KINDS)
        offloaded = convert_bytes(needed.host) if needed.host else "-"
        return (needed.strategy, convert_bytes(needed.device), *parts, offloaded, *fit)

    batch = ""
    if options.batch_size is not None:
        batch = f", {options.batch_size} x {options.sequence_length} tokens each"
    return Table(
        title=f"training with {OPTIMIZERS[setup.optimizer]} on {setup.devices} device(s), precision "
        f"{options.mixed_precision}{batch}",
        head=("strategy", "device", *KINDS, "host", *(() if memory is None else ("verdict",))),
        rows=tuple(map(row, estimates)),
    )


def _advice(
    suggestion: Suggestion | None, checkpointed: TrainingSetup, memory: int, precision: str
) -> list[str]:
    if suggestion is not None:
        config = {**suggestion.config, "mixed_precision": precision}
        text = yaml.safe_dump(config, sort_keys=False).rstrip()
        return [f"suggested: {suggestion.estimate.strategy}", text]
    needed = devices_needed(checkpointed, memory)
    if needed is None:
        return ["no configuration fits on any number of devices: use a smaller batch or shorter sequences."]
    return [f"no configuration fits. FSDP2 would fit on {needed} devices with activation checkpointing."]


def _placement(model: nn.Module, memory: int, devices: int) -> Explanation:
    """Return the device map of inference in half precision."""
    budget = {**dict.fromkeys(range(devices), memory), "cpu": 1 << 60}
    device_map = infer_auto_device_map(
        model,
        budget,
        no_split_module_classes=getattr(model, "_no_split_modules", None),
        dtype=torch.float16,
    )
    return explain(device_map, model, dtype=torch.float16)


def _notes(options: Namespace) -> list[str]:
    notes = ["The driver, kernels and fragmentation take more: plan with 90 % of a device's memory."]
    if options.batch_size is None:
        notes.append("Activations are not included. Add --batch_size and --sequence_length to include them.")
    if options.mixed_precision == "fp8":
        notes.append("FP8 multiplies matrices in 8 bits and stores the same tensors as bf16.")
    return notes


def _as_json(weights: dict[str, Weights], estimates: list[Estimate], suggestion: Suggestion | None) -> str:
    facts: dict[str, Any] = {
        "weights": {
            dtype: {"total": sizes.total, "largest layer": sizes.largest, "layers": list(sizes.layers)}
            for dtype, sizes in weights.items()
        },
        "training": {
            needed.strategy: {"device": needed.device, "host": needed.host, "parts": dict(needed.parts)}
            for needed in estimates
        },
    }
    if suggestion is not None:
        facts["suggestion"] = {
            "strategy": suggestion.estimate.strategy,
            "device": suggestion.estimate.device,
            "config": dict(suggestion.config),
        }
    return json.dumps(facts, indent=2)
