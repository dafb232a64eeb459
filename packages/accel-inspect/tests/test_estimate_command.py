from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from accel_cli.main import main
from accel_ops.weights.write import save_state_dict


@pytest.fixture
def folder(tmp_path):
    """Weights in several files, with blocks under numbers and a buffer of integers."""
    model = nn.ModuleDict(
        {"embed": nn.Embedding(10, 4), "layers": nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])}
    )
    model.register_buffer("ids", torch.arange(10))
    save_state_dict(model.state_dict(), tmp_path / "weights", max_shard_size=200)
    return tmp_path / "weights"


def test_the_command_shows_weights_strategies_and_a_suggestion(folder, capsys):
    line = [
        "estimate-memory",
        str(folder),
        "--num-devices",
        "4",
        "--memory",
        "1GB",
        "--dtypes",
        "float16",
        "int4",
    ]
    assert main(line) == 0
    shown = capsys.readouterr().out
    assert [
        part
        for part in ("float16", "int4", "DDP", "FSDP2", "ZeRO-3", "suggested", "MULTI_GPU")
        if part not in shown
    ] == []
    assert "float32" not in shown.partition("training with Adam on")[0]


def test_the_command_says_on_how_many_devices_a_model_would_fit(folder, capsys):
    assert (
        main(
            [
                "estimate-memory",
                str(folder),
                "--num_devices",
                "2",
                "--memory",
                "1000B",
                "--host_memory",
                "1B",
                "--quiet",
            ]
        )
        == 0
    )
    assert "FSDP2 would fit on 4 devices" in capsys.readouterr().out


def test_the_numbers_come_as_json_too(folder, capsys):
    assert main(["estimate-memory", str(folder), "--json", "--num_devices", "2", "--memory", "1GB"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["weights"]["float32"]["total"] == 4 * 100 + 80
    assert facts["suggestion"]["config"]["num_processes"] == 2
    parts = facts["training"]["DDP"]["parts"]
    assert facts["training"]["DDP"]["device"] == sum(parts.values())


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--memory", "much"], "--memory"),
        (["--batch_size", "2"], "--batch_size"),
        (["--dtypes", "float64"], "float64"),
        (["--num_devices", "none"], "--num_devices"),
    ],
)
def test_a_value_that_cannot_be_used_is_reported_with_its_flag(folder, words, part, capsys):
    assert main(["estimate-memory", str(folder), *words]) == 2
    assert part in capsys.readouterr().err
