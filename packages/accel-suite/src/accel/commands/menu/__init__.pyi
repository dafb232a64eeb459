# fmt: off
# ruff: noqa: A004
from accel.commands.menu import (
    cursor as cursor, helpers as helpers, input as input, keymap as keymap,
    selection_menu as selection_menu,
)
