"""Libraries that import `accelerate`, on a GPU: on accel they find what they find on the reference."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from harness.clients import differences, run_client

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = pytest.mark.gpu

PROGRAM = Path(__file__).parent / "programs" / "run_cases.py"
CASES = (
    "trained",
    "trained_fp16",
    "resumed",
    "optimizer_in_8_bits",
    "qlora",
    "eight_bits",
    "spread",
    "grpo",
    "offloaded",
    "pipelines",
)
TOLERANCE = 1e-3
"""Of numbers: kernels of a GPU add in no fixed order."""


@pytest.fixture(scope="module")
def found(
    python: Path, clients_environ: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What all cases find on one GPU, of the reference and of accel."""
    folder = tmp_path_factory.mktemp("gpu")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # with several, Trainer uses them all
    environ = {**clients_environ, "CUDA_VISIBLE_DEVICES": visible}
    results: list[dict[str, Any]] = []
    for name in ("reference", "accel"):
        out = folder / f"{name}.pt"
        cases = [f"on_device:{case}" for case in CASES]
        run_client(
            *(python, PROGRAM, str(out), *cases),
            ranks=1,
            on_accel=name == "accel",
            environ=environ,
            folder=folder,
        )
        results.append(torch.load(out, weights_only=True))
    return results


@pytest.mark.parametrize("case", CASES)
def test_a_library_finds_on_a_gpu_what_it_finds_on_the_reference(
    case: str, found: list[dict[str, Any]]
) -> None:
    reference, accel = (one[f"on_device:{case}"] for one in found)
    for result in (reference, accel):
        assert not isinstance(result, str), result  # a traceback
    assert not [*differences(case, reference, accel, TOLERANCE)]
