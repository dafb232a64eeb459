"""The argparse parser of each subcommand; the parser of `launch` has a flag per setting."""

from __future__ import annotations

from argparse import (
    REMAINDER,
    SUPPRESS,
    Action,
    ArgumentParser,
    ArgumentTypeError,
    HelpFormatter,
    Namespace,
    _ActionsContainer,
)
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

from accel_ops.weights.layout import convert_file_size_to_int
from accel_state.errors import SettingsError, nearest
from accel_state.frozen import frozen
from accel_state.settings import OPTIONS, Layer, Option
from accel_state.settings.file import DEFAULT_PATH_HELP, concat
from accel_state.settings.model import BY_PATH, parse


class Parser(ArgumentParser):
    """The parser of a subcommand.

    Flags are declared with underscores and may be written with dashes. After `add_script` the first
    positional word is the script. All words after it are passed to the script unchanged.

    Args:
        command: The name of the subcommand.
        description: Its description.
        epilog: The end of its help.

    Example:
        >>> parser = Parser("greet", "Greet.")
        >>> _ = parser.add_argument("--first_name")
        >>> parser.read(["--first-name", "Ada"]).first_name
        'Ada'
    """

    def __init__(self, command: str, description: str, epilog: str | None = None) -> None:
        super().__init__(prog=f"accel {command}", description=description, epilog=epilog, allow_abbrev=False)
        self._has_script = False

    @property
    def actions(self) -> list[Action]:
        """All declared actions, in order."""
        return [*self._actions]

    def add_script(self, usage: str) -> None:
        """Declare `script` and `script_arguments`, after all flags; each flag takes one value or none."""
        self.add_argument("script", nargs="?", help="the script")
        self.add_argument("script_arguments", nargs=REMAINDER, help="its arguments")
        self.usage = usage
        self._has_script = True

    def add_settings(self, *, hidden: bool) -> None:
        """Add the flags of all other settings, by topic; values are stored in `settings`, by path."""
        declared = {*self._option_string_actions}
        topics = dict.fromkeys(row.option.topic for row in FLAGS.values())
        groups = {topic: self.add_argument_group(topic) for topic in topics}
        for row in {id(row): row for row in FLAGS.values()}.values():
            names = [name for name, flag in FLAGS.items() if flag is row and name not in declared]
            if names:
                text = SUPPRESS if hidden or row.help is None else row.help.replace("%", "%%")
                groups[row.option.topic].add_argument(*names, action=SettingAction, row=row, help=text)

    def read(self, words: Sequence[str]) -> Namespace:
        """Parse the words after the subcommand.

        Raises:
            SettingsError: Words are unknown or invalid, or the script is missing. The message lists all
                problems. Parsing stops at an unknown flag unlike any known one, since the script could be any
                later word.
            SystemExit: Help was requested and shown.
        """
        for name, action in [*self._option_string_actions.items()]:
            self._option_string_actions.setdefault(name[:2] + name[2:].replace("_", "-"), action)
        options, unknown = Namespace(problems=[]), list[str]()
        flags, script = self._split(words, options.problems) if self._has_script else (words, [])
        try:
            _, unknown = self.parse_known_args(flags, options)
        except SettingsError as error:
            options.problems += error.problems
        names = [word.partition("=")[0] for word in unknown if word.startswith("-")] or unknown
        options.problems += [f"argument {name} is unknown{self._hint(name)}" for name in names]
        if options.problems:
            raise SettingsError(*options.problems)
        vars(options).pop("problems")
        if self._has_script:
            if not script:
                raise SettingsError(f"no script given.\nusage: {self.usage}")
            options.script, *options.script_arguments = script
        return options

    def error(self, message: str) -> NoReturn:
        """Raise a `SettingsError`, which the command prints before it exits with code 2."""
        raise SettingsError(f"{message}.")

    def _split(self, words: Sequence[str], problems: list[str]) -> tuple[list[str], list[str]]:
        """Return the flags, joined with their values, which may begin with a dash; and the script."""
        flags, remaining = list[str](), list(words)
        while remaining and remaining[0].startswith("-") and remaining[0] not in {"-", "--"}:
            word = remaining.pop(0)
            name = word.partition("=")[0] if word.startswith("--") else word[:2]
            action = self._option_string_actions.get(name)
            known = action or self._option_string_actions.get(self._nearest(name) or "")
            if known is not None and known.nargs is None and word == name and remaining:
                word += f"={remaining.pop(0)}"
            if action is not None:
                flags.append(word)
                continue
            hint = f"{self._hint(name)} Put flags of the script after its name."
            problems.append(f"argument {name} is unknown{hint}")
            if known is None:
                break
        return flags, remaining[1:] if remaining[:1] == ["--"] else remaining

    def _nearest(self, flag: str) -> str | None:
        declared = [name for action in self._actions for name in action.option_strings if name[:2] == "--"]
        return nearest(f"--{flag.lstrip('-').replace('-', '_')}", declared)

    def _hint(self, flag: str) -> str:
        near = self._nearest(flag)
        return "." if near is None else f"; did you mean {near}?"


class SettingAction(Action):
    """An argparse action that stores settings by path; values of a repeated flag are concatenated."""

    def __init__(self, *, row: SettingFlag, **declared: Any) -> None:
        choices = row.option.choices
        metavar = f"{{{','.join(choices)}}}" if 0 < len(choices) < 5 else row.option.name.upper()
        declared |= {"dest": "settings", "default": {}, "nargs": None if row.const is None else 0}
        declared["metavar"] = metavar
        super().__init__(**declared)
        self.row = row

    def __call__(
        self, parser: ArgumentParser, namespace: Namespace, values: Any, flag: str | None = None
    ) -> None:
        del parser
        text = values if self.row.const is None else self.row.const
        try:
            value = parse(self.row.option, text, Layer.ARGUMENT, f"argument {flag}")
        except SettingsError as error:
            namespace.problems += error.problems
            return
        if value is not None:
            path, before = self.row.option.path, namespace.settings
            namespace.settings = {**before, path: concat(before.get(path), value)}


@frozen
class SettingFlag:
    """A flag of a setting.

    Args:
        option: The setting.
        const: The value of a flag without an argument.
        help: Its help; None for negated flags, which help and completion do not list.
    """

    option: Option
    const: str | None
    help: str | None = None


def _make_flags() -> dict[str, SettingFlag]:
    flags: dict[str, SettingFlag] = {}
    for option in OPTIONS:
        # A switch that a file can turn on has a negated flag that takes precedence over the file.
        if option.const == "true" and (option.key or not option.name):
            off = SettingFlag(option=option, const="false")
            flags |= {f"--no_{name[2:]}": off for name in option.flags}
        has_list = option.const is None and len(option.choices) >= 5
        choices = f" One of {', '.join(option.choices)}." if has_list else ""
        default = f" With --use_{option.section}: {option.launch_default}." if option.launch_default else ""
        text = f"{option.help}{choices}{default} {option.sources_help}".rstrip()
        flag = SettingFlag(option=option, const=option.const, help=text)
        flags |= dict.fromkeys(option.flags, flag)
        for name, const in option.flag_aliases:
            text = f"Sets {option.name} to {const}."
            flags[name] = SettingFlag(option=option, const=const, help=text)
    return flags


FLAGS = _make_flags()
"""Every flag of a setting, spelled with underscores."""

USAGE = "accel launch [options] training_script [training_script_args ...]"


def launch() -> Parser:
    """Build the parser of `accel launch`."""
    made = Parser("launch", ABOUT_LAUNCH)
    made.formatter_class = partial(HelpFormatter, max_help_position=6, width=100)
    add_config_file(made, "read, in YAML or JSON")
    _switch(made, "--explain", text="show the source of each setting and the command, but run nothing")
    _switch(made, "--dry_run", text="print the job or command, but run nothing")
    made.add_settings(hidden=False)
    made.add_script(USAGE)
    return made


ABOUT_LAUNCH = (
    "Run a Python script in one process, like `python script`, or in several. A flag overrides an"
    " environment variable, which overrides the config file, which overrides the default. Flags may have"
    " hyphens (`--num-processes 2`) or underscores (`--num_processes 2`); `--no_NAME` turns off a switch of"
    " the config file. Arguments after the script are passed to the script."
)


def read_arguments(words: Sequence[str]) -> Namespace:
    """Parse the words after `accel launch`; see `Parser.read`."""
    return launch().read(words)


def config() -> Parser:
    """Build the parser of `accel config`."""
    made = Parser(
        "config",
        "Create a launch config interactively. `accel config default` writes the defaults of this host"
        " without questions; `accel config update` rewrites a file of a legacy format.",
    )
    made.add_argument(
        "action", nargs="?", choices=("default", "update"), help="without an action, ask questions"
    )
    add_config_file(made, "write, YAML or JSON")
    text = "with `default`: mixed precision (default: no)"
    made.add_argument(
        "--mixed_precision", choices=_PRECISIONS[:3], help=setting("precision.mixed_precision", text)
    )
    return made


_PRECISIONS = ("no", "fp16", "bf16", "fp8")


def selftest() -> Parser:
    """Build the parser of `accel test`."""
    made = Parser(
        "test",
        "Check in a minute or two whether this host trains correctly with a config: collectives, data"
        " loading, equality with one process, mixed precision, checkpoints, and transfer speeds.",
    )
    add_config_file(made, "test")
    text = "as in accel launch"
    _number(made, "--num_processes", setting("launch.num_processes", f"{text}, instead of the config's"))
    _switch(made, "--cpu", text=setting("process.use_cpu", f"{text}: use the CPU"))
    made.add_argument(
        "--mixed_precision", choices=_PRECISIONS, help=setting("precision.mixed_precision", text)
    )
    text = (
        "stop the processes after this many seconds (collectives time out after a third of this)"
        " (default: %(default)s)"
    )
    _number(made, "--timeout", text, metavar="SECONDS", default=300)
    _switch(made, "--json", text="write the results as JSON")
    made.add_argument("--html", metavar="FILE", help="also write the report as an HTML page")
    _switch(made, "--quiet", "-q", text="show only failures")
    return made


def env() -> Parser:
    """Build the parser of `accel env`."""
    made = Parser(
        "env",
        "Print environment information for bug reports: versions, devices, launcher and "
        "settings. Secrets are removed.",
    )
    add_config_file(made, "read")
    _switch(made, "--json", text="write JSON instead of text")
    return made


def merge() -> Parser:
    """Build the parser of `accel merge-weights`."""
    made = Parser(
        "merge-weights",
        "Merge a sharded checkpoint (FSDP or torch.distributed.checkpoint) into full weights.",
    )
    made.add_argument(
        "checkpoint_directory",
        help="the folder of shards (with a .metadata file), or a save_state checkpoint that contains "
        "such a folder",
    )
    made.add_argument("output_path", help="the output folder")
    _switch(made, "--unsafe_serialization", text="write pytorch_model.bin instead of safetensors")
    _switch(made, "--remove_checkpoint_dir", text="delete the shards after merging")
    _switch(made, "--quiet", "-q", text="print nothing on success")
    return made


def to_fsdp2() -> Parser:
    """Build the parser of `accel to-fsdp2`."""
    made = Parser("to-fsdp2", "Convert an FSDP (version 1) config file to FSDP2.")
    add_config_file(made, "read")
    made.add_argument("--output_file", metavar="FILE", help="the file to write")
    _switch(made, "--overwrite", text="overwrite the input file or the output file")
    _switch(made, "--quiet", "-q", text="do not print the changes")
    return made


def tpu() -> Parser:
    """Build the parser of `accel tpu-config`."""
    made = Parser("tpu-config", "Run commands on all hosts of a Google Cloud TPU pod before training.")
    pod = made.add_argument_group("the pod (defaults: the config file)")
    add_config_file(pod, "read")
    pod.add_argument("--tpu_name", metavar="NAME", help="the name of the TPU [key tpu_name]")
    pod.add_argument("--tpu_zone", metavar="ZONE", help="its zone [key tpu_zone]")
    _switch(pod, "--use_alpha", text="use `gcloud alpha`")
    what = made.add_argument_group("what to run")
    what.add_argument("--command_file", metavar="FILE", help="a file with commands [key command_file]")
    text = "a command; may be repeated [key commands]"
    what.add_argument("--command", action="append", nargs="+", metavar="COMMAND", help=text)
    _switch(what, "--install_accelerate", text="install accel on the pod first")
    text = "the version of accel to install (default: %(default)s)"
    what.add_argument("--accelerate_version", default="latest", metavar="VERSION", help=text)
    _switch(made, "--debug", text="show the command line, but run nothing")
    return made


def examples() -> Parser:
    """Build the parser of `accel examples`."""
    made = Parser("examples", "Copy the example scripts and config templates of accel-suite to a folder.")
    text = "an absent or empty folder (default: %(default)s)"
    made.add_argument("directory", nargs="?", default="accel-examples", help=text)
    text = "Also copy the documentation, as Markdown pages, to DIRECTORY/docs."
    made.add_argument("--docs", action="store_true", help=text)
    return made


def completion() -> Parser:
    """Build the parser of `accel completion`."""
    epilog = (
        'bash: eval "$(accel completion bash)" in ~/.bashrc; zsh: eval "$(accel completion zsh)" in ~/.zshrc,'
        " after compinit; fish: accel completion fish > ~/.config/fish/completions/accel.fish"
    )
    made = Parser(
        "completion", "Print a script that completes accel's commands and flags in a shell.", epilog
    )
    made.add_argument("shell", choices=("bash", "zsh", "fish", "tcsh"))
    return made


def add_config_file(parser: _ActionsContainer, use: str) -> None:
    """Add the argument `--config_file`; its help says, with the verb `use`, what the command does with it."""
    parser.add_argument(
        "--config_file", metavar="FILE", help=f"the config file to {use}; by default {DEFAULT_PATH_HELP}"
    )


def setting(path: str, text: str) -> str:
    """Return the help text of a flag that is a setting, with its variable and key."""
    return f"{text} {BY_PATH[path].sources_help}"


def _switch(made: _ActionsContainer, *flags: str, text: str) -> None:
    made.add_argument(*flags, action="store_true", help=text)


def _number(made: _ActionsContainer, flag: str, text: str, metavar: str = "N", **more: Any) -> None:
    made.add_argument(flag, type=count, metavar=metavar, help=text, **more)


def count(text: str) -> int:
    """Parse an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def size(text: str) -> int:
    """Parse a human-readable size in bytes."""
    try:
        return convert_file_size_to_int(text)
    except SettingsError as error:
        raise ArgumentTypeError(str(error)) from None
