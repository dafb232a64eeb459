"""Reports of the commands: what they show, and that they open without a network."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("plotly")

from accel_cli.commands import selftest
from accel_cli.commands.check.command import find_problems, write_html
from accel_cli.commands.check.record import RankRecord, RecordedCollective, SelectedStrategy
from accel_cli.commands.estimate.memory import ModelSizes
from accel_cli.commands.selftest import Outcome, RankReport
from accel_cli.html_report import timeline
from accel_state.settings import merge_layers

LOADED = re.compile(r"""<(?:script|link|img)[^>]+(?:src|href)=["']?https?:""")
SIZES = ModelSizes(parameters=10**6, trainable=10**6)


def calls(*kinds):
    return tuple(
        RecordedCollective(kind=kind, where=f"train.py:{line}", nbytes=line * 10**9)
        for line, kind in enumerate(kinds, 1)
    )


def records():
    return [
        RankRecord(
            rank=0,
            strategy=SelectedStrategy(name="DDP"),
            sizes=SIZES,
            events=calls("prepare", "gather", "save_state"),
        ),
        RankRecord(
            rank=1,
            strategy=SelectedStrategy(name="DDP"),
            sizes=SIZES,
            events=calls("prepare", "gather", "<b>"),
        ),
    ]


def test_a_timeline_marks_the_call_at_which_a_rank_differs():
    figure = timeline(records())
    first, other = (trace for trace in figure.data if trace.text)
    assert first.marker.symbol == ("square",) * 3
    assert other.marker.symbol == ("square", "square", "x")
    assert other.text[2] == "<b> at train.py:3"
    memory = [trace for trace in figure.data if trace.mode == "lines+markers"]
    assert [[*trace.y] for trace in memory] == [[1.0, 2.0, 3.0]] * 2


def test_the_report_of_a_check_has_its_problems_and_opens_offline(tmp_path):
    findings = find_problems(records(), merge_layers(), 2, None)
    write_html(tmp_path / "check.html", findings, "train.py", None)
    page = (tmp_path / "check.html").read_text()
    assert "rank 0 calls save_state at train.py:3, while rank 1 calls &lt;b&gt; at train.py:3" in page
    assert page.count("plotly.js v") == 1
    assert not LOADED.search(page)


def test_memory_at_a_call_does_not_make_ranks_differ():
    first, second = (RecordedCollective(kind="gather", where="train.py:1", nbytes=size) for size in (1, 2))
    assert first == second


def test_the_report_of_a_test_has_failures_first(tmp_path):
    outcomes = [
        Outcome(name="collectives", state="passed"),
        Outcome(name="training", state="failed", detail="5 != 4"),
    ]
    report = RankReport(rank=0, world_size=2, facts={"device type": "cpu"}, speeds={"all-reduce": 2e9})
    selftest.write_html(tmp_path / "test.html", outcomes, [report], ["Buy a faster one."])
    page = (tmp_path / "test.html").read_text()
    assert page.index("training: 5 != 4") < page.index("plotly.js v")
    assert "Advice: Buy a faster one." in page
    assert not LOADED.search(page)
