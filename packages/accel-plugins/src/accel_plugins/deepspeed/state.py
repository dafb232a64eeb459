"""What the ranks of an engine have in parts, brought together tensor by tensor, and divided again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast, final

import torch
import torch.distributed as dist

from accel_plugins.deepspeed.gathered import GatheredParameters, is_sharded
from accel_plugins.deepspeed.library import part
from accel_plugins.sharding.shards import names_of_each
from accel_state.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor, nn


_MOST = 20  # problems that a message names


@final
class EngineState:
    """Weights and optimizer state of one engine. Every method is called on all ranks.

    Args:
        engine: The engine; `None` for a model that is divided and has none.
        groups: The parameters of every group of the optimizer that the engine took over.
        module: The model; that of the engine if `None`.
    """

    def __init__(
        self, engine: Any, groups: Sequence[Sequence[Tensor]] = (), *, module: nn.Module | None = None
    ) -> None:
        self._engine = engine
        self._groups = groups
        self._module: nn.Module = engine.module if module is None else module

    @torch.no_grad()
    def weights(self, *, keep: bool, exact: bool) -> dict[str, Any]:
        """The state dict of the model, whole.

        Args:
            keep: Whether this rank needs it; else it is empty.
            exact: Whether weights come in float32, as they are updated, where the model has 16-bit ones.
        """
        found: dict[str, Any] = {}
        seen: dict[int, Any] = {}  # of tied weights, one is enough
        to_host = any(is_sharded(p) for p in self._module.parameters())
        for name, value in self._module.state_dict(keep_vars=True).items():
            if id(value) not in seen:
                seen[id(value)] = self._full(value, keep=keep, exact=exact, to_host=to_host)
            if keep:
                found[name] = seen[id(value)]
        return found

    @torch.no_grad()
    def weight_parts(self, *, keep: bool) -> Iterator[dict[str, Any]]:
        """The same, one tensor after the other where they are divided; tied ones together.

        Args:
            keep: Whether this rank needs them; else they are empty.
        """
        if not any(is_sharded(p) for p in self._module.parameters()):
            yield self.weights(keep=keep, exact=False)
            return
        for names, value in names_of_each(self._module.state_dict(keep_vars=True)):
            full = self._full(value, keep=keep, exact=False, to_host=True)
            yield dict.fromkeys(names, full) if keep else {}
            del full  # before the next one comes

    @torch.no_grad()
    def load_weights(self, state: Mapping[str, Any], *, strict: bool = True, assign: bool = False) -> Any:
        """Load a whole state dict, also into the float32 copies that are updated.

        Args:
            state: Name to tensor, on every rank.
            strict: Whether names must be the same.
            assign: Not there.

        Returns:
            What `Module.load_state_dict` returns.

        Raises:
            RuntimeError: Names or shapes do not fit.
            UnsupportedError: `assign` is asked for.
        """
        if assign:
            raise UnsupportedError(
                "load_state_dict(assign=True): DeepSpeed's engine keeps the tensors that it has."
            )
        shard = self._module.state_dict(keep_vars=True)
        missing, unexpected = sorted(shard.keys() - state.keys()), sorted(state.keys() - shard.keys())
        problems = [
            f"{name} has the shape {tuple(state[name].shape)} in the state dict and "
            f"{tuple(_shape_of(value))} here"
            for name, value in shard.items()
            if name in state
            and isinstance(value, torch.Tensor)
            and tuple(state[name].shape) != tuple(_shape_of(value))
        ]
        if strict:
            problems += [f"{name} is missing" for name in missing]
            problems += [f"{name} is not known here" for name in unexpected]
        if problems:
            more = f"; and {len(problems) - _MOST} more" if len(problems) > _MOST else ""
            raise RuntimeError(
                f"The state dict does not fit {type(self._module).__name__}: "
                f"{'; '.join(problems[:_MOST])}{more}."
            )
        seen: set[int] = set()
        for name, value in shard.items():
            if name in state and isinstance(value, torch.Tensor) and id(value) not in seen:
                seen.add(id(value))
                self._put(value, state[name])
        self._refresh()
        for name, value in shard.items():
            if name in state and self._is_small(value):
                self._put_master(value, state[name])
        return torch.nn.modules.module._IncompatibleKeys(missing, unexpected)  # pyright: ignore[reportPrivateUsage]

    @torch.no_grad()
    def optimizer(self, *, keep: bool) -> dict[str, Any]:
        """The state dict that the optimizer would have in one process.

        Args:
            keep: Whether this rank needs it; else it is empty.

        Raises:
            UnsupportedError: The optimizer keeps something for several parameters together.
        """
        outer = self._engine.optimizer
        if not _shards(outer):
            base = getattr(outer, "optimizer", outer)
            return base.state_dict() if keep else {}
        groups, number = [], 0
        for tensors, group in zip(self._groups, outer.optimizer.param_groups, strict=False):
            indices = [*range(number, number + len(tensors))]
            number += len(tensors)
            groups.append(
                {**{name: value for name, value in group.items() if name != "params"}, "params": indices}
            )
        states: dict[int, Any] = {}
        for index, tensor in enumerate(self._tensors()):
            if not tensor.requires_grad:
                continue
            saved = self._saved_state_for(tensor)
            single = {  # each counts its own steps
                name: value.clone() if isinstance(value, torch.Tensor) else value
                for name, value in saved.items()
                if not _is_flat(value)
            }
            full = {
                name: _on_host(_get(tensor, name)) if keep else _get(tensor, name)
                for name, value in saved.items()
                if _is_flat(value)
            }
            if keep and saved:
                states[index] = {**single, **full}
        return {"state": states, "param_groups": groups} if keep else {}

    @torch.no_grad()
    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        """Load such a state dict, which every rank has.

        Raises:
            CheckpointError: It is of other parameters.
        """
        outer = self._engine.optimizer
        if not _shards(outer):
            getattr(outer, "optimizer", outer).load_state_dict(dict(state))
            return
        tensors = [*self._tensors()]
        saved: Sequence[Mapping[str, Any]] = state["param_groups"]
        counts = [len(group["params"]) for group in saved]
        if counts != [len(group) for group in self._groups]:
            raise CheckpointError(
                f"The checkpoint has the state of an optimizer with groups of {counts} parameters, and the "
                f"one that was prepared has groups of {[len(group) for group in self._groups]}."
            )
        for group, before in zip(outer.optimizer.param_groups, saved, strict=False):
            group.update({name: value for name, value in before.items() if name != "params"})
        self._allocate_state(tensors, state["state"])
        order = [index for group in saved for index in group["params"]]
        for tensor, index in zip(tensors, order, strict=True):
            for name, value in state["state"].get(index, {}).items():
                if tensor.requires_grad and isinstance(value, torch.Tensor) and value.dim() > 0:
                    _set(tensor, name, value)

    def named(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Let names stand for parameters in a state dict of the optimizer."""
        names = {id(value): name for name, value in self._module.named_parameters()}
        order = [names[id(one)] for one in self._tensors()]
        groups = [
            {**group, "params": [order[index] for index in group["params"]]}
            for group in state.get("param_groups", ())
        ]
        states = {order[index]: value for index, value in state.get("state", {}).items()}
        return {"state": states, "param_groups": groups}

    def load_named_optimizer(self, state: Mapping[str, Any]) -> None:
        """Load a state dict in which names stand for parameters.

        Raises:
            CheckpointError: It is of other parameters.
        """
        names = {id(value): name for name, value in self._module.named_parameters()}
        mine = [[names[id(one)] for one in group] for group in self._groups]
        saved = state["param_groups"]
        known = {name for group in saved for name in group["params"]}
        lost = sorted({name for group in mine for name in group} - known)
        trained = {name for name, value in self._module.named_parameters() if value.requires_grad}
        if len(saved) != len(mine) or trained & {*lost}:
            raise CheckpointError(
                f"The checkpoint has the state of an optimizer of {len(saved)} group(s), without "
                f"{', '.join(lost) or 'further parameters'}; the one that was prepared has {len(mine)} "
                "group(s)."
            )
        index = {name: number for number, name in enumerate(name for group in mine for name in group)}
        groups = [
            {**group, "params": [index[name] for name in shard]}
            for group, shard in zip(saved, mine, strict=True)
        ]
        states = {index[name]: value for name, value in state["state"].items() if name in index}
        self.load_optimizer({"state": states, "param_groups": groups})

    def _tensors(self) -> Iterator[Tensor]:
        for group in self._groups:
            yield from group

    def _is_small(self, value: Any) -> bool:
        is_weight = isinstance(value, torch.nn.Parameter) and value.requires_grad
        return is_weight and value.dtype in {torch.bfloat16, torch.float16} and self._engine is not None

    def _full(self, value: Any, *, keep: bool, exact: bool, to_host: bool) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if exact and self._is_small(value):
            master = self._master(value)
            return _on_host(master) if keep else None
        if not is_sharded(value):
            return (_on_host(value) if to_host else value.detach()) if keep else None
        with GatheredParameters([value]):
            return _on_host(value.detach().clone()) if keep else None

    def _master(self, value: Tensor) -> Tensor:
        found = part("utils").safe_get_full_fp32_param(value)
        if found is not None:
            return found
        saved = dict(_pairs(self._engine.optimizer))
        return saved.get(id(value), value.detach().float())

    def _put(self, value: Tensor, new: Any) -> None:
        with GatheredParameters([value], modifier_rank=0):
            if not is_sharded(value) or dist.get_rank() == 0:
                value.copy_(new[:] if not isinstance(new, torch.Tensor) else new)

    def _put_master(self, value: Tensor, new: Any) -> None:
        full = (new[:] if not isinstance(new, torch.Tensor) else new).to(value.device, torch.float32)
        if is_sharded(value):
            part("utils").safe_set_local_fp32_param(value, _local_shard(value, full))
        elif hasattr(value, "_hp_mapping"):
            part("utils").safe_set_full_fp32_param(value, full)
        else:
            saved = dict(_pairs(self._engine.optimizer))
            if id(value) in saved:
                saved[id(value)].copy_(full)

    def _refresh(self) -> None:
        refresh: Callable[[], None] | None = getattr(
            None if self._engine is None else self._engine.optimizer, "refresh_fp32_params", None
        )
        if refresh is not None:
            refresh()

    def _flat_of(self, tensor: Tensor) -> Tensor:
        """The flat partition of this rank in which a parameter has its place."""
        outer = self._engine.optimizer
        if is_sharded(tensor):
            return outer.fp32_partitioned_groups_flat[outer.grad_position[outer.get_param_id(tensor)][0]]
        flat = getattr(outer, "single_partition_of_fp32_groups", None) or outer.fp32_groups_flat_partition
        for index, group in enumerate(getattr(outer, "bit16_groups", None) or outer.bf16_groups):
            if any(one is tensor for one in group):
                return flat[index]
        raise AssertionError("every trained parameter is in a group")

    def _saved_state_for(self, tensor: Tensor) -> dict[str, Any]:
        flat = self._flat_of(tensor)
        saved = cast("dict[str, Any]", self._engine.optimizer.optimizer.state.get(flat, {}))
        for name, value in saved.items():
            if _is_flat(value) and value.shape != flat.shape:
                raise UnsupportedError(
                    f"The optimizer keeps {name!r} of shape {tuple(value.shape)} for parameters that "
                    "DeepSpeed has made one: it cannot be told apart which part belongs to which. Save the "
                    "engine's own folder."
                )
        return {name: value for name, value in saved.items() if value is not None}

    def _allocate_state(self, tensors: Sequence[Tensor], states: Mapping[int, Mapping[str, Any]]) -> None:
        """Let every flat partition have what the state has, zero where it is as long as the partition."""
        outer = self._engine.optimizer
        sample = next(iter(states.values()), None)
        if sample is None:
            return
        for tensor in tensors:
            if not tensor.requires_grad:
                continue
            flat = self._flat_of(tensor)
            saved = outer.optimizer.state[flat]
            for name, value in sample.items():
                if not isinstance(value, torch.Tensor) or value.dim() == 0:
                    saved[name] = value.clone() if isinstance(value, torch.Tensor) else value
                elif name not in saved:
                    saved[name] = torch.zeros_like(flat)
        link: Callable[[], None] | None = getattr(outer, "_lazy_init_hp_params_optimizer_state", None)
        if link is not None:
            outer._hp_optimizer_states_linked = False
            link()


def _shards(outer: Any) -> bool:
    """Whether an optimizer of DeepSpeed has made parameters flat and divided them."""
    names = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups_flat_partition")
    return any(hasattr(outer, name) for name in names)


def _pairs(outer: Any) -> Iterator[tuple[int, Tensor]]:
    """Every 16-bit parameter with its float32 copy, where an optimizer keeps them so."""
    for small, large in zip(
        getattr(outer, "fp16_groups", ()), getattr(outer, "fp32_groups", ()), strict=False
    ):
        for parameter, copy in zip(small, large, strict=True):
            yield id(parameter), copy


def _is_flat(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _shape_of(value: Tensor) -> Any:
    return getattr(value, "ds_shape", value.shape)


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()


def _local_shard(parameter: Any, full: Tensor) -> Tensor:
    """The part of a whole tensor that this rank has, with zeros where the division leaves a rest."""
    numel: int = parameter.ds_tensor.numel()
    flat = full.flatten()
    begin = numel * dist.get_rank(parameter.ds_process_group)
    shard = flat[begin : begin + numel]
    return torch.nn.functional.pad(shard, (0, numel - shard.numel()))


def _get(parameter: Any, name: str) -> Tensor:
    return part("utils").safe_get_full_optimizer_state(parameter, name)


def _set(parameter: Any, name: str, value: Tensor) -> None:
    full = value.to(parameter.device, torch.float32)
    if is_sharded(parameter):
        part("utils").safe_set_local_optimizer_state(parameter, _local_shard(parameter, full), name)
    else:
        part("utils").safe_set_full_optimizer_state(parameter, full, name)
