"""Compare the lines of code of each package (no blanks, comments, docstrings) with tools/budgets.toml.

    uv run tools/budgets.py           fail if a package or the tools have more than their budget
    uv run tools/budgets.py --lower   also lower each budget to what is there now

A budget is a ceiling that falls with the code: raise one only with a reason in the commit.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUDGETS = Path(__file__).with_suffix(".toml")
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


def main(argv: list[str] | None = None) -> int:
    """Print what is over its budget; return 1 if anything is."""
    parser = argparse.ArgumentParser(description="Compare lines of code with their budgets.")
    parser.add_argument("--lower", action="store_true", help="lower each budget to what is there now")
    lower = parser.parse_args(argv).lower
    budgets: dict[str, int] = tomllib.loads(BUDGETS.read_text())["code"]
    folders = {path.parent.name: path for path in ROOT.glob("packages/*/src")} | {"tools": ROOT / "tools"}
    lines = {name: sum(map(code_lines, path.rglob("*.py"))) for name, path in folders.items()}
    over = {name: number for name, number in lines.items() if number > budgets.get(name, 0)}
    for name, number in sorted(over.items()):
        print(f"{name} has {number} lines of code, and a budget of {budgets.get(name, 0)} in {BUDGETS.name}")
    if lower:
        rows = (
            f"{name} = {min(number, budgets.get(name, number))}" for name, number in sorted(lines.items())
        )
        BUDGETS.write_text("\n".join(("[code]", *rows, "")))
    return int(bool(over))


def code_lines(path: Path) -> int:
    """Return the lines of a file that hold code.

    Example:
        >>> code_lines(Path(__file__)) > 30
        True
    """
    text = path.read_text()
    strings = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = {
        line
        for token in tokens
        if token.type not in NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(code - strings)


if __name__ == "__main__":
    sys.exit(main())
