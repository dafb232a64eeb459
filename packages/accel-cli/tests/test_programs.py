"""What programs that embed the command use: parsers, functions that run a namespace, configs as records."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from types import SimpleNamespace

import pytest

from accel_cli import programs
from accel_cli.arguments import FLAGS, read_arguments
from accel_cli.launch import hosts
from accel_cli.programs import (
    attribute_of,
    flag_words,
    launch_command,
    launch_command_parser,
    load_config_from_file,
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_sagemager_args_inputs,
    prepare_simple_launcher_cmd_env,
    prepare_tpu,
)
from accel_state.errors import SettingsError
from accel_state.settings import from_environ

WORDS = {"word": "1", "list": "a=1", "table": '{"a": 1}'}


def value_for(option):
    return option.choices[-1] if option.choices else WORDS[option.kind]


def lines():
    for flag, row in FLAGS.items():
        yield [flag] if row.const is not None else [flag, value_for(row.option)]


@pytest.mark.parametrize("line", [*lines()], ids=lambda line: line[0])
def test_a_flag_means_what_it_means_to_the_command(line):
    try:
        meant = read_arguments([*line, "train.py"]).settings
    except SettingsError:
        pytest.skip("the value is none for this flag")
    args = launch_command_parser().parse_args([*line, "train.py"])
    found = read_arguments([*flag_words(vars(args)), "train.py"]).settings
    assert {path: one.value for path, one in found.items()} == {
        path: one.value for path, one in meant.items()
    }
    assert attribute_of(next(flag for flag in (line[0], *_long(line[0])) if flag.startswith("--"))) in vars(
        args
    )


def _long(flag):
    row = FLAGS[flag]
    return row.option.flags


def test_flags_and_script_are_separated():
    parser = launch_command_parser()
    args = parser.parse_args(["--num-processes", "2", "--cpu", "train.py", "--num_processes", "3", "-x"])
    assert (args.num_processes, args.cpu, args.mixed_precision) == (2, True, None)
    assert (args.training_script, args.training_script_args) == ("train.py", ["--num_processes", "3", "-x"])
    with pytest.raises(SystemExit):
        parser.parse_args(["--num_processes", "some", "train.py"])


def test_the_command_runs_a_script_and_ends_with_its_exit_code(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nprint(os.environ['ACCELERATE_MIXED_PRECISION'])\nsys.exit(int(sys.argv[1]))"
    )
    args = launch_command_parser().parse_args(["--cpu", "--mixed_precision", "bf16", str(script), "0"])
    launch_command(args)
    assert capfd.readouterr().out == "bf16\n"
    args.training_script_args = ["3"]
    with pytest.raises(SystemExit) as ended:
        launch_command(args)
    assert ended.value.code == 3
    with pytest.raises(SettingsError, match=r"none\.py.*does not exist"):
        launch_command(Namespace(cpu=True, training_script=str(tmp_path / "none.py")))


FAKE_SDK = """
import json, os, sys
class HuggingFace:
    def __init__(self, **arguments): self.arguments = arguments
    def fit(self, inputs):
        keys = [os.environ.get(f"AWS_{name}") for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY")]
        open("job.json", "w").write(json.dumps({"line": sys.orig_argv, "keys": keys}))
"""


def test_keys_of_aws_are_in_no_argument_list(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "sagemaker").mkdir()
    (tmp_path / "sagemaker" / "__init__.py").touch()
    (tmp_path / "sagemaker" / "huggingface.py").write_text(FAKE_SDK)
    (tmp_path / "train.py").touch()
    (tmp_path / "c.yaml").write_text(
        "compute_environment: AMAZON_SAGEMAKER\nec2_instance_type: ml.g5.xlarge\niam_role_name: role\n"
    )
    line = ["--config_file=c.yaml", "--aws_access_key_id=open", "--aws_secret_access_key=hidden", "train.py"]
    launch_command(launch_command_parser().parse_args(line))
    job = json.loads((tmp_path / "job.json").read_text())
    assert job["keys"] == ["open", "hidden"]
    assert not [word for word in job["line"] if "open" in word or "hidden" in word]


def test_the_parser_can_be_a_subcommand_of_another_program():
    parser = ArgumentParser("mine")
    launch_command_parser(parser.add_subparsers(required=True))
    assert parser.parse_args(["launch", "--cpu", "train.py"]).func is launch_command


def test_the_parser_imports_no_torch():
    program = "import sys, accel_cli.programs as p; p.launch_command_parser(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


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


def test_deepspeed_is_started_by_its_launcher_or_by_torch(args, tmp_path, monkeypatch):
    monkeypatch.setattr(hosts, "is_installed", lambda name: True)
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
    values = Namespace(cpu=True, num_processes=2, megatron_lm_tp_degree=1, megatron_lm_gradient_clipping=1.0)
    assert not [name for name in prepare_multi_gpu_env(values) if name.startswith("MEGATRON")]
    nodes = Namespace(
        cpu=True, num_processes=4, num_machines=2, main_process_ip="127.0.0.1", main_process_port=29700
    )
    prepare_multi_gpu_env(nodes)
    assert (nodes.nproc_per_node, nodes.nnodes, nodes.rdzv_endpoint) == ("2", "2", "127.0.0.1:29700")


def test_a_config_file_is_a_record_of_its_keys(tmp_path):
    content = {"distributed_type": "FSDP", "mixed_precision": "bf16", "fsdp_config": {"fsdp_version": 2}}
    (tmp_path / "c.json").write_text(json.dumps(content))
    config = load_config_from_file(str(tmp_path / "c.json"))
    assert (config.distributed_type, config.num_machines, config.gpu_ids) == ("FSDP", 1, None)
    assert content.items() <= config.to_dict().items()


def test_no_as_yaml_reads_it_is_no_precision(tmp_path):
    (tmp_path / "c.yaml").write_text("distributed_type: NO\nmixed_precision: no\n")
    config = load_config_from_file(str(tmp_path / "c.yaml"))
    assert (config.mixed_precision, config.distributed_type) == ("no", "NO")


def test_a_config_file_that_does_not_exist_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no config file"):
        load_config_from_file(str(tmp_path / "none.yaml"))
