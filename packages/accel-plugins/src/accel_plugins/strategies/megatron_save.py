"""Full state dicts of models that Megatron trains, under the names of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from accel_plugins.dcp.tensors import named_state, renumbered
from accel_plugins.megatron.engine import MegatronEngine
from accel_plugins.megatron.optimizer_state import iter_masters, named_optimizer_state
from accel_plugins.megatron.sharded_state import check_names, engine_of, load_entries, load_weights
from accel_plugins.megatron.weights import aliases_of, buffers_of
from accel_plugins.strategies.replicated import ReplicatedPersister
from accel_state.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from accel_plugins.roles import StateDict


class MegatronPersister(ReplicatedPersister):
    """Persister that gathers weights from all stages and tensor-parallel ranks, and shards them again."""

    def full_state_dict(self, model: nn.Module, *, keep: bool = True) -> StateDict:
        """Return the weights of the model of transformers, on the CPU."""
        found: StateDict = {}
        for part in self.iter_full_state_dict(model, keep=keep):
            found |= part
        return found

    def iter_full_state_dict(self, model: nn.Module, *, keep: bool = True) -> Iterator[StateDict]:
        """Yield the same in parts, each gathered when it is requested."""
        if not isinstance(model, MegatronEngine):
            yield from ReplicatedPersister.iter_full_state_dict(self, model, keep=keep)
            return
        check_names(model)
        aliases = aliases_of(model.source)
        yield dict(buffers_of(model.source)) if keep else {}
        for part in iter_masters(model):
            if keep:
                yield {alias: value.cpu() for name, value in part.items() for alias in aliases[name]}

    def load_full_state_dict(self, model: nn.Module, state: Mapping[str, Any], **options: Any) -> Any:
        """Load weights of a model of transformers."""
        if not isinstance(model, MegatronEngine):
            return ReplicatedPersister.load_full_state_dict(self, model, state, **options)
        check_names(model)
        strict = options.get("strict", True)
        aliases = aliases_of(model.source)
        found: dict[str, Tensor] = {
            name: state[alias] for name, known in aliases.items() for alias in known if alias in state
        }
        known = {alias for names in aliases.values() for alias in names} | {
            name for name, _ in buffers_of(model.source)
        }
        missing = sorted(aliases.keys() - found.keys())
        unexpected = sorted(state.keys() - known)
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(model.source).__name__}: missing keys {missing}, "
                f"unexpected keys {unexpected}."
            )
        load_weights(model, found)
        result = torch.nn.Module().load_state_dict({})
        return result._replace(missing_keys=missing, unexpected_keys=unexpected)

    def full_optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], *, keep: bool = True
    ) -> StateDict:
        """Return the state dict that the optimizer of PyTorch would have in one process."""
        engine = engine_of(optimizer, models)
        state = named_optimizer_state(engine, optimizer, lambda value: value.cpu().clone() if keep else None)
        return renumbered(state if keep else {**state, "state": {}}, engine.optimizer_names)

    def load_full_optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]
    ) -> None:
        """Load such a state dict."""
        engine = engine_of(optimizer, models)
        if engine.plugin.no_load_optim:
            return
        saved, names = state["param_groups"], engine.optimizer_names
        found, own = [len(group["params"]) for group in saved], [len(group) for group in names]
        if found != own:
            raise CheckpointError(
                f"The optimizer was saved with groups of {found} parameters, and has groups of {own} now."
            )
        named = named_state(state, names)
        for group, before in zip(optimizer.param_groups, saved, strict=True):
            group.update({name: value for name, value in before.items() if name != "params"})
        load_entries(engine, named["state"])
