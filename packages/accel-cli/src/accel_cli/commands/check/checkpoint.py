"""List the files that `save_state` would write on one rank, with their sizes; write nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor
from torch.utils._pytree import tree_leaves

from accel_cli.commands.estimate.memory import ADAM, MASTER
from accel_cli.commands.estimate.trace import storage_key
from accel_ops.dtensors import local_part
from accel_plugins.dcp import local
from accel_plugins.dcp.layout import INDEX_NAME, shard_file
from accel_plugins.dcp.protocol import StateForm
from accel_plugins.dcp.write import ShardWriter
from accel_train.checkpoint import layout
from accel_train.checkpoint.sharded import form_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from accel_plugins.dcp.protocol import ShardedStates
    from accel_train.checkpoint.run import Run

FORMS: Mapping[StateForm, str] = {
    StateForm.FULL: "whole",
    StateForm.SHARDED: "sharded",
    StateForm.NATIVE: "by rank",
}
"""What forms are called: one rank writes everything; all ranks write parts that any number of ranks can read;
all ranks write parts in the strategy's own way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharded:
    """The sharding of checkpoints by a strategy whose own code does not run in the check.

    Args:
        saved: Form of the checkpoint.
        stage: ZeRO stage, 0 to 3; None for FSDP.
        width: Bytes of an element of DeepSpeed's weights.
    """

    saved: StateForm
    stage: int | None = None
    width: int = MASTER

    def form(self) -> StateForm:
        """Return the form that `save_state` would write."""
        return self.saved


def files_of(run: Run, *, safe: bool) -> Iterator[tuple[str, int, int]]:
    """Yield the files that a rank would write, with their bytes and those of all ranks' shards.

    What is small counts nothing.
    """
    prepared, shards = run.prepared, run.strategy.shards
    sharded = shards if isinstance(shards, Sharded) else None
    if sharded is not None and sharded.stage is not None:
        yield from _of_deepspeed(run, sharded.stage, sharded.width)
    else:
        yield from _of_states(run, safe, sharded is not None)
    if run.commits:
        yield from ((layout.scheduler_name(index), 0, 0) for index, _ in enumerate(prepared.schedulers))
        yield from ((layout.custom_name(index), 0, 0) for index, _ in enumerate(run.custom))
    if prepared.dataloaders:
        yield layout.position_name(run.rank), 0, 0
    yield layout.rng_name(run.rank), 0, 0


def _of_states(run: Run, safe: bool, estimated: bool) -> Iterator[tuple[str, int, int]]:
    """Yield the files of models and optimizers in the form of the run."""
    rank, ranks, form = run.rank, run.runtime.topology.world_size, form_of(run)
    if form is StateForm.FULL and not run.commits:
        return
    for names, nbytes, shards in _states(run, safe):
        if form is StateForm.FULL:
            yield names[form], nbytes, nbytes
        elif form is StateForm.NATIVE:
            yield names[form], nbytes // ranks, nbytes
        else:
            mine = nbytes // ranks if estimated else ShardWriter({"state": shards()}, rank).nbytes
            yield f"{names[form]}/{shard_file(rank)}", mine, nbytes
            if run.commits:
                yield f"{names[form]}/{INDEX_NAME}", 0, 0


def _states(run: Run, safe: bool) -> Iterator[tuple[Mapping[StateForm, str], int, Callable[[], Any]]]:
    """Yield the name by form, the bytes, and this rank's shards of each model and optimizer."""
    models, shards = run.prepared.models, cast("ShardedStates", run.strategy.shards)
    for index, model in enumerate(models):
        names = {
            StateForm.FULL: layout.weights_name(index, safe=safe),
            StateForm.SHARDED: layout.sharded_model_name(index),
            StateForm.NATIVE: local.local_file(local.MODEL, index, run.rank),
        }
        yield names, full_nbytes(model.state_dict()), lambda model=model: shards.model_tensors(model)
    for index, optimizer in enumerate(run.prepared.optimizers):
        names = {
            StateForm.FULL: layout.optimizer_name(index),
            StateForm.SHARDED: layout.sharded_optimizer_name(index),
            StateForm.NATIVE: local.local_file(local.OPTIMIZER, index, run.rank),
        }
        inner = optimizer.optimizer
        yield names, _state_nbytes(optimizer), lambda inner=inner: shards.optimizer_tensors(inner, models)


def _of_deepspeed(run: Run, stage: int, width: int) -> Iterator[tuple[str, int, int]]:
    """Yield the files of DeepSpeed's engines (`accel_plugins.deepspeed.folder`)."""
    rank, ranks = run.rank, run.runtime.topology.world_size
    for index, model in enumerate(run.prepared.models):
        elements = sum(one.numel() for one in model.parameters())
        trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
        folder = layout.engine_name(index)
        weights, states = width * elements, (MASTER + ADAM) * trained
        if stage == 3:
            yield f"{folder}/zero_pp_rank_{rank}_mp_rank_00_model_states.pt", weights // ranks, weights
        elif rank == 0:
            size = weights + (0 if stage else ADAM * trained)
            yield f"{folder}/mp_rank_00_model_states.pt", size, size
        if stage:
            prefix = "bf16_" if width == 2 else ""
            yield (
                f"{folder}/{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
                states // ranks,
                states,
            )


def full_nbytes(data: Any) -> int:
    """Return the bytes of all tensors in nested data, each once; a sharded one counts in full."""
    found: dict[int, int] = {}
    for leaf in tree_leaves(data):
        if isinstance(leaf, Tensor):
            found[storage_key(local_part(leaf))] = leaf.numel() * leaf.element_size()
    return sum(found.values())


def _state_nbytes(optimizer: Any) -> int:
    """Return the bytes of the optimizer's state; that of Adam before the first step."""
    known = full_nbytes([*optimizer.state.values()])
    return known or ADAM * sum(one.numel() for group in optimizer.param_groups for one in group["params"])
