"""`accel launch` for programs that carry its flags within their own command line.

`launch_command_parser()` makes a parser of its flags, `launch_command(args)` runs what was parsed.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from accel_cli.config_records import ClusterConfig, SageMakerConfig, load_config_from_file
from accel_cli.launch.args import FLAGS, HELP, USAGE
from accel_cli.launch.command import job_of, plan_of_line
from accel_cli.launch.namespace import attribute_of, check_script, line_of
from accel_state.environ import read
from accel_state.settings.file import DEFAULT_PATH_HELP
from accel_state.settings.file import default_config_file as _found_config_file

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from accel_state.settings import Option


def launch_command_parser(subparsers: Any = None) -> ArgumentParser:
    """Make a parser of the flags of `accel launch`.

    Args:
        subparsers: What `ArgumentParser.add_subparsers` returned, to make it the parser of a subcommand
            `launch`; None makes a parser of its own.

    Returns:
        The parser. A flag that is not given is `None`, or false if it takes no value.

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
        if row.option is None or not flag.startswith("--"):
            continue
        about: dict[str, Any] = {"dest": attribute_of(flag), "help": SUPPRESS}
        if flag in row.option.flags:
            about["help"] = row.option.help.replace("%", "%%")
        if row.const is not None:
            about["action"] = "store_true"
        else:
            about |= {"type": _reader(row.option), "action": _ACTIONS[row.option.kind]}
        short = [name for name in row.option.flags if not name.startswith("--")]
        parser.add_argument(*dict.fromkeys((*short, flag)), **about)
        if "_" in flag:
            about |= {"help": SUPPRESS, "default": SUPPRESS}
            parser.add_argument(flag.replace("_", "-"), **about)
    parser.add_argument("training_script", help="the script, module or program to run")
    parser.add_argument("training_script_args", nargs="...", help="what it is given")
    return parser


def launch_command(args: Namespace) -> None:
    """Run what `launch_command_parser` parsed, and wait for it.

    Args:
        args: Its namespace, or another one with an attribute for each flag.

    Raises:
        SettingsError: Things do not add up; nothing was started.
        SystemExit: What ran failed; the code is its exit code.
    """
    check_script(vars(args))
    plan, notes = plan_of_line(line_of(vars(args)))
    job = job_of(plan, notes)
    sys.stdout.flush()
    with subprocess.Popen(job.command, env=dict(job.environ)) as process, _handing_on(process):
        try:
            code = process.wait()
        except KeyboardInterrupt:  # the terminal has told the process as well
            code = process.wait()
    if code:
        raise SystemExit(code if code > 0 else 128 - code)


def _validate_launch_command(  # pyright: ignore[reportUnusedFunction] - programs call it by this name
    args: Namespace,
) -> tuple[Namespace, ClusterConfig | SageMakerConfig | None, bool]:
    """Check flags as `launch_command` does.

    Returns:
        The flags, with number of processes and precision decided; the config file; whether it decides the
        precision.
    """
    check_script(vars(args))
    plan, _ = plan_of_line(line_of(vars(args)))
    path = args.config_file or _found_config_file(read())
    config = load_config_from_file(str(path)) if path else None
    precision = plan.merged.settings.precision.mixed_precision
    from_file = config is not None and args.mixed_precision is None and precision == config.mixed_precision
    decided = {"num_processes": plan.launch.num_processes, "num_machines": plan.launch.num_machines}
    return Namespace(**{**vars(args), **decided, "mixed_precision": precision}), config, from_file


@contextmanager
def _handing_on(process: subprocess.Popen[bytes]) -> Generator[None]:
    """Forward the signal that asks to end to a process. Only the main thread gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


_ACTIONS = {"word": "store", "table": "store", "list": "append"}


def _reader(option: Option) -> Callable[[str], Any]:
    """Check a value as the command does; numbers are returned as such, others as they are written."""

    def read_value(text: str) -> Any:
        try:
            value = option.parse(text)
        except ValueError as error:
            raise ArgumentTypeError(f"{text!r}: {error}") from None
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else text

    return read_value
