"""The documented kwargs handlers and configurations."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_plugins.ddp import DistributedDataParallelKwargs
from accel_plugins.kwargs import (
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from accel_state.environ import clear_environment, patch_environment
from accel_state.errors import SettingsError
from accel_state.labels import DDPCommunicationHookType, DynamoBackend


@dataclass
class Lamp(KwargsHandler):
    color: str = "white"
    watts: int = 40
    spares: list[int] | None = None


@given(st.sampled_from(["white", "red"]), st.integers(39, 41), st.none() | st.lists(st.integers()))
def test_kwargs_are_exactly_the_differences_from_the_defaults(
    color: str, watts: int, spares: list[int] | None
):
    kwargs = Lamp(color, watts, spares).to_kwargs()
    assert Lamp(**kwargs) == Lamp(color, watts, spares)
    assert all(kwargs[name] != getattr(Lamp(), name) for name in kwargs)


def test_the_copy_of_a_handler_does_not_share_its_containers():
    lamp = Lamp(spares=[1])
    lamp.to_dict()["spares"].append(2)
    assert lamp.spares == [1]


@pytest.mark.parametrize(
    ("handler", "fields"),
    [
        (AutocastKwargs, {"enabled": True, "cache_enabled": None}),
        (
            GradScalerKwargs,
            {
                "init_scale": 65536.0,
                "growth_factor": 2.0,
                "backoff_factor": 0.5,
                "growth_interval": 2000,
                "enabled": True,
            },
        ),
        (
            GradientAccumulationPlugin,
            {
                "num_steps": None,
                "adjust_scheduler": True,
                "sync_with_dataloader": True,
                "sync_each_batch": False,
            },
        ),
        (
            DistributedDataParallelKwargs,
            {
                "dim": 0,
                "broadcast_buffers": True,
                "bucket_cap_mb": 25,
                "find_unused_parameters": False,
                "check_reduction": False,
                "gradient_as_bucket_view": False,
                "static_graph": False,
            },
        ),
        (
            ProfileKwargs,
            {
                "activities": None,
                "schedule_option": None,
                "on_trace_ready": None,
                "record_shapes": False,
                "profile_memory": False,
                "with_stack": False,
                "with_flops": False,
                "with_modules": False,
                "output_trace_dir": None,
            },
        ),
        (InitProcessGroupKwargs, {"backend": "nccl", "init_method": None, "timeout": timedelta(minutes=10)}),
    ],
)
def test_the_documented_fields_and_defaults_are_these_in_this_order(handler: type, fields: dict[str, Any]):
    assert list(handler().to_dict().items()) == list(fields.items())
    assert handler().to_kwargs() == {}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: AutocastKwargs(enabled="false"),
            r"AutocastKwargs\(enabled='false'\): expected True or False",
        ),  # type: ignore[arg-type]
        (lambda: AutocastKwargs(cache_enabled=2), r"cache_enabled=2.*or None"),  # type: ignore[arg-type]
        (lambda: GradScalerKwargs(init_scale=0), "init_scale=0.*above 0"),
        (lambda: GradScalerKwargs(growth_factor=1.0), "growth_factor=1.0.*above 1"),
        (lambda: GradScalerKwargs(backoff_factor=1.5), "backoff_factor=1.5.*between 0 and 1"),
        (lambda: GradScalerKwargs(growth_interval=0), "growth_interval=0.*whole number"),
        (lambda: InitProcessGroupKwargs(timeout=90), "timeout=90.*timedelta"),  # type: ignore[arg-type]
        (lambda: InitProcessGroupKwargs(timeout=timedelta(0)), "timeout=.*positive"),
        (lambda: InitProcessGroupKwargs(backend=1), "backend=1.*text"),  # type: ignore[arg-type]
        (lambda: GradientAccumulationPlugin(num_steps=0), "num_steps=0.*at least 1"),
        (lambda: GradientAccumulationPlugin(num_steps=True), "num_steps=True.*at least 1"),
        (lambda: GradientAccumulationPlugin(sync_each_batch="no"), "sync_each_batch='no'"),  # type: ignore[arg-type]
        (lambda: DataLoaderConfiguration(dispatch_batches="yes"), "dispatch_batches='yes'"),  # type: ignore[arg-type]
        (
            lambda: DataLoaderConfiguration(already_sharded=False, shard_iterable_dataset=False),
            "already_sharded=False\\): expected None or True with shard_iterable_dataset=False",
        ),
        (lambda: DataLoaderConfiguration(data_seed="7"), "data_seed='7'.*integer"),  # type: ignore[arg-type]
        (lambda: ProjectConfiguration(total_limit=0), "total_limit=0"),
        (lambda: ProjectConfiguration(iteration=-1), "iteration=-1"),
        (lambda: ProjectConfiguration(project_dir=3), "project_dir=3.*path"),  # type: ignore[arg-type]
        (
            lambda: ProjectConfiguration(project_dir="nowhere://bucket/a"),
            "project_dir='nowhere://bucket/a'.*scheme 'nowhere'",
        ),
        (lambda: DistributedDataParallelKwargs(bucket_cap_mb=0), "bucket_cap_mb=0"),
        (lambda: DistributedDataParallelKwargs(comm_hook="fp8"), "comm_hook='fp8'.*batched_power_sgd"),  # type: ignore[arg-type]
        (
            lambda: DistributedDataParallelKwargs(comm_wrapper="power_sgd"),
            r"comm_wrapper='power_sgd'.*'bf16'\]",
        ),  # type: ignore[arg-type]
        (lambda: ProfileKwargs(activities="cpu"), "activities='cpu'.*list"),  # type: ignore[arg-type]
        (lambda: ProfileKwargs(activities=["gpu"]).build(), r"activities=\['gpu'\].*'cpu'"),
    ],
)
def test_a_bad_field_is_refused_with_its_name_and_value(make: Any, message: str):
    with pytest.raises(SettingsError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: DistributedDataParallelKwargs(comm_hook="fp16", comm_state_option={"a": 1}),  # type: ignore[arg-type]
            "comm_state_option={'a': 1}) has no effect with comm_hook='fp16'",
        ),
    ],
)
def test_an_option_without_effect_is_named_once(make: Any, message: str, caplog: pytest.LogCaptureFixture):
    make()
    make()
    assert caplog.text.count(message) == 1


def test_a_hook_may_be_named_by_its_text():
    handler = DistributedDataParallelKwargs(
        comm_hook="power_sgd", comm_state_option={"matrix_approximation_rank": 2}
    )  # type: ignore[arg-type]
    assert handler.comm_hook is DDPCommunicationHookType.POWER_SGD
    assert handler.to_kwargs() == {}
    assert handler.to_dict(ignore_keys=())["comm_state_option"] == {"matrix_approximation_rank": 2}


@pytest.mark.parametrize(("backend", "minutes"), [("nccl", 10), ("gloo", 30), (None, 30)])
def test_the_timeout_is_the_backends_own_unless_given(backend: str | None, minutes: int):
    assert InitProcessGroupKwargs(backend=backend).timeout == timedelta(minutes=minutes)


def test_a_timeout_that_was_given_is_passed_on_even_if_it_is_some_default():
    handler = InitProcessGroupKwargs(timeout=timedelta(minutes=10))
    assert handler.to_kwargs() == {"timeout": timedelta(minutes=10)}


def test_logs_go_to_the_project_unless_they_have_a_directory():
    project = ProjectConfiguration("a")
    assert (project.project_dir, project.logging_dir) == ("a", "a")
    project = ProjectConfiguration("a", "b")
    project.set_directories("c")
    assert (project.project_dir, project.logging_dir) == ("c", "b")


def test_the_profiler_follows_its_schedule():
    seen: list[int] = []
    options = {"wait": 1, "warmup": 1, "active": 2, "repeat": 1}
    handler = ProfileKwargs(
        activities=["cpu"],
        schedule_option=options,
        on_trace_ready=lambda profiler: seen.append(profiler.step_num),
        record_shapes=True,
    )
    with handler.build() as profiler:
        for _ in range(6):
            torch.ones(3, 5) @ torch.ones(5, 2)
            profiler.step()
    assert seen == [4]
    assert any(event.input_shapes == [[3, 5], [5, 2]] for event in profiler.events())


def test_compilation_is_off_by_default():
    with clear_environment():
        plugin = TorchDynamoPlugin()
    assert plugin.backend is DynamoBackend.NO
    assert (plugin.mode, plugin.fullgraph, plugin.dynamic) == ("default", False, None)
    assert (plugin.options, plugin.disable, plugin.use_regional_compilation) == (None, False, False)
    assert plugin.to_kwargs() == {}


def test_what_the_plugin_leaves_out_comes_from_the_environment():
    variables = {
        "ACCELERATE_DYNAMO_BACKEND": "inductor",
        "ACCELERATE_DYNAMO_MODE": "max-autotune",
        "ACCELERATE_DYNAMO_USE_FULLGRAPH": "true",
        "ACCELERATE_DYNAMO_USE_DYNAMIC": "0",
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "1",
    }
    with clear_environment(), patch_environment(**variables):
        from_environ = TorchDynamoPlugin()
        given = TorchDynamoPlugin(backend="eager", fullgraph=False)  # type: ignore[arg-type]
    assert from_environ.to_kwargs() == {
        "backend": "inductor",
        "mode": "max-autotune",
        "fullgraph": True,
        "dynamic": False,
    }
    assert from_environ.use_regional_compilation is True
    assert given.to_kwargs() == {"backend": "eager", "mode": "max-autotune", "dynamic": False}


def test_an_unknown_compiler_is_refused_with_the_nearest():
    with pytest.raises(
        SettingsError, match=r"backend='inductr'\): no such compiler; did you mean 'inductor'"
    ):
        TorchDynamoPlugin(backend="inductr")  # type: ignore[arg-type]


def test_the_kwargs_of_the_plugin_are_taken_by_torch():
    plugin = TorchDynamoPlugin(backend="eager", dynamic=True)  # type: ignore[arg-type]
    double = torch.compile(lambda x: 2 * x, **plugin.to_kwargs())
    assert double(torch.tensor(3.0)) == 6.0


@pytest.mark.parametrize(
    ("given", "backend"),
    [
        ("openxla", "openxla"),
        ("AOT_TORCHXLA_TRACE_ONCE", "openxla"),
        ("torchxla_trace_once", "openxla_eval"),
        ("openxla_eval", "openxla_eval"),
    ],
)
def test_the_compilers_of_xla_have_the_names_that_torch_knows(given, backend):
    assert TorchDynamoPlugin(backend=given).to_kwargs() == {"backend": backend}
