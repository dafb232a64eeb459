from __future__ import annotations

import gc
import threading
import types
from datetime import timedelta

import pytest
import torch

from accel_state import runtime
from accel_state.accelerator_state import (
    AcceleratorState,
    GradientState,
    ThreadLocalSharedDict,
    do_nothing,
    is_initialized,
)
from accel_state.environ import patch_environment
from accel_state.errors import SettingsError
from accel_state.labels import DistributedType
from accel_state.partial_state import PartialState, wait_for_everyone

pytestmark = pytest.mark.usefixtures("fresh")


def test_a_process_alone_is_first_and_last():
    state = PartialState(cpu=True)
    assert (state.num_processes, state.process_index, state.local_process_index) == (1, 0, 0)
    assert state.is_main_process
    assert state.is_local_main_process
    assert state.is_last_process
    assert not state.use_distributed
    assert state.distributed_type == DistributedType.NO
    assert state.backend is None
    assert state.device == torch.device("cpu")


def test_all_instances_are_one():
    first = PartialState(cpu=True)
    first.marker = 1
    assert PartialState().marker == 1
    assert PartialState().__dict__ is PartialState._shared_state


def test_the_printed_form_is_the_documented_one():
    assert repr(PartialState(cpu=True)) == (
        "Distributed environment: DistributedType.NO\nNum processes: 1\nProcess index: 0\n"
        "Local process index: 0\nDevice: cpu\n"
    )


def test_the_runtime_is_there_after_the_state_and_gone_after_the_reset():
    with pytest.raises(runtime.NotStartedError, match="PartialState"):
        runtime.current()
    assert runtime.active.collectives.world_size == 1
    state = PartialState(cpu=True)
    assert runtime.current() is state.runtime
    PartialState._reset_state()
    with pytest.raises(runtime.NotStartedError):
        runtime.current()


def test_an_attribute_asked_for_after_a_reset_says_why_it_is_gone():
    state = PartialState(cpu=True)
    PartialState._reset_state()
    assert not state.initialized
    with pytest.raises(
        AttributeError, match=r"`PartialState` object has no attribute `device`.*_reset_state"
    ):
        _ = state.device


@pytest.mark.parametrize("kind", [PartialState, AcceleratorState, GradientState])
def test_a_state_can_be_shown_after_a_reset(
    kind: type[PartialState | AcceleratorState | GradientState],
) -> None:
    state = kind()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    assert repr(state) == f"{kind.__name__}(reset)"
    assert not PartialState._shared_state


def test_a_misspelt_attribute_does_not_speak_of_a_reset():
    with pytest.raises(
        AttributeError, match=r"'PartialState' object has no attribute 'proces_index'$"
    ) as raised:
        _ = PartialState(cpu=True).proces_index
    assert "reset" not in str(raised.value)


def test_the_environment_chooses_the_cpu_and_debugging():
    with patch_environment(accelerate_use_cpu="yes", accelerate_debug_mode="1"):
        state = PartialState()
    assert state.device.type == "cpu"
    assert state.debug


def test_the_environment_chooses_the_device():
    with patch_environment(accelerate_torch_device="cpu"):
        assert PartialState().device == torch.device("cpu")


def test_an_unknown_argument_is_named_with_those_that_exist():
    with pytest.raises(TypeError, match=r"'timeuot'.*timeout"):
        PartialState(cpu=True, timeuot=timedelta(seconds=3))


def test_a_second_construction_cannot_move_the_process_to_the_cpu():
    PartialState(cpu=True)
    PartialState(cpu=True)
    PartialState()._cpu = False
    with pytest.raises(SettingsError, match="cpu=True"):
        PartialState(cpu=True)


def test_options_that_come_too_late_are_named(caplog):
    PartialState(cpu=True)
    PartialState(backend="mpi")
    assert "backend='mpi'" in caplog.text


def test_a_timeout_in_seconds_is_explained():
    with pytest.raises(TypeError, match=r"timeout=30 .*timedelta"):
        PartialState(cpu=True, timeout=30)


def test_pinning_to_cores_is_done_when_asked_for(monkeypatch):
    pinned: list[int] = []
    monkeypatch.setattr("accel_state.partial_state.set_numa_affinity", pinned.append)
    PartialState(cpu=True)
    assert pinned == []
    PartialState._reset_state()
    with patch_environment(accelerate_cpu_affinity="1"):
        PartialState(cpu=True)
    assert pinned == [0]


def test_rich_tracebacks_are_installed_when_asked_for_and_need_rich(monkeypatch):
    asked: list[object] = []
    module = types.SimpleNamespace(install=lambda *, show_locals: asked.append(show_locals))
    monkeypatch.setattr("accel_state.partial_state.require", lambda name, what: asked.append((name, what)))
    monkeypatch.setattr("accel_state.partial_state.import_module", {"rich.traceback": module}.__getitem__)
    with patch_environment(accelerate_enable_rich="1"):
        PartialState(cpu=True)
    assert asked == [("rich", "ACCELERATE_ENABLE_RICH"), False]


def test_contradicting_launcher_variables_are_refused():
    with patch_environment(rank=2, world_size=2), pytest.raises(SettingsError, match="RANK=2"):
        PartialState(cpu=True)


def test_decorated_functions_run_on_a_process_alone():
    state = PartialState(cpu=True)

    def answer(value: int = 42) -> int:
        return value

    assert state.on_main_process(answer)() == 42
    assert state.on_main_process()(answer)(7) == 7
    assert state.on_local_main_process(answer)() == 42
    assert state.on_local_main_process()(answer)() == 42
    assert state.on_last_process(answer)() == 42
    assert state.on_process(answer, process_index=3)() == 42
    assert state.on_process(process_index=0)(answer)() == 42
    assert state.on_local_process(answer, local_process_index=0)() == 42


def test_a_function_for_no_process_in_particular_is_an_error():
    with pytest.raises(ValueError, match="process_index=0"):
        PartialState(cpu=True).on_process(len)
    with pytest.raises(ValueError, match="local_process_index=0"):
        PartialState(cpu=True).on_local_process(len)


def test_blocks_and_shares_work_for_a_process_alone(capsys):
    state = PartialState(cpu=True)
    with state.main_process_first(), state.local_main_process_first():
        state.print("once", end="!")
    assert capsys.readouterr().out == "once!"
    with state.split_between_processes([1, 2]) as share:
        assert share == [1, 2]
    state.wait_for_everyone()
    wait_for_everyone()
    state.destroy_process_group()
    state.set_device()
    assert state.default_device.type in {"cpu", "cuda", "xpu", "mps"}


def test_the_precision_comes_from_the_argument_before_the_environment():
    with patch_environment(accelerate_mixed_precision="bf16"):
        assert AcceleratorState(cpu=True).mixed_precision == "bf16"
        AcceleratorState._reset_state()
        assert AcceleratorState("no", cpu=True).mixed_precision == "no"


def test_the_accelerator_state_has_what_the_partial_state_has():
    state = AcceleratorState(mixed_precision="no", cpu=True)
    assert is_initialized()
    assert state.device == torch.device("cpu")
    assert state.is_main_process
    assert state.is_local_main_process
    assert state.is_last_process
    assert not state.use_distributed
    assert not state.fork_launched
    assert not state.is_fsdp2
    assert state.deepspeed_plugin is None
    assert state.distributed_type == DistributedType.NO
    with state.main_process_first(), state.local_main_process_first():
        state.wait_for_everyone()
    with state.split_between_processes((1,)) as share:
        assert share == (1,)
    assert repr(state).endswith("Device: cpu\n\nMixed precision type: no\n")


def test_resetting_the_accelerator_state_keeps_the_place_of_the_process_unless_asked():
    AcceleratorState(cpu=True)
    AcceleratorState._reset_state()
    assert not is_initialized()
    assert runtime.current().topology.world_size == 1
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(runtime.NotStartedError):
        runtime.current()


def test_another_precision_is_refused_except_from_an_accelerator():
    AcceleratorState("no", cpu=True)
    with pytest.raises(SettingsError, match=r"'bf16'.*already uses 'no'"):
        AcceleratorState("bf16")
    assert AcceleratorState().mixed_precision == "no"
    AcceleratorState("bf16", _from_accelerator=True)
    assert AcceleratorState().mixed_precision == "bf16"


def test_an_accelerator_without_a_precision_keeps_the_one_in_use():
    AcceleratorState("bf16", cpu=True, _from_accelerator=True)
    assert AcceleratorState(_from_accelerator=True).mixed_precision == "bf16"


def test_an_unknown_precision_lists_those_that_exist():
    with pytest.raises(SettingsError, match=r"'bf32'.*'bf16'"):
        AcceleratorState("bf32", cpu=True)


def test_plugins_are_kept_until_another_is_given():
    class Plugin:
        fsdp_version = 2

    one = Plugin()
    assert AcceleratorState(cpu=True, fsdp_plugin=one).is_fsdp2
    assert AcceleratorState().fsdp_plugin is one
    assert AcceleratorState().distributed_type == DistributedType.FSDP
    assert AcceleratorState(mixed_precision="bf16", _from_accelerator=True).fsdp_plugin is one
    with pytest.raises(SettingsError, match=r"has .* already"):
        AcceleratorState(fsdp_plugin=Plugin())


class EnginePlugin:
    """What the state asks of a DeepSpeed plugin."""

    def __init__(self):
        self.selected, self.mixed_precision = False, "no"

    def select(self, _from_accelerator_state=False):
        self.selected = _from_accelerator_state

    def _unselect(self):
        self.selected = False

    def set_mixed_precision(self, mixed_precision):
        self.mixed_precision = mixed_precision


def test_the_first_of_several_deepspeed_plugins_is_active_until_another_is_selected():
    train, judge = EnginePlugin(), EnginePlugin()
    state = AcceleratorState("bf16", cpu=True, deepspeed_plugin={"train": train, "judge": judge})
    assert state.deepspeed_plugin is train
    assert (train.selected, judge.selected) == (True, False)
    assert (train.mixed_precision, judge.mixed_precision) == ("bf16", "bf16")
    state.select_deepspeed_plugin("judge")
    assert (train.selected, judge.selected) == (False, True)
    assert AcceleratorState().deepspeed_plugin is judge
    again = AcceleratorState(deepspeed_plugin=state.deepspeed_plugins, _from_accelerator=True)
    assert again.deepspeed_plugin is judge, "what was selected stays so for the next Accelerator"
    assert state.get_deepspeed_plugin("train") is train
    with pytest.raises(SettingsError, match=r"'zero3'. This run has: 'train', 'judge'"):
        state.select_deepspeed_plugin("zero3")


def test_the_precision_of_a_run_is_that_of_its_engine():
    plugin = EnginePlugin()
    plugin.set_mixed_precision = lambda mixed_precision: None
    plugin.mixed_precision = "fp16"
    assert AcceleratorState(cpu=True, deepspeed_plugin=plugin).mixed_precision == "fp16"


def test_bf16_on_a_device_that_lacks_it_is_refused(monkeypatch):
    monkeypatch.setattr("accel_state.accelerator_state.is_bf16_available", lambda *_, **__: False)
    with pytest.raises(SettingsError, match="bfloat16"):
        AcceleratorState("bf16", cpu=True)


class Plugin:
    num_steps, adjust_scheduler, sync_with_dataloader = 4, True, False

    def to_kwargs(self):
        return {"num_steps": 4}


class Loader:
    end_of_dataloader = False
    remainder = 3


def test_a_plugin_sets_how_gradients_accumulate_and_none_keeps_it():
    assert GradientState(Plugin()).num_steps == 4
    state = GradientState()
    assert (state.num_steps, state.adjust_scheduler, state.sync_with_dataloader) == (4, True, False)
    assert state.plugin_kwargs == {"num_steps": 4}


def test_the_innermost_loader_is_the_active_one():
    state, outer, inner = GradientState(), Loader(), Loader()
    inner.end_of_dataloader, inner.remainder = True, 5
    assert (state.in_dataloader, state.end_of_dataloader, state.remainder) == (False, False, -1)
    state._add_dataloader(outer)
    state._add_dataloader(inner)
    assert state.active_dataloader is inner
    assert (state.end_of_dataloader, state.remainder) == (True, 5)
    assert state.dataloader_references == [None, outer, inner]
    state._remove_dataloader(outer)
    assert state.active_dataloader is inner
    state._remove_dataloader(inner)
    state._remove_dataloader(inner)
    assert not state.in_dataloader


def test_a_loader_that_is_collected_is_forgotten():
    state, outer, inner = GradientState(), Loader(), Loader()
    state._add_dataloader(outer)
    state._add_dataloader(inner)
    del inner
    gc.collect()
    assert state.active_dataloader is outer
    assert state.dataloader_references == [None, outer]


def test_a_reset_forgets_loaders_and_steps():
    state, loader = GradientState(Plugin()), Loader()
    state._add_dataloader(loader)
    state._set_sync_gradients(False)
    GradientState._reset_state()
    del loader
    fresh = GradientState()
    assert fresh.sync_gradients
    assert (fresh.num_steps, fresh.active_dataloader) == (1, None)


def test_the_printed_gradient_state_is_the_documented_one():
    assert repr(GradientState()) == (
        "Sync Gradients: True\nAt end of current dataloader: False\nExtra samples added: -1\n"
        "Gradient accumulation plugin: {}\n"
    )


@pytest.mark.parametrize("thread_local", [False, True])
def test_a_shared_dict_is_one_for_all_threads_or_one_for_each(thread_local):
    class State:
        shared = ThreadLocalSharedDict(thread_local=thread_local)

    State().shared["here"] = 1
    seen: list[dict[str, int]] = []
    thread = threading.Thread(target=lambda: seen.append(dict(State().shared)))
    thread.start()
    thread.join()
    assert seen == [{} if thread_local else {"here": 1}]
    State().shared = {"new": 2}
    assert State().shared == {"new": 2}


def test_do_nothing_accepts_anything():
    assert do_nothing(1, two=3) is None
