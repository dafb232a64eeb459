"""One process on one XLA device: equal to plain PyTorch on the CPU, one execution per step."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch_xla
import torch_xla.debug.metrics as metrics
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from accel import Accelerator, DistributedDataParallelKwargs, DistributedType, PartialState
from accel.errors import UnsupportedError
from accel.local_sgd import LocalSGD
from accel.state import AcceleratorState
from accel.utils import (
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    is_torch_xla_available,
    pad_across_processes,
    reduce,
    save,
    send_to_device,
    set_seed,
    synchronize_rng_states,
)
from accel_plugins.kwargs import StepGuard
from accel_plugins.xla import XlaStrategy
from accel_state import runtime, xla_devices
from accel_state.errors import MissingDependencyError, SettingsError
from accel_state.topology import Topology
from accel_train.data.transfer import warn_of_shapes
from nightly.xla.problems import (
    CHECKS,
    Problem,
    Tied,
    assert_as_plain,
    check_conformance,
    counted,
    loss_of,
    plain_losses,
    run_guide,
    train,
)

NEAR = {"rtol": 0, "atol": 1e-5}
XLA = torch.device("xla", 0)


def counts() -> tuple[int, int]:
    """Compilations and executions so far."""
    return counted("CompileTime", "ExecuteTime")


def fallbacks() -> int:
    """Operations so far that ran on the CPU, since they have no form for the device, or ask for a number."""
    names = [name for name in metrics.counter_names() if name.startswith("aten::")]
    return sum(metrics.counter_value(name) for name in names)


def prepared(accelerator: Accelerator, **options):
    problem = Problem(**options)
    return accelerator.prepare(problem.model, problem.optimizer, problem.loader)


def test_the_state_names_the_device_and_the_run():
    state = PartialState()
    assert (state.device, state.distributed_type) == (XLA, DistributedType.XLA)
    assert (state.num_processes, state.process_index, state.is_main_process) == (1, 0, True)
    assert state.backend is None
    with state.main_process_first(), state.split_between_processes([1, 2]) as share:
        assert share == [1, 2]


def test_the_cpu_can_be_asked_for():
    assert Accelerator(cpu=True).device == torch.device("cpu")


def test_hardware_behind_xla_can_be_asked_for():
    assert is_torch_xla_available()
    assert not is_torch_xla_available(check_is_tpu=True)
    assert not is_torch_xla_available(check_is_gpu=True)


def test_collectives_take_tensors_of_the_device():
    PartialState()
    tree = {
        "a": torch.arange(3, device=XLA),
        "b": [torch.ones(2, 2, device=XLA), torch.tensor(4.0, device=XLA)],
    }
    assert gather(tree)["a"].tolist() == [0, 1, 2]
    assert reduce(tree, "sum")["b"][0].device == XLA
    assert broadcast(tree)["b"][1].item() == 4.0
    assert pad_across_processes(tree["a"]).tolist() == [0, 1, 2]
    assert gather_object(["x"]) == ["x"]
    assert broadcast_object_list([1, "two"]) == [1, "two"]
    assert send_to_device({"x": torch.ones(1)}, XLA)["x"].device == XLA


def test_seeds_reach_the_device_also_those_set_before():
    set_seed(11)
    accelerator = Accelerator()
    first = torch.rand(4, device=accelerator.device).cpu()
    set_seed(11)
    torch.testing.assert_close(torch.rand(4, device=accelerator.device).cpu(), first)
    state = xla_devices.get_rng_state()
    drawn = torch.rand(4, device=accelerator.device).cpu()
    xla_devices.set_rng_state(state)
    torch.testing.assert_close(torch.rand(4, device=accelerator.device).cpu(), drawn)
    synchronize_rng_states(["torch", "xla"])


@pytest.mark.parametrize(("accumulation", "max_norm"), [(1, None), (2, 0.5)])
def test_losses_and_weights_are_those_of_plain_pytorch(accumulation, max_norm):
    accelerator = Accelerator(gradient_accumulation_steps=accumulation)
    model, optimizer, loader = prepared(accelerator)
    losses = train(accelerator, model, optimizer, loader, max_norm=max_norm)
    assert_as_plain(accelerator, model, losses, accumulation=accumulation, max_norm=max_norm)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    "name",
    [check for check in CHECKS if "guarded_steps_are_skipped" not in check.values],  # refused
)
def test_the_strategy_conforms(name, tmp_path):
    check_conformance(name, XlaStrategy, {}, tmp_path)


def test_nothing_is_compiled_after_the_second_step_and_a_step_is_one_execution():
    accelerator = Accelerator()
    model, optimizer, loader = prepared(accelerator, rows=64)
    seen = []
    metrics.clear_all()
    train(accelerator, model, optimizer, loader, epochs=1, max_norm=1.0, each=lambda: seen.append(counts()))
    compiled, executed = zip(*seen, strict=True)
    assert set(compiled[1:]) == {compiled[1]}, f"compilations after each step: {compiled}"
    steps = [after - before for before, after in pairwise(executed[1:])]
    assert steps == [1] * 6, f"executions of the third and later steps: {steps}"


@pytest.mark.parametrize("looks", [False, True], ids=["a plain step", "a step with item()"])
def test_a_step_waits_for_the_device_only_if_the_loop_does(looks):
    """Nothing is read back in a step; the second case shows what would be counted."""
    accelerator = Accelerator()
    model, optimizer, loader = prepared(accelerator, rows=64)
    seen, losses = [], []
    for (tokens,) in loader:
        seen.append((*counted("CompileTime", "ExecuteTime", "TransferFromDeviceTime"), fallbacks()))
        loss = loss_of(model, tokens)
        accelerator.backward(loss)
        if looks:
            loss.item()
        losses.append(loss.detach())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    steps = [tuple(b - a for a, b in zip(before, after, strict=True)) for before, after in pairwise(seen[3:])]
    assert {compiled for compiled, *_ in steps} == {0}
    assert {read for _, _, read, _ in steps} == {int(looks)}
    assert {fallen for *_, fallen in steps} == {int(looks)}
    assert ({executed for _, executed, *_ in steps} == {1}) is not looks
    expected = plain_losses(epochs=1, rows=64, max_norm=1.0)
    torch.testing.assert_close(torch.stack(losses).cpu(), torch.tensor(expected), **NEAR)


def test_the_example_of_the_guide_trains_on_the_device():
    (names,) = run_guide(sharded=False)
    assert names["model"].weight.device == XLA


@pytest.mark.parametrize(
    "backend",
    [
        "openxla",
        *(
            pytest.param(name, marks=pytest.mark.thorough)
            for name in ("aot_torchxla_trace_once", "eager", "aot_eager")
        ),
    ],
)
def test_a_compiled_model_trains_as_plain_pytorch(backend):
    accelerator = Accelerator(dynamo_backend=backend)
    model, optimizer, loader = prepared(accelerator, rows=16)
    losses = train(accelerator, model, optimizer, loader, epochs=1)
    assert_as_plain(accelerator, model, losses, epochs=1, rows=16)


def test_a_model_is_compiled_for_evaluation():
    accelerator = Accelerator(dynamo_backend="torchxla_trace_once")
    problem = Problem(rows=16)
    plain = Problem(rows=16).model
    model, loader = accelerator.prepare(problem.model.eval(), problem.loader)
    with torch.no_grad():
        for (tokens,), (expected,) in zip(loader, problem.loader, strict=True):
            torch.testing.assert_close(model(tokens).cpu(), plain(expected), **NEAR)


def test_a_checkpoint_is_written_while_training_goes_on(tmp_path):
    accelerator = Accelerator()
    model, optimizer, loader = prepared(accelerator)
    train(accelerator, model, optimizer, loader, epochs=1)
    saving = accelerator.save_state(str(tmp_path), blocking=False)
    later = train(accelerator, model, optimizer, loader, epochs=1)
    saving.wait()
    accelerator.load_state(str(tmp_path))
    assert train(accelerator, model, optimizer, loader, epochs=1) == later


def test_a_micro_batch_is_one_execution_and_an_evaluated_batch_too():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer, loader = prepared(accelerator, rows=64)
    seen = []
    metrics.clear_all()
    train(accelerator, model, optimizer, loader, epochs=1, each=lambda: seen.append(counts()))
    assert {b[1] - a[1] for a, b in pairwise(seen[3:])} == {1}
    assert {compiled for compiled, _ in seen[3:]} == {seen[3][0]}
    model.eval()
    seen, kept = [], []
    with torch.no_grad():
        for (tokens,) in loader:
            kept.append(model(tokens))
            seen.append(counts())
    assert {b[1] - a[1] for a, b in pairwise(seen[1:])} == {1}


def test_tied_weights_stay_tied_and_optimizers_keep_their_parameters():
    accelerator = Accelerator()
    problem = Problem()
    embedding = problem.model.embed.weight
    model, optimizer, _ = accelerator.prepare(problem.model, problem.optimizer, problem.loader)
    assert model.head.weight is model.embed.weight is embedding
    assert embedding.device == XLA
    assert optimizer.param_groups[0]["params"][0] is embedding
    assert accelerator.unwrap_model(model) is problem.model


def test_bfloat16_computes_in_bfloat16_and_returns_float32():
    accelerator = Accelerator(mixed_precision="bf16")
    model = accelerator.prepare(nn.Linear(4, 4))
    assert model(torch.ones(2, 4, device=XLA)).dtype == torch.float32
    with accelerator.autocast():
        assert (torch.ones(2, 2, device=XLA) @ torch.ones(2, 2, device=XLA)).dtype == torch.bfloat16
    losses = train(accelerator, *prepared(accelerator))
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(plain_losses()), rtol=0, atol=0.05)


class Stream(IterableDataset):
    """Numbers; each worker has its own."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self):
        info = get_worker_info()
        return iter(range(self.size) if info is None else range(info.id, self.size, info.num_workers))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [torch.arange, Stream])
def test_batches_have_one_shape_and_metrics_count_every_sample_once(kind, workers):
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(kind(22), batch_size=8, num_workers=workers))
    gathered = []
    for batch in loader:
        assert batch.shape == (8,)
        gathered += accelerator.gather_for_metrics(batch).tolist()
        gathered_objects = accelerator.gather_for_metrics(batch.tolist(), use_gather_object=True)
        assert gathered[-len(gathered_objects) :] == gathered_objects
    assert sorted(gathered) == list(range(22))


def test_a_size_that_does_not_divide_compiles_nothing_more_and_trains_on_the_completed_batch():
    accelerator = Accelerator()
    model, optimizer, loader = prepared(accelerator, rows=30)
    seen = []
    metrics.clear_all()
    losses = train(accelerator, model, optimizer, loader, each=lambda: seen.append(counts()[0]))
    assert len(seen) == 8
    assert set(seen[1:]) == {seen[1]}, f"compilations after each step: {seen}"
    problem = Problem(rows=30)
    rows = torch.cat([tokens for (tokens,) in problem.loader])
    completed = DataLoader(TensorDataset(torch.cat([rows, rows[:2]])), batch_size=8)
    torch.testing.assert_close(
        torch.tensor(losses), torch.tensor(plain_losses(rows=30, loader=completed)), **NEAR
    )


def test_a_last_batch_can_be_dropped_or_left_as_it_is():
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
    assert [len(batch) for batch in accelerator.prepare(DataLoader(range(10), 4, drop_last=True))] == [4, 4]
    assert [len(batch) for batch in accelerator.prepare(DataLoader(range(10), 4))] == [4, 4, 2]


@pytest.mark.parametrize("even", [True, False])
def test_a_shorter_last_batch_is_completed_or_reported_once(even, caplog):
    warn_of_shapes.cache_clear()
    with caplog.at_level(logging.WARNING):
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=even))
        for _ in range(2):
            loader = accelerator.prepare(DataLoader(torch.arange(10), batch_size=4))
            assert [len(batch) for batch in loader] == [4, 4, 4 if even else 2]
    said = [record.message for record in caplog.records if "drop_last=True" in record.message]
    assert ["Batches have different shapes" in message for message in said] == ([] if even else [True])


def test_batches_arrive_in_order_with_workers_and_after_skipping():
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(torch.arange(12), batch_size=4, num_workers=1))
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    skipped = accelerator.skip_first_batches(loader, 2)
    assert [(batch.device, batch.tolist()) for batch in skipped] == [(XLA, [8, 9, 10, 11])]


def test_local_sgd_trains():
    accelerator = Accelerator()
    model, optimizer, loader = prepared(accelerator)
    losses = []
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2) as local_sgd:
        losses = train(accelerator, model, optimizer, loader, each=local_sgd.step)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(plain_losses()), **NEAR)


def test_a_checkpoint_is_read_without_xla_and_the_reverse(tmp_path):
    """Two epochs in one go are one epoch here, and one resumed on the other device."""
    for number, (writer, reader) in enumerate([("xla", "cpu"), ("cpu", "xla")]):
        first = Accelerator(cpu=writer == "cpu")
        objects = prepared(first)
        losses = train(first, *objects, epochs=1)
        folder = tmp_path / str(number)
        first.save_state(str(folder))
        first.free_memory()
        AcceleratorState._reset_state(reset_partial_state=True)
        second = Accelerator(cpu=reader == "cpu")
        objects = prepared(second)
        second.load_state(str(folder))
        losses += train(second, *objects, epochs=1)
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(plain_losses()), **NEAR)
        for tensor in torch.load(folder / "optimizer.bin", weights_only=True)["state"][0].values():
            assert tensor.device.type == "cpu"
        AcceleratorState._reset_state(reset_partial_state=True)


def test_checkpoints_restore_the_generator_of_the_device(tmp_path):
    accelerator = Accelerator()
    accelerator.save_state(str(tmp_path))
    drawn = torch.rand(3, device=XLA).cpu()
    accelerator.load_state(str(tmp_path))
    torch.testing.assert_close(torch.rand(3, device=XLA).cpu(), drawn)


def test_models_are_saved_as_on_every_device(tmp_path):
    accelerator = Accelerator()
    problem = Problem()
    expected = {name: tensor.clone() for name, tensor in problem.model.state_dict().items()}
    model = accelerator.prepare(problem.model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accelerator.save_model(model, str(tmp_path))
    saved = load_file(tmp_path / "model.safetensors")
    assert expected.keys() - saved.keys() == {"head.weight"}
    for name, tensor in saved.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)
    accelerator.save(model.state_dict(), str(tmp_path / "weights.bin"))
    read = torch.load(tmp_path / "weights.bin", weights_only=True)
    assert {tensor.device.type for tensor in read.values()} == {"cpu"}
    assert read["head.weight"].data_ptr() == read["embed.weight"].data_ptr(), "tied weights are written once"
    Tied().load_state_dict(read)


def test_every_rank_executes_what_it_saves_and_the_main_process_writes(tmp_path):
    """A collective may be a part of what was recorded, and waits until all ranks execute it."""
    PartialState()
    tensor = torch.ones(2, device=XLA)
    torch_xla.sync(wait=True)
    other = replace(runtime.current(), topology=Topology(rank=1, world_size=2, local_rank=1))
    for rank, run in enumerate([runtime.current(), other]):
        runtime.active = run
        before = counts()
        path = tmp_path / str(rank)
        save({"twice": [tensor * (2 + rank), tensor + 1]}, path)
        assert counts()[1] == before[1] + 1
        assert path.exists() is (rank == 0)
    read = torch.load(tmp_path / "0", weights_only=True)
    assert [found.tolist() for found in read["twice"]] == [[2, 2], [2, 2]]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"mixed_precision": "fp16"}, "mixed_precision='fp16'"),
        ({"kwargs_handlers": [DistributedDataParallelKwargs(comm_hook="bf16")]}, "hook 'bf16'"),
        ({"parallelism_config": ParallelismConfig(tp_size=1)}, "ParallelismConfig"),
        ({"deepspeed_plugin": DeepSpeedPlugin(zero_stage=2)}, "DeepSpeed"),
        ({"mixed_precision": "fp8"}, "not 'xla'"),
        ({"fsdp_plugin": FullyShardedDataParallelPlugin()}, "xla_fsdp_v2=True"),
        ({"dynamo_backend": "inductor"}, "compiler 'inductor'"),
        ({"kwargs_handlers": [StepGuard()]}, "STEP_GUARD"),
    ],
)
def test_what_xla_cannot_do_is_refused_at_construction(options, named):
    with pytest.raises(UnsupportedError, match=named):
        Accelerator(**options)


def test_debug_mode_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "1")
    with pytest.raises(UnsupportedError, match="debug mode"):
        Accelerator()


def test_versions_that_do_not_belong_together_are_named_with_the_right_pair():
    with pytest.raises(
        MissingDependencyError, match=r"torch 2\.15\.0 and torch_xla 2\.9\.0.*torch==2\.9\.\*"
    ):
        xla_devices.check_versions("2.15.0", "2.9.0")
    xla_devices.check_versions("2.9.1+cu128", "2.9.0")


def test_processes_that_torch_xla_has_not_started_are_refused():
    with pytest.raises(SettingsError, match=r"torchrun started 4 processes.*accel launch --tpu"):
        xla_devices.topology(Topology(rank=1, world_size=4, launcher="torchrun"))
