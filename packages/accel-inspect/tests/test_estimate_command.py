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


def test_the_command_shows_weights_and_which_strategies_fit(folder, capsys):
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
        part for part in ("float16", "int4", "DDP", "FSDP2", "ZeRO-3", "verdict", "fits") if part not in shown
    ] == []
    assert "float32" not in shown.partition("training with Adam on")[0]


def test_the_command_says_that_no_strategy_fits(folder, capsys):
    line = ["estimate-memory", str(folder), "--num_devices", "2", "--memory", "1000B", "--host_memory", "1B"]
    assert main([*line, "--quiet"]) == 0
    table = capsys.readouterr().out.partition("training with Adam on")[2]
    assert "too large" in table
    assert "fits" not in table


def test_the_numbers_come_as_json_too(folder, capsys):
    assert main(["estimate-memory", str(folder), "--json", "--num_devices", "2", "--memory", "1GB"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["weights"]["float32"]["total"] == 4 * 100 + 80
    parts = facts["training"]["DDP"]["parts"]
    assert facts["training"]["DDP"]["device"] == sum(parts.values())


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--memory", "much"], "--memory"),
        (["--batch_size", "2"], "--batch_size"),
        (["--dtypes", "float64"], "float64"),
        (["--num_devices", "none"], "--num_devices"),
        (["--megatron_lm_tp_degree", "2"], "--megatron_lm_tp_degree"),
    ],
)
def test_a_value_that_cannot_be_used_is_reported_with_its_flag(folder, words, part, capsys):
    assert main(["estimate-memory", str(folder), *words]) == 2
    assert part in capsys.readouterr().err
