"""A small model and its data, and the loop that trains it with PyTorch alone or with accel."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch_xla.core.xla_model
import torch_xla.debug.metrics as metrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import PartialState
from accel_plugins.precision import build_precision
from accel_plugins.testing import STRATEGY_CHECKS, StrategySubject
from accel_state import runtime
from accel_state.settings.model import Settings

# These take minutes, and what they show is shown by tests of this folder: tools/check_xla.py --all.
THOROUGH = {
    "training_equals_one_process",
    "micro_batches_equal_one_batch",
    "clipping_by_norm_equals_one_process",
    "saved_state_is_loaded",
}
CHECKS = [pytest.param(name, marks=[pytest.mark.thorough] * (name in THOROUGH)) for name in STRATEGY_CHECKS]
GUIDE = Path(__file__).resolve().parents[3] / "packages/accel-suite/docs/guides/tpu.md"


def counted(*names: str) -> tuple[int, ...]:
    """How often each metric of torch_xla was recorded; an execution is recorded when it ends."""
    torch_xla.core.xla_model.wait_device_ops()
    return tuple((metrics.metric_data(name) or [0])[0] for name in names)


def run_guide(*, sharded: bool) -> list[dict]:
    """Run the Python examples of the guide, those with FSDP or the others; return what each defines."""
    found = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    defined = []
    for code in found:
        if ("xla_fsdp_v2" in code) is sharded:
            names = {"__name__": "__main__"}
            exec(compile(code, GUIDE, "exec"), names)
            defined.append(names)
    return defined


def check_conformance(name: str, build, handlers: dict, directory: Path) -> None:
    """Run a check of the public suite for strategies."""
    PartialState()
    run = runtime.active
    subject = StrategySubject(
        make=lambda: build(Settings(), run, build_precision("no", run.device), handlers),
        runtime=run,
        directory=directory,
        dtype=torch.float32,
        tolerance=1e-5,
    )
    STRATEGY_CHECKS[name](subject)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Tied(nn.Module):
    """A small language model whose head is its embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(24, 16)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(16, 24, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.roll(-1, 1).flatten())


@dataclass
class Problem:
    """The same model, optimizer and batches for the same seed."""

    seed: int = 3
    rows: int = 32
    batch_size: int = 8
    model: nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    loader: DataLoader = field(init=False)

    def __post_init__(self):
        torch.manual_seed(self.seed)
        self.model = Tied()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.loader = DataLoader(TensorDataset(torch.randint(24, (self.rows, 6))), batch_size=self.batch_size)


def plain_training(
    *, epochs: int = 2, accumulation: int = 1, max_norm: float | None = None, loader=None, **options
):
    """Train with PyTorch alone, on the CPU, on the problem's batches or others; return losses and weights."""
    problem, losses = Problem(**options), []
    for _ in range(epochs):
        for number, (tokens,) in enumerate(loader or problem.loader, start=1):
            loss = loss_of(problem.model, tokens)
            (loss / accumulation).backward()
            losses.append(loss.item())
            if number % accumulation == 0:
                if max_norm is not None:
                    nn.utils.clip_grad_norm_(problem.model.parameters(), max_norm)
                problem.optimizer.step()
                problem.optimizer.zero_grad()
    return losses, problem.model.state_dict()


def plain_losses(**options) -> list:
    """Return the losses of `plain_training`."""
    return plain_training(**options)[0]


def assert_as_plain(accelerator, model, losses: list, **options) -> None:
    """Compare losses and weights with those of PyTorch alone."""
    expected, weights = plain_training(**options)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=0, atol=1e-5)
    state = accelerator.get_state_dict(model)
    found = {name: tensor.cpu() for name, tensor in state.items()}
    torch.testing.assert_close(found, dict(weights), rtol=0, atol=1e-4)


def train(accelerator, model, optimizer, loader, *, epochs: int = 2, max_norm=None, each=None):
    """Train with accel; `each` is called after every step."""
    losses = []
    for _ in range(epochs):
        for (tokens,) in loader:
            with accelerator.accumulate(model):
                loss = loss_of(model, tokens)
                accelerator.backward(loss)
                if max_norm is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            if each is not None:
                each()
    return losses
