"""`accel config`: ask, show, and write a config file."""

from __future__ import annotations

import shlex
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from accel_cli.config.basic import DEFAULT_CONFIG_FILE, update, write_basic_config
from accel_cli.config.defaults import probe_host
from accel_cli.config.interview import interview
from accel_cli.config_file import path_to_write, write
from accel_cli.launch.checks import Facts, problems
from accel_cli.launch.machine import Machine
from accel_cli.output import Table, show
from accel_state.environ import read
from accel_state.errors import SettingsError
from accel_state.settings import OPTIONS, combine, parse_file, to_content
from accel_state.settings.environ import as_text

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from accel_cli.config.defaults import HostInfo
    from accel_state.settings import Settings


def run(options: Namespace) -> int:
    """Run the command."""
    if options.mixed_precision is not None and options.action != "default":
        raise SettingsError("argument --mixed_precision is only for `accel config default`.")
    return _ACTIONS[options.action](options)


def _default(options: Namespace) -> int:
    written = write_basic_config(options.mixed_precision or "no", options.config_file or DEFAULT_CONFIG_FILE)
    if not written:
        path = path_to_write(options.config_file, read())
        show(
            f"The config file {path} exists already and is unchanged. Run `accel config` to replace it, or "
            "name another file with --config_file."
        )
        return 0
    show(f"Written to {written}.")
    return 0


def _update(options: Namespace) -> int:
    path, notes = update(options.config_file)
    show(*notes[:-1], f"{path} is in the current format.")
    return 0


def _ask(options: Namespace) -> int:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise SettingsError(
            "`accel config` asks questions, which need a terminal. `accel config default` writes a file "
            "without questions, and docs/reference/settings.md lists the keys of a file."
        )
    environ = read()
    path, found = path_to_write(options.config_file, environ), probe_host(environ)
    terminal = import_module("accel_cli.config.terminal")
    show("Esc goes back to the question before; Ctrl-C ends, and writes nothing.", "")
    try:
        settings = interview(terminal.ask, found)
        show("", summary(settings))
        wrong = find_conflicts(settings, found)
        show(*(f"Conflict: {one}" for one in wrong))
        replaces = " (replaces the existing file)" if path.exists() else ""
        if not terminal.agree(f"Write this to {path}{replaces}?", default=not wrong):
            show("Nothing was written.")
            return 1
    except KeyboardInterrupt:
        show("", "Nothing was written.")
        return 130
    write(path, to_content(settings))
    show(f"Written to {path}. To run a script:", *commands(settings, options.config_file))
    return 0


_ACTIONS: Mapping[str | None, Callable[[Namespace], int]] = {
    None: _ask,
    "default": _default,
    "update": _update,
}


def summary(settings: Settings) -> Table:
    """Return a table of the settings to write."""
    sourced = combine(parse_file(to_content(settings), "")).sourced
    rows = [
        (option.key or "", as_text(sourced[option.path].value))
        for option in OPTIONS
        if option.path in sourced and option.key
    ]
    return Table(head=("setting", "value"), rows=tuple(rows), title="Your answers")


def find_conflicts(settings: Settings, found: HostInfo) -> list[str]:
    """Return the problems for which `accel launch` would refuse settings."""
    merged = combine(parse_file(to_content(settings), "the answers"))
    machine = Machine(gpus=found.gpus, cores=found.cores)
    return problems(Facts(merged=merged, machine=machine, environ={}))


def commands(settings: Settings, config_file: Path | str | None) -> list[str]:
    """Return the command lines that run a script with settings: one, or one per node."""
    named = ["--config_file", str(config_file)] if config_file is not None else []
    by_launcher = (settings.deepspeed and settings.hosts.hostfile) or settings.mpi.hostfile
    several = settings.launch.num_machines > 1 and settings.launch.compute_environment == "LOCAL_MACHINE"
    if not several or by_launcher or settings.launch.on_tpu:
        return [shlex.join(["accel", "launch", *named, "train.py"])]
    ranks = range(settings.launch.num_machines)
    return [
        shlex.join(["accel", "launch", *named, "--machine_rank", str(rank), "train.py"])
        for rank in (ranks if len(ranks) <= 4 else (0, 1))
    ] + (["… and so on"] if len(ranks) > 4 else [])
