"""The strategies of the table of equality: what `Accelerator` gets, where each rounds, what cannot exist."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from accel.utils import (
    AORecipeKwargs,
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    TorchPipelineParallelConfig,
)
from distributed.equality.alone import CLIP, Arithmetic, fresh

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor

    from distributed.equality.alone import Fresh


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One entry of the table.

    Args:
        strategy: One of `STRATEGIES`.
        precision: `"no"` or `"bf16"`.
        accumulation: Micro-batches of a step.
        clip: Whether gradients are clipped.
        world_size: Number of processes.
        fault: An error that is made on purpose.
    """

    strategy: str
    precision: str
    accumulation: int
    clip: bool
    world_size: int
    fault: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A strategy.

    Args:
        arguments: Of `Accelerator`.
        bf16: Where it rounds in bfloat16, but for the number of processes that divide batches.
        sharing: How many processes have the same rows; all of them for `None`.
        smallest: The smallest number of processes.
        bound: The largest distance in bfloat16.
        recipe: The recipe of torchao in which it computes instead of bfloat16, if any.
        fresh: Makes the model and its optimizer.
        computes_loss: Whether the model computes the loss, as that of a pipeline does.
        train: Trains through `Accelerator` where the engine computes the loss; `None` for the loop of all.
        context: In which it trains.
    """

    arguments: Callable[[Cell], dict[str, Any]]
    bf16: Arithmetic
    sharing: int | None = 1
    smallest: int = 2
    bound: float
    recipe: str | None = None
    fresh: Fresh = fresh
    computes_loss: bool = False
    train: Callable[[Any, Cell, Tensor], Mapping[str, Tensor]] | None = None
    context: Callable[[], AbstractContextManager[None]] = nullcontext

    def arithmetic(self, cell: Cell) -> Arithmetic:
        """Where a cell rounds."""
        if cell.precision == "no":
            return Arithmetic()
        shards = cell.world_size // (self.sharing or cell.world_size)
        return replace(self.bf16, shards=shards, recipe=self.recipe)

    def limit(self, cell: Cell) -> float:
        """The largest difference of a weight in float32; the largest distance in bfloat16."""
        return 1e-6 if cell.precision == "no" else self.bound


def fsdp(version: int, **options: Any) -> dict[str, Any]:
    """Every block of the model is sharded on its own."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        **options,
    )
    return {"fsdp_plugin": plugin}


def fp8(recipe: str) -> dict[str, Any]:
    """Matrices of the blocks in 8 bits, by torchao; emulated, on the CPU."""
    return {"mixed_precision": "fp8", "kwargs_handlers": [AORecipeKwargs(config=recipe)]}


def axes(**sizes: Any) -> dict[str, Any]:
    """Processes along several axes."""
    return {"parallelism_config": ParallelismConfig(**sizes)}


def stages(cell: Cell, micro_batches: int | None = None, **sizes: Any) -> dict[str, Any]:
    """A pipeline of two stages; by default with one micro-batch for each process."""
    handler = TorchPipelineParallelConfig(pp_num_microbatches=micro_batches or cell.world_size)
    return axes(pp_size=2, pp_handler=handler, **sizes)


def zero(stage: int) -> Callable[[Cell], dict[str, Any]]:
    """A stage of DeepSpeed."""

    def arguments(cell: Cell) -> dict[str, Any]:
        plugin = DeepSpeedPlugin(
            zero_stage=stage,
            gradient_accumulation_steps=cell.accumulation,
            gradient_clipping=CLIP if cell.clip and cell.fault is None else None,
        )
        return {"deepspeed_plugin": plugin}

    return arguments


AUTOCAST = Arithmetic(autocast=True)
SMALL_WEIGHTS = Arithmetic(autocast=True, small_weights=True)
ENGINE = Arithmetic(small_weights=True, small_start=True, small_sums=True)
ENGINE_FROM_2 = replace(ENGINE, processes_first=True)

STRATEGIES: Mapping[str, Row] = {
    "ddp": Row(arguments=lambda _: {}, bf16=AUTOCAST, bound=0.01),
    "fsdp1": Row(arguments=lambda _: fsdp(1), bf16=replace(SMALL_WEIGHTS, small_sums=True), bound=0.01),
    "fsdp2": Row(arguments=lambda _: fsdp(2), bf16=SMALL_WEIGHTS, bound=0.01),
    "hsdp": Row(
        arguments=lambda cell: fsdp(2) | axes(dp_replicate_size=2, dp_shard_size=cell.world_size // 2),
        bf16=SMALL_WEIGHTS,
        smallest=4,
        bound=0.01,
    ),
    "tp": Row(arguments=lambda cell: axes(tp_size=cell.world_size), bf16=AUTOCAST, sharing=None, bound=0.01),
    "fsdp2+tp": Row(
        arguments=lambda cell: fsdp(2) | axes(dp_shard_size=cell.world_size // 2, tp_size=2),
        bf16=SMALL_WEIGHTS,
        sharing=2,
        smallest=4,
        bound=0.01,
    ),
    "copies+tp": Row(
        arguments=lambda cell: axes(dp_replicate_size=cell.world_size // 2, tp_size=2),
        bf16=SMALL_WEIGHTS,
        sharing=2,
        smallest=4,
        bound=0.01,
    ),
    "cp": Row(
        arguments=lambda cell: fsdp(2) | axes(cp_size=2, dp_shard_size=cell.world_size // 2),
        bf16=SMALL_WEIGHTS,
        sharing=2,
        bound=0.01,
    ),
    "sp": Row(
        arguments=lambda cell: fsdp(2) | axes(sp_size=2, dp_shard_size=cell.world_size // 2),
        bf16=SMALL_WEIGHTS,
        sharing=2,
        bound=0.01,
    ),
    "ep": Row(
        arguments=lambda cell: fsdp(2) | axes(dp_shard_size=cell.world_size, ep_size=2),
        bf16=SMALL_WEIGHTS,
        bound=0.01,  # 4.5e-3 to 5.5e-3 after 20 steps on 2 and 4 ranks: as far as without experts
        fresh=partial(fresh, experts=True),
    ),
    "pp": Row(
        arguments=lambda cell: stages(cell, tp_size=cell.world_size // 2),
        bf16=AUTOCAST,
        bound=0.01,
        computes_loss=True,
    ),
    "fsdp2+pp": Row(
        arguments=lambda cell: fsdp(2) | stages(cell, micro_batches=2, dp_shard_size=cell.world_size // 2),
        bf16=SMALL_WEIGHTS,
        smallest=4,
        bound=0.01,
        computes_loss=True,
    ),
    "ddp+fp8": Row(  # 0 or 2.5e-2, by the CPU's own products of bfloat16
        arguments=lambda _: fp8("rowwise"), bf16=AUTOCAST, bound=0.05, recipe="rowwise"
    ),
    "fsdp2+fp8": Row(
        arguments=lambda _: fsdp(2) | fp8("rowwise"), bf16=SMALL_WEIGHTS, bound=0.05, recipe="rowwise"
    ),
    "zero0": Row(arguments=zero(0), bf16=ENGINE, bound=0.01),
    "zero1": Row(arguments=zero(1), bf16=ENGINE, bound=0.01),
    "zero2": Row(arguments=zero(2), bf16=ENGINE_FROM_2, bound=0.01),
    "zero3": Row(arguments=zero(3), bf16=ENGINE_FROM_2, bound=0.01),
}
"""By name. `cp` and `sp` shard sequences across two ranks; further ranks shard the model. `ep` trains a
mixture of experts, which two ranks share. `pp` has two stages; of four ranks, two share each layer (TP)."""
