from __future__ import annotations

import re

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from accel_cli.commands.config import find_conflicts, list_commands, summarize
from accel_cli.interview import (
    HostInfo,
    PreviousQuestion,
    interview,
    make_question,
    probe_host,
    suggest_answer,
)
from accel_cli.output import as_text
from accel_state.settings import OPTIONS, Settings, merge_layers, parse_file, to_content
from accel_state.settings.engines import ParallelismSettings
from accel_state.settings.model import value_at

LAPTOP = HostInfo(cores=8)
SERVER = HostInfo(gpus=8, cores=64, bf16=True, address="10.0.0.5")


def answered(found, **answers):
    """Settings from these answers, by path with `__` for the dot, or those suggested; and what was asked."""
    wanted = {path.replace("__", "."): answer for path, answer in answers.items()}
    asked = []

    def ask(question):
        asked.append(question.path)
        answer = wanted.pop(question.path, question.default)
        assert question.find_problem(answer) is None
        assert not question.choices or answer in dict(question.choices)
        return answer

    settings = interview(ask, found)
    assert wanted == {}, "never asked"
    return settings, asked


def test_on_a_laptop_little_is_asked():
    settings, asked = answered(LAPTOP)
    assert asked == [
        "launch.compute_environment", "launch.distributed_type", "process.use_cpu",
        "precision.mixed_precision", "dynamo.backend",
    ]  # fmt: skip
    assert settings.launch.num_processes == 1


def test_who_goes_back_is_asked_again_with_the_earlier_answer():
    asked, first = [], {"launch.distributed_type": "MULTI_GPU", "launch.num_machines": "3"}

    def ask(question):
        asked.append((question.path, question.default))
        if question.path == "launch.num_processes" and ("back", "yes") not in asked:
            asked.append(("back", "yes"))
            raise PreviousQuestion
        return first.pop(question.path, question.default)

    settings = interview(ask, LAPTOP)
    assert asked[:6] == [
        ("launch.compute_environment", "LOCAL_MACHINE"),
        ("launch.distributed_type", "NO"),
        ("launch.num_machines", "1"),
        ("launch.num_processes", "3"),
        ("back", "yes"),
        ("launch.num_machines", "3"),
    ]
    assert settings.launch.num_machines == 3


def test_going_back_forgets_what_only_followed_from_the_answer():
    steps = iter(["MULTI_GPU", "3", PreviousQuestion, PreviousQuestion, "NO"])

    def ask(question):
        if question.path in {"launch.distributed_type", "launch.num_machines", "launch.num_processes"}:
            step = next(steps)
            if step is PreviousQuestion:
                raise PreviousQuestion
            return step
        return question.default

    settings = interview(ask, LAPTOP)
    assert settings.launch.distributed_type == "NO"
    assert settings.launch.num_machines == 1


def test_at_the_first_question_back_asks_it_again():
    asked = []

    def ask(question):
        asked.append(question.path)
        if len(asked) == 1:
            raise PreviousQuestion
        return question.default

    interview(ask, LAPTOP)
    assert asked[0] == asked[1]


def test_on_a_server_its_gpus_are_suggested():
    settings, asked = answered(SERVER)
    assert settings.launch.distributed_type == "MULTI_GPU"
    assert settings.launch.num_processes == 8
    assert settings.precision.mixed_precision == "bf16"
    assert "launch.main_process_ip" not in asked


def test_several_machines_are_asked_where_they_meet():
    settings, _ = answered(SERVER, launch__num_machines="3", launch__machine_rank="1")
    assert (settings.launch.num_processes, settings.launch.main_process_ip) == (24, "10.0.0.5")
    assert settings.launch.main_process_port == 29500


def test_a_slurm_job_is_recognised():
    found = probe_host(
        {"SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": "gpu[3-6]", "CUDA_VISIBLE_DEVICES": ""}
    )
    assert (found.nodes, found.first_node, found.gpus) == (4, "gpu3", 0)


def test_fsdp_is_asked_in_detail():
    settings, asked = answered(SERVER, fsdp="true", fsdp__transformer_cls_names_to_wrap="Block, Layer")
    assert settings.fsdp.fsdp_version == 2
    assert settings.fsdp.transformer_cls_names_to_wrap == ("Block", "Layer")
    assert "fsdp.sharding_strategy" not in asked, "a matter of version 1"
    assert "fsdp.min_num_params" not in asked, "a matter of another policy"
    first, asked = answered(
        SERVER, fsdp="true", fsdp__fsdp_version="1", fsdp__auto_wrap_policy="SIZE_BASED_WRAP"
    )
    assert (first.fsdp.sharding_strategy, first.fsdp.min_num_params) == ("FULL_SHARD", 100_000_000)


def test_deepspeed_is_asked_in_detail_or_takes_a_file():
    settings, asked = answered(
        SERVER, deepspeed="true", deepspeed__zero_stage="3", deepspeed__offload_param_device="nvme",
        deepspeed__offload_param_nvme_path="/nvme", training__gradient_accumulation_steps="4",
    )  # fmt: skip
    assert (settings.deepspeed.zero_stage, settings.deepspeed.offload_param_nvme_path) == (3, "/nvme")
    assert settings.training.gradient_accumulation_steps == 4
    assert "fsdp" not in asked
    settings, asked = answered(SERVER, deepspeed="true", deepspeed__hf_ds_config="ds.json")
    assert settings.deepspeed.hf_ds_config == "ds.json"
    assert "deepspeed.zero_stage" not in asked


def test_machines_of_a_hostfile_are_asked_for():
    settings, _ = answered(
        SERVER, deepspeed="true", launch__num_machines="2", hosts__launcher="pdsh", hosts__hostfile="hosts",
        hosts__inclusion="a@b",
    )  # fmt: skip
    assert (settings.hosts.launcher, settings.hosts.hostfile, settings.hosts.inclusion) == (
        "pdsh",
        "hosts",
        "a@b",
    )


def test_tpu_and_mpi_are_asked_for():
    tpu, _ = answered(
        LAPTOP, launch__distributed_type="XLA", tpu__use_cluster="true", tpu__name="pod", tpu__zone="us",
        tpu__env="A=1, B=2", launch__num_processes="8",
    )  # fmt: skip
    assert (tpu.tpu.name, tpu.tpu.env) == ("pod", ("A=1", "B=2"))
    assert tpu.tpu.main_training_function == "main"
    mpi, _ = answered(
        LAPTOP, launch__distributed_type="MULTI_CPU", launch__num_machines="2", mpi__hostfile="hosts",
        launch__main_process_ip="n1",
    )  # fmt: skip
    assert mpi.mpi.hostfile == "hosts"


@pytest.mark.parametrize(
    ("backend", "field"), [("AO", "pad_inner_dim"), ("TE", "margin"), ("MSAMP", "opt_level")]
)
def test_only_what_the_backend_of_fp8_reads_is_asked_for(backend, field):
    settings, asked = answered(SERVER, precision__mixed_precision="fp8", fp8__backend=backend)
    assert settings.fp8.backend == backend
    fields = {"pad_inner_dim", "margin", "opt_level"}
    assert {one.removeprefix("fp8.") for one in asked if one.startswith("fp8.")} & fields == {field}


def test_megatron_is_asked_with_what_it_reads():
    settings, asked = answered(
        SERVER, launch__distributed_type="MULTI_GPU", megatron="true", megatron__tp_degree="2",
        megatron__sequence_parallelism="true", megatron__num_micro_batches="4",
    )  # fmt: skip
    assert (settings.megatron.tp_degree, settings.megatron.num_micro_batches) == (2, 4)
    assert not {"fsdp", "parallelism", "megatron.use_custom_fsdp"} & {*asked}
    _, asked = answered(SERVER, launch__distributed_type="MULTI_GPU", megatron="true")
    assert "megatron.sequence_parallelism" not in asked


def test_all_precisions_are_offered():
    questions = []
    interview(lambda question: questions.append(question) or question.default, SERVER)
    (precision,) = (one for one in questions if one.path == "precision.mixed_precision")
    assert [choice for choice, _ in precision.choices] == ["no", "fp8", "fp16", "bf16"]


def test_parallelism_is_asked_with_fsdp2():
    settings, _ = answered(
        SERVER, fsdp="true", parallelism="true", parallelism__tp_size="2", parallelism__dp_shard_size="4"
    )
    assert (settings.parallelism.tp_size, settings.parallelism.dp_shard_size) == (2, 4)
    assert find_conflicts(settings, SERVER) == []
    wrong, _ = answered(SERVER, fsdp="true", parallelism="true", parallelism__tp_size="3")
    assert "cannot be divided" in find_conflicts(wrong, SERVER)[0]


def test_axes_that_cannot_be_combined_are_refused_before_a_process_starts():
    for first, second, reason in (("cp", "sp", "context and sequence parallelism cannot be combined"),):
        sizes = {f"{axis}_size": 2 for axis in (first, second)}
        settings = Settings(parallelism=ParallelismSettings(dp_shard_size=2, **sizes))
        (problem,) = find_conflicts(settings, SERVER)
        assert re.search(rf"parallelism_config_{first}_size.* is 2, and .*_{second}_size.* is 2: ", problem)
        assert problem.endswith(f": {reason}; set one of the two to 1.")


def test_sagemaker_is_asked_for():
    settings, asked = answered(LAPTOP, launch__compute_environment="AMAZON_SAGEMAKER")
    assert settings.sagemaker.ec2_instance_type == "ml.g5.2xlarge"
    software = settings.sagemaker
    assert (software.py_version, software.pytorch_version) == ("py312", "2.8.0")  # the newest of the SDK
    assert software.transformers_version == "4.56.2"
    assert "launch.num_processes" not in asked


@given(st.data(), st.sampled_from([LAPTOP, SERVER, HostInfo(gpus=1, cores=4, nodes=2)]))
def test_any_answers_make_a_file_that_is_read_back(data, found):
    """Answers that are offered, or suggested."""

    def ask(question):
        if question.choices:
            return data.draw(st.sampled_from([value for value, _ in question.choices]))
        if question.kind == "yes or no":
            return data.draw(st.sampled_from(["true", "false"]))
        return question.default or "1"

    settings = interview(ask, found)
    again = merge_layers(
        parse_file(yaml.safe_load(yaml.safe_dump(to_content(settings))), "run.yaml")
    ).settings
    assert to_content(again) == to_content(settings)
    find_conflicts(settings, found)
    assert list_commands(settings, None)
    assert as_text(summarize(settings))


def test_every_suggestion_can_be_read():
    settings = Settings()
    for option in OPTIONS:
        if option.question:
            question = make_question(option, SERVER, lambda path: value_at(settings, path))
            assert question.default == "" or question.find_problem(question.default) is None, option.path
            assert suggest_answer(option, LAPTOP, lambda path: value_at(settings, path)) is not None


def test_what_cannot_be_used_is_complained_about():
    by_path = {option.path: option for option in OPTIONS}
    question = make_question(by_path["launch.num_machines"], LAPTOP, lambda path: value_at(Settings(), path))
    assert question.find_problem("zero") == "expected a whole number of at least 1"
    question = make_question(
        by_path["launch.main_process_ip"], LAPTOP, lambda path: value_at(Settings(), path)
    )
    assert question.find_problem("") == "This answer is required."


def test_several_machines_get_a_command_each():
    settings, _ = answered(SERVER, launch__num_machines="2")
    assert list_commands(settings, "run.yaml") == [
        "accel launch --config_file run.yaml --machine_rank 0 train.py",
        "accel launch --config_file run.yaml --machine_rank 1 train.py",
    ]
