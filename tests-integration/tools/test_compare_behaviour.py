"""Differences from the reference are reported, unless they are intended and documented."""

from __future__ import annotations

from argparse import Namespace

import pytest

import compare_behaviour as tool

ALL = Namespace(only="*", show=False)
NAME = "loaders/iterable[size=1,split=True]"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"raises": "ValueError", "message": "a"}, {"raises": "ValueError", "message": "b"}, True),
        ({"raises": "ValueError", "message": "a"}, {"raises": "TypeError", "message": "a"}, False),
        ([1, 1.0], [1, 1.00001], True),
        ([1, 1.0], [1, 1.0001], False),
        ([1], [True], False),
        ({"a": 1}, {"b": 1}, False),
        ({"tuple": [1]}, [1], False),
        ([[1], []], [[1]], False),
    ],
)
def test_results_are_the_same_up_to_rounding_and_words(one: object, other: object, same: bool) -> None:
    assert tool.same(one, other) is same


def test_a_difference_fails_unless_it_is_intended(capsys: pytest.CaptureFixture[str]) -> None:
    reference, ours = {(2, NAME): [1, 1]}, {(2, NAME): [1, 2]}
    assert tool.report(reference, ours, [], ALL) == 1
    assert f"DIFFERS  2 {NAME}" in capsys.readouterr().out
    covers = tool.Intended(("loaders/iterable[size=1*",), (2,), "Why.")
    assert tool.report(reference, ours, [covers], ALL) == 0
    for idle in (
        tool.Intended(("loaders/iterable*",), (1,), "On one process."),
        tool.Intended(("loaders/iterable[size=2*",), (2,), "Another size."),
    ):
        assert tool.report(reference, ours, [covers, idle], ALL) == 1
        assert "NOT NEEDED" in capsys.readouterr().out
    assert tool.report(reference, reference, [], ALL) == 0


def test_the_page_of_differences_has_every_reason() -> None:
    assert tool.main(["--check"]) == 0, "run tools/compare_behaviour.py --write"
