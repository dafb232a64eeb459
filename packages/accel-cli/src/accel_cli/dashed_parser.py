"""A parser whose flags may be spelled with dashes or underscores, for programs that extend commands."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser, HelpFormatter, RawDescriptionHelpFormatter
from typing import Any


def clean_option(option: str) -> str:
    """Return the namespace attribute of a flag.

    Example:
        >>> clean_option("--num-processes")
        'num_processes'
    """
    return option.lstrip("-").replace("-", "_") if option.startswith("--") else option


options_to_group = {
    "multi_gpu": "Distributed GPUs",
    "tpu": "TPU",
    "use_deepspeed": "DeepSpeed Arguments",
    "use_fsdp": "FSDP Arguments",
    "use_megatron_lm": "Megatron-LM Arguments",
    "fp8_backend": "FP8 Arguments",
}
"""The help group that each flag needs."""


def _spellings(options: tuple[str, ...]) -> list[str]:
    """Return flags with dashes and with underscores, each once."""
    both: list[str] = []
    for option in options:
        both.append(option)
        if option.startswith("--"):
            both += [f"--{option[2:].replace('_', '-')}", f"--{option[2:].replace('-', '_')}"]
    return list(dict.fromkeys(both))


class _StoreAction(argparse._StoreAction):  # pyright: ignore[reportPrivateUsage, reportUnusedClass]
    """Store a value; the flag may have dashes or underscores."""

    def __init__(self, option_strings: Any, dest: str, **options: Any) -> None:
        super().__init__(_spellings(tuple(option_strings)), dest, **options)


class _StoreConstAction(argparse._StoreConstAction):  # pyright: ignore[reportPrivateUsage]
    """Store a constant; the flag may have dashes or underscores."""

    def __init__(self, option_strings: Any, dest: str, const: Any, **options: Any) -> None:
        super().__init__(_spellings(tuple(option_strings)), dest, const, **options)


class _StoreTrueAction(_StoreConstAction):  # pyright: ignore[reportUnusedClass]
    """Store true; the flag may have dashes or underscores."""

    def __init__(self, option_strings: Any, dest: str, default: Any = None, **options: Any) -> None:
        super().__init__(option_strings, dest, const=True, default=default, **options)


class CustomArgumentGroup(argparse._ArgumentGroup):  # pyright: ignore[reportPrivateUsage]
    """A group of flags that may have dashes or underscores."""

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        """Add a flag."""
        return super().add_argument(*_spellings(args), **kwargs)


class CustomArgumentParser(ArgumentParser):
    """A parser of flags that may have dashes or underscores.

    Example:
        >>> parser = CustomArgumentParser()
        >>> _ = parser.add_argument("--main_port", type=int)
        >>> parser.parse_args(["--main-port", "3"]).main_port
        3
    """

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        """Add a flag."""
        return super().add_argument(*_spellings(args), **kwargs)

    def add_argument_group(self, *args: Any, **kwargs: Any) -> CustomArgumentGroup:
        """Add a group of flags."""
        group = CustomArgumentGroup(self, *args, **kwargs)
        self._action_groups.append(group)
        return group


class SubcommandHelpFormatter(RawDescriptionHelpFormatter):
    """A help formatter that omits the usage of a subcommand."""

    def _format_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any) -> str:
        text = super()._format_usage(usage, actions, groups, prefix)
        return text.replace("<command> [<args>] ", "")


class CustomHelpFormatter(HelpFormatter):
    """A help formatter with room for long flags."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"max_help_position": 40, **kwargs})
