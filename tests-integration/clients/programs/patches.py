"""Replay what libraries replace in `accelerate`: the replacement runs, its result is used, it can be undone.

    python -m accel_compat patches.py [CASE ...]

Prints one line for each case: its name, and what was seen.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import accelerate
import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

CASES: dict[str, tuple[int, Callable[[], Any]]] = {}


def case(ranks: int = 1) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a case that needs so many ranks, 0 for any number."""

    def register(function: Callable[[], Any]) -> Callable[[], Any]:
        CASES[function.__name__] = (ranks, function)
        return function

    return register


def reset() -> None:
    """Forget the run before."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def make_model() -> nn.Module:
    """Make a small model, the same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def make_fsdp2(**options: Any) -> Accelerator:
    """Make an accelerator whose models are sharded."""
    return Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2), **options)


def train(accelerator: Accelerator) -> list[Any]:
    """Prepare the four kinds of objects and train a step; return them."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    data = torch.utils.data.TensorDataset(torch.arange(32.0).reshape(8, 4) / 32)
    prepared = accelerator.prepare(
        model, optimizer, scheduler, torch.utils.data.DataLoader(data, batch_size=2)
    )
    model, optimizer, scheduler, loader = prepared
    for (batch,) in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        break
    return [model, optimizer, scheduler, loader]


def weights(model: nn.Module) -> list[float]:
    """Return the first row of the first layer, gathered."""
    weight = next(model.parameters())
    full = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return full[0].tolist()


@case(ranks=2)
def fsdp2_prepare_model() -> Any:
    """axolotl shards models by a function of its own, LLaMA-Factory wraps the original."""
    plain = weights(train(make_fsdp2())[0])
    seen = []

    def own(accelerator: Any, model: nn.Module) -> nn.Module:
        seen.append(type(accelerator).__name__)
        for layer in model:
            fully_shard(layer)
        return fully_shard(model)

    reset()
    with mock.patch("accelerate.utils.fsdp_utils.fsdp2_prepare_model", own):
        model, optimizer, *_ = train(make_fsdp2())
        own_weights = weights(model)
        ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        assert ids == {id(parameter) for parameter in model.parameters()}
    original = accelerate.utils.fsdp_utils.fsdp2_prepare_model

    def wrapping(accelerator: Any, model: nn.Module) -> nn.Module:
        seen.append("wrapping")
        return original(accelerator, model)

    reset()
    accelerate.utils.fsdp_utils.fsdp2_prepare_model = wrapping
    wrapped = weights(train(make_fsdp2())[0])
    accelerate.utils.fsdp_utils.fsdp2_prepare_model = original
    reset()
    undone = weights(train(make_fsdp2())[0])
    assert plain == own_weights == wrapped == undone, (plain, own_weights, wrapped, undone)
    return seen


@case(ranks=2)
def fsdp2_load_full_state_dict() -> Any:
    """SimpleTuner replaces how a sharded model gets its values."""
    plain = weights(train(make_fsdp2())[0])
    original = accelerate.utils.fsdp_utils.fsdp2_load_full_state_dict
    seen = []

    def load(accelerator: Any, model: nn.Module, full_sd: dict[str, Any], cpu_offload: bool = False) -> Any:
        seen.append([sorted(full_sd) if accelerator.is_main_process else None, cpu_offload])
        doubled = {name: 2 * value for name, value in full_sd.items()}
        return original(accelerator, model, doubled, cpu_offload=cpu_offload)

    reset()
    with mock.patch.object(accelerate.utils.fsdp_utils, "fsdp2_load_full_state_dict", load):
        model = make_fsdp2().prepare(make_model())
    reset()
    expected = [2 * value for value in weights(make_fsdp2().prepare(make_model()))]
    assert weights(model) == expected
    reset()
    assert weights(train(make_fsdp2())[0]) == plain
    return seen


@case(ranks=2)
def prepare_fsdp2() -> Any:
    """ms-swift wraps the method that prepares everything under FSDP2."""
    original = Accelerator._prepare_fsdp2
    plain = weights(train(make_fsdp2())[0])
    seen = []

    def wrapper(self: Accelerator, *args: Any) -> Any:
        seen.append([type(arg).__name__ for arg in args])
        result = original(self, *args)
        seen.append([type(prepared).__name__ for prepared in result])
        return result

    reset()
    Accelerator._prepare_fsdp2 = wrapper
    wrapped = weights(train(make_fsdp2())[0])
    Accelerator._prepare_fsdp2 = original
    reset()
    assert weights(train(make_fsdp2())[0]) == wrapped == plain
    return seen


@case(ranks=2)
def prepare_cp() -> Any:
    """axolotl replaces the method that prepares context parallelism; another wraps it."""
    seen = []

    def prepare() -> int:
        reset()
        model = make_fsdp2(parallelism_config=ParallelismConfig(cp_size=2)).prepare(make_model())
        return sum(len(module._forward_pre_hooks_with_kwargs) for module in model.modules())

    plain = prepare()
    original = Accelerator._prepare_cp

    def without(self: Accelerator, *args: Any) -> Any:
        seen.append([type(arg).__name__ for arg in args])
        return args

    with mock.patch.object(Accelerator, "_prepare_cp", without):
        left_out = prepare()
    with mock.patch.object(Accelerator, "_prepare_cp", lambda self, *args: original(self, *args)):
        wrapped = prepare()
    assert plain == wrapped == prepare(), (plain, wrapped)
    assert left_out < plain
    return seen


def main() -> int:
    """Run the cases of this number of ranks."""
    ranks = PartialState(cpu=True).num_processes
    for name, (needed, function) in CASES.items():
        if needed in (0, ranks) and (len(sys.argv) < 2 or name in sys.argv[1:]):
            reset()
            seen = function()
            if PartialState(cpu=True).is_main_process:
                print(json.dumps({name: seen}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
