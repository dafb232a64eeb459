"""What repositories import, read and replace of `accelerate` works on accel as on the reference.

names_in_use.json says of repositories, by a scan of their sources, what they import of `accelerate`, which
attributes they use and what they replace. One program replays the table on both libraries, in one process and
on two ranks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness import chosen_params
from harness.clients import run_client

if TYPE_CHECKING:
    from collections.abc import Iterator

TABLE = Path(__file__).parent / "names_in_use.json"
PAGE = Path(__file__).parents[2] / "packages/accel-suite/docs/guides/coming-from-accelerate.md"
PROGRAM = Path(__file__).parent / "programs" / "probe.py"
KINDS = ("imports", "attrs", "patches")
NAMES: dict[str, dict[str, list[str]]] = json.loads(TABLE.read_text())
REPOSITORIES = sorted({user for kind in KINDS for users in NAMES[kind].values() for user in users})

SHARDED = {
    "accelerate.accelerator.Accelerator._prepare_fsdp2",
    "accelerate.accelerator.fsdp2_prepare_model",
    "accelerate.utils.fsdp_utils.fsdp2_prepare_model",
}
"""What FSDP2 calls on two ranks; the reference does not shard on the CPU, and cannot tell."""


@pytest.fixture(scope="module")
def replayed(
    request: pytest.FixtureRequest, python: Path, clients_environ: dict[str, str], tmp_path_factory: Any
) -> dict[tuple[int, str], dict[str, Any]]:
    """What happened, by number of ranks and library."""
    folder = tmp_path_factory.mktemp("replayed")
    chosen = {params["ranks"] for params in chosen_params(request)}
    happened = {}
    for ranks in sorted(chosen):
        for on_accel in (False, True):
            out = folder / f"{ranks}_{on_accel}.json"
            run_client(
                python,
                PROGRAM,
                str(out),
                str(TABLE),
                ranks=ranks,
                on_accel=on_accel,
                environ=clients_environ,
                folder=folder,
            )
            outcome = json.loads(out.read_text())
            assert outcome["library"] == ("accel_state" if on_accel else "accelerate")
            happened[ranks, "accel" if on_accel else "reference"] = outcome
    return happened


def _cases() -> Iterator[Any]:
    for repository in REPOSITORIES:
        yield pytest.param(1, repository)
        yield pytest.param(2, repository, marks=pytest.mark.thorough)


@pytest.mark.parametrize(("ranks", "repository"), [*_cases()])
def test_what_works_on_the_reference_works_on_accel(
    ranks: int, repository: str, replayed: dict[tuple[int, str], dict[str, Any]]
) -> None:
    reference, accel = replayed[ranks, "reference"], replayed[ranks, "accel"]
    for kind in KINDS:
        rows = [name for name, users in NAMES[kind].items() if repository in users]
        failed = {name: accel[kind][name] for name in rows if not reference[kind][name] and accel[kind][name]}
        assert not failed, kind
    replaced = {name for name, users in NAMES["patches"].items() if repository in users}
    assert not replaced & uncalled(ranks, replayed), "replacements without effect"
    assert not [error for error in accel["runs"].values() if error]


def uncalled(ranks: int, replayed: dict[tuple[int, str], dict[str, Any]]) -> set[str]:
    """Return the replacements that the reference calls and accel does not."""
    expected = {*replayed[ranks, "reference"]["called"], *(SHARDED if ranks > 1 else ())}
    return expected - {*replayed[ranks, "accel"]["called"]}


@pytest.mark.parametrize("ranks", [1])
def test_the_page_says_of_each_repository_what_was_replayed(
    ranks: int, replayed: dict[tuple[int, str], dict[str, Any]]
) -> None:
    reference, accel = replayed[ranks, "reference"], replayed[ranks, "accel"]
    rows = [line.split("|")[1:5] for line in PAGE.read_text().splitlines() if line.count("|") == 6]
    said = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}
    for repository in REPOSITORIES:
        counts: list[str] = []
        for kind in KINDS:
            works = [
                not accel[kind][name]
                for name, users in NAMES[kind].items()
                if repository in users and not reference[kind][name]
            ]
            counts.append(f"{sum(works)} of {len(works)}" if works else "none")
        assert said[repository] == counts, repository
