"""Carry weights from a model of transformers to Megatron's stages, and back."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accel_plugins.megatron.library import core
from accel_plugins.sharding.shards import names_of_each
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from accel_plugins.megatron.groups import Groups
    from accel_plugins.megatron.model_family import Weight
    from accel_plugins.megatron.packing import Packing
    from accel_state.runtime import Runtime

_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")
# TransformerEngine's linear layers have the norm before them.
_FUSED = {
    ".self_attention.linear_qkv.layer_norm_": ".input_layernorm.",
    ".mlp.linear_fc1.layer_norm_": ".pre_mlp_layernorm.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A parameter of this rank, and the weights of transformers that it holds a part of."""

    name: str
    parameter: nn.Parameter
    names: tuple[str, ...]
    packing: Packing


def find_rows(stages: Sequence[nn.Module], weights: Sequence[Weight]) -> list[Placed]:
    """Find the row of every parameter of this rank."""
    rows = {row.parameter: row for row in weights}
    found: list[Placed] = []
    for stage in stages:
        for name, parameter in stage.named_parameters():
            full, layer = _full_name(stage, name)
            row = rows.get(_LAYER.sub("{layer}", full))
            if row is None:
                raise SettingsError(
                    f"The parameter {full!r} of Megatron's model has no row in its family: add one."
                )
            names = tuple(one.format(layer=layer) for one in row.names)
            if (
                row.packing.dim is not None
            ):  # megatron-core says so when it initialises weights, which it does not
                vars(parameter).setdefault("tensor_model_parallel", True)
            found.append(Placed(name=full, parameter=parameter, names=names, packing=row.packing))
    return found


def check_covered(model: nn.Module, weights: Sequence[Weight]) -> None:
    """Refuse a model with weights that no row carries over."""
    patterns = {re.escape(name).replace(r"\{layer\}", r"\d+") for row in weights for name in row.names}
    known = re.compile("|".join(patterns))
    missing = [name for name, _ in model.named_parameters() if not known.fullmatch(name)]
    if missing:
        raise SettingsError(
            f"{type(model).__name__} has weights without a row in its family, which Megatron would not train "
            f"or save: {', '.join(missing)}. Add rows for them, or leave out what makes them."
        )


def _full_name(stage: nn.Module, name: str) -> tuple[str, int | None]:
    """Return the name of a parameter in the full model, and its layer; a stage counts layers from 0."""
    for fused, plain in _FUSED.items():
        name = name.replace(fused, plain)
    match = _LAYER.search(name)
    if match is None:
        return name, None
    layers = stage.get_submodule(name[: match.start() - 1])
    layer = layers[int(match[0])].layer_number - 1  # pyright: ignore[reportIndexIssue, reportOperatorIssue]
    return f"{name[: match.start()]}{layer}{name[match.end() :]}", layer


@torch.no_grad()
def share_values(model: nn.Module, runtime: Runtime) -> None:
    """Give every rank the values that rank 0 has.

    Ranks that seeded differently would otherwise train a model that is put together of several.
    """
    for value in (*model.parameters(), *model.buffers()):
        before = value.detach().to(runtime.device)
        values = before.clone(memory_format=torch.contiguous_format)
        runtime.collectives.broadcast(values, 0)
        if not torch.equal(values, before):  # else a file that is mapped stays shared
            value.detach().copy_(values)


@torch.no_grad()
def load(placed: Sequence[Placed], state: Mapping[str, Tensor], groups: Groups) -> None:
    """Copy the parts of weights of transformers that this rank has."""
    for one in placed:
        packed = one.packing.pack([state[name] for name in one.names])
        own = one.packing.shard(packed, groups.tensor_rank, groups.tensor)
        one.parameter.copy_(own)


@torch.no_grad()
def gather(
    placed: Sequence[Placed],
    weights: Sequence[Weight],
    groups: Groups,
    tensor_of: Callable[[Placed], Tensor],
    dtype_of: Callable[[Placed], torch.dtype],
) -> Iterator[dict[str, Tensor]]:
    """Yield weights of transformers, gathered from all stages and tensor-parallel ranks.

    Every rank iterates over all. A tied weight comes once.

    `tensor_of` returns what is gathered, of the shape of the parameter: it is called when the turn comes, on
    all ranks that have a part of it. `dtype_of` returns the dtype beforehand.
    """
    state = core("parallel_state")
    pipeline = state.get_pipeline_model_parallel_group()
    shape_of = partial(_joined_shape, groups)
    plans = gather_plan([(row.name, row.names, shape_of(row), dtype_of(row)) for row in placed], groups)
    rows = {row.parameter: row.packing for row in weights}
    known = {row.name: row for row in placed}
    done: set[tuple[str, ...]] = set()
    for stage, plan in enumerate(plans):
        for name, names, shape, dtype in plan:
            if names in done:  # the last stage has a copy of a tied weight
                continue
            done.add(names)
            if stage == groups.pipeline_rank:
                row = known[name]
                packed = _join(row, tensor_of(row), groups).contiguous()
            else:
                packed = torch.empty(shape, dtype=dtype, device=placed[0].parameter.device)
            if groups.pipeline > 1:
                dist.broadcast(packed, group_src=stage, group=pipeline)
            packing = rows[_LAYER.sub("{layer}", name)]
            yield dict(zip(names, packing.unpack(packed), strict=True))
            del packed


def _joined_shape(groups: Groups, row: Placed) -> tuple[int, ...]:
    return tuple(row.packing.joined_shape(row.parameter.shape, groups.tensor))


def gather_plan(own: Any, groups: Groups) -> list[Any]:
    """Return what every pipeline stage has, in their order."""
    if groups.pipeline == 1:
        return [own]
    plans: list[Any] = [None] * groups.pipeline
    dist.all_gather_object(plans, own, group=core("parallel_state").get_pipeline_model_parallel_group())
    return plans


def _join(one: Placed, value: Tensor, groups: Groups) -> Tensor:
    if one.packing.dim is None or groups.tensor == 1:
        return one.packing.join([value])
    shards = [torch.empty_like(value) for _ in range(groups.tensor)]
    group = core("parallel_state").get_tensor_model_parallel_group()
    dist.all_gather(shards, value.contiguous(), group=group)
    return one.packing.join(shards)


def drop_values(model: nn.Module) -> None:
    """Move the parameters of a model to the meta device, in place; tied ones stay tied."""
    dropped: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            empty = torch.empty_like(parameter, device="meta")
            new = dropped.setdefault(id(parameter), torch.nn.Parameter(empty, parameter.requires_grad))
            dropped[id(new)] = new
            setattr(module, name, new)


def aliases_of(source: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return all names of every weight, by its first: tied weights have several."""
    weights = dict(source.named_parameters(remove_duplicate=False))
    return {names[0]: names for names, _ in names_of_each(weights)}


def buffers_of(source: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the buffers in the state dict of a model."""
    weights = {name for name, _ in source.named_parameters(remove_duplicate=False)}
    return [(name, value) for name, value in source.state_dict().items() if name not in weights]
