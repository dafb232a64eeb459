"""The packages' tests that need an accelerator, on the simulated one; those that need NVIDIA's are listed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from harness import simulated

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(
    str(path.relative_to(ROOT))
    for path in ROOT.glob("packages/*/tests/*.py")
    if "mark.gpu" in path.read_text()
)
NEED_NVIDIA = {
    "packages/accel-quant/tests/test_bnb.py": "the kernels of bitsandbytes",
    "test_the_host_blocks_on_an_event_and_does_not_spin": "operators that take time",
    "test_memory_that_cannot_be_pinned_is_said_and_does": "the pinned memory of CUDA",
    "test_threads_of_a_rank_make_no_context_on_the_first_gpu": "CUDA's list of contexts",
    "test_the_next_batch_is_copied_while_this_one_is_computed_with": "operators that take time",
}
"""Files, and tests, with what they need."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The failures of each file; all run in one process."""
    simulated.require()
    report = tmp_path_factory.mktemp("report") / "report.xml"
    chosen = [file for file in FILES if file not in NEED_NVIDIA]
    names = " or ".join(name for name in NEED_NVIDIA if name.startswith("test_"))
    options = ["-m", "gpu", "-k", f"not ({names})", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short"]
    command = [sys.executable, "-m", "pytest", "-q", *options, f"--junitxml={report}", *chosen]
    done = subprocess.run(
        command, cwd=ROOT, env=simulated.environment("npu"), capture_output=True, text=True, check=False
    )
    assert report.exists(), done.stdout + done.stderr
    found: dict[str, list[str]] = {}
    for case in ET.parse(report).iter("testcase"):
        problems = [*case.iter("failure"), *case.iter("error"), *case.iter("skipped")]
        texts = [f"{case.get('name')}: {problem.get('message')}\n{problem.text}" for problem in problems]
        found.setdefault(str(case.get("classname")), []).extend(texts)
    return found


@pytest.mark.parametrize("file", [file for file in FILES if file not in NEED_NVIDIA])
def test_tests_of_accelerators_pass(file: str, outcomes: dict[str, list[str]]) -> None:
    name = file.removesuffix(".py").replace("/", ".")
    assert name in outcomes, f"no test of {file} ran: {sorted(outcomes)}"
    assert not outcomes[name], "\n".join(outcomes[name])
