"""Generate text: gather the weights of an engine into the model of transformers, and call its `generate`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from accel_plugins.megatron.library import core
from accel_plugins.megatron.state import find_aliases, gather
from accel_state.errors import SettingsError, UnsupportedError

if TYPE_CHECKING:
    from accel_plugins.megatron.engine import MegatronEngine


def generate(
    engine: MegatronEngine, inputs: Tensor, attention_mask: Tensor | None, requested: Mapping[str, Any]
) -> Tensor:
    """Continue prompts; see `MegatronEngine.megatron_generate`."""
    model: Any = engine.source
    if not model.can_generate():
        raise UnsupportedError(f"{type(model).__name__} does not generate text: prepare a decoder or a T5.")
    options = {name: value for name, value in requested.items() if value is not None}
    options.setdefault("do_sample", not {"temperature", "top_k", "top_p"}.isdisjoint(options))
    seed, adds_start = options.pop("random_seed", None), options.pop("add_BOS", False)
    mask = torch.ones_like(inputs) if attention_mask is None else attention_mask.to(inputs)
    # 1. Put padding on the left, where transformers expects it, and the start behind it.
    shifts = torch.zeros(len(inputs), 1, dtype=torch.long, device=inputs.device)
    if not model.config.is_encoder_decoder:
        shifts = (mask.flip(1).cumsum(1) == 0).sum(1, keepdim=True)
    inputs, mask = _roll(inputs, shifts), _roll(mask, shifts)
    if adds_start:
        start = model.generation_config.bos_token_id
        if start is None:
            raise SettingsError("megatron_generate(add_BOS=True): the model has no bos_token_id.")
        inputs, mask = functional.pad(inputs, (1, 0)), functional.pad(mask, (1, 0))
        first = mask.argmax(1, keepdim=True) - 1
        inputs, mask = inputs.scatter(1, first, start), mask.scatter(1, first, 1)
    # 2. Every rank of a replica draws the same tokens.
    if seed is None and options["do_sample"]:
        seeds = torch.randint(2**31, (1,), device="cpu").to(inputs.device)
        groups = core("parallel_state")
        dist.broadcast(seeds, groups.get_model_parallel_src_rank(), groups.get_model_parallel_group())
        seed = int(seeds)
    # 3. Gather the full weights into a copy of the model.
    model, aliases = copy.deepcopy(model), find_aliases(engine)
    state: dict[str, Tensor] = {}
    for part in gather(engine, lambda row: row.parameter.detach(), engine.transformer_config.params_dtype):
        for name, value in part.items():
            state |= dict.fromkeys(aliases[name], value.clone())
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    model = model.eval().to(inputs.device)
    with torch.random.fork_rng([inputs.device] if inputs.is_cuda else []):
        torch.manual_seed(seed or 0)
        tokens = model.generate(inputs, attention_mask=mask, **options)
    # 4. Put back padding on the right.
    return _roll(tokens, -shifts.repeat_interleave(len(tokens) // len(inputs), dim=0))


def _roll(rows: Tensor, shifts: Tensor) -> Tensor:
    """Move each row to the right by its number of places, the last elements to its beginning."""
    columns = torch.arange(rows.shape[1], device=rows.device)
    return rows.gather(1, (columns - shifts) % rows.shape[1])
