"""Replay what repositories do to `accelerate`: their imports, the attributes they use, what they replace.

    python probe.py OUT.json NAMES.json
    python -m accel_compat probe.py OUT.json NAMES.json

NAMES.json is the table of names in use. Each row gets an outcome: "" if it works, else an error. All
replacements are made together, as wrappers that note that they are called and call what they replace; then a
small run is done, in one process or on several ranks, and which of them were called is written too.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import types
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, TensorDataset

if TYPE_CHECKING:
    from collections.abc import Callable

warnings.simplefilter("ignore")
torch.set_num_threads(1)
INSTANCE = "@accelerator"
"""How the table writes a variable of this name: an `Accelerator`, torch's module or that of `accelerate`."""

ABSENT = "a mark of the repository's own, or a name that is gone"


def main(out: str, table: str) -> None:
    """Replay the table; rank 0 writes what happened."""
    names = json.loads(Path(table).read_text())
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    accelerator = Accelerator(cpu=True)
    outcome: dict[str, Any] = {
        "library": AcceleratorState.__module__.partition(".")[0],
        "imports": {name: error_of(resolve, name) for name in names["imports"]},
        "attrs": {name: error_of(use, name, accelerator) for name in names["attrs"]},
    }
    called: set[str] = set()
    restore: list[Callable[[], None]] = []
    outcome["patches"] = {
        name: error_of(replace, name, accelerator, called, restore) for name in names["patches"]
    }
    reset()
    outcome["runs"] = {run.__name__: error_of(run) for run in RUNS[os.environ.get("WORLD_SIZE", "1") != "1"]}
    for undo in reversed(restore):
        undo()
    outcome["called"] = sorted(called)
    if int(os.environ.get("RANK", "0")) == 0:
        Path(out).write_text(json.dumps(outcome, indent=1))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def error_of(action: Callable[..., object], *arguments: Any) -> str:
    """Do something; return how it fails, nothing if it does not."""
    try:
        action(*arguments)
    except Exception as error:  # noqa: BLE001 - whatever it raises is what the table is asked for
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def resolve(name: str) -> Any:
    """Import a module or a name of one; call what is followed by parentheses, without arguments."""
    value: Any = None
    path = ""
    for part in name.split("."):
        word = part.removesuffix("()")
        path = f"{path}.{word}".lstrip(".")
        value = importlib.import_module(word) if value is None else member(value, word, path)
        if word != part:
            value = value(cpu=True) if isinstance(value, type) else value()
    return value


def member(value: Any, word: str, path: str) -> Any:
    """Read an attribute, or import the submodule of this name."""
    if isinstance(value, types.ModuleType) and not hasattr(value, word):
        return importlib.import_module(path)
    return getattr(value, word)


def use(row: str, accelerator: Any) -> None:
    """Read an attribute, or set it to what it is; a call ends the path, what it returns is the user's."""
    verb, _, name = row.rpartition(":")
    owner, last = owner_of(name.partition("()")[0] if name.startswith(INSTANCE) else name, accelerator)
    if verb == "hasattr":
        hasattr(owner, last)
    elif verb == "getattr":
        getattr(owner, last, None)
    elif verb == "setattr":
        setattr(owner, last, getattr(owner, last, None))
    else:
        getattr(owner, last)


def owner_of(name: str, accelerator: Any) -> tuple[Any, str]:
    """What has the last attribute of a name."""
    words = name.split(".")
    if words[0] != INSTANCE:
        return resolve(".".join(words[:-1])), words[-1]
    module = resolve("accelerate.accelerator")
    for start in (accelerator, torch.accelerator, module):
        owner = start
        for word in words[1:-1]:
            owner = getattr(owner, word, None)
        if owner is not None and hasattr(owner, words[-1]):
            return owner, words[-1]
    return accelerator, words[-1]


def replace(name: str, accelerator: Any, called: set[str], restore: list[Callable[[], None]]) -> None:
    """Replace a function, method or property by one that notes its calls; set any other value to itself."""
    owner, last = owner_of(name, accelerator)
    own = isinstance(owner, type) and last in vars(owner)
    before = vars(owner)[last] if own else getattr(owner, last, ABSENT)
    if before is ABSENT:
        setattr(owner, last, True)
        assert getattr(owner, last) is True
        delattr(owner, last)
        raise LookupError(ABSENT)

    def note(*arguments: Any, **options: Any) -> Any:
        called.add(name)
        function = before.fget if isinstance(before, property) else before
        return function(*arguments, **options)

    new: Any = before
    if isinstance(before, property):
        new = property(note, before.fset, before.fdel)
    elif isinstance(before, types.FunctionType) and isinstance(owner, type | types.ModuleType):
        new = note
    setattr(owner, last, new)
    now = vars(owner)[last] if own else getattr(owner, last)
    assert now == new or isinstance(new, types.MethodType), f"{name} is {now!r} after it was replaced"
    if isinstance(owner, type | types.ModuleType):
        restore.append(lambda: setattr(owner, last, before))


def reset() -> None:
    """Forget the states of the process, but not its process group."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def train(**options: Any) -> None:
    """Prepare a model, an optimizer, a schedule and data; train four steps with clipping; read the state."""
    from accelerate import Accelerator
    from patches import make_model

    reset()
    accelerator = Accelerator(cpu=True, **options)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    data = DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2)
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
    for (batch,) in data:
        with accelerator.accumulate(model):
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        accelerator.gather_for_metrics(loss.detach()[None])
    accelerator.wait_for_everyone()
    accelerator.get_state_dict(model)
    accelerator.unwrap_model(model)
    accelerator.end_training()


def plain() -> None:
    """Train in float32, or under DistributedDataParallel."""
    train()


def compiled_in_bf16() -> None:
    """Train in bfloat16, compiled."""
    from accelerate.utils import TorchDynamoPlugin

    train(mixed_precision="bf16", dynamo_plugin=TorchDynamoPlugin(backend="eager"))


def dispatched() -> None:
    """Run a model of which a part lies on the disk."""
    from accelerate import dispatch_model
    from patches import make_model

    with tempfile.TemporaryDirectory() as folder:
        model = dispatch_model(make_model(), {"0": "cpu", "1": "disk"}, main_device="cpu", offload_dir=folder)
        model(torch.ones(1, 4))


def sharded() -> None:
    """Train a model that FSDP2 shards."""
    from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="NO_WRAP")
    train(fsdp_plugin=plugin, parallelism_config=ParallelismConfig(dp_shard_size=2))


RUNS = {False: (plain, compiled_in_bf16, dispatched), True: (plain, sharded)}
"""What is done in one process, and on several ranks."""

if __name__ == "__main__":
    main(*sys.argv[1:])
