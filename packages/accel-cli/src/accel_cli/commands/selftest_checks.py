"""The checks of `accel test`, which run on all ranks: compare collectives and training with plain PyTorch."""

from __future__ import annotations

import json
import logging
import math
import statistics
import sys
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accel_cli.commands.selftest import FAILED, PASSED, RUNNING, SKIPPED
from accel_cli.output import first_line
from accel_ops.collectives import broadcast, gather, gather_object, reduce
from accel_ops.pad import pad_across_processes
from accel_plugins.fp8.ao import has_ao_layers
from accel_plugins.fp8.te import has_transformer_engine_layers
from accel_plugins.kwargs import InitProcessGroupKwargs
from accel_state import runtime
from accel_state.accelerator_state import AcceleratorState
from accel_state.frozen import frozen
from accel_state.partial_state import PartialState
from accel_state.streams import device_streams, synchronize
from accel_train.accelerator import Accelerator


class DiffersError(AssertionError):
    """A difference found by a check while all ranks are still synchronised."""


@frozen
class Session:
    """Context of the checks.

    Args:
        folder: A folder that all processes share; each check may write there.
    """

    accelerator: Accelerator
    precision: str
    folder: Path


def processes(session: Session) -> str:
    """Check that every rank exists once, with its own device."""
    accelerator = session.accelerator
    device = accelerator.device
    index = torch.tensor([accelerator.process_index], device=device)
    ranks = gather(index).tolist()
    devices = gather_object([(accelerator.local_process_index, str(device))])
    _expect(ranks, [*range(session.accelerator.num_processes)], "the ranks that answer")
    if device.type != "cpu":
        local = {entry for entry in devices if entry[1] == str(device)}
        _expect(len(local), 1, f"the local ranks on {device}")
    return f"{session.accelerator.num_processes} on {device.type}"


def collectives(session: Session) -> str:
    """Check gather, reduce, broadcast and pad against arithmetic, including nested and uneven data."""
    accelerator = session.accelerator
    rank, size, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    row, rows = torch.full((3,), rank + 1.0, device=device), torch.full((rank + 1,), rank, device=device)
    results: Mapping[str, tuple[Any, Any]] = {  # All ranks run all collectives before one differs.
        "gather": (gather({"a": [row]})["a"][0].view(size, 3)[:, 0], [*range(1, size + 1)]),
        "gather of uneven lengths": (gather(rows), [r for r in range(size) for _ in range(r + 1)]),
        "reduce to the sum": (reduce(row, "sum"), [size * (size + 1) / 2] * 3),
        "reduce to the mean": (reduce(row, "mean"), [(size + 1) / 2] * 3),
        "broadcast": (broadcast(row.clone(), from_process=size - 1), [size] * 3),
        "padding": (pad_across_processes(rows, pad_index=-1), [rank] * (rank + 1) + [-1] * (size - rank - 1)),
        "gather of objects": (torch.tensor(gather_object([rank])), [*range(size)]),
    }
    for subject, (result, expected) in results.items():
        _expect(result.tolist(), expected, subject)
    return "gather, reduce, broadcast, pad, objects"


def data_loader(session: Session) -> str:
    """Check that an epoch has every sample once, including uneven last batches and shuffling."""
    accelerator = session.accelerator
    count = _ROWS * accelerator.num_processes * 3 + 1
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
    """Check losses and weights of a few steps against plain PyTorch on one process."""
    if _needs_other_model(session):
        return ""
    losses, weights, batch_size = _train(session, precision="no")
    plain_losses, plain_weights = _train_plainly(session, batch_size)
    _expect_close(losses, plain_losses, 1e-4, "the losses")
    if session.accelerator.is_main_process:
        for name, weight in plain_weights.items():
            trained = weights[name].cpu()
            _expect_close(trained.flatten().tolist(), weight.flatten().tolist(), 1e-4, name)
    return f"{len(losses)} steps equal those of one process"


def mixed_precision(session: Session) -> str:
    """Check that training in the configured precision gives about the same losses."""
    if session.precision == "no" or _needs_other_model(session):
        return ""
    losses, _, batch_size = _train(session, precision=session.precision)
    expected, _ = _train_plainly(session, batch_size)
    _expect_close(losses, expected, 5e-2, f"the losses in {session.precision}")  # NaN is close to nothing
    return f"{session.precision} trains"


def checkpoint(session: Session) -> str:
    """Check that training resumes from a checkpoint as if it had never stopped."""
    if _needs_other_model(session):
        return ""
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
    return "saved and loaded, same losses"


CHECKS: Mapping[str, Callable[[Session], str]] = {
    "processes": processes,
    "collectives": collectives,
    "data loader": data_loader,
    "training": training,
    "mixed precision": mixed_precision,
    "checkpoint": checkpoint,
}
"""The checks, in order. A check that returns an empty text is skipped."""


_STEPS = 4

_ROWS = 16
"""Rows of each process and step. 16 divides all sizes, which FP8 needs."""

_FEATURES, _HIDDEN = 32, 64


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(_FEATURES, _HIDDEN)
        self.down = nn.Linear(_HIDDEN, _FEATURES)

    def forward(self, rows: Tensor) -> Tensor:
        return rows + self.down(torch.tanh(self.up(rows)))


class _Net(nn.Module):
    """A network of blocks, for sharding.

    Args:
        names: Names of the classes of its blocks, for a config that names the blocks of another model.
    """

    def __init__(self, names: Sequence[str] = ("Block",)) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([type(name, (_Block,), {})() for name in names])
        self.head = nn.Linear(_FEATURES, 1)
        self.tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def forward(self, rows: Tensor) -> Tensor:
        for block in self.blocks:
            rows = block(rows)
        return self.head(rows)


def _net(accelerator: Accelerator) -> _Net:
    fsdp, deepspeed = accelerator.state.fsdp_plugin, accelerator.deepspeed_plugin
    names = [] if fsdp is None else list(fsdp.transformer_cls_names_to_wrap or ())
    if deepspeed is not None and deepspeed.transformer_moe_cls_names:
        names += deepspeed.transformer_moe_cls_names.split(",")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return _Net([name.strip() for name in names] or ["Block"])


def _needs_other_model(session: Session) -> bool:
    """Return whether the config needs a model of its own: Ulysses one of transformers, a pipeline stages."""
    config = session.accelerator.parallelism_config
    return config is not None and (config.sp_enabled or config.pp_enabled)


def _optimizer(model: _Net) -> torch.optim.Optimizer:
    """Return SGD with a learning rate that does not diverge for any number of blocks."""
    return torch.optim.SGD(model.parameters(), lr=0.05 / len(model.blocks))


def _rows(session: Session) -> TensorDataset:
    generator = torch.Generator().manual_seed(11)
    count = (
        _STEPS * session.accelerator.gradient_accumulation_steps * _ROWS * session.accelerator.num_processes
    )
    rows = torch.randn(count, _FEATURES, generator=generator)
    return TensorDataset(rows, rows.sum(dim=1, keepdim=True))


def _prepared(session: Session, accelerator: Accelerator) -> tuple[Any, Any, Any]:
    model = _net(accelerator)
    optimizer = _optimizer(model)
    loader: Any = DataLoader(_rows(session), batch_size=_ROWS)
    return accelerator.prepare(model, optimizer, loader)


def _epoch(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> list[float]:
    """Train for one epoch; return the loss of each step over all processes."""
    losses: list[Tensor] = []
    for rows, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(rows).float(), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(reduce(loss.detach().float().reshape(1), "mean"))
    return [float(loss) for loss in losses]


def _train(session: Session, *, precision: str) -> tuple[list[float], dict[str, Tensor], int]:
    """Train; return the losses, the full weights on the main process, and the rows of each backward pass."""
    # The plugins of the state have the precision of the last `Accelerator`.
    AcceleratorState._reset_state()
    accelerator = Accelerator(mixed_precision=precision)  # pyright: ignore[reportArgumentType] - or a recipe
    model, optimizer, loader = _prepared(session, accelerator)
    batch_size = loader.total_batch_size  # Tensor-parallel ranks read the same batches.
    losses = _epoch(accelerator, model, optimizer, loader)
    weights = accelerator.get_state_dict(model)
    has_layers = {"AO": has_ao_layers, "TE": has_transformer_engine_layers}.get(accelerator.fp8_backend or "")
    if precision == "fp8" and has_layers is not None and not has_layers(model):
        raise DiffersError("no layer has been converted to fp8")
    accelerator.free_memory()
    return losses, weights, batch_size


def _train_plainly(session: Session, batch_size: int) -> tuple[list[float], dict[str, Tensor]]:
    """Train on the same batches with plain PyTorch in this process, on the CPU."""
    accelerator = session.accelerator
    model, every = _net(accelerator), accelerator.gradient_accumulation_steps
    plugin = accelerator.deepspeed_plugin  # DeepSpeed clips gradients itself
    norm = plugin and (plugin.gradient_clipping or plugin.get_value("gradient_clipping"))
    optimizer = _optimizer(model)
    losses: list[float] = []
    for index, (rows, targets) in enumerate(DataLoader(_rows(session), batch_size=batch_size), start=1):
        loss = nn.functional.mse_loss(model(rows), targets)
        (loss / every).backward()
        losses.append(loss.item())
        if index % every == 0:
            if isinstance(norm, int | float) and norm > 0:
                nn.utils.clip_grad_norm_(model.parameters(), norm)
            optimizer.step()
            optimizer.zero_grad()
    return losses, model.state_dict()


def _expect(result: object, expected: object, subject: str) -> None:
    if result != expected:
        raise DiffersError(f"{subject}: {result!r} instead of {expected!r}")


def _expect_close(result: list[float], expected: list[float], tolerance: float, subject: str) -> None:
    pairs = zip(result, expected, strict=True)
    if not all(math.isclose(*pair, rel_tol=tolerance, abs_tol=tolerance) for pair in pairs):
        raise DiffersError(f"{subject}: {result!r} instead of {expected!r}")


_REDUCED_BYTES = {"cpu": 8 << 20, "accelerator": 64 << 20}
_COPIED_BYTES = 256 << 20


def measure_speeds() -> dict[str, float]:
    """Measure all-reduce and copies, on all ranks at once.

    Returns:
        Bytes per second. For all-reduce, the bus bandwidth, 2 (n-1)/n times the bytes of the tensor
        (github.com/NVIDIA/nccl-tests, PERFORMANCE.md), which is comparable to the bandwidth of links.
    """
    current = runtime.current()
    device, size = current.device, current.topology.world_size
    speeds: dict[str, float] = {}
    if size > 1:
        nbytes = _REDUCED_BYTES["cpu" if device.type == "cpu" else "accelerator"]
        tensor = torch.ones(nbytes // 4, device=device)
        seconds = median_seconds(lambda: current.collectives.all_reduce(tensor.zero_()), device)
        speeds["all-reduce"] = tensor.nbytes * 2 * (size - 1) / size / seconds
    if device.type != "cpu":
        on_device = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=device)
        pageable = torch.zeros(_COPIED_BYTES, dtype=torch.uint8)
        copies: dict[str, Callable[[], object]] = {"host to device": lambda: on_device.copy_(pageable)}
        if (streams := device_streams(device)) is not None:
            pinned = streams.pinned(_COPIED_BYTES)
            copies["host to device, pinned"] = lambda: streams.copy_(on_device, pinned)
            copies["device to host, pinned"] = lambda: streams.copy_(pinned, on_device)
        speeds |= {name: _COPIED_BYTES / median_seconds(copy, device) for name, copy in copies.items()}
    return speeds


_ROUNDS = 5


def median_seconds(action: Callable[[], object], device: torch.device) -> float:
    """Return the median duration of an action in seconds, without the first run."""

    def timed() -> None:
        action()
        synchronize(device)

    times = timeit.repeat(timed, setup=lambda: synchronize(device), number=1, repeat=_ROUNDS + 1)
    return statistics.median(times[1:])


def main(folder: Path, timeout: timedelta) -> int:
    """Run all checks; write `rank<rank>.json` to a folder that all ranks of a node share.

    Args:
        folder: The folder.
        timeout: Seconds that ranks wait for each other.
    """
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)])
    session = Session(accelerator=accelerator, precision=str(accelerator.mixed_precision), folder=folder)
    accelerators = ""  # The accelerators of this host, used or not.
    if torch.accelerator.is_available():
        accelerators = f"{torch.accelerator.device_count()} x {torch.accelerator.current_accelerator()}"
    report: dict[str, Any] = {
        "rank": accelerator.process_index,
        "world_size": accelerator.num_processes,
        "facts": {
            "device": str(accelerator.device),
            "device type": accelerator.device.type,
            "accelerators": accelerators,
            "threads": torch.get_num_threads(),
            "strategy": str(accelerator.distributed_type.value),
            "mixed precision": session.precision,
        },
        "checks": {key: {"result": SKIPPED, "what": "not reached", "seconds": 0.0} for key in CHECKS},
        "speeds": {},
    }
    for name in CHECKS:
        report["checks"][name] = {"result": RUNNING, "what": "", "seconds": 0.0}
        _write(folder, report)
        report["checks"][name], in_step = _run_check(name, session)
        _write(folder, report)
        if not in_step:  # Other ranks may wait for this one, until its process ends.
            return 1
    failed = any(check["result"] == FAILED for check in report["checks"].values())
    if not failed:
        report["speeds"] = measure_speeds()
        _write(folder, report)
    PartialState().destroy_process_group()
    return int(failed)


def _run_check(name: str, session: Session) -> tuple[dict[str, Any], bool]:
    """Run a check; return its result, and whether this rank is still synchronised with the others."""
    start = time.perf_counter()
    try:
        detail, state, in_step = CHECKS[name](session), PASSED, True
    except DiffersError as error:
        detail, state, in_step = str(error), FAILED, True
    except Exception as error:
        logging.getLogger(__name__).exception("%s", name)
        detail, state, in_step = first_line(error), FAILED, False
    if not detail:
        detail, state = "not enabled in the config, or for a model of its own", SKIPPED
    return {"result": state, "what": detail, "seconds": time.perf_counter() - start}, in_step


def _write(folder: Path, report: dict[str, Any]) -> None:
    path = folder / f"rank{report['rank']}.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(report), encoding="utf-8")
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), timedelta(seconds=float(sys.argv[2]))))
