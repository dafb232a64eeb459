"""List the attributes of Accelerate's objects, and whether each can be read and set to what it is.

    python attributes.py OUT.json NAMES.json
    python -m accel_compat attributes.py OUT.json NAMES.json

Where NAMES.json is an empty table, OUT.json gets what `dir()` of each object has; else what happened to the
names of the table: "" if a name can be read and set, else "read: " or "set: " and an error.
"""

from __future__ import annotations

import json
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import accelerate
import torch
from accelerate import Accelerator, PartialState, hooks, utils
from accelerate.local_sgd import LocalSGD
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

if TYPE_CHECKING:
    from collections.abc import Iterator

warnings.simplefilter("ignore")

ARGUMENTS: dict[str, dict[str, Any]] = {
    "FullyShardedDataParallelPlugin": {"fsdp_version": 2},
    "GradientAccumulationPlugin": {"num_steps": 2},
    "TorchTensorParallelPlugin": {"tp_size": 2},
    "BnbQuantizationConfig": {"load_in_8bit": True},
}
"""The arguments of records of `accelerate.utils` that need some, or are to have others than the defaults."""

RECORDS = [
    *ARGUMENTS,
    *("TorchDynamoPlugin", "DataLoaderConfiguration", "ProjectConfiguration", "MegatronLMPlugin"),
    *("AutocastKwargs", "GradScalerKwargs", "InitProcessGroupKwargs", "ProfileKwargs"),
    *("DistributedDataParallelKwargs", "MSAMPRecipeKwargs", "TorchTensorParallelConfig"),
    *("TorchContextParallelConfig", "DeepSpeedSequenceParallelConfig", "DeepSpeedPlugin"),
]


class Stream(IterableDataset[Any]):
    """Eight samples."""

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.ones(8, 2))


def objects() -> Iterator[tuple[str, Any]]:
    """Yield objects of each class, in the state in which a script has them."""
    for dispatches in (False, True):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        config = utils.DataLoaderConfiguration(dispatch_batches=dispatches)
        yield from trained(Accelerator(cpu=True, dataloader_config=config), Stream() if dispatches else None)
    for name in RECORDS:
        yield name, getattr(utils, name)(**ARGUMENTS.get(name, {}))
    yield "ParallelismConfig", ParallelismConfig(dp_shard_size=2, tp_size=2)
    yield "AlignDevicesHook", hooks.AlignDevicesHook(execution_device="cpu")
    yield "SequentialHook", hooks.SequentialHook(hooks.ModelHook())
    yield "ModelHook", hooks.ModelHook()
    yield "CpuOffload", hooks.CpuOffload()
    casting = {"storage_dtype": torch.float16, "compute_dtype": torch.float32, "non_blocking": False}
    yield "LayerwiseCastingHook", hooks.LayerwiseCastingHook(**casting)
    yield "UserCpuOffloadHook", accelerate.cpu_offload_with_hook(torch.nn.Linear(1, 1), "cpu")[1]


def trained(accelerator: Any, dataset: Any) -> Iterator[tuple[str, Any]]:
    """Yield an accelerator and what it has prepared, after an epoch."""
    model: Any = torch.nn.Linear(2, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader: Any = DataLoader(dataset or TensorDataset(torch.ones(8, 2)), batch_size=2)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    for batch in loader:
        accelerator.backward(model(batch if dataset else batch[0]).mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    yield "AcceleratedOptimizer", optimizer
    yield "AcceleratedScheduler", scheduler
    yield "DataLoaderDispatcher" if dataset else "DataLoaderShard", loader
    if not dataset:
        yield "BatchSampler", loader.batch_sampler
    yield "LocalSGD", LocalSGD(accelerator, model, 2)
    yield "Accelerator", accelerator
    yield "AcceleratorState", accelerator.state
    yield "PartialState", PartialState()
    yield "GradientState", accelerator.gradient_state


def outcome(owner: Any, name: str) -> str:
    """Read a name, and set it to what it is; return the error."""
    try:
        value = getattr(owner, name)
    except Exception as error:  # noqa: BLE001 - it is what is asked
        return f"read: {error!r}"
    known = name in getattr(owner, "__dict__", {})
    try:
        setattr(owner, name, value)
    except Exception as error:  # noqa: BLE001
        return f"set: {error!r}"
    if callable(value) and not known:
        with suppress(AttributeError):
            delattr(owner, name)
    return ""


def main(out: str, table: str) -> None:
    """Look at every object."""
    names: dict[str, dict[str, bool]] = json.loads(Path(table).read_text())
    seen: dict[str, dict[str, str]] = {}
    for kind, owner in objects():
        asked = names[kind] if names else [name for name in dir(owner) if name[:2] != "__"]
        happened = seen.setdefault(kind, {})
        happened.update({name: outcome(owner, name) for name in asked})
    Path(out).write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
