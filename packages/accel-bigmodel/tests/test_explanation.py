"""Device maps and load reports as pictures and as HTML."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from accel_bigmodel import explain
from accel_bigmodel.load import FileReport, LoadReport


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
    assert [row.entry_nbytes for row in explanation.rows] == [(LINEAR, 0, BIAS), (LINEAR,), (LINEAR,)]
    assert all(sum(row.entry_nbytes) == row.nbytes for row in explanation.rows)


def test_a_device_map_is_drawn_with_a_bar_for_each_device(tmp_path):
    pytest.importorskip("matplotlib")
    explanation = explain(MAP, Model())
    figure = explanation.plot(tmp_path / "map.svg")
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "cpu", "disk"]
    assert sum(bar.get_width() for bar in axes.patches) == explanation.total
    assert {"first", "layers.0", "layers.1"} <= {text.get_text() for text in axes.texts}
    assert (tmp_path / "map.svg").read_text().startswith("<?xml")


def test_a_device_map_is_a_table_in_a_notebook():
    html = explain({"": "cpu"}, nn.Linear(16, 16))._repr_html_()
    assert "<th>moved per forward</th>" in html
    assert "<td>the model</td>" in html


def test_a_load_report_is_a_table_in_a_notebook_and_names_are_escaped():
    file = FileReport(path=Path("a<b>.safetensors"), strategies={"map": 2048}, seconds=1e-6)
    html = LoadReport(files=(file,), seconds=0.5, peak=1024)._repr_html_()
    assert "<td>a&lt;b&gt;.safetensors</td><td>2.0 KB</td><td>map</td>" in html
