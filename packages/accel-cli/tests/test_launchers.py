"""Plans for other machines: MPI, DeepSpeed's hostfiles, Slurm, TPU pods, Amazon SageMaker."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from shutil import which
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_cli.arguments import read_arguments
from accel_cli.interview import HostInfo, suggest_answer
from accel_cli.launch import deepspeed_hosts, launchers, sagemaker, xla_workers
from accel_cli.launch.command import explain, make_plan, parse_nodes, probe_host
from accel_cli.launch.hosts import HostDevices
from accel_cli.launch.sagemaker import hyperparameters
from accel_cli.main import main
from accel_state.errors import AccelError, MissingDependencyError, SettingsError
from accel_state.settings import Settings, from_environ, merge_layers, parse_environ, parse_file
from accel_state.settings.model import BY_PATH
from accel_state.settings.run import TpuSettings

EIGHT = HostDevices(gpus=8, cores=64)


def plan(*line, environ=None, file=None, machine=EIGHT, script="train.py"):
    read = read_arguments([*line, script, "--lr", "1"])
    outside = environ or {}
    merged = merge_layers(
        read.settings, parse_environ(outside), parse_nodes(outside), parse_file(file or {}, "run.yaml")
    )
    return make_plan(merged, read.script, read.script_arguments, outside, machine)


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train.py").write_text("")
    return str(tmp_path / "train.py")


def pairs(words):
    """Each word with the one after it, to look for a flag and its value."""
    return list(pairwise(words))


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (
            "mpirun (Open MPI) 4.1.4",
            ["-n", "4", "--hostfile", "hosts", "--map-by", "ppr:2:node", "-x", "ACCELERATE_USE_CPU",
             "-x", "OMP_NUM_THREADS", "-x", "MASTER_ADDR"],
        ),
        (
            "Intel(R) MPI Library for Linux* OS, Version 2021.11",
            ["-n", "4", "-f", "hosts", "-ppn", "2",
             "-genvlist", "ACCELERATE_USE_CPU,OMP_NUM_THREADS,MASTER_ADDR"],
        ),
        (
            "Version: MVAPICH 4.0\nHYDRA build details:",
            ["-n", "4", "-f", "hosts", "-ppn", "2",
             "-genvlist", "ACCELERATE_USE_CPU,OMP_NUM_THREADS,MASTER_ADDR"],
        ),
    ],
)  # fmt: skip
def test_each_kind_of_mpirun_gets_its_own_flags(version, expected, script):
    line = ["--mpirun_hostfile", "hosts", "--num_processes", "4", "--num_machines", "2"]
    made = plan(*line, file={"distributed_type": "MULTI_CPU"}, script=script)
    assert made.row.name == "mpirun"
    assert made.environ.keys() >= {"MASTER_ADDR", "MASTER_PORT"}
    environ = {name: value for name, value in made.environ.items() if name != "MASTER_PORT"}
    made = replace(made, environ={**environ, "MASTER_ADDR": "n1"})
    words = launchers.mpi_arguments(made, is_open=launchers.is_open_mpi(version))
    end = words.index(sys.executable)
    assert words[:end] == expected
    assert words[end:] == [sys.executable, "-m", "accel_cli.launch.worker", "--aloud", script, "--lr", "1"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [([], "ppr:2:node"), (["--num_machines", "1"], "ppr:4:node"), (["--num_processes", "3"], "3 processes")],
)
def test_processes_are_spread_over_the_machines_of_the_hostfile(
    words, expected, tmp_path, script, monkeypatch, capsys
):
    (tmp_path / "mpirun").write_text("#!/bin/sh\necho 'mpirun (Open MPI) 4.1.4'\n")
    (tmp_path / "mpirun").chmod(0o755)
    (tmp_path / "hosts").write_text("n1 slots=2\nn2:1\nn2\n# n3\n")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    line = [
        "--mpirun_hostfile",
        str(tmp_path / "hosts"),
        "--num_processes",
        "4",
        *words,
        "--cpu",
        "--explain",
    ]
    main(["launch", *line, script])
    assert expected in "".join(capsys.readouterr())


def test_an_unknown_mpirun_is_named():
    with pytest.raises(SettingsError, match=r"'something else'.*Open MPI, Intel MPI, MVAPICH, MPICH"):
        launchers.is_open_mpi("something else")


def test_without_mpirun_the_message_names_it(script):
    with pytest.raises(MissingDependencyError, match="mpirun_hostfile requests mpirun"):
        launchers.mpi_words(plan("--mpirun_hostfile", "hosts", "--cpu", script=script, environ={"PATH": ""}))


HOSTS = ["--use_deepspeed", "--deepspeed_hostfile", "hosts", "--num_machines", "2"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ([], [("--launcher", "pdsh")]),
        (["--deepspeed_multinode_launcher", "openmpi"], [("--launcher", "openmpi")]),
        (["--deepspeed_multinode_launcher", "nossh", "--machine_rank", "1"], [("--no_ssh", "--node_rank")]),
        (["--deepspeed_inclusion_filter", "b:0,1"], [("--include", "b:0,1")]),
        (["--deepspeed_exclusion_filter", "a"], [("--exclude", "a")]),
        (["--main_process_ip", "10.0.0.1", "--main_process_port", "1234"],
         [("--master_addr", "10.0.0.1"), ("--master_port", "1234")]),
    ],
)  # fmt: skip
def test_a_hostfile_is_handed_to_deepspeeds_launcher(line, expected):
    made = plan(*HOSTS, *line, "--zero_stage", "3", machine=replace(EIGHT, hosts={"a": 8, "b": 4}))
    assert (made.row.name, made.launch.num_processes) == ("deepspeed", 12)
    words = launchers.deepspeed_words(made)
    assert words[-3:] == ["train.py", "--lr", "1"]
    assert {*expected, ("--hostfile", "hosts")} <= {*pairs(words)}
    assert {"ACCELERATE_USE_DEEPSPEED", "ACCELERATE_DEEPSPEED_ZERO_STAGE"} <= {
        *words[0].removeprefix("--export=").split(",")
    }


def test_the_hostfile_says_how_many_machines_there_are():
    line = ["--use_deepspeed", "--deepspeed_hostfile", "hosts"]
    machine = replace(EIGHT, hosts={"a": 8, "b": 4, "c": 4})
    launch = plan(*line, machine=machine).launch
    assert (launch.num_machines, launch.num_processes) == (3, 16)
    assert plan(*line, machine=replace(EIGHT, hosts={"a": 8})).row.name == "torchrun"
    with pytest.raises(
        SettingsError, match=r"--num_machines is 2, but the hostfile 'hosts' has 3 usable machines"
    ):
        plan(*line, "--num_machines", "2", machine=machine)


def test_the_standard_launcher_is_started_on_each_machine_by_hand():
    line = [
        "--deepspeed_multinode_launcher",
        "standard",
        "--main_process_ip",
        "a",
        "--main_process_port",
        "1",
    ]
    made = plan(*HOSTS, *line, "--num_processes", "16", "--machine_rank", "1")
    assert (made.row.name, made.local_processes) == ("torchrun", 8)


def test_both_filters_at_once_are_refused():
    with pytest.raises(SettingsError, match=r"inclusion_filter.*exclusion_filter.*cannot be used together"):
        plan(*HOSTS, "--deepspeed_inclusion_filter", "a", "--deepspeed_exclusion_filter", "b")


def deepspeed(main):
    """The two modules of DeepSpeed's launcher that matter."""

    class Runner:
        def __init__(self, name, args=None):
            self.name, self.args, self.exports = name, args, {}

        def add_export(self, key, value):
            self.exports[key] = f'"{value}"'

        def get_cmd(self, environment, resources):
            return ["pdsh", *resources], ["pdsh", *resources, "pkill -f ", "python"], environment

    return {
        "deepspeed.launcher.runner": SimpleNamespace(EXPORT_ENVS=["PYTHON"], main=main),
        "deepspeed.launcher.multinode_runner": SimpleNamespace(MultiNodeRunner=Runner, PDSHRunner=Runner),
    }


def test_deepspeeds_launcher_hands_over_the_variables_of_settings_as_they_are():
    seen = []
    modules = deepspeed(seen.append)
    deepspeed_hosts.main(["--export=A,B", "--launcher", "pdsh"], modules.__getitem__)
    runner, runners = modules.values()
    assert (runner.EXPORT_ENVS, seen) == (["PYTHON", "A", "B"], [["--launcher", "pdsh"]])
    made = [
        runners.PDSHRunner(name, SimpleNamespace(user_args=["a b", "%n"])) for name in ("pdsh", "openmpi")
    ]
    for one in made:
        one.add_export("A", "$HOME %n")
        one.add_export("PYTHONPATH", "/a b")
    assert [one.exports["A"] for one in made] == ["'$HOME %%n'", "$HOME %n"]
    assert [one.exports["PYTHONPATH"] for one in made] == ['"/a b"'] * 2
    assert made[0].parse_user_args() == ["'a b'", "%%n"]


def test_a_signal_does_not_end_other_jobs_of_deepspeed():
    modules = deepspeed(print)
    deepspeed_hosts.main(["--export="], modules.__getitem__)
    runner = modules["deepspeed.launcher.multinode_runner"].PDSHRunner("pdsh")
    runner.args = SimpleNamespace(master_addr="n1", master_port=1234)
    command, kill, environ = runner.get_cmd({"A": "1"}, ["n1"])
    assert (command, kill[:3], environ) == (["pdsh", "n1"], ["pdsh", "n1", "pkill -f "], {"A": "1"})
    assert kill[3] == "'[d]eepspeed.launcher.launch .*--master_addr=n1 --master_port=1234 '"


def test_what_deepspeeds_launcher_cannot_do_is_a_sentence():
    def main(words):
        raise RuntimeError("launcher 'pdsh' not installed.")

    with pytest.raises(AccelError, match="DeepSpeed's launcher: launcher 'pdsh' not installed"):
        deepspeed_hosts.main(["--export="], deepspeed(main).__getitem__)


def test_a_signal_ends_deepspeeds_launcher_with_its_exit_code(monkeypatch):
    started = []
    monkeypatch.setattr(deepspeed_hosts, "children", lambda: started)

    def main(words):
        signal.raise_signal(signal.SIGTERM)
        with subprocess.Popen(["sleep", "600"]) as child:
            started.append(child.pid)
            signal.raise_signal(signal.SIGHUP)
            assert child.wait() == -signal.SIGTERM

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        deepspeed_hosts.main(["--export="], deepspeed(main).__getitem__)
    assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


STEP = {
    "SLURM_STEP_ID": "0", "SLURM_NTASKS": "3", "SLURM_PROCID": "2", "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "gpu[07-09]", "SLURM_JOB_ID": "15001", "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
}  # fmt: skip


def test_one_task_per_machine_of_slurm_starts_the_processes_of_its_machine():
    made = plan(environ=STEP)
    launch = made.launch
    assert made.row.name == "torchrun"
    assert (launch.num_processes, launch.num_machines, launch.machine_rank) == (24, 3, 2)
    assert (launch.main_process_ip, launch.main_process_port) == ("gpu07", 15018)  # 15000 + 15001 % 14983


def test_several_tasks_of_slurm_on_a_machine_are_the_processes():
    environ = {**STEP, "SLURM_NTASKS": "24", "SLURM_STEP_TASKS_PER_NODE": "8(x3)"}
    made = plan(environ=environ)
    assert (made.row.name, made.launch.num_processes) == ("simple", 24)
    assert made.environ.items() >= environ.items()


@pytest.mark.parametrize(
    "pod",
    [
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "23456"},
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
         "OMPI_COMM_WORLD_LOCAL_RANK": "0", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "23456"},
    ],
)  # fmt: skip
def test_one_process_per_node_of_a_scheduler_starts_the_processes_of_its_node(pod):
    made = plan(environ=pod)
    launch = made.launch
    assert made.row.name == "torchrun"
    assert (launch.num_processes, launch.num_machines, launch.machine_rank) == (16, 2, 1)
    assert (launch.main_process_ip, launch.main_process_port) == ("10.0.0.1", 23456)
    line = ["--num_machines", "4", "--num_processes", "8", "--machine_rank", "3", "--main_process_ip", "a"]
    chosen = plan(*line, environ=pod).launch
    assert (chosen.num_processes, chosen.num_machines, chosen.machine_rank) == (8, 4, 3)


def test_numbers_of_ranks_without_an_address_are_left_over():
    assert plan(environ={"RANK": "0", "WORLD_SIZE": "2"}).launch.num_processes == 8


def test_a_number_of_processes_that_the_launcher_did_not_start_is_refused():
    ranks = {"RANK": "1", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
    assert plan("--num_processes", "8", environ=ranks).row.name == "simple"
    with pytest.raises(SettingsError, match=r"--num_processes requests 4 .* torchrun .* one of 8"):
        plan("--num_processes", "4", environ=ranks)


def test_secrets_are_neither_shown_nor_arguments(script):
    more = {"environment": {"WANDB_API_KEY": "s3cr3t", "WANDB_PROJECT": "x"}}
    made = plan(file={**CLOUD, "additional_args": more}, script=script)
    told = sagemaker.job_request(made)["estimator"]["environment"]
    assert told["WANDB_API_KEY"] == "s3cr3t"
    assert told["ACCELERATE_USE_SAGEMAKER"] == "true", "merged, not replaced"
    shown = "\n".join(map(str, explain(made, {})))
    assert "WANDB_PROJECT" in shown
    assert "s3cr3t" not in shown
    token = replace(plan(), script_arguments=("--hub_token", "abcdef"))
    shown = "\n".join(map(str, explain(token, {})))
    assert "abcdef" not in shown


def test_outside_srun_slurm_says_nothing():
    assert parse_nodes({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) == {}


POD = {
    "distributed_type": "XLA", "tpu_use_cluster": True, "tpu_name": "pod", "tpu_zone": "us-central1-a",
    "tpu_env": ["A=1 2"], "commands": ["cd repo"], "mixed_precision": "bf16",
    "main_training_function": "train",
}  # fmt: skip


def test_a_pod_runs_the_command_on_every_machine():
    made = plan(file=POD)
    words = launchers.pod_arguments(made, ".variables")
    assert made.row.name == "pod"
    assert words[:6] == ["compute", "tpus", "tpu-vm", "ssh", "pod", "--zone=us-central1-a"]
    assert words[-1] == "--worker=all"
    before, line = words[-2].removeprefix("--command=").split("; ")
    assert before == "cd repo"
    assert shlex.split(line) == [
        "env", "ACCELERATE_MIXED_PRECISION=bf16", "sh", "-c", '. "$0" && rm -f "$0" && exec "$@"',
        "$HOME/.variables", "accel", "launch", "--tpu", "--no_tpu_cluster",
        "--main_training_function", "train", "train.py", "--lr", "1",
    ]  # fmt: skip
    shown = launchers.show_pod(plan(file={**POD, "tpu_env": ["A=1 2", "HF_TOKEN=s3cr3t"]}))
    assert shown.startswith("gcloud compute tpus tpu-vm scp .accel-pod-variables pod:.accel-pod-variables ")
    assert " && gcloud compute tpus tpu-vm ssh pod " in shown
    assert "s3cr3t" not in shown


GCLOUD = """#!/bin/sh
printf '%s\\n' "$@" >> "$HOME/../seen"
if [ "$4" = scp ]; then cp -p "$5" "$HOME/${6#*:}"; exit; fi
for word; do case "$word" in --command=*) exec sh -c "${word#--command=}" ;; esac; done
"""


@pytest.mark.skipif(sys.platform == "win32", reason="the programs are shell scripts")
def test_variables_of_a_pod_stand_in_no_list_of_processes(tmp_path):
    (home := tmp_path / "home").mkdir()
    for name, text in {"gcloud": GCLOUD, "accel": '#!/bin/sh\necho "$HF_TOKEN, $A, $*"\n'}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    file = {**POD, "tpu_env": ["HF_TOKEN=s3cr3t 'value'", "A=1=2"], "commands": ["cd /"]}
    (tmp_path / "run.yaml").write_text(json.dumps(file))
    line = ["launch", "--config_file", str(tmp_path / "run.yaml"), "train.py"]
    program = f"import sys; from accel_cli.main import main; sys.exit(main({line!r}))"
    environ = {**os.environ, "HOME": str(home), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "s3cr3t 'value', 1=2, launch --tpu --no_tpu_cluster --main_training_function train train.py\n"
    )
    seen = (tmp_path / "seen").read_text()
    assert "--command=" in seen
    assert "s3cr3t" not in seen
    assert [*home.iterdir()] == [], "the file is gone once it has been read"


def test_every_machine_of_a_pod_shards_as_the_file_says():
    made = plan(file={**POD, "tpu_env": [], "fsdp_config": {"xla": True, "xla_fsdp_v2": True}})
    _, line = launchers.pod_arguments(made, "v")[-2].removeprefix("--command=").split("; ")
    words = shlex.split(line)
    start = words.index("accel")
    variables = dict(word.split("=", 1) for word in words[1:start])
    remote = plan(*words[start + 2 : -3], environ=variables)
    assert remote.row.name == "xla_spmd"
    assert remote.merged.settings.fsdp == made.merged.settings.fsdp
    assert remote.merged.settings.precision.mixed_precision == "bf16"


def test_a_pod_takes_some_machines_root_and_a_file_of_commands():
    file = {**POD, "tpu_vm": ["vm-1", "vm-2"], "tpu_use_sudo": True}
    words = launchers.pod_arguments(plan(file=file, machine=replace(EIGHT, commands=("ls", "pwd"))), "v")
    assert words[-1] == "--worker=vm-1,vm-2"
    assert words[-2].startswith("--command=ls; pwd; sudo env ")


def test_a_comment_in_the_file_of_commands_leaves_the_command_that_follows(tmp_path):
    file = tmp_path / "commands"
    file.write_text("# once\ncd repo\n\n")
    tpu = TpuSettings(use_cluster=True, command_file=str(file))
    assert probe_host(Settings(tpu=tpu), {}).commands == ("cd repo",)


def test_no_word_of_a_config_file_becomes_an_option_of_gcloud():
    with pytest.raises(SettingsError, match="tpu_name is '--impersonate-service-account=x'"):
        launchers.pod_arguments(plan(file={**POD, "tpu_name": "--impersonate-service-account=x"}), "v")
    evil = {"tpu_zone": "--zone", "tpu_vm": ["--impersonate-service-account=x"], "commands": ["--quiet"]}
    words = launchers.pod_arguments(plan(file={**POD, **evil}), "v")
    assert [word.partition("=")[0] for word in words if word.startswith("-")] == [
        "--zone", "--command", "--worker",
    ]  # fmt: skip


@pytest.mark.skipif(which("gcloud") is None, reason="gcloud is not installed")
def test_gcloud_reads_the_command_line_of_a_pod(tmp_path):
    line = ["gcloud", *launchers.pod_arguments(plan(file=POD), "v")]
    environ = {**os.environ, "CLOUDSDK_CONFIG": str(tmp_path), "CLOUDSDK_CORE_DISABLE_PROMPTS": "1"}
    told = [
        subprocess.run([*line, *more], env=environ, capture_output=True, text=True, check=False)
        for more in ([], ["--no-such-flag"])
    ]
    assert [one.returncode for one in told] == [1, 2], (
        "without an account; and with a flag that it does not know"
    )
    assert "account" in told[0].stderr


def test_a_pod_that_has_no_name_is_refused():
    with pytest.raises(SettingsError, match="needs tpu_name and tpu_zone"):
        plan(file={"distributed_type": "XLA", "tpu_use_cluster": True})


def test_one_tpu_machine_runs_a_function_of_the_script(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("calls = []\ndef main():\n    calls.append(__name__)\n")
    made = plan("--tpu", "--mixed_precision", "bf16", script=str(tmp_path / "train.py"))
    assert (made.row.name, made.environ["XLA_USE_BF16"]) == ("xla", "1")
    other = plan("--tpu", "--downcast_bf16", script=str(tmp_path / "train.py"))
    assert not {"XLA_USE_BF16", "XLA_DOWNCAST_BF16"} & other.environ.keys()
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "train", raising=False)
    started = SimpleNamespace(launch=lambda function: function(0))
    xla_workers.main(["each", "main", made.script, "--lr", "1"], {"torch_xla": started}.__getitem__)
    assert sys.modules.pop("train").calls == ["train"]
    assert sys.argv[1:] == ["--lr", "1"]
    with pytest.raises(SettingsError, match="no function 'train'"):
        xla_workers.main(["one", "train", made.script], {"torch_xla": started}.__getitem__)
    del sys.modules["train"]


def test_one_process_drives_a_tpu_machine_where_the_compiler_shards(tmp_path):
    (tmp_path / "train.py").touch()
    file = {"distributed_type": "XLA", "fsdp_config": {"xla": True, "xla_fsdp_v2": True}}
    made = plan(file=file, script=str(tmp_path / "train.py"))
    assert made.row.name == "xla_spmd"
    assert made.row.explain.startswith("one process drives all chips")
    assert "-m accel_cli.launch.xla_workers one main " in made.row.show(made)


CLOUD = {
    "compute_environment": "AMAZON_SAGEMAKER", "distributed_type": "DATA_PARALLEL", "num_machines": 2,
    "ec2_instance_type": "ml.p3.16xlarge", "iam_role_name": "trainer", "profile": "research",
    "mixed_precision": "fp16", "additional_args": {"volume_size": 100},
}  # fmt: skip


def test_a_job_of_sagemaker_has_the_arguments_of_the_estimator(script, tmp_path):
    inputs, metrics = tmp_path / "inputs.tsv", tmp_path / "metrics.tsv"
    inputs.write_text("channel_name\tdata_location\ntrain\ts3://bucket/train\n")
    metrics.write_text("metric_name\tmetric_regex\nloss\tloss=([0-9.]+)\n")
    file = {**CLOUD, "sagemaker_inputs_file": str(inputs), "sagemaker_metrics_file": str(metrics)}
    made = plan("--aws_access_key_id", "id", "--aws_secret_access_key", "hush", file=file, script=script)
    told = sagemaker.job_request(made)
    assert told["inputs"] == {"train": "s3://bucket/train"}
    estimator = told["estimator"]
    assert from_environ(estimator.pop("environment")).precision.mixed_precision == "fp16"
    assert estimator == {
        "entry_point": "train.py", "source_dir": str(tmp_path), "role": "trainer", "instance_count": 2,
        "instance_type": "ml.p3.16xlarge", "transformers_version": "4.17.0", "pytorch_version": "1.10.2",
        "py_version": "py38", "base_job_name": "accelerate-sagemaker-1", "debugger_hook_config": False,
        "distribution": {"smdistributed": {"dataparallel": {"enabled": True}}},
        "hyperparameters": {"lr": 1}, "metric_definitions": [{"Name": "loss", "Regex": "loss=([0-9.]+)"}],
        "volume_size": 100,
    }  # fmt: skip
    assert "hush" not in made.row.show(made)


def test_a_job_of_sagemaker_is_started_with_what_was_planned(script, monkeypatch):
    seen = []

    class HuggingFace:
        def __init__(self, **arguments):
            seen.append((arguments["role"], os.environ["AWS_SECRET_ACCESS_KEY"], os.environ["AWS_PROFILE"]))

        def fit(self, inputs):
            seen.append(inputs)

    before = dict(os.environ)
    made = plan("--aws_secret_access_key", "hush", file=CLOUD, script=script)
    monkeypatch.setitem(sys.modules, "sagemaker.huggingface", SimpleNamespace(HuggingFace=HuggingFace))
    try:
        assert made.row.run(made) == 0
        monkeypatch.setitem(sys.modules, "sagemaker.huggingface", None)
        with pytest.raises(MissingDependencyError, match=r"accel-cli\[sagemaker\]"):
            made.row.run(made)
    finally:
        os.environ.clear()
        os.environ.update(before)
    assert seen == [("trainer", "hush", "research"), None]


CHECK = """\
import json, sys
from sagemaker.huggingface import HuggingFace
for arguments in json.loads(sys.argv[1]):
    made = HuggingFace(**arguments)
    print(json.dumps([made.instance_count, made.hyperparameters()["lr"], made.training_image_uri()]))
"""


SUGGESTED = {
    name: suggest_answer(BY_PATH[f"sagemaker.{name}"], HostInfo(), lambda _: None)
    for name in ("transformers_version", "pytorch_version", "py_version")
}


@pytest.mark.thorough
@pytest.mark.skipif(find_spec("sagemaker") is None, reason="the SageMaker SDK is not installed")
def test_the_sdk_of_sagemaker_accepts_the_arguments(script):
    role = {"iam_role_name": "arn:aws:iam::123456789012:role/trainer"}
    cases = [("NO", {}), ("DATA_PARALLEL", {}), ("MODEL_PARALLEL", {}), ("NO", SUGGESTED)]
    files = [{**CLOUD, **software, "distributed_type": kind, **role} for kind, software in cases]
    told = json.dumps([sagemaker.estimator_arguments(plan(file=file, script=script)) for file in files])
    environ = {"AWS_DEFAULT_REGION": "us-east-1", "HOME": str(Path(script).parent)}
    done = subprocess.run([sys.executable, "-c", CHECK, told], env=environ, capture_output=True, check=True)
    found = [
        json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"[2, ")
    ]  # it logs, too
    assert len(found) == len(cases)
    for (count, rate, image), (_, software) in zip(found, cases, strict=True):
        assert (count, rate) == (2, "1")
        expected = "2.8.0-transformers4.56.2-gpu-py312" if software else "1.10.2-transformers4.17.0"
        assert f"pytorch-training:{expected}" in image


@pytest.mark.parametrize("words", [["word"], ["--flag"], ["--flag", "--other", "1"]])
def test_what_sagemaker_cannot_pass_to_a_script_is_refused(words):
    with pytest.raises(SettingsError, match="Amazon SageMaker"):
        hyperparameters(words)


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), st.integers() | st.booleans()))
def test_hyperparameters_keep_their_types(values):
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    assert hyperparameters(words) == values


def test_a_job_of_sagemaker_without_a_role_is_refused():
    with pytest.raises(SettingsError, match="needs iam_role_name"):
        plan(file={key: value for key, value in CLOUD.items() if key != "iam_role_name"})


@pytest.mark.parametrize(
    ("start", "job"),
    [
        (deepspeed_hosts.main, ["--export="]),
        (xla_workers.main, ["main", "train.py"]),
    ],
)
def test_a_library_that_is_not_installed_is_named(start, job):
    def load(name):
        raise ImportError(name)

    with pytest.raises(MissingDependencyError, match="install"):
        start(job, load)
