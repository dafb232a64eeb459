"""The plan of a launch, and its explanation."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.run import parse_args

from accel_cli.arguments import read_arguments
from accel_cli.launch import command, hosts, launchers
from accel_cli.launch.command import make_plan
from accel_cli.launch.hosts import HostDevices, count_nvidia_gpus
from accel_cli.main import main
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_state.environ import patch_environment
from accel_state.errors import SettingsError
from accel_state.settings import from_environ, merge_layers, parse_environ, parse_file

WORKER = ("--module", "--", "accel_cli.launch.worker")
NO_GPU = HostDevices(gpus=0, cores=8)
FOUR_GPUS = HostDevices(gpus=4, cores=8)


def plan(*line, environ=None, file=None, machine=NO_GPU):
    read = read_arguments([*line, "train.py", "--lr", "1"])
    merged = merge_layers(read.settings, parse_environ(environ or {}), parse_file(file or {}, "run.yaml"))
    return make_plan(merged, read.script, read.script_arguments, environ or {}, machine)


def uses_cpu(made):
    return from_environ(made.environ).process.use_cpu


def torchrun(made, port=29500):
    """The arguments of torchrun as a mapping, and what comes after them."""
    line = launchers.torchrun_arguments(made, port)
    end = line.index("train.py")
    own = [word for word in line[:end] if word not in WORKER]
    return dict(word.removeprefix("--").partition("=")[::2] for word in own), line[end:]


def test_torch_takes_no_word_of_the_script_for_an_option_of_its_own():
    made = replace(plan("--num_processes", "2"), script_arguments=("--signal=KILL", "--", "--r"))
    read = parse_args(launchers.torchrun_arguments(made, 29500))
    assert read.module
    assert (read.training_script, read.training_script_args) == (
        "accel_cli.launch.worker",
        ["train.py", "--signal=KILL", "--", "--r"],
    )


@pytest.mark.parametrize(
    ("line", "machine", "processes", "runner"),
    [
        ([], NO_GPU, 1, "simple"),
        ([], FOUR_GPUS, 4, "torchrun"),
        (["--cpu"], FOUR_GPUS, 1, "simple"),
        (["--num_processes", "2"], FOUR_GPUS, 2, "torchrun"),
        (["--num_processes", "1"], FOUR_GPUS, 1, "simple"),
        (["--cpu", "--num_processes", "3"], NO_GPU, 3, "torchrun"),
        (["--multi_gpu"], FOUR_GPUS, 4, "torchrun"),
        (["--gpu_ids", "1,3"], FOUR_GPUS, 2, "torchrun"),
        (["--gpu_ids", "all"], FOUR_GPUS, 4, "torchrun"),
        (["--max_restarts", "2"], NO_GPU, 1, "torchrun"),
        (["--log_dir", "logs"], NO_GPU, 1, "torchrun"),
    ],
)
def test_one_process_per_device_unless_somebody_says_otherwise(line, machine, processes, runner):
    made = plan(*line, machine=machine)
    assert (made.launch.num_processes, made.row.name) == (processes, runner)


def test_the_settings_reach_the_worker_and_stale_ones_do_not():
    made = plan(
        "--mixed_precision", "no", "--debug", environ={"ACCELERATE_MIXED_PRECISION": "bf16", "HOME": "/root"}
    )
    assert made.environ == {"ACCELERATE_DEBUG_MODE": "true", "HOME": "/root"}


def test_argument_beats_environment_beats_file():
    file = {"mixed_precision": "fp16", "debug": True, "gradient_accumulation_steps": 2}
    environ = {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3"}
    made = plan("--gradient_accumulation_steps", "4", environ=environ, file=file)
    settings = from_environ(made.environ)
    assert settings.process.debug
    assert settings.precision.mixed_precision == "bf16"
    assert settings.training.gradient_accumulation_steps == 4


@pytest.mark.parametrize(
    ("line", "file", "expected"),
    [
        ([], {"distributed_type": "MULTI_CPU", "num_processes": 2}, True),
        ([], {"distributed_type": "MULTI_GPU"}, False),
        (["--cpu"], {"distributed_type": "MULTI_GPU"}, True),
        (["--multi_gpu"], {"use_cpu": True}, False),
        (["--no_cpu"], {"distributed_type": "MULTI_CPU"}, False),
        (["--no_cpu"], {"use_cpu": True}, False),
    ],
)
def test_of_two_that_disagree_about_the_cpu_the_stronger_decides(line, file, expected):
    assert uses_cpu(plan(*line, file=file, machine=FOUR_GPUS)) is expected


def test_an_argument_overrules_the_number_of_processes_of_a_file():
    """A flag of the command line wins over the config file: #3203."""
    made = plan("--num_processes", "2", file={"num_processes": 1, "distributed_type": "NO"})
    assert made.launch.num_processes == 2
    assert plan(file={"distributed_type": "NO"}, machine=FOUR_GPUS).launch.num_processes == 1


@pytest.mark.parametrize(
    ("line", "file", "parts"),
    [
        (["--cpu", "--multi_gpu"], {}, ["argument --cpu", "argument --multi_gpu"]),
        (
            [],
            {"use_cpu": True, "distributed_type": "MULTI_GPU"},
            ["key use_cpu of run.yaml", "distributed_type"],
        ),
        ([], {"distributed_type": "NO", "num_processes": 2}, ["key num_processes of run.yaml", "2", "'NO'"]),
        (["--multi_gpu"], {}, ["--multi_gpu", "none", "--cpu"]),
        ([], {"distributed_type": "MULTI_NPU"}, ["key distributed_type of run.yaml", "--num_processes"]),
        (["--num_processes", "3", "--num_machines", "2"], {}, ["3 processes", "2 machines"]),
        (["--num_processes", "4", "--num_machines", "2"], {}, ["--main_process_ip"]),
        (["--num_processes", "1", "--machine_rank", "1"], {}, ["machine rank 1", "start at 0"]),
        (["--num_processes", "3", "--gpu_ids", "0,1"], {}, ["3 processes", "'0,1'"]),
    ],
)
def test_settings_that_contradict_each_other_name_both(line, file, parts):
    with pytest.raises(SettingsError) as caught:
        plan(*line, file=file)
    assert [part for part in parts if part not in str(caught.value)] == []


@given(st.integers(1, 64), st.integers(1, 8))
def test_processes_are_spread_evenly_over_nodes_or_refused(processes, machines):
    line = ["--cpu", "--num_processes", str(processes), "--num_machines", str(machines),
            "--main_process_ip", "10.0.0.1", "--main_process_port", "29500"]  # fmt: skip
    if processes % machines:
        with pytest.raises(SettingsError, match="cannot be divided by"):
            plan(*line)
    else:
        made = plan(*line)
        assert made.local_processes * made.launch.num_machines == processes


@given(st.integers(2, 32), st.integers(1, 64))
def test_several_processes_share_the_cores(processes, cores):
    machine = HostDevices(gpus=0, cores=cores)
    threads = int(
        plan("--cpu", "--num_processes", str(processes), machine=machine).environ["OMP_NUM_THREADS"]
    )
    assert threads == 1 or 1 < threads * processes <= cores


def test_one_process_keeps_all_threads_and_the_users_own_number_is_kept():
    assert "OMP_NUM_THREADS" not in plan().environ
    assert plan("--num_processes", "2", environ={"OMP_NUM_THREADS": "5"}).environ["OMP_NUM_THREADS"] == "5"
    assert plan("--num_cpu_threads_per_process", "3").environ["OMP_NUM_THREADS"] == "3"


def test_nccl_gets_its_variables_for_cards_that_cannot_reach_each_others_memory():
    names = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE")
    machine = replace(
        FOUR_GPUS, peer_variables=lambda known: {name: "1" for name in names if name not in known}
    )
    environ = {"NCCL_IB_DISABLE": "0"}
    assert [plan(machine=machine, environ=environ).environ[name] for name in names] == ["1", "0"]
    for line in (["--cpu", "--num_processes", "2"], ["--num_processes", "1"]):
        assert names[0] not in plan(*line, machine=machine).environ


def test_a_container_has_the_gpus_of_its_device_files(tmp_path):
    for index in range(8):
        (tmp_path / f"proc/driver/nvidia/gpus/0000:0{index}:00.0").mkdir(parents=True)
    (tmp_path / "dev").mkdir()
    for name in ("nvidia1", "nvidia6", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert count_nvidia_gpus(tmp_path) == 2


def test_chosen_devices_are_the_only_visible_ones():
    assert plan("--gpu_ids", "1, 3", machine=FOUR_GPUS).environ["CUDA_VISIBLE_DEVICES"] == "1,3"
    made = plan(file={"gpu_ids": "0", "distributed_type": "MULTI_NPU", "num_processes": 1})
    assert made.environ["ASCEND_RT_VISIBLE_DEVICES"] == "0"
    assert "CUDA_VISIBLE_DEVICES" not in plan("--gpu_ids", "all", machine=FOUR_GPUS).environ


TWO_NPUS = HostDevices(gpus=2, cores=8, kind="MULTI_NPU", visible_devices="ASCEND_RT_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    ("line", "file", "processes", "visible"),
    [
        ([], {}, 2, None),
        (["--multi_gpu"], {}, 2, None),
        ([], {"distributed_type": "MULTI_NPU"}, 2, None),
        (["--gpu_ids", "1"], {}, 1, "1"),
        (["--gpu_ids", "0,1"], {"distributed_type": "FSDP"}, 2, "0,1"),
        (["--multi_gpu", "--gpu_ids", "0,1"], {}, 2, "0,1"),
        (["--cpu"], {}, 1, None),
    ],
)
def test_devices_of_another_kind_are_launched_as_gpus_are(line, file, processes, visible):
    made = plan(*line, file=file, machine=TWO_NPUS)
    assert made.launch.num_processes == processes
    assert made.environ.get("ASCEND_RT_VISIBLE_DEVICES") == visible
    assert "CUDA_VISIBLE_DEVICES" not in made.environ


def test_one_process_is_the_same_interpreter_with_the_script():
    assert launchers.simple_words(plan()) == [sys.executable, "train.py", "--lr", "1"]
    assert launchers.simple_words(plan("-m")) == [sys.executable, "-m", "train.py", "--lr", "1"]


def test_a_program_is_looked_up_on_the_path_of_the_worker(tmp_path):
    program = tmp_path / "train.py"
    environ = {"PATH": str(tmp_path)}
    with pytest.raises(SettingsError, match=r"'train\.py'"):
        launchers.simple_words(plan("--no_python", environ=environ))
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert launchers.simple_words(plan("--no_python", environ=environ)) == [str(program), "--lr", "1"]


def test_one_process_gets_the_rendezvous_of_the_arguments():
    environ = plan("--main_process_port", "29400", "--main_process_ip", "10.0.0.1").environ
    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("10.0.0.1", "29400")


def test_torchrun_gets_processes_nodes_and_the_rendezvous():
    line = ["--num_processes", "4", "--num_machines", "2", "--machine_rank", "1", "--main_process_ip",
            "10.0.0.1", "--main_process_port", "29400"]  # fmt: skip
    options, rest = torchrun(plan(*line), 29400)
    assert options == {"nproc_per_node": "2", "nnodes": "2", "node_rank": "1", "master_addr": "10.0.0.1",
                       "master_port": "29400"}  # fmt: skip
    assert rest == ["train.py", "--lr", "1"]


def test_what_only_torchrun_knows_is_passed_on():
    line = ["--num_processes", "2", "--max_restarts", "3", "--monitor_interval", "2.5", "-t", "3",
            "--log_dir", "logs", "--role", "trainer", "--rdzv_conf", "timeout=9", "-m"]  # fmt: skip
    options, _ = torchrun(plan(*line))
    assert options.items() >= {
        ("max_restarts", "3"), ("monitor_interval", "2.5"), ("tee", "3"), ("log_dir", "logs"),
        ("role", "trainer"), ("rdzv_conf", "timeout=9"),
    }  # fmt: skip


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_machine_hosts_the_c10d_rendezvous(rank):
    line = ["--num_processes", "2", "--num_machines", "2", "--machine_rank", str(rank),
            "--rdzv_backend", "c10d", "--main_process_ip", "10.0.0.1",
            "--main_process_port", "29400"]  # fmt: skip
    options, _ = torchrun(plan(*line, "--rdzv_conf", "timeout=9"), 29400)
    assert options["rdzv_endpoint"] == "10.0.0.1:29400"
    assert options["rdzv_conf"] == f"timeout=9,is_host={1 - rank}"
    options, _ = torchrun(plan(*line, "--rdzv_conf", "is_host=true"), 29400)
    assert options["rdzv_conf"] == "is_host=true"


def test_machines_may_come_and_go_down_to_a_number():
    line = ["--num_processes", "8", "--num_machines", "4", "--min_machines", "2", "--rdzv_backend", "c10d",
            "--main_process_ip", "10.0.0.1", "--main_process_port", "29400"]  # fmt: skip
    options, _ = torchrun(plan(*line))
    assert (options["nnodes"], options["nproc_per_node"]) == ("2:4", "2")


def test_every_machine_knows_the_address_under_which_the_others_reach_it():
    line = ["--num_processes", "2", "--num_machines", "2", "--rdzv_backend", "c10d",
            "--main_process_ip", "127.0.0.1", "--main_process_port", "29400"]  # fmt: skip
    made = plan(*line, "--machine_rank", "1")
    assert launchers.local_address(made.launch) == "127.0.0.1", "the endpoint is this machine"
    assert launchers.local_address(replace(made.launch, machine_rank=0, main_process_ip="gpu1")) == "gpu1"
    assert launchers.local_address(replace(made.launch, main_process_ip="no.such.host.invalid")) is None
    assert "--local_addr=10.0.0.7" in launchers.torchrun_arguments(made, 29400, "10.0.0.7")
    assert not any("local_addr" in argument for argument in launchers.torchrun_arguments(made, 29400))


def test_machines_without_a_rank_find_out_which_of_them_is_the_host():
    line = ["--num_processes", "2", "--num_machines", "2", "--rdzv_backend", "c10d"]
    for endpoint, local, is_host in (("127.0.0.1", "127.0.0.1", 1), ("127.0.0.1", "10.0.0.7", 0)):
        made = plan(*line, "--main_process_ip", endpoint)
        arguments = launchers.torchrun_arguments(made, 29400, local)
        assert f"--rdzv_conf=is_host={is_host}" in arguments
        assert f"--local_addr={local}" in arguments


def test_several_machines_agree_on_a_port_that_nobody_chose():
    made = plan("--num_processes", "2", "--num_machines", "2", "--main_process_ip", "10.0.0.1")
    assert launchers.choose_port(made.launch) == 29500


def test_a_script_that_is_not_there_starts_nothing():
    for line in ([], ["--num_processes", "2"]):
        made = plan(*line)
        with pytest.raises(SettingsError, match=r"'train\.py'"):
            made.row.run(made)


def requested_port(asked, free, **kwargs):
    launch = replace(plan("--num_processes", "2").launch, main_process_port=asked, **kwargs)
    return launchers.requested_port(launch, is_in_use=lambda port: not free)


def test_a_port_that_was_asked_for_must_be_free_on_the_first_machine():
    assert requested_port(29400, free=True) == 29400
    assert requested_port(29400, free=False, num_machines=2, machine_rank=1) == 29400
    with pytest.raises(SettingsError, match=r"29400.*used.*omit it"):
        requested_port(29400, free=False)


@pytest.mark.parametrize("line", [[], ["--main_process_port", "0"], ["--rdzv_backend", "c10d"]])
def test_without_a_wish_the_port_is_chosen_as_it_is_bound(line):
    made = plan("--num_processes", "2", *line)
    assert launchers.requested_port(made.launch) is None
    options, _ = torchrun(made, None)
    assert options["rdzv_backend"] == "c10d"
    assert options["rdzv_endpoint"] == "127.0.0.1:0"
    assert (options["local_addr"], options["rdzv_conf"]) == ("127.0.0.1", "is_host=1")


def test_launchers_that_choose_no_port_get_one_that_is_free():
    launch = plan("--num_processes", "2").launch
    assert launchers.choose_port(launch) not in {0, 29500}
    assert launchers.choose_port(replace(launch, main_process_port=29400)) == 29400


@pytest.mark.parametrize(
    ("line", "machine", "said"),
    [
        (["--multi_gpu", "--num_processes", "8"], NO_GPU, ["--multi_gpu", "none", "--cpu"]),
        (["--multi_gpu", "--num_processes", "1"], NO_GPU, ["--multi_gpu", "none"]),
        (["--gpu_ids", "0,1"], NO_GPU, ["--gpu_ids", "none", "--cpu"]),
        (["--gpu_ids", "0,4,7"], FOUR_GPUS, ["--gpu_ids", "GPU 4, 7", "has 4"]),
        (["--num_processes", "5"], FOUR_GPUS, ["--num_processes requests 5", "4 GPUs", "--cpu"]),
        (["--multi_gpu", "--num_processes", "5"], FOUR_GPUS, ["--num_processes requests 5", "4 GPUs"]),
        (["--num_processes", "3"], HostDevices(gpus=2, cores=8, installed=8), ["3 processes", "2 GPUs"]),
    ],
)
def test_devices_that_were_asked_for_and_are_absent_are_an_error(line, machine, said):
    with pytest.raises(SettingsError) as raised:
        plan(*line, machine=machine)
    assert all(word in str(raised.value) for word in said)
    assert plan(*line, "--cpu", machine=machine) if "--multi_gpu" not in line else True


@pytest.mark.parametrize(
    ("line", "environ"),
    [
        (["--num_processes", "8"], {}),
        (["--cpu", "--num_processes", "8"], {}),
        (["--gpu_ids", "0,7"], {"CUDA_VISIBLE_DEVICES": "1,2"}),
        (["--gpu_ids", "GPU-5ef1,MIG-07"], {}),
    ],
)
def test_what_may_be_there_is_no_error(line, environ):
    machine = HostDevices(gpus=2, cores=8, installed=8) if "--gpu_ids" in line else NO_GPU
    assert plan(*line, machine=machine, environ=environ).launch.num_processes in {2, 8}


@pytest.mark.parametrize("version", ["1", "2"])
@pytest.mark.parametrize("policy", ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"])
def test_the_launcher_hands_over_nothing_that_the_plugin_warns_of(version, policy, caplog):
    line = ["--use_fsdp", "--fsdp_version", version, "--fsdp_auto_wrap_policy", policy]
    with patch_environment(**plan(*line, "--num_processes", "2").environ):
        plugin = FullyShardedDataParallelPlugin()
    assert caplog.messages == []
    assert plugin.min_num_params == (100_000_000 if policy == "SIZE_BASED_WRAP" else 0)


def test_quiet_reaches_the_launcher_of_the_workers(tmp_path, monkeypatch):
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    loud, quiet = (
        launchers.torchrun_words(plan("--num_processes", "2", *line)) for line in ([], ["--quiet"])
    )
    assert (loud[0].startswith("--nproc"), quiet[0]) == (True, "--quiet")


def test_as_accelerate_puts_the_alias_first_on_the_path_of_workers():
    machine = replace(NO_GPU, alias="/compat/startup")
    for made in (
        plan("--as_accelerate", environ={"PYTHONPATH": "/mine:/compat/startup"}, machine=machine),
        plan(file={"as_accelerate": True}, environ={"PYTHONPATH": "/mine"}, machine=machine),
        plan(environ={"ACCELERATE_AS_ACCELERATE": "yes", "PYTHONPATH": "/mine"}, machine=machine),
    ):
        assert made.environ["PYTHONPATH"] == "/compat/startup:/mine"
        assert from_environ(made.environ).process.as_accelerate
    assert "PYTHONPATH" not in plan(machine=machine).environ
    with pytest.raises(SettingsError, match=r"--as_accelerate requests accel-compat, which is not installed"):
        plan("--as_accelerate")


def test_modules_that_fsdp_ignores_come_from_a_config_file_as_in_accelerate():
    file = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_ignored_modules": "head.*"}}
    made = plan("--cpu", "--num_processes", "2", file=file)
    with patch_environment(**made.environ):
        assert FullyShardedDataParallelPlugin().ignored_modules == "head.*"


@pytest.fixture
def explained(monkeypatch, tmp_path, capsys):
    """Run the command in a given environment, where becoming anything is a failure, and give what it says."""

    def become(words, environ):
        raise AssertionError(words)

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

    monkeypatch.setattr(launchers, "become", become)
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
    differs = text.partition("environment changes:")[2].split()
    assert "ACCELERATE_USE_CPU=true" in differs
    assert "unset FSDP_VERSION" in text
    assert "HOME" not in " ".join(differs)


@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard", "tp", "cp", "sp", "pp", "ep"])
def test_the_size_of_an_axis_is_explained_and_handed_over(explained, axis):
    flag = f"--parallelism_config_{axis}_size"
    beside = ["--parallelism_config_dp_shard_size", "2"] if axis == "ep" else []
    text = explained("--cpu", "--num_processes", "2", "--use_parallelism_config", *beside, flag, "2")
    assert row(text, f"parallelism.{axis}_size") == ("2", f"argument {flag}")
    assert f"PARALLELISM_CONFIG_{axis.upper()}_SIZE=2" in text


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
