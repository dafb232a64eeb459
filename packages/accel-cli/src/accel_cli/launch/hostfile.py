"""Files that list machines: of DeepSpeed, with the number of slots of each and filters; of MPI."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from accel_cli.text_file import text_lines
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_MOST_SLOTS = 1 << 16  # more than any machine has; filters name slots one by one
_LINE = re.compile(r"(?P<host>[^\s:=]+)\s+slots\s*=\s*(?P<slots>\d+)\s*")


def read_hosts(file: str, inclusion: str | None = None, exclusion: str | None = None) -> dict[str, int]:
    """Read a hostfile of DeepSpeed.

    Raises:
        SettingsError: The file cannot be used, or a filter names what is not in it.
    """
    return filtered(parse_hosts(text_lines(file, "hostfile"), file), inclusion, exclusion)


def parse_hosts(lines: Sequence[str], source: str) -> dict[str, int]:
    """Read the lines of a hostfile of DeepSpeed.

    Raises:
        SettingsError: A line cannot be read, or a machine occurs twice; the message has its number.

    Example:
        >>> parse_hosts(["worker-1 slots=4", "worker-2 slots=8  # large"], "hosts")
        {'worker-1': 4, 'worker-2': 8}
    """
    found: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _LINE.fullmatch(text)
        if match is None or match["host"] in found:
            expected = "that machine is there already" if match else "expected `<machine> slots=<number>`"
            raise SettingsError(
                f"line {number} of hostfile {source!r} is {line.strip()[:100]!r}: {expected}."
            )
        # Compared as text first: Python refuses to read numbers of thousands of digits.
        if len(match["slots"].lstrip("0")) > 5 or int(match["slots"]) > _MOST_SLOTS:
            raise SettingsError(
                f"line {number} of hostfile {source!r} is {line.strip()[:60]!r}: expected at most "
                f"{_MOST_SLOTS} slots."
            )
        found[match["host"]] = int(match["slots"])
    if not found:
        raise SettingsError(f"hostfile {source!r} names no machine.")
    return found


def filtered(
    hosts: Mapping[str, int], inclusion: str | None = None, exclusion: str | None = None
) -> dict[str, int]:
    """Apply DeepSpeed's filters.

    Args:
        hosts: Machines and their numbers of slots.
        inclusion: Machines that take part, `@` between, each with `:` and its slots if not all do.
        exclusion: The same for what does not take part.

    Raises:
        SettingsError: A filter names a machine or slot that is not there, or leaves none.

    Example:
        >>> hosts = {"a": 4, "b": 4}
        >>> filtered(hosts, inclusion="b:0,2"), filtered(hosts, exclusion="a@b:3")
        ({'b': 2}, {'b': 3})
    """
    slots = {host: set(range(count)) for host, count in hosts.items()}
    if inclusion:
        chosen = _named(inclusion, slots, "inclusion")
        slots = {host: chosen[host] for host in slots if host in chosen}
    if exclusion:
        dropped = _named(exclusion, slots, "exclusion")
        slots = {host: left - dropped.get(host, set()) for host, left in slots.items()}
    result = {host: len(left) for host, left in slots.items() if left}
    if not result:
        raise SettingsError("the filters leave no machine of the hostfile.")
    return result


def _named(text: str, slots: Mapping[str, set[int]], what: str) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for part in text.split("@"):
        host, colon, numbers = part.strip().partition(":")
        if host not in slots:
            raise SettingsError(
                f"the {what} filter {text!r} names the machine {host!r}; the hostfile has {', '.join(slots)}."
            )
        try:
            chosen = {int(number) for number in numbers.split(",")} if colon else slots[host]
        except ValueError:
            raise SettingsError(f"the {what} filter {text!r}: {numbers!r} are no numbers of slots.") from None
        if not chosen <= slots[host]:
            raise SettingsError(
                f"the {what} filter {text!r} names slots of {host!r} that it has not: "
                f"{sorted(chosen - slots[host])}."
            )
        found[host] = found.get(host, set()) | chosen
    return found


def first_machine(file: str) -> str:
    """Return the first machine that a hostfile of MPI lists.

    Raises:
        SettingsError: The file cannot be read, or lists none.
    """
    names = [line.partition("#")[0].split() for line in text_lines(file, "hostfile")]
    found = next((words[0].partition(":")[0] for words in names if words), None)
    if found is None:
        raise SettingsError(f"hostfile {file!r} names no machine.")
    return found
