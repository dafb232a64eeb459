from __future__ import annotations

import sys

import pytest

from accel_cli.launch import command, hosts
from accel_cli.main import main


@pytest.fixture
def explained(monkeypatch, tmp_path, capsys):
    """Run the command in a given environment, where becoming anything is a failure, and give what it says."""

    def become(job):
        raise AssertionError(job)

    def explain(*line, environ=None, file=None):
        outside = {"HF_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", "HOME": "/root", **(environ or {})}
        monkeypatch.setattr(command, "read", lambda: outside)
        (tmp_path / "train.py").touch()
        (tmp_path / "run.yaml").write_text(file or "")
        words = ["--config_file", str(tmp_path / "run.yaml"), "--explain", *line, str(tmp_path / "train.py")]
        assert main(["launch", *words]) == 0
        told = capsys.readouterr()
        assert told.err == ""
        return told.out

    monkeypatch.setattr(command, "become", become)
    return explain


def row(text, setting):
    """The value of a setting, and where it comes from."""
    line = next(line for line in text.splitlines() if line.startswith(f"{setting} "))
    _, value, *origin = line.split(maxsplit=2)
    return value, *origin


def test_every_value_names_the_source_that_won(explained, tmp_path):
    text = explained(
        "--num_processes",
        "2",
        "--main_process_port",
        "0",
        environ={"ACCELERATE_MIXED_PRECISION": "bf16"},
        file="num_processes: 4\nmixed_precision: fp16\ndebug: true\nuse_cpu: true\n",
    )
    assert row(text, "launch.num_processes") == ("2", "argument --num_processes")
    assert row(text, "precision.mixed_precision") == ("bf16", "variable ACCELERATE_MIXED_PRECISION")
    assert row(text, "process.debug") == ("true", f"key debug of {tmp_path / 'run.yaml'}")


def test_the_command_and_what_differs_in_the_environment_are_shown(explained, tmp_path):
    text = explained(
        "--cpu",
        "--num_processes",
        "2",
        "--main_process_port",
        "0",
        environ={"ACCELERATE_DEBUG_MODE": "0", "FSDP_VERSION": "2"},
    )
    assert f"  {sys.executable} -m accel_cli.launch.elastic --nproc_per_node=2" in text
    assert text.count(str(tmp_path / "train.py")) == 1
    differs = text.partition("environment, as far as it differs:")[2].split()
    assert "ACCELERATE_USE_CPU=true" in differs
    assert "unset FSDP_VERSION" in text
    assert "HOME" not in " ".join(differs)


def test_the_number_of_processes_that_nobody_gave_is_reported(explained):
    assert row(explained(), "launch.num_processes") == ("1", "this machine")


def test_what_is_not_used_says_so(explained, monkeypatch):
    monkeypatch.setattr(hosts, "count_nvidia_gpus", lambda: 1)
    text = explained(
        "--multi_gpu", "--num_processes", "1",
        environ={"CUDA_VISIBLE_DEVICES": "0"},
        file="distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\n",
    )  # fmt: skip
    assert "not used: no FSDP" in text
    assert "FSDP_VERSION" not in text


def test_defaults_that_only_workers_get_are_marked(explained):
    text = explained("--use_fsdp", "--cpu")
    assert row(text, "fsdp.cpu_ram_efficient_loading") == ("true", "default of accel launch")
    assert "FSDP_CPU_RAM_EFFICIENT_LOADING=true" in text


def test_keys_are_not_shown(explained):
    text = explained(
        "--aws_access_key_id", "AKIA1", "--aws_secret_access_key", "hush",
        file="compute_environment: AMAZON_SAGEMAKER\nec2_instance_type: m\niam_role_name: r\n",
    )  # fmt: skip
    assert "AKIA1" not in text
    assert "hush" not in text
    assert "AWS_SECRET_ACCESS_KEY=<redacted>" in text


def test_an_older_file_is_noted(explained):
    assert "note: " in explained(file="fp16: true\n")


KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0",
    "PET_MASTER_PORT": "29400",
    "PET_MAX_RESTARTS": "3",
}


def test_torchruns_own_variables_start_a_node_of_several(explained):
    text = explained("--cpu", environ=KUBEFLOW)
    assert row(text, "launch.num_processes") == ("8", "variable PET_NPROC_PER_NODE")
    assert row(text, "launch.num_machines") == ("2", "variable PET_NNODES")
    assert row(text, "launch.machine_rank") == ("1", "variable PET_NODE_RANK")
    words = text.split()
    expected = ["--nnodes=2", "--nproc_per_node=4", "--node_rank=1", "--master_addr=job-node-0-0",
                "--master_port=29400", "--max_restarts=3"]  # fmt: skip
    assert [word for word in expected if word not in words] == []


def test_arguments_win_over_torchruns_variables_and_these_over_a_file(explained):
    text = explained("--cpu", "--max_restarts", "0", "--num_processes", "6", environ=KUBEFLOW)
    assert {"--max_restarts=0", "--nproc_per_node=3"} <= set(text.split())
    text = explained("--cpu", environ=KUBEFLOW, file="num_machines: 1\nnum_processes: 1\nmachine_rank: 0\n")
    assert {"--nnodes=2", "--nproc_per_node=4", "--node_rank=1"} <= set(text.split())


@pytest.mark.parametrize("per_node", ["auto", "cpu", ""])
def test_one_process_per_device_where_torchruns_variable_asks_for_that(explained, per_node):
    text = explained("--cpu", environ={**KUBEFLOW, "PET_NPROC_PER_NODE": per_node})
    assert {"--nnodes=2", "--nproc_per_node=1"} <= set(text.split())


def test_an_elastic_job_of_torchruns_variables_keeps_its_range_of_nodes(explained):
    elastic = {"PET_NNODES": "1:4", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "node-0:29400"}
    words = explained("--cpu", environ=elastic).split()
    assert {"--nnodes=1:4", "--rdzv_backend=c10d", "--rdzv_endpoint=node-0:29400"} <= set(words)


def test_a_variable_of_torchrun_that_is_no_number_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "read", lambda: {"HF_HOME": str(tmp_path), "PET_NNODES": "two"})
    assert main(["launch", "--explain", "train.py"]) == 2
    assert "variable PET_NNODES is 'two'" in capsys.readouterr().err
