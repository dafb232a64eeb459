"""Checkpoints of DeepSpeed's engine: resuming, another stage, another strategy, files without trust."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_plugins.deepspeed.folder import load_file, read_folder
from accel_plugins.deepspeed.library import start
from accel_plugins.deepspeed.plugin import DeepSpeedPlugin
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.kwargs import DataLoaderConfiguration
from accel_state.accelerator_state import AcceleratorState
from accel_state.errors import CheckpointError
from accel_state.partial_state import PartialState
from accel_train import Accelerator
from harness import distributed
from harness.engines import deepspeed_process

BATCHES = 6


class Counter:
    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Run:
    """A small training run: `stage` of DeepSpeed, or plain data parallelism for `None`."""

    def __init__(self, stage, precision="no"):
        AcceleratorState._reset_state()
        plugin = None if stage is None else DeepSpeedPlugin(zero_stage=stage)
        self.accelerator = Accelerator(
            cpu=True,
            mixed_precision=precision,
            deepspeed_plugin=plugin,
            dataloader_config=DataLoaderConfiguration(resume_mid_epoch=True),
        )
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 1))
        model[0].bias.requires_grad_(requires_grad=False)
        decays = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() < 2 and p.requires_grad]
        optimizer = torch.optim.AdamW([{"params": decays}, {"params": vectors, "weight_decay": 0.0}], lr=0.05)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        generator = torch.Generator().manual_seed(3)
        data = TensorDataset(torch.randn(96, 5, generator=generator), torch.randn(96, 1, generator=generator))
        loader = DataLoader(data, batch_size=8, shuffle=True)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)

    def train(self, stop, *, save_at=None, folder=None):
        """Train until so many batches are done, also those of an earlier run that was loaded."""
        for inputs, targets in self.loader:
            loss = nn.functional.mse_loss(self.model(inputs), targets)
            self.accelerator.backward(loss)
            self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.counter.count += 1
            if self.counter.count == save_at:
                self.accelerator.save_state(folder, flush=False)
            if self.counter.count == stop:
                break
        return self

    def state(self):
        weights = self.accelerator.get_state_dict(self.model)
        return {name: value.clone() for name, value in weights.items()}

    def end(self):
        self.accelerator.free_memory()


def assert_same(actual, wanted, tolerance=0.0):
    assert actual.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(actual[name].float(), value.float(), rtol=0, atol=tolerance)


def shared(tmp_path):
    return str(tmp_path / "checkpoint")


@pytest.mark.parametrize(("stage", "precision"), [(0, "no"), (1, "no"), (2, "bf16"), (3, "no"), (3, "bf16")])
@distributed(world_size=2)
def test_a_run_that_was_resumed_ends_like_the_one_that_was_not_interrupted(stage, precision, tmp_path):
    with deepspeed_process():
        whole = Run(stage, precision).train(BATCHES)
        right = whole.state()
        whole.end()
        first = Run(stage, precision).train(4, save_at=3, folder=shared(tmp_path))
        first.end()
        second = Run(stage, precision)
        second.accelerator.load_state(shared(tmp_path))
        assert second.counter.count == 3
        second.train(BATCHES)
        assert_same(second.state(), right)
        assert second.scheduler.get_last_lr() == whole.scheduler.get_last_lr()
        second.end()
        assert Path(shared(tmp_path), "pytorch_model").is_dir()
        assert Path(shared(tmp_path), "latest").read_text() == "pytorch_model"


@pytest.mark.parametrize(
    ("before", "after"),
    [(2, 3), (3, 1), (3, None), (1, None), (0, 3), (0, None), (None, 3), (None, 2), (None, 0), (2, 0)],
)
@distributed(world_size=2)
def test_a_checkpoint_goes_on_under_another_stage_or_strategy(before, after, tmp_path):
    with deepspeed_process():
        first = Run(before).train(4, save_at=3, folder=shared(tmp_path))
        first.end()
        whole = Run(after).train(BATCHES)
        right = whole.state()
        whole.end()
        second = Run(after)
        second.accelerator.load_state(shared(tmp_path))
        second.train(BATCHES)
        assert_same(second.state(), right, 1e-6)
        second.end()


def make_native(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def native_batch(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 5, generator=generator), torch.randn(8, 1, generator=generator)


def shard_of(batch):
    return [tensor[4 * dist.get_rank() : 4 * dist.get_rank() + 4] for tensor in batch]


def train_without_us(stage, folder):
    """Three steps and a checkpoint of DeepSpeed alone; what it has then, in plain torch."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    model, optimizer = make_native(0)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for number in range(3):
        inputs, targets = shard_of(native_batch(number))
        engine.backward(nn.functional.mse_loss(engine(inputs), targets))
        engine.step()
    engine.save_checkpoint(folder)
    right, right_optimizer = make_native(0)
    for own, parameter in zip(right.parameters(), model.parameters(), strict=True):
        kept = {"step": torch.tensor(3.0)}
        for name in ("exp_avg", "exp_avg_sq"):
            state = (
                safe_get_full_optimizer_state(parameter, name) if stage else optimizer.state[parameter][name]
            )
            kept[name] = state.detach().clone().view(own.shape)
        right_optimizer.state[own] = kept
        whole = safe_get_full_fp32_param(parameter) if stage else parameter
        own.data.copy_(whole.detach().view(own.shape))
    engine.destroy()
    return right, right_optimizer


@pytest.mark.parametrize(("stage", "after"), [(0, "fsdp2"), (1, "ddp"), (2, "zero3"), (3, "fsdp2")])
@distributed(world_size=2)
def test_a_folder_of_deepspeed_alone_goes_on_elsewhere(stage, after, tmp_path):
    with deepspeed_process():
        start(PartialState(cpu=True).runtime)  # without what DeepSpeed would compile for minutes
        right, right_optimizer = train_without_us(stage, shared(tmp_path))
        assert Path(shared(tmp_path), "latest").read_text() == "global_step3"
        chosen = {
            "ddp": {},
            "fsdp2": {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)},
            "zero3": {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=3)},
        }
        accelerator = Accelerator(cpu=True, **chosen[after])
        model, optimizer = make_native(1)
        loader = DataLoader(torch.arange(8), batch_size=4)
        model, optimizer, _ = accelerator.prepare(model, optimizer, loader)
        accelerator.load_state(shared(tmp_path))
        for number in (3, 4):
            if state := accelerator.get_state_dict(model):
                assert_same(state, right.state_dict(), 1e-6)
            inputs, targets = shard_of(native_batch(number))
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            inputs, targets = native_batch(number)
            nn.functional.mse_loss(right(inputs), targets).backward()
            right_optimizer.step()
            right_optimizer.zero_grad()
        if state := accelerator.get_state_dict(model):
            assert_same(state, right.state_dict(), 1e-6)
        accelerator.free_memory()


@pytest.mark.parametrize("stage", [1, 2, 3])
@distributed(world_size=2)
def test_the_folder_of_an_engine_is_read_without_an_engine(stage, tmp_path):
    with deepspeed_process():
        run = Run(stage).train(2, save_at=2, folder=shared(tmp_path))
        folder = read_folder(Path(shared(tmp_path), "pytorch_model"))
        assert folder.stage == stage
        if state := run.state():  # on the main process
            assert_same(folder.weights(), state)
        state = folder.optimizer()
        trained = {name for name, p in run.model.module.named_parameters() if p.requires_grad}
        assert {*state["state"]} == trained
        assert [len(group["params"]) for group in state["param_groups"]] == [2, 3]
        assert all(entry["step"] == 2 for entry in state["state"].values())
        shapes = {name: value.shape for name, value in folder.weights().items()}
        assert all(entry["exp_avg"].shape == shapes[name] for name, entry in state["state"].items())
        run.end()


@distributed(world_size=2)
def test_weights_are_saved_whole_for_other_libraries(tmp_path):
    from accel_ops.weights.read import load_state_dict

    with deepspeed_process():
        run = Run(3, "bf16").train(1)
        run.accelerator.save_model(run.model, tmp_path / "weights")
        run.accelerator.wait_for_everyone()
        saved = load_state_dict(tmp_path / "weights" / "model.safetensors")
        state = run.state()
        if dist.get_rank() == 0:
            assert {*saved} == {*state}
            assert saved["0.weight"].dtype is torch.bfloat16
        inside = run.accelerator.unwrap_model(run.model)
        assert type(inside) is nn.Sequential
        run.end()


class Evil:
    def __reduce__(self):
        return (print, ("run!",))


def test_a_file_that_would_run_something_is_refused(tmp_path, capsys):
    path = tmp_path / "mp_rank_00_model_states.pt"
    torch.save({"module": Evil()}, path, pickle_module=pickle)
    with pytest.raises(CheckpointError, match=r"builtin.*\.print is not allowed"):
        load_file(path)
    assert capsys.readouterr().out == ""


def test_a_folder_of_an_engine_that_is_not_whole_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="model_states"):
        read_folder(tmp_path)
    state = {"zero_stage": 2, "partition_count": 2}
    torch.save({"module": {}}, tmp_path / "mp_rank_00_model_states.pt")
    torch.save({"optimizer_state_dict": state}, tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    with pytest.raises(CheckpointError, match="1 ranks of 2"):
        read_folder(tmp_path)
