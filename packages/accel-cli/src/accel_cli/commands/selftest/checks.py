"""The checks, on all processes together: they communicate first and compare last, to stay in step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_ops.collect import broadcast, gather, gather_object, reduce
from accel_ops.pad import pad_across_processes
from accel_train.accelerator import Accelerator

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor

_STEPS, _ROWS, _FEATURES = 4, 4, 8  # rows: for each process and step


class DiffersError(AssertionError):
    """A check found something else than it should have; all processes are still in step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What checks work with.

    Args:
        accelerator: As the config makes it.
        precision: The mixed precision that the config asks for.
        folder: A folder that all processes share; each check may write there.
    """

    accelerator: Accelerator
    precision: str
    folder: Path

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        return self.accelerator.num_processes


def processes(session: Session) -> str:
    """Every process is there once, with a device of its own."""
    accelerator = session.accelerator
    device = accelerator.device
    index = torch.tensor([accelerator.process_index], device=device)
    ranks = gather(index).tolist()
    places = gather_object([(accelerator.local_process_index, str(device))])
    _expect(ranks, [*range(session.world_size)], "the ranks that answer")
    if device.type != "cpu":
        local = {place for place in places if place[1] == str(device)}
        _expect(len(local), 1, f"the local ranks on {device}")
    return f"{session.world_size} on {device.type}"


def collectives(session: Session) -> str:
    """Gather, reduce, broadcast and pad give what arithmetic says, for nested and uneven data too."""
    rank, size, device = session.accelerator.process_index, session.world_size, session.accelerator.device
    mine = {"a": torch.full((2,), float(rank), device=device), "b": [torch.tensor([rank], device=device)]}
    uneven = torch.full((rank + 1,), rank, device=device)
    gathered = gather(mine)
    lengths = gather(uneven)
    total = reduce(torch.full((3,), rank + 1.0, device=device), "sum")
    average = reduce(torch.full((3,), rank + 1.0, device=device), "mean")
    spread = broadcast(torch.full((3,), float(rank), device=device), from_process=size - 1)
    padded = pad_across_processes(uneven, pad_index=-1)
    objects = gather_object([{"rank": rank}])
    _expect(gathered["a"].tolist(), [float(one) for one in range(size) for _ in range(2)], "gather")
    _expect(gathered["b"][0].tolist(), [*range(size)], "gather of a list")
    _expect(
        lengths.tolist(), [one for one in range(size) for _ in range(one + 1)], "gather of uneven lengths"
    )
    _expect(total.tolist(), [size * (size + 1) / 2] * 3, "reduce to the sum")
    _expect(average.tolist(), [(size + 1) / 2] * 3, "reduce to the mean")
    _expect(spread.tolist(), [size - 1.0] * 3, "broadcast")
    _expect(padded.tolist(), [rank] * (rank + 1) + [-1] * (size - rank - 1), "padding")
    _expect([one["rank"] for one in objects], [*range(size)], "gather of objects")
    return "gather, reduce, broadcast, pad, objects"


def data_loader(session: Session) -> str:
    """An epoch has every sample once, also where the last batches are uneven and the order is random."""
    accelerator = session.accelerator
    count = _ROWS * session.world_size * 3 + 1
    seen: list[list[int]] = []
    for shuffle in (False, True):
        loader: Any = DataLoader(TensorDataset(torch.arange(count)), batch_size=_ROWS, shuffle=shuffle)
        prepared = accelerator.prepare_data_loader(loader)
        rows = [accelerator.gather_for_metrics(batch[0]).tolist() for batch in prepared]
        seen.append([row for batch in rows for row in batch])
    _expect(seen[0], [*range(count)], "the samples in order")
    _expect(sorted(seen[1]), [*range(count)], "the shuffled samples")
    return f"{count} samples once each"


def training(session: Session) -> str:
    """A few steps give the losses and the weights that plain PyTorch gives on one process."""
    losses, weights = _train(session, precision="no")
    wanted_losses, wanted_weights = _train_plainly(session)
    _expect_close(losses, wanted_losses, 1e-4, "the losses")
    if session.accelerator.is_main_process:
        for name, weight in wanted_weights.items():
            _expect_close(weights[name].cpu().flatten().tolist(), weight.flatten().tolist(), 1e-4, name)
    return f"{_STEPS} steps equal those of one process"


def mixed_precision(session: Session) -> str:
    """The config's precision trains, to about the same losses."""
    if session.precision == "no":
        return ""
    losses, _ = _train(session, precision=session.precision)
    wanted, _ = _train_plainly(session)
    if not all(map(math.isfinite, losses)):
        raise DiffersError(f"the losses in {session.precision} are {losses}")
    _expect_close(losses, wanted, 5e-2, f"the losses in {session.precision}")
    return f"{session.precision} trains"


def checkpoint(session: Session) -> str:
    """A state that was saved and loaded goes on as it would have gone on."""
    accelerator = session.accelerator
    model, optimizer, loader = _prepared(session, accelerator)
    _epoch(accelerator, model, optimizer, loader)
    folder = session.folder / "checkpoint"
    accelerator.save_state(str(folder))
    first = _epoch(accelerator, model, optimizer, loader)
    accelerator.load_state(str(folder))
    second = _epoch(accelerator, model, optimizer, loader)
    accelerator.free_memory()
    _expect_close(second, first, 1e-5, "the losses after loading")
    return "saved, loaded, the same again"


CHECKS: Mapping[str, Callable[[Session], str]] = {
    "processes": processes,
    "collectives": collectives,
    "data loader": data_loader,
    "training": training,
    "mixed precision": mixed_precision,
    "checkpoint": checkpoint,
}
"""The checks in their order. One that returns nothing has nothing to check."""


class _Net(nn.Module):
    """Two layers, the first in a block of its own, so that sharding has something to divide."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(_FEATURES, 2 * _FEATURES), nn.Tanh())
        self.head = nn.Linear(2 * _FEATURES, 1)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.block(rows))


def _net() -> _Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return _Net()


def _rows(session: Session) -> TensorDataset:
    generator = torch.Generator().manual_seed(11)
    count = _STEPS * _ROWS * session.world_size
    rows = torch.randn(count, _FEATURES, generator=generator)
    return TensorDataset(rows, rows.sum(dim=1, keepdim=True))


def _prepared(session: Session, accelerator: Accelerator) -> tuple[Any, Any, Any]:
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader: Any = DataLoader(_rows(session), batch_size=_ROWS)
    return accelerator.prepare(model, optimizer, loader)


def _epoch(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> list[float]:
    """Train for one epoch; return the loss of each step over all processes."""
    losses: list[Tensor] = []
    for rows, wanted in loader:
        loss = nn.functional.mse_loss(model(rows).float(), wanted)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(reduce(loss.detach().float().reshape(1), "mean"))
    return [float(loss) for loss in losses]


def _train(session: Session, *, precision: str) -> tuple[list[float], dict[str, Tensor]]:
    accelerator = Accelerator(mixed_precision=precision)
    model, optimizer, loader = _prepared(session, accelerator)
    losses = _epoch(accelerator, model, optimizer, loader)
    weights = accelerator.get_state_dict(model)
    accelerator.free_memory()
    return losses, weights


def _train_plainly(session: Session) -> tuple[list[float], dict[str, Tensor]]:
    """The same with plain PyTorch on this process alone, on the CPU."""
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses: list[float] = []
    for rows, wanted in DataLoader(_rows(session), batch_size=_ROWS * session.world_size):
        loss = nn.functional.mse_loss(model(rows), wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: weight.detach() for name, weight in model.state_dict().items()}


def _expect(found: object, wanted: object, what: str) -> None:
    if found != wanted:
        raise DiffersError(f"{what}: {found!r} instead of {wanted!r}")


def _expect_close(found: list[float], wanted: list[float], tolerance: float, what: str) -> None:
    pairs = zip(found, wanted, strict=True)
    if not all(math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance) for one, other in pairs):
        raise DiffersError(f"{what}: {found!r} instead of {wanted!r}")
