"""What programs embed of the command: the parser of `launch`, environments of processes, config files.

A function takes the namespace of a parser; missing attributes have their defaults. The attributes are each
flag of `accel launch`, spelled without dashes, `training_script` and `training_script_args`; attributes that
are `None`, false or empty count as not set.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from accel_cli.arguments import ABOUT_LAUNCH, FLAGS, USAGE, read_arguments
from accel_cli.config_file import read_config
from accel_cli.launch import launchers, sagemaker
from accel_cli.launch.command import make_plan, plan_launch, probe_host
from accel_cli.launch.launchers import LAUNCHERS, xla_formats
from accel_cli.launch.plan import LaunchPlan
from accel_state.environ import read
from accel_state.errors import SettingsError
from accel_state.settings import OPTIONS, Option, SourcedValue, merge_sources, parse_environ
from accel_state.settings.file import DEFAULT_PATH_HELP, FILE_NAMES, default_config_folder, parse_file
from accel_state.settings.file import default_config_file as _find_config_file
from accel_state.settings.model import BY_KEY, as_text
from accel_state.topology import DEFAULT_PORT, free_port, is_port_in_use

default_yaml_config_file = str(default_config_folder(read()) / FILE_NAMES[0])
"""The path at which the default config file is created."""

default_config_file = str(_find_config_file(read()) or default_yaml_config_file)
"""The existing default config file, else the path at which it is created."""


class ConfigRecord(SimpleNamespace):
    """A config file; its attributes are the keys of the reference page of settings, None without a value."""

    def to_dict(self) -> dict[str, Any]:
        """Return the keys and values, except `None`."""
        return {key: value for key, value in vars(self).items() if value is not None}


def load_config_from_file(config_file: str | None) -> ConfigRecord:
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
    content = {**_DEFAULTS, **read_config(str(path), read()).content}
    for key, meant in (("mixed_precision", "no"), ("distributed_type", "NO")):
        if content[key] is False:  # as YAML reads a bare `no`
            content[key] = meant
    return ConfigRecord(**{**dict.fromkeys(key.partition(".")[0] for key in BY_KEY), **content})


_DEFAULTS = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "NO",
    "mixed_precision": "no",
    "use_cpu": False,
    "debug": False,
    "num_processes": -1,
    "machine_rank": 0,
    "num_machines": 1,
}


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
    options: dict[str, Any] = {"description": ABOUT_LAUNCH, "usage": USAGE, "allow_abbrev": False}
    if subparsers is None:
        parser = ArgumentParser("accel launch", **options)
    else:
        parser = subparsers.add_parser("launch", **options)
        parser.set_defaults(func=launch_command)
    text = f"the config file; by default {DEFAULT_PATH_HELP}"
    parser.add_argument("--config_file", "--config-file", help=text)
    for flag, row in FLAGS.items():
        if flag.startswith("--"):
            short = [name for name in row.option.flags if not name.startswith("--")]
            text = row.option.help.replace("%", "%%") if flag in row.option.flags else SUPPRESS
            about: dict[str, Any] = {"dest": attribute_of(flag), "help": text, "action": "store_true"}
            if row.const is None:
                about["action"] = "append" if row.option.kind == "list" else "store"
                about["type"] = partial(_read_value, row.option)
            parser.add_argument(*dict.fromkeys((*short, flag, flag.replace("_", "-"))), **about)
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


def _read_value(option: Option, text: str) -> Any:
    """Check a value of a setting; convert it if it is a number."""
    try:
        value = option.parse(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r}: {error}") from None
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else text


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
    flags = vars(args)
    # No list of processes may show a key.
    keys = {name: str(flags[name]) for name in _KEYS if flags.get(name)}
    environ = {**read(), **{name.upper(): key for name, key in keys.items()}}
    words = flag_words({name: value for name, value in flags.items() if name not in keys})
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


_KEYS = ("aws_access_key_id", "aws_secret_access_key")

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
    if plan.row.name == "deepspeed":
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
