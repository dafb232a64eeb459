from __future__ import annotations

import socket
import sys
from argparse import Namespace
from types import SimpleNamespace

import pytest

from accel_cli import programs
from accel_cli.programs import (
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_sagemager_args_inputs,
    prepare_simple_launcher_cmd_env,
    prepare_tpu,
)
from accel_state.errors import SettingsError
from accel_state.settings import from_environ


@pytest.fixture
def args(tmp_path, monkeypatch):
    """Flags as a parser leaves them, most of them not said."""
    monkeypatch.setattr(programs, "read", lambda: {"CUDA_VISIBLE_DEVICES": "", "PATH": "/bin"})
    (tmp_path / "train.py").touch()
    nothing = {"cpu": False, "num_processes": None, "gpu_ids": "", "vm": None, "fsdp_version": None}
    return lambda **said: Namespace(
        **{**nothing, **said}, training_script=str(tmp_path / "train.py"), training_script_args=["--lr", 1]
    )


def test_one_process_gets_its_command_line_and_environment(args):
    line, environ = prepare_simple_launcher_cmd_env(args(cpu=True, mixed_precision="bf16", num_processes=4))
    assert (line[0], line[2:]) == (sys.executable, ["--lr", "1"])
    assert from_environ(environ).precision.mixed_precision == "bf16"
    assert environ["PATH"] == "/bin"


def test_several_processes_get_their_environment(args):
    settings = from_environ(
        prepare_multi_gpu_env(args(use_fsdp=True, fsdp_version=2, fsdp_offload_params=True, num_processes=2))
    )
    assert (settings.fsdp.fsdp_version, settings.fsdp.cpu_offload) == (2, True)


def test_deepspeed_is_started_by_its_launcher_or_by_torch(args, tmp_path):
    line, environ = prepare_deepspeed_cmd_env(args(zero_stage=3, num_processes=2, main_process_port=0))
    assert "accel_cli.launch.elastic" in line
    assert from_environ(environ).deepspeed.zero_stage == 3
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    line, _ = prepare_deepspeed_cmd_env(args(deepspeed_hostfile=str(tmp_path / "hosts"), num_machines=2))
    assert "accel_cli.launch.deepspeed_hosts" in line


def test_a_tpu_gets_its_variables(args):
    assert prepare_tpu(args(mixed_precision="bf16"), {"A": "1"})[1] == {"A": "1", "XLA_USE_BF16": "1"}
    changed, environ = prepare_tpu(
        args(mixed_precision="bf16", downcast_bf16=True, env=["B=2"]), {}, pod=True
    )
    assert environ == {"XLA_DOWNCAST_BF16": "1", "B": "2"}
    assert changed.tpu_use_cluster is False


def test_a_job_of_sagemaker_gets_the_arguments_of_the_estimator(args):
    config = SimpleNamespace(ec2_instance_type="ml.p3", iam_role_name="r", num_machines=2, profile="p")
    estimator, inputs = prepare_sagemager_args_inputs(config, args(mixed_precision="fp16"))
    assert (estimator["instance_type"], estimator["role"], estimator["instance_count"]) == ("ml.p3", "r", 2)
    assert estimator["hyperparameters"] == {"lr": 1}
    assert from_environ(estimator["environment"]).precision.mixed_precision == "fp16"
    assert inputs is None


@pytest.mark.parametrize("prepare", [prepare_simple_launcher_cmd_env, prepare_deepspeed_cmd_env])
def test_without_a_script_there_is_nothing_to_run(prepare):
    with pytest.raises(SettingsError, match="training_script"):
        prepare(Namespace(cpu=True))


def test_several_processes_get_what_torchs_launcher_reads_also_without_a_script():
    flags = Namespace(training_script=None, cpu=True, num_processes=2, main_process_port=0)
    prepare_multi_gpu_env(flags)
    assert (flags.nproc_per_node, flags.master_port) == ("2", str(flags.main_process_port))
    assert 0 < flags.main_process_port < 65536
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        taken = Namespace(cpu=True, num_processes=2, main_process_port=server.getsockname()[1])
        prepare_multi_gpu_env(taken)
        assert taken.main_process_port not in {0, server.getsockname()[1]}
    nodes = Namespace(
        cpu=True, num_processes=4, num_machines=2, main_process_ip="127.0.0.1", main_process_port=29700
    )
    prepare_multi_gpu_env(nodes)
    assert (nodes.nproc_per_node, nodes.nnodes, nodes.rdzv_endpoint) == ("2", "2", "127.0.0.1:29700")
