"""Python API of the command: parsers, functions that run a namespace, config files as records.

With `subparsers`, a parser is added as a subcommand to another parser. A function takes the namespace of its
parser; missing attributes have their defaults. For `launch` the attributes are each flag, spelled without
dashes, `training_script` and `training_script_args`; attributes that are `None`, false or empty count as not
set.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, Self

from accel_cli.arguments import FLAGS, HELP, USAGE, read_arguments
from accel_cli.commands.config import to_fsdp2
from accel_cli.config_file import read_config, write
from accel_cli.launch import launchers, sagemaker
from accel_cli.launch.command import make_plan, plan_launch, probe_host
from accel_cli.launch.launchers import LAUNCHERS, xla_formats
from accel_cli.launch.plan import LaunchPlan
from accel_cli.main import Subcommand, find_command
from accel_state.environ import read
from accel_state.errors import SettingsError
from accel_state.labels import ComputeEnvironment, DistributedType, SageMakerDistributedType
from accel_state.settings import OPTIONS, Option, SourcedValue, merge_sources, parse_environ
from accel_state.settings.file import DEFAULT_PATH_HELP, FILE_NAMES, default_config_folder, parse_file
from accel_state.settings.file import default_config_file as _find_config_file
from accel_state.settings.model import as_text
from accel_state.topology import DEFAULT_PORT, free_port, is_port_in_use

_environ = read()

cache_dir = str(default_config_folder(_environ))
"""The folder of the default config file."""

default_yaml_config_file, default_json_config_file = (str(Path(cache_dir) / name) for name in FILE_NAMES)
"""The paths of the default config file in both formats."""

default_config_file = str(_find_config_file(_environ) or default_yaml_config_file)
"""The existing default config file, else the path at which it is created."""


@dataclass
class BaseConfig:
    """The keys of every config file."""

    compute_environment: ComputeEnvironment | str
    distributed_type: DistributedType | SageMakerDistributedType | str
    mixed_precision: str
    use_cpu: bool
    debug: bool

    def __post_init__(self) -> None:
        self.compute_environment = ComputeEnvironment(self.compute_environment)
        is_local = self.compute_environment == ComputeEnvironment.LOCAL_MACHINE
        known = DistributedType if is_local else SageMakerDistributedType
        self.distributed_type = known(self.distributed_type)
        parse_file(self.to_dict(), type(self).__name__)

    def to_dict(self) -> dict[str, Any]:
        """Return the keys and values of the file, except `None`."""
        content = dataclasses.asdict(self)
        content |= content.pop("further", {})
        return {
            key: value.value if isinstance(value, Enum) else value
            for key, value in content.items()
            if value is not None
        }

    def to_yaml_file(self, yaml_file: str) -> None:
        """Write the record as YAML.

        Raises:
            SettingsError: It cannot be written.
        """
        write(Path(yaml_file), self.to_dict())

    def to_json_file(self, json_file: str) -> None:
        """Write the record as JSON.

        Args:
            json_file: The file, with the suffix `.json`.

        Raises:
            SettingsError: It has another suffix, or cannot be written.
        """
        if Path(json_file).suffix != ".json":
            raise SettingsError(f"to_json_file({json_file!r}): the file must have the suffix .json.")
        write(Path(json_file), self.to_dict())

    @classmethod
    def from_yaml_file(cls, yaml_file: str | None = None) -> Self:
        """Read a file.

        Raises:
            SettingsError: It cannot be read, or contains invalid values.
        """
        return cls(**_record_arguments(yaml_file or default_yaml_config_file, cls))

    @classmethod
    def from_json_file(cls, json_file: str | None = None) -> Self:
        """Read a file, as `from_yaml_file` does; the suffix decides the format."""
        return cls(**_record_arguments(json_file or default_json_config_file, cls))


@dataclass
class ClusterConfig(BaseConfig):
    """The config file of hosts or a cluster; its fields are keys of the reference page of settings.

    Keys specific to accel are in `further`.

    Example:
        >>> config = ClusterConfig("LOCAL_MACHINE", "NO", "bf16", use_cpu=True, debug=False, num_processes=2)
        >>> config.to_dict()["num_processes"], config.distributed_type.value
        (2, 'NO')
    """

    num_processes: int = -1
    machine_rank: int = 0
    num_machines: int = 1
    gpu_ids: str | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: str | None = "static"
    same_network: bool | None = False
    main_training_function: str = "main"
    enable_cpu_affinity: bool = False
    fp8_config: dict[str, Any] | None = None
    deepspeed_config: dict[str, Any] | None = None
    fsdp_config: dict[str, Any] | None = None
    parallelism_config: dict[str, Any] | None = None
    megatron_lm_config: dict[str, Any] | None = None
    mpirun_config: dict[str, Any] | None = None
    downcast_bf16: bool = False
    tpu_name: str | None = None
    tpu_zone: str | None = None
    tpu_use_cluster: bool = False
    tpu_use_sudo: bool = False
    command_file: str | None = None
    commands: list[str] | None = None
    tpu_vm: list[str] | None = None
    tpu_env: list[str] | None = None
    dynamo_config: dict[str, Any] | None = None
    further: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass
class SageMakerConfig(BaseConfig):
    """The config file of jobs on Amazon SageMaker; the fields are keys of the reference page of settings."""

    ec2_instance_type: str
    iam_role_name: str
    image_uri: str | None = None
    profile: str | None = None
    region: str = "us-east-1"
    num_machines: int = 1
    gpu_ids: str = "all"
    base_job_name: str = "accelerate-sagemaker-1"
    pytorch_version: str | None = None
    transformers_version: str | None = None
    py_version: str | None = None
    sagemaker_inputs_file: str | None = None
    sagemaker_metrics_file: str | None = None
    additional_args: dict[str, Any] | None = None
    dynamo_config: dict[str, Any] | None = None
    enable_cpu_affinity: bool = False


def load_config_from_file(config_file: str | None) -> ClusterConfig | SageMakerConfig:
    """Read a config file as a record.

    Raises:
        FileNotFoundError: The file does not exist.
        SettingsError: It cannot be read, or contains invalid values.
    """
    path = config_file or default_config_file
    if not Path(path).expanduser().is_file():
        raise FileNotFoundError(
            f"there is no config file {str(path)!r}: pass an existing file, or run `accel config`."
        )
    content = read_config(str(path), read()).content
    on_sagemaker = content.get("compute_environment") == ComputeEnvironment.AMAZON_SAGEMAKER.value
    kind = SageMakerConfig if on_sagemaker else ClusterConfig
    return kind(**_record_arguments(str(path), kind))


def _record_arguments(path: str, kind: type[BaseConfig]) -> dict[str, Any]:
    """Return the arguments of the record for a file, including the keys of every file."""
    content = {**_DEFAULTS, **read_config(path, read()).content}
    if isinstance(content["mixed_precision"], bool):  # YAML reads a bare `no` as false.
        content["mixed_precision"] = "no"
    if isinstance(content["distributed_type"], bool):
        content["distributed_type"] = "NO"
    content = {key: value for key, value in content.items() if value is not None}
    known = {field.name for field in dataclasses.fields(kind)}
    arguments = {key: value for key, value in content.items() if key in known}
    if "further" in known:
        arguments["further"] = {key: value for key, value in content.items() if key not in known}
    return arguments


_DEFAULTS = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "NO",
    "mixed_precision": "no",
    "use_cpu": False,
    "debug": False,
}


def _make_functions(name: str) -> tuple[Callable[..., ArgumentParser], Callable[[Namespace], None]]:
    def subcommand() -> Subcommand:
        command = find_command(name)
        if not isinstance(command, Subcommand):
            raise SettingsError(f"`accel {name}` is not installed: `pip install accel-suite`.")
        return command

    def make_parser(subparsers: Any = None) -> ArgumentParser:
        """Create the parser of the subcommand; see the module."""
        made = subcommand().make_parser()
        if subparsers is None:
            return made
        parser = subparsers.add_parser(name, parents=[made], add_help=False, description=made.description)
        parser.set_defaults(func=run)
        return parser

    def run(args: Namespace) -> None:
        """Run the subcommand; see the module."""
        command = subcommand()
        actions = command.make_parser().actions
        defaults = {action.dest: action.default for action in actions if action.dest != "help"}
        if code := command.call(Namespace(**{**defaults, **vars(args)})):
            raise SystemExit(code)

    return make_parser, run


get_config_parser, config_command = _make_functions("config")

env_command_parser, env_command = _make_functions("env")

estimate_command_parser, estimate_command = _make_functions("estimate-memory")

merge_command_parser, merge_command = _make_functions("merge-weights")

test_command_parser, test_command = _make_functions("test")


to_fsdp2_command_parser, to_fsdp2_command = _make_functions("to-fsdp2")

tpu_command_parser, tpu_command_launcher = _make_functions("tpu-config")


def convert_config_to_fsdp2(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an FSDP config to FSDP2; any other config is returned unchanged.

    Raises:
        SettingsError: FSDP2 has no equivalent of a value.

    Example:
        >>> convert_config_to_fsdp2({"fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}})
        {'fsdp_config': {'fsdp_version': 2, 'fsdp_reshard_after_forward': False}}
    """
    fsdp = config.get("fsdp_config")
    if not isinstance(fsdp, dict) or str(fsdp.get("fsdp_version", 1)) == "2":
        return dict(config)
    return to_fsdp2(config)[0]


def launch_command_parser(subparsers: Any = None) -> ArgumentParser:
    """Create a parser of the flags of `accel launch`.

    Args:
        subparsers: The result of `ArgumentParser.add_subparsers`, to add a subcommand `launch`; None for a
            separate parser.

    Returns:
        The parser. A missing flag is `None`, or false if it takes no value.

    Example:
        >>> args = launch_command_parser().parse_args(["--num-processes", "2", "train.py", "--lr", "1"])
        >>> args.num_processes, args.training_script, args.training_script_args
        (2, 'train.py', ['--lr', '1'])
    """
    options: dict[str, Any] = {
        "description": " ".join(HELP),
        "usage": USAGE.removeprefix("usage: "),
        "allow_abbrev": False,
    }
    if subparsers is None:
        parser = ArgumentParser("accel launch", **options)
    else:
        parser = subparsers.add_parser("launch", **options)
        parser.set_defaults(func=launch_command)
    parser.add_argument("--config_file", help=f"the config file; by default {DEFAULT_PATH_HELP}")
    parser.add_argument("--config-file", dest="config_file", help=SUPPRESS, default=SUPPRESS)
    for flag, row in FLAGS.items():
        if not flag.startswith("--"):
            continue
        about: dict[str, Any] = {"dest": attribute_of(flag), "help": SUPPRESS}
        if flag in row.option.flags:
            about["help"] = row.option.help.replace("%", "%%")
        if row.const is not None:
            about["action"] = "store_true"
        else:
            about |= {"type": _make_reader(row.option), "action": _ACTIONS[row.option.kind]}
        short = [name for name in row.option.flags if not name.startswith("--")]
        parser.add_argument(*dict.fromkeys((*short, flag)), **about)
        if "_" in flag:
            about |= {"help": SUPPRESS, "default": SUPPRESS}
            parser.add_argument(flag.replace("_", "-"), **about)
    parser.add_argument("training_script", help="the script, module or program to run")
    parser.add_argument("training_script_args", nargs="...", help="its arguments")
    return parser


def attribute_of(flag: str) -> str:
    """Return the attribute of a namespace for a flag of `accel launch`.

    Example:
        >>> attribute_of("--num_processes"), attribute_of("--tpu_cluster")
        ('num_processes', 'tpu_use_cluster')
    """
    return "tpu_use_cluster" if flag == "--tpu_cluster" else flag.lstrip("-")


def _make_reader(option: Option) -> Callable[[str], Any]:
    """Return a function that checks a value of a setting, and converts it if it is a number."""

    def read_value(text: str) -> Any:
        try:
            value = option.parse(text)
        except ValueError as error:
            raise ArgumentTypeError(f"{text!r}: {error}") from None
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else text

    return read_value


_ACTIONS = {"word": "store", "table": "store", "list": "append"}


def launch_command(args: Namespace) -> None:
    """Launch a script as parsed by `launch_command_parser`, and wait for it.

    Args:
        args: Its namespace, or another one with an attribute for each flag.

    Raises:
        SettingsError: The flags are invalid or contradict each other; nothing was started.
        SystemExit: The job failed; the code is its exit code.
    """
    plan, _ = plan_launch(_read_namespace(args))
    if plan.is_local:
        launchers.require_script(plan)
    words, environ = flag_words(vars(args)), read()
    for name in ("aws_access_key_id", "aws_secret_access_key"):  # which no list of processes may show
        if key := getattr(args, name, None):
            environ[name.upper()] = str(key)
    config = getattr(args, "config_file", None)
    named = [] if config is None else [f"--config_file={config}"]
    script = ["--", str(args.training_script), *map(str, getattr(args, "training_script_args", ()))]
    line = [sys.executable, "-m", "accel_cli", "launch", *named, *words, *script]
    sys.stdout.flush()
    # Only the main thread can handle signals.
    signals = ("SIGTERM",) if threading.current_thread() is threading.main_thread() else ()
    with (
        subprocess.Popen(line, env=environ) as process,
        launchers.handle_signals(signals, lambda number, _: process.send_signal(number)),
    ):
        try:
            code = process.wait()
        except KeyboardInterrupt:  # The terminal has sent Ctrl-C to the process, too.
            code = process.wait()
    if code:
        raise SystemExit(code if code > 0 else 128 - code)


def _validate_launch_command(  # pyright: ignore[reportUnusedFunction] - programs call it by this name
    args: Namespace,
) -> tuple[Namespace, ClusterConfig | SageMakerConfig | None, bool]:
    """Check flags as `launch_command` does.

    Returns:
        The flags, with number of processes and precision resolved; the config file; whether the precision
        comes from it.
    """
    plan, _ = plan_launch(_read_namespace(args))
    path = args.config_file or _find_config_file(read())
    config = load_config_from_file(str(path)) if path else None
    precision = plan.settings.precision.mixed_precision
    from_file = config is not None and args.mixed_precision is None and precision == config.mixed_precision
    decided = {"num_processes": plan.num_processes, "num_machines": plan.num_machines}
    return Namespace(**{**vars(args), **decided, "mixed_precision": precision}), config, from_file


TORCH_LAUNCH_PARAMS = [
    *("nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "standalone"),
    *("max_restarts", "monitor_interval", "start_method", "role", "module", "m", "no_python", "run_path"),
    *("log_dir", "r", "redirects", "t", "tee", "node_rank", "master_addr", "master_port"),
]
"""The arguments of `torch.distributed.run`."""


def prepare_simple_launcher_cmd_env(args: Namespace) -> tuple[list[str], dict[str, str]]:
    """Return the command line and environment of a single process.

    Raises:
        SettingsError: The flags contradict each other.

    Example:
        >>> from argparse import Namespace
        >>> args = Namespace(cpu=True, training_script="train.py", training_script_args=["--lr", "1"])
        >>> line, environ = prepare_simple_launcher_cmd_env(args)
        >>> line[1:], environ["ACCELERATE_USE_CPU"]
        (['train.py', '--lr', '1'], 'true')
    """
    plan = plan_of(args, {"num_processes": 1, "num_machines": 1, "machine_rank": 0})
    plan = replace(plan, launcher=LAUNCHERS.built_in["simple"])
    return launchers.simple_words(plan), dict(plan.environ)


def prepare_multi_gpu_env(args: Namespace) -> dict[str, str]:
    """Return the environment of processes started by torchrun; add torchrun's arguments to `args`.

    Args:
        args: The flags; see the module. `nproc_per_node`, `main_process_port` and either `master_port` or,
            with several nodes, `nnodes` and `rdzv_endpoint` are added. No script is needed; values for
            Megatron-LM are ignored without `use_megatron_lm`, as launchers always pass them.

    Raises:
        SettingsError: The flags contradict each other.
    """
    megatron = [] if getattr(args, "use_megatron_lm", False) else [*vars(args)]
    without = {name: None for name in megatron if name.startswith("megatron_lm_")}
    plan = plan_of(args, without, needs_script=False)
    launch = plan.launch
    port = DEFAULT_PORT if launch.main_process_port is None else launch.main_process_port
    if launch.num_machines > 1:
        args.nnodes = str(launch.num_machines)
        args.rdzv_endpoint = f"{launch.main_process_ip}:{port}"
    else:
        port = port if port and not is_port_in_use(port) else free_port()
        args.master_port = str(port)
    args.nproc_per_node, args.main_process_port = str(plan.local_processes), port
    return dict(plan.environ)


def prepare_deepspeed_cmd_env(args: Namespace) -> tuple[list[str], dict[str, str]]:
    """Return the command line that starts processes for DeepSpeed, and their environment.

    Args:
        args: The flags; see the module. With a hostfile DeepSpeed's launcher is used, else torch's.

    Raises:
        SettingsError: The flags contradict each other, or a file or port cannot be used.
    """
    plan = plan_of(args, {"use_deepspeed": True})
    launchers.require_script(plan)
    module, words = launchers.ELASTIC, launchers.torchrun_words
    if plan.runner == "deepspeed":
        module, words = launchers.DEEPSPEED_HOSTS, launchers.deepspeed_words
    return [sys.executable, "-m", module, *words(plan)], dict(plan.environ)


def prepare_tpu(
    args: Namespace, current_env: Mapping[str, str], pod: bool = False
) -> tuple[Namespace, dict[str, str]]:
    """Return the flags and environment for a TPU.

    Args:
        args: The flags; see the module. With `pod` they are changed to the flags of a machine of the pod.
        current_env: The environment to extend.
        pod: Whether this is for the machines of a pod.
    """
    precision, downcast = getattr(args, "mixed_precision", None), getattr(args, "downcast_bf16", False)
    environ = {**current_env, **xla_formats(str(precision).lower(), downcast=bool(downcast))}
    if pod:
        for variable in getattr(args, "env", None) or ():
            name, _, value = variable.partition("=")
            environ[name] = value
        args.tpu_use_cluster = False
    return args, environ


def prepare_sagemager_args_inputs(
    sagemaker_config: Any, args: Namespace
) -> tuple[dict[str, Any], dict[str, str] | None]:
    """Return the arguments of the estimator of a SageMaker job, and its inputs.

    Args:
        sagemaker_config: An object with the keys of a config file for SageMaker as attributes.
        args: The flags; see the module.

    Raises:
        SettingsError: The flags contradict each other, or a file cannot be used.
    """
    content = {
        option.key: getattr(value, "value", value)
        for option in OPTIONS
        if option.key is not None and (value := getattr(sagemaker_config, option.key, None)) is not None
    }
    content["compute_environment"] = "AMAZON_SAGEMAKER"
    plan = plan_of(args, file=parse_file(content, "sagemaker_config"))
    inputs = sagemaker.inputs(plan.settings.sagemaker.sagemaker_inputs_file)
    return sagemaker.estimator_arguments(plan), inputs


def _convert_nargs_to_dict(nargs: Sequence[str]) -> dict[str, Any]:  # pyright: ignore[reportUnusedFunction] - programs call it by this name
    """Return the arguments of a script in SageMaker's form; see `sagemaker.hyperparameters`."""
    return sagemaker.hyperparameters(nargs)


def plan_of(
    args: Namespace,
    overrides: Mapping[str, Any] | None = None,
    file: Mapping[str, SourcedValue] | None = None,
    *,
    needs_script: bool = True,
) -> LaunchPlan:
    """Return the launch plan of the flags of a namespace; its config file is not read."""
    options = _read_namespace(Namespace(**{**vars(args), **(overrides or {})}), needs_script=needs_script)
    environ = read()
    merged = merge_sources(options.settings, parse_environ(environ), file or {})
    host = probe_host(merged.settings, environ)
    return make_plan(merged, options.script, tuple(options.script_arguments), environ, host)


def _read_namespace(args: Namespace, *, needs_script: bool = True) -> Namespace:
    """Return the namespace of another parser as that of `accel launch`.

    Raises:
        SettingsError: There is no script, or a value is invalid; the message lists all.
    """
    script = getattr(args, "training_script", None)
    if needs_script and not script:
        raise SettingsError(f"args.training_script is {script!r}: pass a script.")
    words = [*flag_words(vars(args)), "--", str(script or "-")]
    options = read_arguments([*words, *map(str, getattr(args, "training_script_args", None) or ())])
    options.config_file = getattr(args, "config_file", None)
    return options


def flag_words(flags: Mapping[str, Any]) -> list[str]:
    """Return flags that were parsed by another parser as words of `accel launch`.

    Args:
        flags: Value by flag without dashes. `None`, false and empty values are not set.

    Example:
        >>> flag_words({"num_processes": 2, "cpu": True, "debug": False})
        ['--num_processes=2', '--cpu']
    """
    words: list[str] = []
    for name, flag in FLAGS.items():
        value = flags.get(attribute_of(name))
        if not name.startswith("--") or value in (None, False, "", [], ()):
            continue
        texts = value if isinstance(value, list) else [value]
        words += [name] if flag.const is not None else [f"{name}={as_text(text)}" for text in texts]
    return words
