"""Pipeline parallelism, time per step relative to a hand-written program on the same parts of PyTorch.

    uv run torchrun --nproc_per_node 2 tools/benchmarks/pipeline.py [--rounds 12] [--schedule GPipe]

Both train the same model in float32 on gloo, by a schedule of `torch.distributed.pipelining` with four
micro-batches: by `ParallelismConfig(pp_size=2)`, and by `PipelineStage` around the modules of this rank. They
alternate within one process, and their losses are compared. Printed is the ratio of their times, the median
over pairs of rounds. Claim: at most 1.05.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from alternating import compare
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from accel_plugins.parallelism.config import ParallelismConfig, TorchPipelineParallelConfig
from accel_train import Accelerator

CLAIM = 1.05
WIDTH, LAYERS, VOCABULARY, ROWS, LENGTH, MICRO_BATCHES, STEPS = 192, 8, 1024, 16, 64, 4, 4


class Block(nn.Module):
    """A network of two layers, added to what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))


class Model(nn.Module):
    """Predicts tokens from themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return loss_of(self.head(hidden), tokens)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean loss."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def make_parts() -> tuple[Model, Tensor]:
    """A model and the batches; always the same."""
    torch.manual_seed(0)
    return Model(), torch.randint(0, VOCABULARY, (STEPS, ROWS, LENGTH))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def by_hand(schedule: str) -> Any:
    """Plain PyTorch; both halves have four layers, as those of the prepared model."""
    model, batches = make_parts()
    rank, half = dist.get_rank(), LAYERS // 2
    ends = [[model.embed, *model.layers[:half]], [*model.layers[half:], model.head]]
    module = nn.Sequential(*ends[rank])
    optimizer = optimizer_of(module)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    kind: Any = get_schedule_class(schedule)
    runner = kind(stage, MICRO_BATCHES, loss_fn=loss_of)

    def epoch() -> Tensor:
        loss = torch.zeros(())
        for batch in batches:
            losses: list[Tensor] = []
            if rank == 0:
                runner.step(batch)
            else:
                runner.step(target=batch, losses=losses, return_outputs=False)
                loss = torch.stack(losses).mean().detach()
            dist.broadcast(loss, 1)  # every rank logs it
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return epoch


def prepared(schedule: str) -> Any:
    """The same through `Accelerator`."""
    handler = TorchPipelineParallelConfig(pp_schedule=schedule, pp_num_microbatches=MICRO_BATCHES)
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2, pp_handler=handler))
    model, batches = make_parts()
    model, optimizer = accelerator.prepare(model, optimizer_of(model))

    def epoch() -> Tensor:
        loss = torch.zeros(())
        for batch in batches:
            loss = model(batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return epoch


def main() -> None:
    """Measure, and print the ratio."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--schedule", choices=["1F1B", "GPipe"], default="1F1B")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    loops = (prepared(arguments.schedule), by_hand(arguments.schedule))
    compare(loops, rounds=arguments.rounds, steps=STEPS, claim=CLAIM)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
