"""Menus and questions for programs: what is written, which keys are handled, what answers become."""

from __future__ import annotations

import builtins

import pytest

from accel_cli import terminal_menu
from accel_cli.dashed_parser import CustomArgumentParser, clean_option
from accel_cli.terminal_menu import (
    KEYMAP,
    BulletMenu,
    _ask_field,
    _ask_options,
    _convert_distributed_mode,
    _convert_yes_no_to_bool,
)
from accel_state.labels import DistributedType


@pytest.fixture
def answers(monkeypatch):
    """A list of answers that `input` returns in turn."""
    given: list[str] = []
    monkeypatch.setattr(builtins, "input", lambda _="": given.pop(0))
    return given


@pytest.fixture
def keys(monkeypatch):
    """A list of the codes of keys that are pressed in turn."""
    pressed: list[int] = []
    monkeypatch.setattr(terminal_menu, "get_character", lambda: chr(pressed.pop(0)))
    return pressed


def test_the_cursor_is_moved_as_accelerate_does(capsys):
    terminal_menu.move_cursor(2, "up")
    terminal_menu.writeColor("x", 32)
    with terminal_menu.hide():
        pass
    assert capsys.readouterr().out == "\x1b[2A\x1b[32mx\x1b[0m\x1b[?25l\x1b[?25h"


def test_arrow_keys_and_numbers_select(monkeypatch, keys, capsys):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    menu = BulletMenu("which?", ["a", "b", "c"])
    keys += [KEYMAP["down"], KEYMAP["down"], KEYMAP["down"], KEYMAP["up"], KEYMAP["newline"]]
    assert menu.run() == 1
    keys += [ord("2"), KEYMAP["newline"]]
    assert menu.run() == 2
    keys += [KEYMAP["interrupt"]]
    with pytest.raises(KeyboardInterrupt):
        menu.run()
    assert "which?" in capsys.readouterr().out


def test_a_key_of_several_characters_has_its_code(monkeypatch):
    codes = {"\x1b[A": KEYMAP["up"], "\x1b[D": KEYMAP["left"], "\r": KEYMAP["newline"], "\x1b": KEYMAP["esc"]}
    for characters, code in codes.items():
        monkeypatch.setattr(terminal_menu, "get_raw_chars", lambda characters=characters: characters)
        assert ord(terminal_menu.get_character()) == code


def test_marked_methods_handle_their_keys(keys):
    @terminal_menu.register
    class Menu:
        @terminal_menu.mark(5)
        def five(self):
            return "five"

        @terminal_menu.mark_multiple(6, 7)
        def more(self):
            return "more"

    assert sorted(Menu.key_handler) == [5, 6, 7]
    keys += [7, 5, 9]
    menu = Menu()
    assert [menu.handle_input(), menu.handle_input(), menu.handle_input()] == ["more", "five", None]


def test_questions_are_asked_until_the_answer_can_be_converted(answers, capsys):
    answers += ["x", "4", "", "free text"]
    assert _ask_field("?", int, error_message="bad") == 4
    assert _ask_field("?", int, default=3) == 3
    assert _ask_field("?") == "free text"
    assert capsys.readouterr().out == "bad\n"


def test_without_a_terminal_a_menu_asks_for_a_number(answers, monkeypatch):
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    answers += ["1", ""]
    assert _ask_options("?", ["a", "b"], _convert_distributed_mode) is DistributedType.MULTI_CPU
    assert _ask_options("?", ["a", "b"], default=0) == 0


def test_answers_become_the_values_of_accelerate():
    assert _convert_distributed_mode("4") is DistributedType.MULTI_GPU
    assert [_convert_yes_no_to_bool(text) for text in ("yes", "NO")] == [True, False]
    with pytest.raises(KeyError):
        _convert_yes_no_to_bool("y")


def test_flags_may_have_dashes_or_underscores():
    parser = CustomArgumentParser()
    parser.add_argument("--a_b")
    parser.add_argument("--c-d", action="store_true")
    parser.add_argument_group("group").add_argument("--e_f", type=int)
    read = parser.parse_args(["--a-b", "1", "--c_d", "--e-f", "3"])
    assert (read.a_b, read.c_d, read.e_f) == ("1", True, 3)
    assert [clean_option(flag) for flag in ("--a-b-c", "--x")] == ["a_b_c", "x"]
