"""Terminal menus and questions for programs that use the helpers of `accelerate config`.

They are imported as `accelerate.commands.menu` and `accelerate.commands.config.config_utils`; `accel config`
itself asks with questionary.
"""

from __future__ import annotations

import os
import shutil
import string
import sys
import termios
import tty
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

from accel_state.labels import (
    DYNAMO_BACKENDS,
    ComputeEnvironment,
    DistributedType,
    DynamoBackend,
    FP8BackendType,
    PrecisionType,
    SageMakerDistributedType,
)

ARROW_KEY_FLAG = 1 << 8
"""The offset added to the code of the last letter of an arrow key's sequence."""

KEYMAP = {
    "tab": ord("\t"),
    "newline": ord("\r"),
    "esc": 27,
    "up": 65 + ARROW_KEY_FLAG,
    "down": 66 + ARROW_KEY_FLAG,
    "right": 67 + ARROW_KEY_FLAG,
    "left": 68 + ARROW_KEY_FLAG,
    "mod_int": 91,
    "undefined": sys.maxsize,
    "interrupt": 3,
    "insert": 50,
    "delete": 51,
    "pg_up": 53,
    "pg_down": 54,
    "arrow_begin": 65 + ARROW_KEY_FLAG,
    "arrow_end": 68 + ARROW_KEY_FLAG,
    **{digit: ord(digit) for digit in string.digits},
}
"""Codes of keys by name."""

CURSOR_TO_CHAR = {"UP": "A", "DOWN": "B", "RIGHT": "C", "LEFT": "D"}
"""The last letters of the sequences that move the cursor."""

TERMINAL_WIDTH, TERMINAL_HEIGHT = shutil.get_terminal_size()


class Direction(Enum):
    """The direction in which a selection moves."""

    UP = 0
    DOWN = 1


def forceWrite(content: object, end: str = "") -> None:  # noqa: N802 - the name that programs call
    """Write to the terminal and flush."""
    sys.stdout.write(f"{content}{end}")
    sys.stdout.flush()


def writeColor(content: object, color: object, end: str = "") -> None:  # noqa: N802 - the name that programs call
    """Write in a color, such as `32` for green."""
    forceWrite(f"\x1b[{color}m{content}\x1b[0m", end)


def reset_cursor() -> None:
    """Move the cursor to the start of its line."""
    forceWrite("\r")


def clear_line() -> None:
    """Blank the line of the cursor."""
    forceWrite(" " * TERMINAL_WIDTH)
    reset_cursor()


def linebreak() -> None:
    """Draw a line."""
    reset_cursor()
    forceWrite("-" * TERMINAL_WIDTH)


def move_cursor(num_lines: int, direction: str) -> None:
    """Move the cursor `"up"`, `"down"`, `"left"` or `"right"`."""
    forceWrite(f"\x1b[{num_lines}{CURSOR_TO_CHAR[direction.upper()]}")


def hide_cursor() -> None:
    """Hide the cursor of the terminal."""
    forceWrite("\x1b[?25l")


def show_cursor() -> None:
    """Show the cursor of the terminal."""
    forceWrite("\x1b[?25h")


@contextmanager
def hide() -> Generator[None]:
    """Hide the cursor in the block."""
    hide_cursor()
    try:
        yield
    finally:
        show_cursor()


def get_raw_chars() -> str:
    """Wait for a key, and return the characters that it sends."""
    descriptor = sys.stdin.fileno()
    settings = termios.tcgetattr(descriptor)
    try:
        tty.setraw(descriptor)
        characters = os.read(descriptor, 8)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, settings)
    return characters.decode(errors="replace")


def get_character() -> str:
    """Wait for a key, and return the character of its code in `KEYMAP`."""
    characters = get_raw_chars()
    if len(characters) == 3 and characters.startswith("\x1b[") and characters[2] in CURSOR_TO_CHAR.values():
        return chr(ord(characters[2]) + ARROW_KEY_FLAG)
    return characters if len(characters) == 1 else chr(KEYMAP["esc"])


def mark(key: str) -> Callable[[Any], Any]:
    """Decorate the method that handles a key, in a class decorated with `register`."""
    return mark_multiple(key)


def mark_multiple(*keys: Any) -> Callable[[Any], Any]:
    """Decorate the method that handles several keys."""

    def decorate(function: Any) -> Any:
        function.handle_key = [*getattr(function, "handle_key", []), *keys]
        return function

    return decorate


class KeyHandler(type):
    """Metaclass that collects the marked methods of a class in `key_handler`, by key."""

    def __new__(cls, name: str, bases: tuple[type, ...], attrs: dict[str, Any]) -> KeyHandler:
        """Create the class."""
        made = super().__new__(cls, name, bases, attrs)
        handlers = dict(getattr(made, "key_handler", {}))
        for function in attrs.values():
            handlers.update(dict.fromkeys(getattr(function, "handle_key", ()), function))
        made.key_handler = handlers  # pyright: ignore[reportAttributeAccessIssue]
        made.handle_input = handle_input  # pyright: ignore[reportAttributeAccessIssue]
        return made


def handle_input(menu: Any) -> Any:
    """Wait for a key, call its method and return the result; None if no method handles the key."""
    key = ord(get_character())
    handler = type(menu).key_handler.get(key)
    menu.current_selection = key
    return None if handler is None else handler(menu)


def register(cls: type) -> KeyHandler:
    """Decorate a class so that it handles keys."""
    attributes = {name: value for name, value in vars(cls).items() if name not in {"__dict__", "__weakref__"}}
    return KeyHandler(cls.__name__, cls.__bases__, attributes)


in_colab = "google.colab" in sys.modules
"""Whether this process is a notebook of Google Colab, where a menu asks for a number."""


class BulletMenu:
    """A menu of choices, from which the user selects with arrow keys or a number and Enter.

    Args:
        prompt: The question.
        choices: The answers.
    """

    def __init__(self, prompt: str | None = None, choices: Sequence[Any] = ()) -> None:
        self.prompt = prompt
        self.choices = list(choices)
        self.position = 0

    def run(self, default_choice: int = 0) -> int:
        """Ask, and return the index of the choice.

        Args:
            default_choice: The index selected first, and the answer if there is no terminal and no input.
        """
        forceWrite(self.prompt or "", "\n")
        self.position = default_choice
        if not sys.stdin.isatty() or in_colab:
            return self._ask_number(default_choice)
        with hide():
            self._draw()
            while (key := ord(get_character())) != KEYMAP["newline"]:
                self._handle(key)
                move_cursor(len(self.choices), "up")
                self._draw()
        return self.position

    def _ask_number(self, default_choice: int) -> int:
        for index, choice in enumerate(self.choices):
            forceWrite(f"{index}: {choice}", "\n")
        text = input(f"Enter a number [{default_choice}]: ").strip()
        return int(text) if text else default_choice

    def _draw(self) -> None:
        for index, choice in enumerate(self.choices):
            clear_line()
            if index == self.position:
                writeColor(f" ➔  {choice}", 32, "\n")
            else:
                forceWrite(f"    {choice}", "\n")

    def _handle(self, key: int) -> None:
        if key == KEYMAP["interrupt"]:
            raise KeyboardInterrupt
        if key == KEYMAP["up"]:
            self.position = max(self.position - 1, 0)
        elif key == KEYMAP["down"]:
            self.position = min(self.position + 1, len(self.choices) - 1)
        elif chr(key).isdigit() and int(chr(key)) < len(self.choices):
            self.position = int(chr(key))


def _ask_field(  # pyright: ignore[reportUnusedFunction]
    input_text: str,
    convert_value: Callable[[str], Any] | None = None,
    default: Any = None,
    error_message: str | None = None,
) -> Any:
    """Ask for a value until it can be converted.

    Args:
        input_text: The question.
        convert_value: Converts the answer; the question is repeated if it raises.
        default: The value of an empty answer.
        error_message: The text printed if it raises.
    """
    while True:
        text = input(input_text)
        if default is not None and not text:
            return default
        try:
            return text if convert_value is None else convert_value(text)
        except (ValueError, KeyError, IndexError):
            if error_message is not None:
                forceWrite(error_message, "\n")


def _ask_options(  # pyright: ignore[reportUnusedFunction]
    input_text: str,
    options: Sequence[Any] = (),
    convert_value: Callable[[int], Any] | None = None,
    default: int = 0,
) -> Any:
    """Ask with a menu; return the index, converted if there is a conversion."""
    answer = BulletMenu(input_text, options).run(default_choice=default)
    return answer if convert_value is None else convert_value(answer)


def _pick(values: Sequence[Any]) -> Callable[[Any], Any]:
    """Create a function that returns a value by its index, which may be text."""

    def convert(value: Any) -> Any:
        """Return the value of an index."""
        return values[int(value)]

    return convert


_convert_compute_environment = _pick([ComputeEnvironment.LOCAL_MACHINE, ComputeEnvironment.AMAZON_SAGEMAKER])
_convert_distributed_mode = _pick(
    [
        DistributedType.NO,
        *(
            DistributedType(f"MULTI_{kind}")
            for kind in ("CPU", "XPU", "HPU", "GPU", "NPU", "MLU", "SDAA", "MUSA", "NEURON")
        ),
        DistributedType.XLA,
    ]
)
_convert_dynamo_backend = _pick([DynamoBackend(name).value for name in DYNAMO_BACKENDS])
_convert_fp8_backend = _pick([FP8BackendType.AO, FP8BackendType.TE, FP8BackendType.MSAMP])
_convert_mixed_precision = _pick(
    [PrecisionType.NO, PrecisionType.FP16, PrecisionType.BF16, PrecisionType.FP8]
)
_convert_sagemaker_distributed_mode = _pick(
    [
        SageMakerDistributedType.NO,
        SageMakerDistributedType.DATA_PARALLEL,
        SageMakerDistributedType.MODEL_PARALLEL,
    ]
)


def _convert_yes_no_to_bool(value: str) -> bool:  # pyright: ignore[reportUnusedFunction]
    """Return whether an answer is yes; `KeyError` if it is neither yes nor no."""
    return {"yes": True, "no": False}[value.lower()]
