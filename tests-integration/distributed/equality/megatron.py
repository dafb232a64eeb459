"""Megatron's rows of the table of equality, on the CPU: its engine computes the loss of a GPT-2."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

from accel.utils import MegatronLMPlugin
from distributed.equality.alone import CLIP, DECAY, EPSILON, RATE, ROWS, Arithmetic
from distributed.equality.strategies import Cell, Row
from harness.cuda_names import cuda_answered_by_cpu

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn


def fresh(_fault: str | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A GPT-2 and its optimizer, at the beginning."""
    library: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}
    config = library.GPT2Config(**sizes, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0)
    model = library.GPT2LMHeadModel(config)
    return model, torch.optim.AdamW(model.parameters(), lr=RATE, eps=EPSILON, weight_decay=DECAY)


def train(accelerator: Any, cell: Cell, rows: Tensor) -> Mapping[str, Tensor]:
    """Train through `Accelerator`; the weights, whole."""
    model, optimizer = fresh(cell.fault)
    plugin = accelerator.state.megatron_lm_plugin
    samples: list[dict[str, Tensor]] = [{"input_ids": row} for row in rows]
    loader: Any = torch.utils.data.DataLoader(samples, batch_size=ROWS // plugin.num_micro_batches)  # pyright: ignore[reportArgumentType] - a list is a data set
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
    state = accelerator.get_state_dict(model)
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    return state


def row(sharing: int, smallest: int = 2, **sizes: Any) -> Row:
    """A row: weights are copied to bfloat16, gradients are added up in float32."""
    return Row(
        arguments=lambda cell: {
            "megatron_lm_plugin": MegatronLMPlugin(gradient_clipping=CLIP if cell.clip else 0.0, **sizes)
        },
        bf16=Arithmetic(small_weights=True, small_start=True),
        sharing=sharing,
        smallest=smallest,
        bound=0.01,
        fresh=fresh,
        train=train,
        context=cuda_answered_by_cpu,
    )


MEGATRON: Mapping[str, Row] = {
    "megatron": row(1, use_distributed_optimizer=True),
    "megatron+tp": row(2, tp_degree=2),
    "megatron+pp": row(1, pp_degree=2, num_micro_batches=2),
    "megatron+tp+pp": row(2, 4, tp_degree=2, pp_degree=2, num_micro_batches=2),
}
"""By name. Pipelines have two micro-batches, each with the rows that a process has without a pipeline."""
