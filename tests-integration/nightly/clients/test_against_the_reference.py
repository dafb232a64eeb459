"""Libraries that import `accelerate`, unchanged: on accel they find what they find on the reference.

Both run in an environment of their own, which holds these libraries and the reference; under accel-compat
`import accelerate` is accel there. They run with `tools/check.py --all`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import chosen_params
from harness.clients import differences, run_client

PROGRAM = Path(__file__).parent / "programs" / "run_cases.py"

ALONE = (
    "trainer:basic",
    "big_models:device_maps",
    "adapters:lora",
    "preferences:sft",
    "diffusion:training",
    "sentences:ranking",
    "sentences:setfit",
    "trainer:accumulated",
    "trainer:best",
    "trainer:resume",
    "trainer:bf16",
    "trainer:iterable",
    "trainer:evaluated",
    "trainer:compiled",
    "big_models:eight_bits",
    "big_models:four_bits",
    "adapters:qlora",
    "adapters:offloaded",
    "preferences:dpo",
    "preferences:grpo",
    "preferences:reward",
    "preferences:command",
    "diffusion:offloaded",
)
TWO_RANKS = (
    "trainer:accumulated",
    "trainer:best",
    "trainer:iterable",
    "trainer:fsdp2",
    "adapters:lora",
    "preferences:sft",
    "preferences:dpo",
    "preferences:reward",
    "diffusion:training",
)
ON_ONE_SIDE = {"trainer:fsdp2": ("files",)}
"""What is not compared: on the CPU the reference shards nothing, and has no files of FSDP."""


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, python: Path, clients_environ: dict[str, str], tmp_path_factory: Any
) -> dict[str, Any]:
    """What the cases that were chosen find, by library and number of ranks; all of them run at once."""
    folder = tmp_path_factory.mktemp("found")
    chosen: dict[int, list[str]] = {}
    for params in chosen_params(request):
        chosen.setdefault(params["ranks"], []).append(params["case"])
    found: dict[str, Any] = {}
    for ranks, cases in chosen.items():
        run = partial(_outcome, python, clients_environ, folder, cases, ranks)
        with ThreadPoolExecutor(2) as pool:
            found |= {
                str(ranks): dict(zip(("reference", "accel"), pool.map(run, (False, True)), strict=True))
            }
    return found


def _outcome(
    python: Path, environ: dict[str, str], folder: Path, cases: list[str], ranks: int, on_accel: bool
) -> dict[str, Any]:
    out = folder / f"{ranks}_{on_accel}.pt"
    arguments = (python, PROGRAM, str(out), *cases)
    run_client(*arguments, ranks=ranks, on_accel=on_accel, environ=environ, folder=folder)
    return torch.load(out, weights_only=True)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("ranks", "case"), [*((1, case) for case in ALONE), *((2, case) for case in TWO_RANKS)]
)
def test_a_library_finds_on_accel_what_it_finds_on_the_reference(
    ranks: int, case: str, found: dict[str, Any]
) -> None:
    reference, accel = found[str(ranks)]["reference"], found[str(ranks)]["accel"]
    assert (reference["library"], accel["library"]) == ("accelerate", "accel_state")
    for result in (reference[case], accel[case]):
        assert not isinstance(result, str), result  # a traceback
    for key in ON_ONE_SIDE.get(case, ()):
        assert reference[case].pop(key) != accel[case].pop(key)
    assert not [*differences(case, reference[case], accel[case])]


def test_the_comparison_sees_a_difference() -> None:
    one = {"log": [{"loss": 1.0}], "weights": torch.ones(2), "files": ["a"]}
    assert not [*differences("", one, {**one, "weights": torch.ones(2) + 1e-7})]
    for other in ({"log": [{"loss": 1.1}]}, {"weights": torch.zeros(2)}, {"files": []}, {"more": 1}):
        assert len([*differences("", one, {**one, **other})]) == 1
