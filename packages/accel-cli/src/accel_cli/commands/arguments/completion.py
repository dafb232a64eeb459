"""Parser of `accel completion`."""

from __future__ import annotations

from accel_cli.commands.arguments.parser import Parser

SHELLS = ("bash", "zsh", "fish")

_EPILOG = (
    'bash: eval "$(accel completion bash)" in ~/.bashrc; zsh: eval "$(accel completion zsh)" in ~/.zshrc,'
    " after compinit; fish: accel completion fish > ~/.config/fish/completions/accel.fish"
)


def parser() -> Parser:
    """Build the parser."""
    made = Parser(
        "completion", "Write a completion script of accel's commands and flags for a shell.", _EPILOG
    )
    made.add_argument("shell", choices=SHELLS)
    return made
