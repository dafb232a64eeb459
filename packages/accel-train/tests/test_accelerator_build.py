"""What `Accelerator` is made of: arguments, environment, and what it refuses."""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from datetime import timedelta
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest
import torch

from accel_plugins import registry
from accel_plugins.ddp import DistributedDataParallelKwargs
from accel_plugins.deepspeed.plugin import DeepSpeedPlugin
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.kwargs import (
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from accel_plugins.megatron.plugin import MegatronLMPlugin
from accel_plugins.precision import ShardedGradScaler
from accel_plugins.strategy import Strategy, StrategySpec
from accel_state import lazy as tables
from accel_state.accelerator_state import AcceleratorState
from accel_state.errors import SettingsError
from accel_state.labels import DistributedType, RNGType
from accel_state.settings.model import from_environ
from accel_train import Accelerator
from accel_train.accelerator.build import index_handlers, resolve_accumulation


def test_alone_it_is_the_main_the_local_main_and_the_last_process():
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 1
    assert accelerator.process_index == accelerator.local_process_index == 0
    assert accelerator.is_main_process
    assert accelerator.is_local_main_process
    assert accelerator.is_last_process
    assert not accelerator.use_distributed
    assert not accelerator.multi_device
    assert accelerator.device == torch.device("cpu")
    assert accelerator.distributed_type == DistributedType.NO
    assert accelerator.mixed_precision == "no"


@pytest.mark.parametrize("mixed_precision", [None, "bf16"])
def test_the_environment_is_read_once(monkeypatch, mixed_precision):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    read = []

    def record(frame, event, _):
        if event == "call" and frame.f_code is from_environ.__code__:
            read.append(frame.f_back.f_code.co_qualname)

    sys.setprofile(record)
    try:
        accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision)
    finally:
        sys.setprofile(None)
    assert accelerator.mixed_precision == "bf16"
    assert read == ["Accelerator.__init__"]


def test_a_later_accelerator_keeps_the_precision_of_the_first(monkeypatch):
    Accelerator(cpu=True, mixed_precision="bf16")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert Accelerator().mixed_precision == "bf16"


def test_users_may_attach_attributes():
    accelerator = Accelerator(cpu=True)
    accelerator.my_tokenizer = "a tokenizer"
    assert accelerator.my_tokenizer == "a tokenizer"


def test_a_switch_of_the_environment_that_cannot_be_read_is_named(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "garbage")
    with pytest.raises(SettingsError, match=r"ACCELERATE_USE_MEGATRON_LM.*garbage"):
        Accelerator(cpu=True)
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "false")
    assert Accelerator(cpu=True).state.megatron_lm_plugin is None


def test_two_engines_are_refused_before_anything_starts():
    pytest.importorskip("megatron")
    with pytest.raises(SettingsError, match=r"Megatron and FSDP were both requested.*tp_degree"):
        Accelerator(
            cpu=True, megatron_lm_plugin=MegatronLMPlugin(), fsdp_plugin=FullyShardedDataParallelPlugin()
        )
    assert not AcceleratorState._shared_state


def test_a_plugin_of_the_wrong_kind_is_refused():
    with pytest.raises(
        SettingsError, match=r"fsdp_plugin='all of it'\): expected a FullyShardedDataParallel"
    ):
        Accelerator(cpu=True, fsdp_plugin="all of it")


def test_kwargs_handlers_are_found_by_their_type():
    autocast, ddp = AutocastKwargs(cache_enabled=False), DistributedDataParallelKwargs(bucket_cap_mb=10)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[ddp, autocast])
    assert accelerator.autocast_handler is autocast
    assert accelerator.ddp_handler is ddp
    assert accelerator.scaler_handler is None


def test_a_subclass_of_a_handler_counts_as_its_kind():
    class Mine(GradScalerKwargs):
        pass

    handler = Mine()
    assert index_handlers([handler]) == {GradScalerKwargs: handler}


def test_two_handlers_of_one_kind_are_refused():
    with pytest.raises(SettingsError, match="contains two AutocastKwargs"):
        index_handlers([AutocastKwargs(), AutocastKwargs(enabled=False)])


@pytest.mark.parametrize("handler", [3, GradientAccumulationPlugin(num_steps=2), AutocastKwargs])
def test_what_is_no_kwargs_handler_is_refused(handler):
    with pytest.raises(
        SettingsError, match=r"kwargs_handlers contains .* accepted are one of each of AutocastKwargs"
    ):
        index_handlers([handler])


def test_the_process_group_handler_is_accepted_where_there_is_no_group():
    Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=5))])


def test_accumulation_comes_from_the_argument_then_the_plugin_then_the_environment(monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "5")
    assert Accelerator(cpu=True).gradient_accumulation_steps == 5
    assert Accelerator(cpu=True, gradient_accumulation_steps=2).gradient_accumulation_steps == 2
    for plugin, steps in (
        (GradientAccumulationPlugin(num_steps=3), 3),
        (GradientAccumulationPlugin(sync_each_batch=True), 5),
    ):
        accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
        assert accelerator.gradient_accumulation_steps == steps


@pytest.mark.parametrize(
    ("said", "environment"), [({}, None), ({"gradient_accumulation_steps": 2}, None), ({}, "5")]
)
def test_accumulation_of_a_deepspeed_configuration_wins_with_a_warning(said, environment, caplog):
    variables = {} if environment is None else {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": environment}
    configuration = {"gradient_accumulation_steps": 37, "zero_optimization": {"stage": 2}}
    plugins = {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=configuration)}
    accumulation = resolve_accumulation(
        said.get("gradient_accumulation_steps", 1), None, from_environ(variables), plugins
    )
    assert accumulation.num_steps == 37
    steps = said.get("gradient_accumulation_steps", int(environment or 1))
    (message,) = caplog.messages
    assert (
        f"gradient_accumulation_steps={steps}, and the DeepSpeed configuration 37, which takes effect"
        in message
    )


@pytest.mark.parametrize("configured", [5, "auto"])
def test_accumulation_that_a_deepspeed_configuration_does_not_contradict_is_no_warning(configured, caplog):
    settings = from_environ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "5"})
    configuration = {"gradient_accumulation_steps": configured, "zero_optimization": {"stage": 2}}
    plugins = {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=configuration)}
    assert resolve_accumulation(1, None, settings, plugins).num_steps == 5
    assert not caplog.messages


def test_accumulation_given_twice_is_refused():
    with pytest.raises(SettingsError, match="gradient_accumulation_steps=2"):
        Accelerator(gradient_accumulation_steps=2, gradient_accumulation_plugin=GradientAccumulationPlugin())


def test_the_number_of_accumulation_steps_can_be_changed_to_another_count():
    accelerator = Accelerator(cpu=True)
    accelerator.gradient_accumulation_steps = 4
    assert accelerator.gradient_accumulation_steps == accelerator.gradient_state.num_steps == 4
    with pytest.raises(SettingsError, match="num_steps=0"):
        accelerator.gradient_accumulation_steps = 0


def test_a_compiler_given_twice_is_refused():
    with pytest.raises(SettingsError, match="pass only one of the two"):
        Accelerator(dynamo_backend="eager", dynamo_plugin=TorchDynamoPlugin(backend="eager"))


def test_split_batches_is_that_of_the_loader_configuration():
    assert Accelerator(cpu=True, split_batches=True).dataloader_config.split_batches
    config = DataLoaderConfiguration(split_batches=True)
    assert Accelerator(cpu=True, split_batches=True, dataloader_config=config).split_batches
    with pytest.raises(SettingsError, match="contradict each other"):
        Accelerator(split_batches=False, dataloader_config=config)


def test_the_loader_configuration_is_shown():
    config = DataLoaderConfiguration(
        dispatch_batches=False, even_batches=False, use_seedable_sampler=True, non_blocking=True
    )
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    assert accelerator.dispatch_batches is False
    assert accelerator.even_batches is False
    assert accelerator.use_seedable_sampler is accelerator.non_blocking is True
    assert accelerator.use_stateful_dataloader is accelerator.split_batches is False
    accelerator.even_batches = True
    assert accelerator.dataloader_config.even_batches is True


def test_random_sources_are_checked():
    assert Accelerator(cpu=True).rng_types == ["generator"]
    assert Accelerator(cpu=True, rng_types=["torch", RNGType.CUDA]).rng_types == ["torch", RNGType.CUDA]
    with pytest.raises(SettingsError, match="rng_types contains 'dice'"):
        Accelerator(rng_types=["dice"])


def test_the_project_directory_may_be_given_in_two_ways(tmp_path):
    assert Accelerator(cpu=True, project_dir=tmp_path).project_dir == tmp_path
    config = ProjectConfiguration(logging_dir="logs")
    accelerator = Accelerator(cpu=True, project_dir="runs", project_config=config)
    assert accelerator.project_dir == "runs"
    assert accelerator.logging_dir == "logs"
    assert accelerator.project_configuration is config


def test_an_unknown_precision_is_refused():
    with pytest.raises(SettingsError, match="mixed_precision='half'"):
        Accelerator(cpu=True, mixed_precision="half")


def test_the_environment_says_the_precision_where_the_argument_does_not(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert Accelerator(cpu=True).mixed_precision == "bf16"
    assert Accelerator(cpu=True, mixed_precision="no").mixed_precision == "no"


def test_the_constructor_keeps_the_documented_order_of_arguments():
    parameters = inspect.signature(Accelerator).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]
    assert names == [
        "device_placement",
        "split_batches",
        "mixed_precision",
        "gradient_accumulation_steps",
        "cpu",
        "dataloader_config",
        "deepspeed_plugin",
        "fsdp_plugin",
        "torch_tp_plugin",
        "megatron_lm_plugin",
        "rng_types",
        "log_with",
        "project_dir",
        "project_config",
        "gradient_accumulation_plugin",
        "step_scheduler_with_optimizer",
        "kwargs_handlers",
        "dynamo_backend",
        "dynamo_plugin",
        "deepspeed_plugins",
        "parallelism_config",
    ]
    assert repr(inspect.signature(Accelerator).parameters["split_batches"].default) == "<unset>"


def test_an_installed_strategy_that_applies_trains_the_run(monkeypatch):
    class Mine(Strategy):
        name = "mine"

        def __init__(self, settings, runtime, precision, handlers):
            assert isinstance(precision.scaler, ShardedGradScaler)
            super().__init__(settings, runtime, precision, handlers)

    spec = StrategySpec(name="mine", applies=lambda *_: True, build=Mine, shards_gradients=True)
    monkeypatch.setitem(sys.modules, "my_package", SimpleNamespace(SPEC=spec))
    point = EntryPoint("mine", "my_package:SPEC", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(tables, "entry_points_of", lambda group: [point])
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    assert accelerator._parts.strategy.name == "mine"


def lazy(events):
    """A strategy of a device that executes on request."""

    class Lazy(Strategy):
        name = "lazy"

        def __init__(self, settings, runtime, precision, handlers):
            assert settings.training.strategy == "lazy"
            super().__init__(settings, runtime, precision, handlers)
            self.after_micro_batch = lambda: events.append("micro-batch")
            self.after_step = lambda: events.append("step")

    return StrategySpec(name="lazy", applies=lambda *_: False, build=Lazy)


def test_a_strategy_may_be_given_as_an_object_and_holds_for_later_accelerators():
    spec = lazy([])
    assert Accelerator(cpu=True, strategy=spec)._parts.strategy.name == "lazy"
    assert Accelerator()._parts.strategy.name == "lazy"
    assert Accelerator(strategy="single")._parts.strategy.name == "single"


def test_hooks_after_micro_batches_and_steps_are_called_once_each():
    events: list[str] = []
    accelerator = Accelerator(cpu=True, strategy=lazy(events), gradient_accumulation_steps=3)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = accelerator.prepare(torch.optim.SGD([weight], lr=0.5))
    for _ in range(6):
        with accelerator.accumulate():
            accelerator.backward(weight.sum())
            optimizer.step()
            optimizer.zero_grad()
    assert events == ["micro-batch", "micro-batch", "step"] * 2


def test_the_environment_selects_a_strategy_and_is_named_in_the_message(monkeypatch):
    monkeypatch.setenv("ACCELERATE_STRATEGY", "single")
    assert Accelerator(cpu=True)._parts.strategy.name == "single"
    AcceleratorState._reset_state()
    monkeypatch.setenv("ACCELERATE_STRATEGY", "fsdp3")
    with pytest.raises(SettingsError, match=r"ACCELERATE_STRATEGY='fsdp3'.*did you mean 'fsdp"):
        Accelerator(cpu=True)


def test_a_strategy_that_is_no_name_and_no_record_is_refused():
    with pytest.raises(SettingsError, match=r"strategy=3\): expected a name or a StrategySpec"):
        Accelerator(cpu=True, strategy=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(SettingsError, match=r"strategy='dpp'\): There is no strategy 'dpp'.*'ddp'"):
        Accelerator(cpu=True, strategy="dpp")


def test_a_strategy_of_any_name_says_whether_fully_shard_shards_its_models():
    named = lazy([])
    build = named.build
    assert callable(build)

    def build_sharded(*parts):
        built = build(*parts)
        built.fsdp_version = 2
        return built

    sharded = replace(named, build=build_sharded)
    assert not Accelerator(cpu=True, strategy=named).is_fsdp2
    AcceleratorState._reset_state()
    assert Accelerator(cpu=True, strategy=sharded).is_fsdp2


def test_a_selected_strategy_makes_the_plugin_that_it_needs():
    accelerator = Accelerator(cpu=True, strategy="fsdp2")
    assert accelerator.is_fsdp2
    assert accelerator.state.fsdp_plugin.fsdp_version == 2
    assert accelerator.distributed_type == "FSDP"
    model, optimizer = accelerator.prepare(
        model := torch.nn.Linear(2, 1), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    torch.distributed.destroy_process_group()
