"""When a step ends, and which process heeds a notice of preemption."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading

import pytest
import torch

from accel_plugins.kwargs import ProjectConfiguration
from accel_state.errors import SettingsError
from accel_train import Accelerator


@pytest.fixture
def preemptible(tmp_path):
    """An `Accelerator` that saves when it is preempted; signals do afterwards what they did before."""
    before = signal.getsignal(signal.SIGTERM)
    project = ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True, save_on_preemption=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    yield accelerator
    accelerator.end_training()
    assert signal.getsignal(signal.SIGTERM) is before


def prepared(accelerator, *loaders):
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = accelerator.prepare(torch.optim.SGD([weight], lr=0.1))
    loaders = [torch.utils.data.DataLoader(range(size), batch_size=1) for size in loaders]
    return weight, optimizer, *(accelerator.prepare(loader) for loader in loaders)


def step(accelerator, weight, optimizer):
    with accelerator.accumulate():
        accelerator.backward(weight.sum())
        optimizer.step()
        optimizer.zero_grad()


def seen_until_exit(accelerator, items):
    seen = []
    with pytest.raises(SystemExit) as exited:
        seen.extend(items)
    assert exited.value.code == 143
    assert accelerator.has_checkpoint
    return seen


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_step_that_gets_a_notice_is_the_last(preemptible, number):
    weight, optimizer, loader = prepared(preemptible, 5)

    def train():
        for index, batch in enumerate(loader):
            if index == 2:
                signal.raise_signal(number)
            step(preemptible, weight, optimizer)
            yield batch.item()

    assert seen_until_exit(preemptible, train()) == [0, 1, 2]


def test_the_last_step_of_a_loader_ends_with_it(preemptible):
    weight, optimizer, loader = prepared(preemptible, 2)

    def train():
        for batch in loader:
            step(preemptible, weight, optimizer)
            signal.raise_signal(signal.SIGTERM) if batch == 1 else None
            yield batch.item()

    assert seen_until_exit(preemptible, train()) == [0, 1]


def test_a_step_of_several_micro_batches_is_completed(preemptible):
    preemptible.gradient_accumulation_steps = 3
    weight, optimizer, loader = prepared(preemptible, 9)

    def train():
        for index, batch in enumerate(loader):
            if index == 1:
                signal.raise_signal(signal.SIGTERM)
            step(preemptible, weight, optimizer)
            yield batch.item()

    assert seen_until_exit(preemptible, train()) == [0, 1, 2]


def test_an_evaluation_is_not_interrupted(preemptible):
    weight, optimizer, loader, evaluation = prepared(preemptible, 4, 3)

    def train():
        for index, _ in enumerate(loader):
            step(preemptible, weight, optimizer)
            for batch in evaluation:
                if (index, batch) == (1, 1):
                    signal.raise_signal(signal.SIGTERM)
                yield index, batch.item()

    assert seen_until_exit(preemptible, train()) == [(i, j) for i in range(2) for j in range(3)]


def test_a_step_of_two_loaders_ends_when_both_are_read(preemptible):
    weight, optimizer, first, second = prepared(preemptible, 4, 4)

    def train():
        for index, (a, b) in enumerate(zip(first, second, strict=True)):
            if index == 1:
                signal.raise_signal(signal.SIGTERM)
            step(preemptible, weight, optimizer)
            yield a.item(), b.item()

    assert seen_until_exit(preemptible, train()) == [(0, 0), (1, 1)]


def test_batches_from_elsewhere_end_their_steps_by_a_call(preemptible):
    weight, optimizer = prepared(preemptible)

    def train():
        for index in range(5):
            if index == 1:
                signal.raise_signal(signal.SIGUSR1)
            step(preemptible, weight, optimizer)
            yield index
            preemptible.exit_if_preempted()

    assert seen_until_exit(preemptible, train()) == [0, 1]


def test_a_forked_process_ends_by_sigterm_as_ever(preemptible):
    child = os.fork()
    if child == 0:
        signal.raise_signal(signal.SIGTERM)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    preemptible.exit_if_preempted()


def test_data_workers_can_be_ended_where_no_thread_can_wait_for_the_sender(preemptible, monkeypatch):
    monkeypatch.delattr(signal, "sigwaitinfo")  # as on macOS
    data = torch.utils.data.DataLoader(range(4), batch_size=1, num_workers=1)
    iterator = iter(preemptible.prepare(data))
    next(iterator)
    (worker,) = multiprocessing.active_children()
    worker.terminate()
    worker.join()
    assert worker.exitcode is not None


def test_a_second_accelerator_takes_the_signals_over(preemptible, tmp_path):
    project = ProjectConfiguration(tmp_path / "b", automatic_checkpoint_naming=True, save_on_preemption=True)
    second = Accelerator(cpu=True, project_config=project)
    signal.raise_signal(signal.SIGTERM)
    preemptible.exit_if_preempted()
    with pytest.raises(SystemExit):
        second.exit_if_preempted()
    second.end_training()


def test_without_the_option_nothing_is_handled(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    assert signal.getsignal(signal.SIGTERM) is before
    accelerator.exit_if_preempted()


def test_what_cannot_be_saved_or_handled_is_refused(tmp_path):
    with pytest.raises(SettingsError, match="expected automatic_checkpoint_naming=True"):
        ProjectConfiguration(tmp_path, save_on_preemption=True)
    project = ProjectConfiguration(automatic_checkpoint_naming=True, save_on_preemption=True)
    with pytest.raises(SettingsError, match="needs a project_dir"):
        Accelerator(cpu=True, project_config=project)
    project = ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True, save_on_preemption=True)
    errors = []

    def build():
        try:
            Accelerator(cpu=True, project_config=project)
        except SettingsError as error:
            errors.append(str(error))

    thread = threading.Thread(target=build)
    thread.start()
    thread.join()
    assert "only in the main thread" in errors[0]
