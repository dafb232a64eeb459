"""`accel config` on a real terminal: every branch of its questions, with real keys."""

from __future__ import annotations

import os
import sys

import pexpect
import pytest
import yaml

from accel_cli.interview import interview, probe_host
from accel_state.settings import OPTIONS, to_content

UP, DOWN, CLEAR, ENTER, ESCAPE = "\x1b[A", "\x1b[B", "\x15", "\r", "\x1b"

BRANCHES = {
    "one process": {"dynamo.backend": "INDUCTOR", "dynamo.mode": "max-autotune", "process.use_cpu": "true"},
    "GPUs of one machine": {
        "launch.distributed_type": "MULTI_GPU",
        "launch.num_processes": "2",
        "launch.gpu_ids": "0,1",
        "process.cpu_affinity": "true",
        "precision.mixed_precision": "bf16",
    },
    "several machines": {
        "launch.distributed_type": "MULTI_GPU",
        "launch.num_machines": "2",
        "launch.num_processes": "16",
        "launch.machine_rank": "1",
        "launch.main_process_ip": "10.0.0.1",
        "launch.main_process_port": "1234",
        "launch.rdzv_backend": "c10d",
    },
    "FSDP2 with parallelism": {
        "launch.distributed_type": "MULTI_GPU",
        "launch.num_processes": "4",
        "fsdp": "true",
        "fsdp.transformer_cls_names_to_wrap": "Block",
        "fsdp.activation_checkpointing": "true",
        "parallelism": "true",
        "parallelism.dp_shard_size": "2",
        "parallelism.cp_size": "2",
        "parallelism.cp_comm_strategy": "alltoall",
        "parallelism.ep_size": "4",
    },
    "FSDP2 with a pipeline": {
        "launch.distributed_type": "MULTI_GPU",
        "launch.num_processes": "4",
        "fsdp": "true",
        "fsdp.transformer_cls_names_to_wrap": "Block",
        "parallelism": "true",
        "parallelism.dp_shard_size": "2",
        "parallelism.pp_size": "2",
        "parallelism.pp_schedule": "GPipe",
        "parallelism.pp_num_microbatches": "8",
    },
    "FSDP1": {
        "launch.distributed_type": "MULTI_GPU",
        "launch.num_processes": "4",
        "fsdp": "true",
        "fsdp.fsdp_version": "1",
        "fsdp.sharding_strategy": "SHARD_GRAD_OP",
        "fsdp.auto_wrap_policy": "SIZE_BASED_WRAP",
        "fsdp.cpu_ram_efficient_loading": "false",
    },
    "DeepSpeed": {
        "launch.distributed_type": "MULTI_GPU",
        "launch.num_machines": "2",
        "launch.num_processes": "16",
        "launch.main_process_ip": "a",
        "deepspeed": "true",
        "deepspeed.zero_stage": "3",
        "deepspeed.offload_optimizer_device": "nvme",
        "deepspeed.offload_optimizer_nvme_path": "/nvme",
        "deepspeed.offload_param_device": "nvme",
        "deepspeed.offload_param_nvme_path": "/other",
        "deepspeed.gradient_clipping": "1.0",
        "hosts.launcher": "openmpi",
        "hosts.hostfile": "hosts",
        "hosts.exclusion": "b:0",
        "parallelism": "true",
        "parallelism.sp_size": "2",
        "parallelism.sp_seq_length": "4096",
    },
    "DeepSpeed with a file": {
        "launch.distributed_type": "MULTI_GPU",
        "launch.num_processes": "2",
        "deepspeed": "true",
        "deepspeed.hf_ds_config": "ds.json",
    },
    "Megatron": {
        "launch.distributed_type": "MULTI_GPU",
        "launch.num_processes": "4",
        "megatron": "true",
        "megatron.tp_degree": "2",
        "megatron.pp_degree": "2",
    },
    "FP8 with transformer-engine": {
        "precision.mixed_precision": "fp8",
        "fp8.backend": "TE",
        "fp8.margin": "2",
    },
    "FP8 with MS-AMP": {
        "precision.mixed_precision": "fp8",
        "fp8.backend": "MSAMP",
        "fp8.opt_level": "O1",
    },
    "FP8 with torchao": {
        "launch.distributed_type": "MULTI_GPU",
        "launch.num_processes": "2",
        "fsdp": "true",
        "precision.mixed_precision": "fp8",
        "fp8.enable_fsdp_float8_all_gather": "true",
        "fp8.backend": "AO",
        "fp8.pad_inner_dim": "false",
    },
    "MPI": {
        "launch.distributed_type": "MULTI_CPU",
        "launch.num_machines": "2",
        "launch.num_processes": "8",
        "launch.main_process_ip": "n1",
        "mpi.hostfile": "hosts",
    },
    "a TPU pod": {
        "launch.distributed_type": "XLA",
        "launch.num_processes": "8",
        "tpu.main_training_function": "train",
        "tpu.use_cluster": "true",
        "tpu.name": "pod",
        "tpu.zone": "us-central1-a",
        "tpu.env": "A=1,B=2",
        "tpu.commands": "cd repo",
    },
    "Amazon SageMaker": {
        "launch.compute_environment": "AMAZON_SAGEMAKER",
        "launch.distributed_type": "DATA_PARALLEL",
        "sagemaker.iam_role_name": "trainer",
        "sagemaker.profile": "research",
    },
}


@pytest.fixture
def environ(tmp_path):
    return {
        **os.environ,
        "HF_HOME": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "",
        "TERM": "xterm",
        "PROMPT_TOOLKIT_NO_CPR": "1",
    }


def start(environ, *line):
    command = [sys.executable, "-m", "accel_cli", "config", *line]
    return pexpect.spawn(
        command[0], command[1:], env=environ, encoding="utf-8", dimensions=(60, 250), timeout=None
    )


def keys(question, answer):
    """What somebody types who wants this answer."""
    if question.kind == "yes or no":
        return "y" if answer == "true" else "n"
    if question.kind == "text":
        return CLEAR + answer + ENTER
    values = [value for value, _ in question.choices]
    steps = values.index(answer) - (values.index(question.default) if question.default in values else 0)
    return (DOWN * steps if steps > 0 else UP * -steps) + ENTER


def test_no_question_is_left_out_of_the_branches(environ):
    asked = set()
    for branch in BRANCHES.values():
        answers = {**branch}

        def ask(question, answers=answers):
            asked.add(question.path)
            return answers.pop(question.path, question.default)

        interview(ask, probe_host(environ))
    questions = {option.path for option in OPTIONS if option.question is not None}
    assert questions - asked == set()


@pytest.mark.parametrize("branch", BRANCHES)
def test_every_branch_is_asked_on_a_terminal_and_written(branch, environ, tmp_path):
    answers, script = {**BRANCHES[branch]}, []

    def ask(question):
        answer = answers.pop(question.path, question.default)
        script.append((question, answer))
        return answer

    settings = interview(ask, probe_host(environ))
    assert answers == {}
    path = tmp_path / "run.yaml"
    terminal = start(environ, "--config_file", str(path))
    for question, answer in script:
        terminal.expect_exact(question.message)
        terminal.send(keys(question, answer))
    terminal.expect_exact("Your answers")
    terminal.expect_exact(f"Write these settings to {path}?")
    terminal.send("y")
    terminal.expect_exact(f"Saved to {path}")
    terminal.expect_exact("accel launch --config_file")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 0
    assert yaml.safe_load(path.read_text()) == to_content(settings)


def test_an_answer_that_cannot_be_used_is_asked_for_again(environ, tmp_path):
    terminal = start(environ)
    terminal.expect_exact("Where will you train?")
    terminal.send(ENTER)
    terminal.expect_exact("Which hardware will you train on?")
    terminal.send(DOWN * 2 + ENTER)
    terminal.expect_exact("Number of nodes (machines)?")
    terminal.send(CLEAR + "none" + ENTER)
    terminal.expect_exact("expected a whole number of at least 1")
    terminal.send(CLEAR + "1" + ENTER)
    terminal.expect_exact("World size: number of processes on all nodes")
    terminal.close()


def test_escape_goes_back_in_every_kind_of_question(environ, tmp_path):
    terminal = start(environ)
    terminal.expect_exact("Where will you train?")
    terminal.send(ESCAPE)  # there is none before it
    terminal.expect_exact("Where will you train?")
    terminal.send(ENTER)
    terminal.expect_exact("Which hardware will you train on?")
    terminal.send(DOWN * 2 + ENTER)
    terminal.expect_exact("Number of nodes (machines)?")
    terminal.send(CLEAR + "2" + ENTER)
    terminal.expect_exact("World size: number of processes on all nodes")
    terminal.send(ESCAPE)
    terminal.expect_exact("Number of nodes (machines)?")
    terminal.send(ESCAPE)
    terminal.expect_exact("Which hardware will you train on?")
    terminal.send(UP * 2 + ENTER)
    terminal.expect_exact("Train on the CPU even if there is an accelerator?")
    terminal.send(ESCAPE)
    terminal.expect_exact("Which hardware will you train on?")
    terminal.send("\x03")
    terminal.expect_exact("Nothing was written.")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 130


def test_giving_up_writes_nothing(environ, tmp_path):
    terminal = start(environ)
    terminal.expect_exact("Where will you train?")
    terminal.send("\x03")
    terminal.expect_exact("Nothing was written.")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 130
    assert list(tmp_path.rglob("*.yaml")) == []
