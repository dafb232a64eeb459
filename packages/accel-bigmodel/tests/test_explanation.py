"""What a device map puts where."""

from __future__ import annotations

from torch import nn

from accel_bigmodel import explain


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.layers[2].weight = self.first.weight  # tied


MAP = {"first": 0, "layers.2.weight": 0, "layers.0": "cpu", "layers.1": "disk", "layers.2": 0}
LINEAR, BIAS = 4 * (16 * 16 + 16), 4 * 16


def test_the_bytes_of_entries_add_up_and_a_tied_tensor_counts_once():
    explanation = explain(MAP, Model())
    assert [row.entries for row in explanation.rows] == [
        ("first", "layers.2.weight", "layers.2"),
        ("layers.0",),
        ("layers.1",),
    ]
    assert [row.nbytes for row in explanation.rows] == [LINEAR + BIAS, LINEAR, LINEAR]
    assert [row.moved for row in explanation.rows] == [0, LINEAR, LINEAR]
