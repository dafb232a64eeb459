"""What the trainers start from and what they leave behind: files, as with their users."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file
from small import language_model, text, tokenizer

if TYPE_CHECKING:
    from pathlib import Path

TIMES = ("time", "speed", "per_second", "per_sec", "flos", "memory", "epoch_s")
"""Parts of the names of what differs from run to run."""


def save_model(folder: Path) -> str:
    """Save a small language model with its tokenizer; return where.

    The tokenizer has a chat template, and its class a name that all versions of transformers know.
    """
    words = tokenizer()
    words.chat_template = (
        "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'w0 ' }}{% endif %}"
    )
    language_model().save_pretrained(folder / "model")
    words.save_pretrained(folder / "model")
    path = folder / "model" / "tokenizer_config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    return str(folder / "model")


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    """Write rows as JSON lines; return where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def conversations(size: int) -> list[dict[str, Any]]:
    """Make questions with answers of different lengths."""
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
