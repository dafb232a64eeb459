"""All parsers, launch's from OPTIONS."""

from __future__ import annotations

import textwrap
from argparse import (
    REMAINDER,
    SUPPRESS,
    Action,
    ArgumentParser,
    ArgumentTypeError,
    Namespace,
    _ActionsContainer,  # pyright: ignore[reportPrivateUsage] - groups have no public name
)
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from accel_ops.weights.layout import convert_file_size_to_int
from accel_state.errors import SettingsError, nearest
from accel_state.settings import OPTIONS, ErrorCollector, Layer, Option, SourcedValue
from accel_state.settings.file import DEFAULT_PATH_HELP, concat
from accel_state.settings.model import BY_PATH, parse

USAGE = "usage: accel launch [options] training_script [training_script_args ...]"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchArguments:
    """A parsed command line.

    Args:
        sourced: Path to value and origin, of every setting that has a flag there.
        config_file: The config file that is named; None for the default one.
        explain: Whether to tell what would be run, and run nothing.
        script: What to run; None if help was asked for.
        script_arguments: What follows it, untouched.
    """

    sourced: Mapping[str, SourcedValue]
    config_file: str | None = None
    explain: bool = False
    script: str | None
    script_arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flag:
    """A flag; `const` is what it stands for if it takes no value, `option` is None for what is no setting."""

    option: Option | None
    const: str | None


_CONFIG_FILE, _EXPLAIN = "--config_file", "--explain"


def _flags() -> dict[str, _Flag]:
    flags = {_CONFIG_FILE: _Flag(option=None, const=None), _EXPLAIN: _Flag(option=None, const="true")}
    for option in OPTIONS:
        # A switch that a file can turn on has its opposite, so that an argument can overrule the file.
        if option.const == "true" and (option.key or not option.name):
            flags |= {f"--no_{name[2:]}": _Flag(option=option, const="false") for name in option.flags}
        flags |= {name: _Flag(option=option, const=option.const) for name in option.flags}
        flags |= {name: _Flag(option=option, const=const) for name, const in option.flag_aliases}
    return flags


FLAGS = _flags()
"""Every flag, spelled with underscores."""


def read_arguments(arguments: Sequence[str]) -> LaunchArguments:
    """Read what follows `accel launch`: flags, the script, and its arguments.

    Raises:
        SettingsError: Flags are unknown, lack their values, or have some that cannot be used; the message
            names all. After an unknown flag that resembles none nobody knows where the script begins.

    Example:
        >>> read = read_arguments(["--num-processes", "2", "train.py", "--num-processes", "3"])
        >>> read.sourced["launch.num_processes"].value, read.script, read.script_arguments
        (2, 'train.py', ('--num-processes', '3'))
    """
    sourced: dict[str, SourcedValue] = {}
    others: dict[str, str] = {}
    rest = list(arguments)
    problems = ErrorCollector()
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        if word in {"-h", "--help"}:
            return LaunchArguments(sourced={}, script=None, script_arguments=())
        name, text = _split(word)
        if (key := _key(name)) not in FLAGS:
            near = nearest(key, [flag for flag in FLAGS if flag.startswith("--")])
            hint = "." if near is None else f"; did you mean {near}?"
            problems.found.append(
                f"argument {name} is unknown{hint} Flags of the script come after the script."
            )
            if near is None:
                problems.raise_if_any()
            elif FLAGS[near].const is None and text is None:
                del rest[:1]
            continue
        with problems:
            flag = FLAGS[key]
            text = _text(name, flag, text, rest)
            if flag.option is None:
                others[key] = text
            elif (value := parse(flag.option, text, Layer.ARGUMENT, f"argument {name}")) is not None:
                sourced[flag.option.path] = concat(sourced.get(flag.option.path), value)
    if not rest and not problems.found:
        raise SettingsError(f"no script to run.\n{USAGE}")
    problems.raise_if_any()
    return LaunchArguments(
        sourced=sourced,
        config_file=others.get(_CONFIG_FILE),
        explain=_EXPLAIN in others,
        script=rest[0],
        script_arguments=tuple(rest[1:]),
    )


def _key(name: str) -> str:
    return "--" + name[2:].replace("-", "_") if name.startswith("--") else name


def _split(word: str) -> tuple[str, str | None]:
    """Return the flag that a word holds, as it is written there, and the value joined to it."""
    name, equals, text = word.partition("=")
    if not name.startswith("--"):
        name, text, equals = (word[:2], word[2:], word[2:]) if len(word) > 2 else (word, "", "")
    return name, text if equals else None


def _text(name: str, flag: _Flag, text: str | None, rest: list[str]) -> str:
    """Return the value of a flag: what is joined to it, its constant, or the next word, which is consumed."""
    if flag.const is not None:
        if text is not None:
            raise SettingsError(f"argument {name} takes no value, but got {text!r}.")
        return flag.const
    if text is None and not rest:
        raise SettingsError(f"argument {name} needs a value.")
    return rest.pop(0) if text is None else text


def help_text() -> str:
    """Return the text of `accel launch --help`."""
    sections: dict[str, list[str]] = {
        "the command": [
            _entry(f"{_CONFIG_FILE} FILE", f"Settings in YAML or JSON; by default {DEFAULT_PATH_HELP}."),
            _entry(_EXPLAIN, "Tell where each setting comes from and what would be run, and run nothing."),
        ]
    }
    for option in OPTIONS:
        if option.flags:
            sections.setdefault(option.topic, []).append(_entry(_spelled(option), _details(option)))
    body = [line for title, entries in sections.items() for line in ("", f"{title}:", *entries)]
    return "\n".join((USAGE, "", *HELP, *body, ""))


HELP = textwrap.wrap(
    "Run a Python script in one process, with the semantics of `python script`, or in several. A setting is"
    " taken from its flag, else from its environment variable, else from the config file, else from its"
    " default. Flags may be spelled with dashes, too; a switch of a config file is turned off with"
    " `--no_` before its name. What follows the script is the script's.",
    width=100,
)
"""What the command does, in lines."""


def _spelled(option: Option) -> str:
    names = ", ".join((*option.flags, *(name for name, _ in option.flag_aliases)))
    if option.const is not None:
        return names
    few = 0 < len(option.choices) < 5
    return f"{names} {{{','.join(option.choices)}}}" if few else f"{names} {option.name.upper()}"


def _details(option: Option) -> str:
    choices = (
        f" One of {', '.join(option.choices)}." if len(option.choices) > 4 and option.const is None else ""
    )
    default = f" With --use_{option.section}: {option.launch_default}." if option.launch_default else ""
    return f"{option.help}{choices}{default} {option.sources_help}".rstrip()


def _entry(names: str, text: str) -> str:
    lines = textwrap.wrap(text, width=76, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join((f"  {names}", *lines))


DTYPES = ("float32", "float16", "int8", "int4")
_PRECISIONS = ("no", "fp16", "bf16", "fp8")
_EPILOG = (
    'bash: eval "$(accel completion bash)" in ~/.bashrc; zsh: eval "$(accel completion zsh)" in ~/.zshrc,'
    " after compinit; fish: accel completion fish > ~/.config/fish/completions/accel.fish"
)


class Parser(ArgumentParser):
    """The parser of a subcommand.

    Flags are declared with underscores and may be written with dashes.

    Example:
        >>> parser = Parser("greet", "Greet.")
        >>> _ = parser.add_argument("--first_name")
        >>> parser.read(["--first-name", "Ada"]).first_name
        'Ada'
    """

    def __init__(self, command: str, description: str, epilog: str | None = None) -> None:
        super().__init__(prog=f"accel {command}", description=description, epilog=epilog, allow_abbrev=False)

    @property
    def actions(self) -> list[Action]:
        """All declared actions, in order."""
        return [*self._actions]

    @property
    def flags(self) -> list[str]:
        """All declared flags."""
        return [*self._option_string_actions]

    def read(self, words: Sequence[str]) -> Namespace:
        """Parse the arguments after the subcommand.

        Raises:
            SettingsError: An argument is unknown or invalid.
            SystemExit: Help was requested, and has been shown.
        """
        options, unknown = self.parse_known_args(self._spelled(words))
        if unknown:
            names = [word.partition("=")[0] for word in unknown if word.startswith("-")] or unknown
            raise SettingsError(*(f"argument {name} is unknown{self._nearest(name)}" for name in names))
        return options

    def error(self, message: str) -> NoReturn:
        """Raise a `SettingsError`, which the command prints as a sentence before it exits with code 2."""
        raise SettingsError(f"{message}.")

    def _spelled(self, words: Sequence[str]) -> list[str]:
        """Replace flags by their declared spelling, up to the script and its arguments."""
        spelled: list[str] = []
        values = 0
        script_follows = any(action.nargs == REMAINDER for action in self._actions)
        for position, word in enumerate(words):
            if values:
                values -= 1
                spelled.append(word)
                continue
            name, equals, value = word.partition("=")
            known = name if name in self._option_string_actions else f"--{name[2:].replace('-', '_')}"
            if word.startswith("--") and known in self._option_string_actions:
                action = self._option_string_actions[known]
                values = 1 if action.nargs is None and not equals else 0
                spelled.append(f"{known}{equals}{value}")
            elif script_follows and not word.startswith("-"):
                return [*spelled, *words[position:]]
            else:
                spelled.append(word)
        return spelled

    def _nearest(self, name: str) -> str:
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        by_spelling = {flag.replace("-", "_"): flag for flag in reversed(flags)}
        near = nearest(name.replace("-", "_"), by_spelling)
        return "." if near is None else f"; did you mean {by_spelling[near]}?"


class _Setting(Action):
    """Collect the settings that flags of `accel launch` give, by path."""

    def __init__(self, *, row: Option, **declared: Any) -> None:
        super().__init__(**declared)
        self.row = row

    def __call__(self, _: ArgumentParser, namespace: Namespace, values: Any, flag: str | None = None) -> None:
        text = self.const if self.nargs == 0 else values
        value = parse(self.row, text, Layer.ARGUMENT, f"argument {flag}")
        if value is not None:
            before = namespace.settings.get(self.row.path)
            namespace.settings = {**namespace.settings, self.row.path: concat(before, value)}


def count(text: str) -> int:
    """Read a whole number of at least 1.

    Example:
        >>> count("8")
        8
    """
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return value


def size(text: str) -> int:
    """Read bytes as people write them.

    Example:
        >>> size("1GB")
        1000000000
    """
    try:
        return convert_file_size_to_int(text)
    except SettingsError as error:
        raise ArgumentTypeError(str(error)) from None


def add_config_file(parser: _ActionsContainer, use: str) -> None:
    """Add the argument `--config_file`; its help says, with the verb `use`, what the command does with it."""
    parser.add_argument(
        "--config_file", metavar="FILE", help=f"the config file to {use}; by default {DEFAULT_PATH_HELP}"
    )


def setting(path: str, text: str) -> str:
    """Return the help text of a flag that is a setting, with its variable and key.

    Example:
        >>> setting("process.use_cpu", "use the CPU")
        'use the CPU [ACCELERATE_USE_CPU; key use_cpu]'
    """
    return f"{text} {BY_PATH[path].sources_help}"


def _switch(made: _ActionsContainer, *flags: str, text: str) -> None:
    made.add_argument(*flags, action="store_true", help=text)


def _number(made: _ActionsContainer, flag: str, text: str, metavar: str = "N", **more: Any) -> None:
    made.add_argument(flag, type=count, metavar=metavar, help=text, **more)


def _devices_per_machine(made: _ActionsContainer) -> None:
    _number(made, "--devices_per_machine", "default: %(default)s", default=8)


def config() -> Parser:
    """Build the parser of `accel config`."""
    made = Parser(
        "config",
        "Ask how to launch scripts on this host, and write the answers to a config file. `accel config"
        " default` writes the defaults of this host without questions; `accel config update` rewrites a"
        " file of a legacy format.",
    )
    made.add_argument(
        "action", nargs="?", choices=("default", "update"), help="without an action, questions are asked"
    )
    add_config_file(made, "write, YAML or JSON")
    text = "with `default`: the precision of forward and backward passes (default: no)"
    made.add_argument(
        "--mixed_precision", choices=_PRECISIONS[:3], help=setting("precision.mixed_precision", text)
    )
    return made


def selftest() -> Parser:
    """Build the parser of `accel test`."""
    made = Parser(
        "test",
        "Check in a minute or two whether this host trains correctly with a config: collectives, data"
        " loading, equality with one process, mixed precision, checkpoints, and transfer speeds.",
    )
    add_config_file(made, "test")
    text = "as for accel launch"
    _number(made, "--num_processes", setting("launch.num_processes", f"{text}, instead of the config's"))
    _switch(made, "--cpu", text=setting("process.use_cpu", f"{text}: use the CPU"))
    made.add_argument(
        "--mixed_precision", choices=_PRECISIONS, help=setting("precision.mixed_precision", text)
    )
    text = (
        "stop the processes after so many seconds; they wait for each other for a third of that (default:"
        " %(default)s)"
    )
    _number(made, "--timeout", text, metavar="SECONDS", default=300)
    _switch(made, "--json", text="write the results as JSON")
    made.add_argument("--html", metavar="FILE", help="also write a report with charts; it opens offline")
    _switch(made, "--quiet", "-q", text="show only failures")
    return made


def env() -> Parser:
    """Build the parser of `accel env`."""
    made = Parser(
        "env", "Show what a bug report needs: versions, devices, launcher and settings; no secrets."
    )
    add_config_file(made, "read")
    _switch(made, "--json", text="write JSON instead of text")
    return made


def estimate() -> Parser:
    """Build the parser of `accel estimate-memory`."""
    made = Parser(
        "estimate-memory",
        "Estimate the memory of a model: its weights by dtype, and its training on each device by strategy."
        " Nothing is loaded or computed.",
    )
    made.add_argument(
        "model_name",
        help="a folder or file with weights, a transformers configuration (config.json), or the id of a model"
        " on the hub, which is looked for in the local cache first",
    )
    model = made.add_argument_group("the model")
    model.add_argument(
        "--library_name", choices=("timm", "transformers"), help="the library that defines the model"
    )
    text = "the dtypes of the weights to list (default: all)"
    model.add_argument("--dtypes", nargs="+", choices=DTYPES, default=[*DTYPES], help=text)
    _switch(model, "--trust_remote_code", text="run the code that comes with a model from the hub")
    _add_training(made)
    output = made.add_argument_group("output")
    _switch(output, "--json", text="write JSON, in bytes")
    output.add_argument(
        "--plot",
        metavar="FILE",
        help="also draw a picture (.svg, .png, .pdf): memory by strategy; with --batch_size over the passes;"
        " with --memory the device map of inference",
    )
    _switch(output, "--quiet", "-q", text="show the numbers without the notes")
    return made


def _add_training(made: Parser) -> None:
    training = made.add_argument_group("training")
    _number(training, "--num_devices", "number of devices (default: 1)")
    text = "memory of each device, as in 80GiB; suggests what fits"
    training.add_argument("--memory", type=size, metavar="SIZE", help=text)
    text = "main memory of each node, for offloading"
    training.add_argument("--host_memory", type=size, metavar="SIZE", help=text)
    _devices_per_machine(training)
    text = "precision of forward and backward passes; fp8 stores what bf16 does (default: %(default)s)"
    training.add_argument("--mixed_precision", choices=_PRECISIONS, default="bf16", help=text)
    _number(training, "--batch_size", "samples per device and micro-batch; adds the activations")
    _number(training, "--sequence_length", "tokens (default: %(default)s)", default=512)
    sizes = {"tp_degree": "tensor", "pp_degree": "pipeline", "context_parallel_size": "context"}
    for flag, what in sizes.items():
        _number(training, f"--megatron_lm_{flag}", f"{what}-parallel size; adds the rows of Megatron")
    text = "recompute the activations of blocks in the backward pass"
    _switch(training, "--gradient_checkpointing", text=text)


def check() -> Parser:
    """Build the parser of `accel check`."""
    made = Parser(
        "check",
        "Run a script for a few batches as selected ranks of a job, without devices, weights or the other"
        " processes, and report: the settings, the memory of each rank, collectives that a rank would miss,"
        " and the files of a checkpoint.",
        "Settings may be given by the flags of `accel launch`, too.",
    )
    _number(made, "--world", "world size (default: that of the settings, else 2)")
    made.add_argument("--memory", type=size, metavar="SIZE", help="memory of each device, as in 80GiB")
    _devices_per_machine(made)
    _number(made, "--batches", "batches of every loader (default: %(default)s)", default=3)
    made.add_argument(
        "--ranks",
        metavar="LIST",
        help="the ranks to check, as 0,1,127; by default the first, the second, the first of the second"
        " node, and the last",
    )
    _number(made, "--timeout", "for each rank (default: %(default)s)", "SECONDS", default=600)
    add_config_file(made, "use")
    _switch(made, "--json", text="write the findings as JSON")
    made.add_argument(
        "--html", metavar="FILE", help="also write a report: collectives and memory by rank; it opens offline"
    )
    _switch(made, "--quiet", "-q", text="show only problems")
    for flag, row in FLAGS.items():
        if row.option is not None and flag not in made.flags:
            const: dict[str, Any] = {} if row.const is None else {"nargs": 0, "const": row.const}
            made.add_argument(
                flag, action=_Setting, row=row.option, default={}, dest="settings", help=SUPPRESS, **const
            )
    made.add_argument("script", help="the script")
    made.add_argument("script_arguments", nargs=REMAINDER, help="its arguments")
    return made


def merge() -> Parser:
    """Build the parser of `accel merge-weights`."""
    made = Parser(
        "merge-weights",
        "Merge a sharded checkpoint of FSDP or torch.distributed.checkpoint into full weights.",
    )
    made.add_argument(
        "checkpoint_directory",
        help="the folder of shards (it holds .metadata), or a checkpoint of save_state that holds one",
    )
    made.add_argument("output_path", help="the folder to write to")
    _switch(made, "--unsafe_serialization", text="write pytorch_model.bin rather than safetensors")
    _switch(made, "--remove_checkpoint_dir", text="delete the shards once the merged weights are written")
    _switch(made, "--quiet", "-q", text="print nothing on success")
    return made


def to_fsdp2() -> Parser:
    """Build the parser of `accel to-fsdp2`."""
    made = Parser("to-fsdp2", "Rewrite a config file for FSDP (version 1) as one for FSDP2.")
    add_config_file(made, "read")
    made.add_argument("--output_file", metavar="FILE", help="the file to write")
    _switch(made, "--overwrite", text="replace the file that is read, or the output file")
    _switch(made, "--quiet", "-q", text="do not print the changes")
    return made


def tpu() -> Parser:
    """Build the parser of `accel tpu-config`."""
    made = Parser("tpu-config", "Run commands on all hosts of a Google Cloud TPU pod before training.")
    where = made.add_argument_group("the pod (defaults come from the config file)")
    add_config_file(where, "read")
    where.add_argument("--tpu_name", metavar="NAME", help="the name of the TPU [key tpu_name]")
    where.add_argument("--tpu_zone", metavar="ZONE", help="its zone [key tpu_zone]")
    _switch(where, "--use_alpha", text="use `gcloud alpha`")
    what = made.add_argument_group("what to run")
    what.add_argument("--command_file", metavar="FILE", help="a file of commands [key command_file]")
    text = "a command; may be repeated [key commands]"
    what.add_argument("--command", action="append", nargs="+", metavar="COMMAND", help=text)
    _switch(what, "--install_accelerate", text="first install accel on the pod")
    text = "the version of accel to install (default: %(default)s)"
    what.add_argument("--accelerate_version", default="latest", metavar="VERSION", help=text)
    _switch(made, "--debug", text="show the command line, and run nothing")
    return made


def completion() -> Parser:
    """Build the parser of `accel completion`."""
    made = Parser(
        "completion", "Write a completion script of accel's commands and flags for a shell.", _EPILOG
    )
    made.add_argument("shell", choices=("bash", "zsh", "fish"))
    return made
