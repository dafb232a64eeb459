"""What the trainers start from and what they leave behind: files, as with their users."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TIMES = ("time", "speed", "per_second", "per_sec", "flos", "memory", "epoch_s")
"""Parts of the names of what differs from run to run."""


def write_once(path: Path, write: Callable[[], object]) -> str:
    """Let the first rank write a file or a folder while the others wait for it; return where it is.

    If each rank wrote, a trainer on one could read what another has just emptied.
    """
    done = path.parent / f"{path.name}.written"
    if os.environ.get("RANK", "0") == "0":
        path.parent.mkdir(parents=True, exist_ok=True)
        write()
        done.touch()
    while not done.exists():
        time.sleep(0.01)
    return str(path)


def save_model(folder: Path, width: int = 32) -> str:
    """Save a small language model with its tokenizer; return where.

    The tokenizer has a chat template, and its class a name that all versions of transformers know.
    """
    return write_once(folder / "model", lambda: _save_model(folder, width))


def _save_model(folder: Path, width: int) -> None:
    from small import language_model, tokenizer  # not every trainer has transformers

    words = tokenizer()
    words.chat_template = (
        "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'w0 ' }}{% endif %}"
    )
    language_model(width=width).save_pretrained(folder / "model")
    words.save_pretrained(folder / "model")
    path = folder / "model" / "tokenizer_config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "tokenizer_class": "PreTrainedTokenizerFast"})
    )


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    """Write rows as JSON lines; return where."""
    return write_once(path, lambda: path.write_text("".join(json.dumps(row) + "\n" for row in rows)))


def conversations(size: int) -> list[dict[str, Any]]:
    """Make questions with answers of different lengths."""
    from small import text

    return [
        {
            "messages": [
                {"role": "user", "content": text(index, 4 + index % 3)},
                {"role": "assistant", "content": text(100 + index, 5 + index % 4)},
            ]
        }
        for index in range(size)
    ]


def training_log(folder: Path) -> list[dict[str, Any]]:
    """Read what transformers' Trainer logged in its newest checkpoint below a folder."""
    newest = max(folder.rglob("trainer_state.json"), key=lambda path: path.stat().st_mtime_ns)
    history = json.loads(newest.read_text())["log_history"]
    return [
        {key: value for key, value in entry.items() if not any(word in key for word in TIMES)}
        for entry in history
    ]


def saved_weights(folder: Path) -> dict[str, Any]:
    """Read all weights directly in a folder."""
    return {
        name: value.float()
        for path in sorted(folder.glob("*.safetensors"))
        for name, value in load_file(path).items()
    }
