"""Command lines and environments for programs that have parsed the flags of `accel launch` themselves.

`args` is a namespace with an attribute for each flag, spelled as the flag without dashes, and with
`training_script` and `training_script_args`. What it lacks, and what is `None`, false or empty, is not set.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from accel_cli.launch import run_deepspeed, run_sagemaker, run_simple, run_torchrun
from accel_cli.launch.args import FLAGS, Arguments
from accel_cli.launch.command import probe_host
from accel_cli.launch.launchers import LAUNCHERS, xla_formats
from accel_cli.launch.plan import LaunchPlan, make_plan
from accel_state.environ import read
from accel_state.errors import SettingsError
from accel_state.ports import free_port, is_port_in_use
from accel_state.settings import (
    OPTIONS,
    ErrorCollector,
    Layer,
    SourcedValue,
    merge_sources,
    parse_environ,
    parse_file,
)
from accel_state.settings.environ import as_text
from accel_state.settings.file import concat
from accel_state.settings.merge import parse
from accel_state.topology import DEFAULT_PORT

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping, Sequence

TORCH_LAUNCH_PARAMS = [
    "nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "standalone",
    "max_restarts", "monitor_interval", "start_method", "role", "module", "m", "no_python", "run_path",
    "log_dir", "r", "redirects", "t", "tee", "node_rank", "master_addr", "master_port",
]  # fmt: skip
"""What `torch.distributed.run` takes."""


def prepare_simple_launcher_cmd_env(args: Namespace) -> tuple[list[str], dict[str, str]]:
    """Return the command line and environment of one process.

    Raises:
        SettingsError: They contradict each other.

    Example:
        >>> from argparse import Namespace
        >>> args = Namespace(cpu=True, training_script="train.py", training_script_args=["--lr", "1"])
        >>> line, environ = prepare_simple_launcher_cmd_env(args)
        >>> line[1:], environ["ACCELERATE_USE_CPU"]
        (['train.py', '--lr', '1'], 'true')
    """
    check_script(vars(args))
    plan = plan_of(args, {"num_processes": 1, "num_machines": 1, "machine_rank": 0})
    job = run_simple.job(replace(plan, launcher=LAUNCHERS.built_in["simple"]))
    return list(job.command), dict(job.environ)


def prepare_multi_gpu_env(args: Namespace) -> dict[str, str]:
    """Return the environment of each of several processes; add to `args` what `torch.distributed.run` needs.

    Args:
        args: The flags; see the module. It gets `nproc_per_node`, `main_process_port` and either
            `master_port` or, with several nodes, `nnodes` and `rdzv_endpoint`. A script is not needed.

    Raises:
        SettingsError: The flags contradict each other.
    """
    plan = plan_of(args)
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
        args: The flags; see the module. With a hostfile DeepSpeed's launcher is started, else that of torch.

    Raises:
        SettingsError: They contradict each other, or a file or port cannot be used.
    """
    check_script(vars(args))
    plan = plan_of(args, {"use_deepspeed": True})
    job = (run_deepspeed if plan.runner == "deepspeed" else run_torchrun).job(plan)
    return list(job.command), dict(job.environ)


def prepare_tpu(
    args: Namespace, current_env: Mapping[str, str], pod: bool = False
) -> tuple[Namespace, dict[str, str]]:
    """Return the flags and environment for a TPU.

    Args:
        args: The flags; see the module. With `pod` they are changed to those of one of its machines.
        current_env: The environment so far.
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
        sagemaker_config: Anything with the keys of a config file for SageMaker as attributes.
        args: The flags; see the module.

    Raises:
        SettingsError: They contradict each other, or a file cannot be used.
    """
    content = {
        option.key: value
        for option in OPTIONS
        if option.key is not None and (value := getattr(sagemaker_config, option.key, None)) is not None
    }
    content = {key: getattr(value, "value", value) for key, value in content.items()}
    content["compute_environment"] = "AMAZON_SAGEMAKER"
    plan = plan_of(args, file=parse_file(content, "sagemaker_config"))
    inputs = run_sagemaker.inputs(plan.merged.settings.sagemaker.sagemaker_inputs_file)
    return run_sagemaker.estimator_arguments(plan), inputs


def _convert_nargs_to_dict(nargs: Sequence[str]) -> dict[str, Any]:  # pyright: ignore[reportUnusedFunction] - programs call it by this name
    """Return the arguments of a script as SageMaker takes them; see `run_sagemaker.hyperparameters`."""
    return run_sagemaker.hyperparameters(nargs)


def plan_of(
    args: Namespace,
    overrides: Mapping[str, Any] | None = None,
    file: Mapping[str, SourcedValue] | None = None,
) -> LaunchPlan:
    """Return the launch plan of the flags of a namespace; its config file is not read."""
    line, environ = line_of({**vars(args), **(overrides or {})}), read()
    merged = merge_sources(line.sourced, parse_environ(environ), file or {})
    machine = probe_host(merged.settings, environ)
    return make_plan(merged, line.script or "", line.script_arguments, environ, machine)


def line_of(flags: Mapping[str, Any]) -> Arguments:
    """Return the command line that the attributes of a namespace stand for."""
    return Arguments(
        sourced=parse_namespace(flags),
        config_file=flags.get("config_file"),
        script=str(flags.get("training_script") or ""),
        script_arguments=tuple(map(str, flags.get("training_script_args") or ())),
    )


def check_script(flags: Mapping[str, Any]) -> None:
    """Check that there is a script to run.

    Raises:
        SettingsError: There is none.
    """
    script = flags.get("training_script")
    if not script:
        raise SettingsError(f"args.training_script is {script!r}: name a script.")


def parse_namespace(flags: Mapping[str, Any]) -> dict[str, SourcedValue]:
    """Read flags that another parser has parsed.

    Args:
        flags: Value by flag without dashes. `None`, false and empty ones are not set.

    Raises:
        SettingsError: Values cannot be used; the message names all.
    """
    found: dict[str, SourcedValue] = {}
    problems = ErrorCollector()
    for name, flag in FLAGS.items():
        attribute = attribute_of(name)
        value = flags.get(attribute)
        if flag.option is None or value in (None, False, "", [], ()):
            continue
        texts = [flag.const] if flag.const is not None else value if isinstance(value, list) else [value]
        for text in texts:
            with problems:
                found_value = parse(flag.option, as_text(text), Layer.ARGUMENT, f"args.{attribute}")
                if found_value is not None:
                    found[flag.option.path] = concat(found.get(flag.option.path), found_value)
    problems.raise_if_any()
    return found


def attribute_of(flag: str) -> str:
    """Return the attribute by which parsers name a flag of `accel launch`.

    Example:
        >>> attribute_of("--num_processes"), attribute_of("--tpu_cluster")
        ('num_processes', 'tpu_use_cluster')
    """
    return "tpu_use_cluster" if flag == "--tpu_cluster" else flag.lstrip("-")
