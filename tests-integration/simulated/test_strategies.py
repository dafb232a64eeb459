"""Every strategy on the simulated accelerator: the public suite, training as on the CPU, exact resume.

Not here are torchft, whose process groups between replica groups are gloo and NCCL ("No backend type
associated with device type npu"); DeepSpeed, which knows devices by libraries of their own (of an npu,
torch_npu) and takes the CPU otherwise; and Megatron, which calls torch.cuda.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_plugins import ddp
from accel_plugins.fsdp import fsdp1, fsdp2
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.kwargs import DataLoaderConfiguration
from accel_plugins.parallelism import tensor
from accel_plugins.parallelism.config import ParallelismConfig
from accel_plugins.pipeline import strategy as pipeline
from accel_plugins.precision import build_precision
from accel_plugins.strategy import Strategy
from accel_plugins.testing import STRATEGY_CHECKS, StrategySubject, check_strategy
from accel_state.accelerator_state import AcceleratorState
from accel_state.errors import UnsupportedError
from accel_state.partial_state import PartialState
from accel_train import Accelerator
from distributed.device_program import train_and_save
from distributed.fsdp.test_conformance import planned
from distributed.fsdp.test_conformance_fsdp1 import CHECKS as FSDP1_CHECKS
from distributed.fsdp.test_conformance_fsdp1 import IN_FLOAT32
from harness import cases, distributed
from harness.small_llama import make_llama
from train.test_async import arguments_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


TOKENS = torch.arange(32).view(2, 16) % 17


def subject(
    folder: Path, build: Callable[..., Any], *, fsdp: int | None = None, **sizes: int
) -> StrategySubject:
    runtime = PartialState().runtime
    assert runtime.device == torch.device("npu", runtime.topology.rank)

    def make() -> Any:
        handlers: dict[type, Any] = {}
        if fsdp is not None:
            plugin = FullyShardedDataParallelPlugin(fsdp_version=fsdp)
            handlers[FullyShardedDataParallelPlugin] = plugin
        if sizes:
            handlers[ParallelismConfig] = ParallelismConfig(**sizes)
        return build(None, runtime, build_precision("no", runtime.device), handlers)

    return StrategySubject(make=make, runtime=runtime, directory=folder)


@distributed(world_size=1, device="npu")
def test_one_process_conforms(tmp_path: Path) -> None:
    check_strategy(subject(tmp_path, Strategy))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "tp"])
@distributed(world_size=2, device="npu")
def test_two_ranks_conform(strategy: str, tmp_path: Path) -> None:
    if strategy == "ddp":
        check_strategy(subject(tmp_path, ddp.DdpStrategy))
    elif strategy == "fsdp2":
        check_strategy(subject(tmp_path, fsdp2.Fsdp2Strategy, fsdp=2))
    else:
        with planned():
            check_strategy(subject(tmp_path, tensor.TensorParallelStrategy, tp_size=2))


@distributed(world_size=2, device="npu")
def test_two_ranks_of_fsdp1_conform(tmp_path: Path) -> None:
    for name in FSDP1_CHECKS:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        STRATEGY_CHECKS[name](subject(folder, fsdp1.Fsdp1Strategy, fsdp=1))
    in_float32 = replace(subject(tmp_path, fsdp1.Fsdp1Strategy, fsdp=1), dtype=torch.float32, tolerance=1e-6)
    for name in IN_FLOAT32:
        STRATEGY_CHECKS[name](in_float32)


@distributed(world_size=2, device="npu")
def test_two_stages_of_a_pipeline_conform(tmp_path: Path) -> None:
    check_strategy(subject(tmp_path, pipeline.PipelineStrategy, pp_size=2))


@pytest.mark.parametrize("axis", cases(["hsdp", "tp"], always={"hsdp"}))
@distributed(world_size=4, device="npu")
def test_four_ranks_of_two_axes_conform(axis: str, tmp_path: Path) -> None:
    if axis == "hsdp":
        check_strategy(subject(tmp_path, fsdp2.Fsdp2Strategy, fsdp=2, dp_replicate_size=2, dp_shard_size=2))
    else:
        with planned():
            check_strategy(subject(tmp_path, fsdp2.Fsdp2Strategy, fsdp=2, dp_shard_size=2, tp_size=2))


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "fsdp2-offload", "tp"])
@distributed(world_size=2, device="npu")
def test_training_and_saving_in_the_background(strategy: str, precision: str, tmp_path: Path) -> None:
    train_and_save("accelerator", strategy, precision, str(tmp_path))


def accelerate(strategy: str) -> Accelerator:
    order = DataLoaderConfiguration(resume_mid_epoch=True)
    return Accelerator(dataloader_config=order, **arguments_of(strategy))


def train(
    accelerator: Accelerator, steps: int, *, load: str | None = None, save: str | None = None
) -> tuple[list[float], list[torch.Tensor]]:
    """Train with dropout, from the start or from a state, and return losses and full weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 1))
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 6)
    loader = DataLoader(data, batch_size=4, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    if load is not None:
        accelerator.load_state(load)
    losses = []
    for inputs, targets in loader:
        assert inputs.device == accelerator.device
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if len(losses) == steps:
            if save is not None:
                accelerator.save_state(save)
            break
    weights = accelerator.get_state_dict(model)
    return losses, [tensor.cpu() for tensor in weights.values()]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "fsdp2-offload"])
@distributed(world_size=2, device="npu")
def test_a_resumed_run_ends_with_the_same_bytes(strategy: str, tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    right_losses, right_weights = train(accelerate(strategy), 6)
    AcceleratorState._reset_state(reset_partial_state=True)
    losses, _ = train(accelerate(strategy), 3, save=state)
    AcceleratorState._reset_state(reset_partial_state=True)
    found_losses, found_weights = train(accelerate(strategy), 3, load=state)
    assert losses + found_losses == right_losses
    assert all(torch.equal(a, b) for a, b in zip(found_weights, right_weights, strict=True))


@distributed(world_size=2, device="npu")
def test_context_parallelism_without_fused_attention_is_refused_and_sequence_parallelism_works() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    with pytest.raises(UnsupportedError, match=r"cp_size=2.*fused attention.*'npu'.*sp_size"):
        Accelerator(fsdp_plugin=plugin, parallelism_config=ParallelismConfig(cp_size=2))
    AcceleratorState._reset_state(reset_partial_state=True)
    model = make_llama()
    right = model(TOKENS).logits
    accelerator = Accelerator(fsdp_plugin=plugin, parallelism_config=ParallelismConfig(sp_size=2))
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    half = slice(8 * accelerator.process_index, 8 * accelerator.process_index + 8)
    inputs, positions = (x[:, half].to(accelerator.device) for x in (TOKENS, torch.arange(16)[None]))
    torch.testing.assert_close(model(inputs, position_ids=positions).logits.cpu(), right[:, half])
