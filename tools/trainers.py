"""Run unchanged third-party trainers on Accelerate and on accel, and compare their results.

Claim: axolotl, ms-swift, LLaMA-Factory, lm-evaluation-harness and the rest of the table below have on accel
the results that they have on Accelerate, to the last digit.

    uv run python tools/trainers.py [NAME ...]              # installs them, from the package index
    uv run pytest -m thorough tests-integration/nightly/clients/test_trainers.py

Each has an environment of its own, build/trainers/NAME, in which neither library is installed: it comes from
a folder on PYTHONPATH, that of accel made from the packages here and the wheel of
tools/build_accelerate_alias.py. Programs are in tests-integration/nightly/clients/programs/trainers;
their models are small, their data written on the spot.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import build_accelerate_alias

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests-integration"))

from harness.clients import differences, run_client  # noqa: E402 - of tests-integration

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

FOLDER = ROOT / "build" / "trainers"
PROGRAM = ROOT / "tests-integration" / "nightly" / "clients" / "programs" / "run_cases.py"
REFERENCE = "accelerate==1.15.0"
REQUIRED = ("xxhash>=3.4",)
"""What accel needs besides what the trainers bring."""
TORCH = ("torch==2.15.0", "torchvision==0.29.2", "torchaudio==2.11.0")


@dataclass(frozen=True)
class Trainer:
    """A package, and what is run of it.

    Args:
        package: What is installed, with a version at which the cases are known to run.
        cases: Names of modules and functions among the programs.
        torch: The versions of torch, torchvision and torchaudio, which override what the package asks for.
        two_ranks: Cases that also run as the ranks of two processes.
    """

    package: str
    cases: tuple[str, ...]
    torch: tuple[str, ...] = TORCH
    two_ranks: tuple[str, ...] = ()


TRAINERS = {
    "axolotl": Trainer("axolotl==0.19.0", ("axolotl:sft", "axolotl:lora"), two_ranks=("axolotl:sft",)),
    "diffsynth": Trainer("diffsynth==2.1.12", ("diffsynth:train",), two_ranks=("diffsynth:train",)),
    "gptqmodel": Trainer("gptqmodel==7.7.0", ("gptqmodel:quantize",)),
    "lerobot": Trainer(
        "lerobot==0.4.4", ("lerobot:act", "lerobot:diffusion"), two_ranks=("lerobot:act", "lerobot:diffusion")
    ),
    "llamafactory": Trainer(
        "llamafactory==0.9.5",
        ("llama_factory:sft", "llama_factory:lora", "llama_factory:dpo"),
        # torchaudio, which it imports, is there for CUDA 13.0 alone.
        torch=("torch==2.11.0", "torchvision==0.26.0", "torchaudio==2.11.0"),
        two_ranks=("llama_factory:sft",),
    ),
    "llmcompressor": Trainer("llmcompressor==0.14.0.1", ("llm_compressor:gptq",)),
    "lm-eval": Trainer("lm-eval[hf]==0.4.13", ("lm_eval:evaluate",), two_ranks=("lm_eval:evaluate",)),
    "ms-swift": Trainer(
        "ms-swift==4.6.0", ("ms_swift:sft", "ms_swift:lora", "ms_swift:dpo"), two_ranks=("ms_swift:sft",)
    ),
    "setfit": Trainer("setfit==1.2.0", ("setfit:embed", "setfit:classify"), two_ranks=("setfit:embed",)),
    "trl": Trainer("trl[peft]==1.9.0", ("trl_commands:sft",)),
}


def main(argv: list[str] | None = None) -> int:
    """Make the environments of trainers."""
    parser = argparse.ArgumentParser(description="Install trainers for tests-integration/nightly/clients.")
    parser.add_argument("name", nargs="*", choices=TRAINERS, default=list(TRAINERS), help="all by default")
    for name in parser.parse_args(argv).name:
        install(name)
    return 0


def cases(names: Iterable[str], ranks: Iterable[int]) -> Iterator[tuple[str, str, int]]:
    """Yield each trainer's name, its cases, and the number of ranks that runs them."""
    for name in names:
        for number in ranks:
            for case in TRAINERS[name].cases if number == 1 else TRAINERS[name].two_ranks:
                yield name, case, number


def python_of(name: str) -> Path:
    """The interpreter of a trainer's environment."""
    return FOLDER / name / "bin" / "python"


def install(name: str) -> None:
    """Make the environment of a trainer, with neither library."""
    trainer = TRAINERS[name]
    overrides = FOLDER / f"{name}.txt"
    FOLDER.mkdir(parents=True, exist_ok=True)
    overrides.write_text("\n".join((*trainer.torch, REFERENCE)))
    uv("venv", "--clear", str(FOLDER / name))
    python = ("--python", str(python_of(name)))
    uv("pip", "install", *python, "--overrides", str(overrides), trainer.package, *REQUIRED)
    uv("pip", "uninstall", *python, "accelerate")


def install_libraries(folder: Path) -> None:
    """Put Accelerate and accel in two folders of these names."""
    target = ("pip", "install", "--python", sys.executable, "--no-deps", "--target")
    uv(*target, str(folder / "accelerate"), REFERENCE)
    wheel = build_accelerate_alias.build(folder)
    packages = [str(path.parent) for path in sorted((ROOT / "packages").glob("*/pyproject.toml"))]
    uv(*target, str(folder / "accel"), *packages, str(wheel))


def uv(*words: str) -> None:
    """Run uv quietly."""
    subprocess.run(["uv", words[0], *words[1:], "--quiet"], check=True)


def compare(name: str, case: str, libraries: Path, *, ranks: int) -> str:
    """Run a case with both libraries at once; return how they differ, or `"equal"`.

    Args:
        name: Of the trainer.
        case: Of the trainer.
        libraries: The folder in which both are.
        ranks: The number of processes.
    """
    paths = (libraries / "accelerate", libraries / "accel")
    with ThreadPoolExecutor() as pool:
        results = [*pool.map(lambda path: outcome(name, case, path, ranks=ranks), paths)]
    for path, result in zip(paths, results, strict=True):
        if isinstance(result, str):
            return f"fails on {path.name}: {result.strip().splitlines()[-1]}"
    far = [*differences(case, *results, tolerance=0.0)]
    return f"differs: {'; '.join(far[:5])}" if far else "equal"


def outcome(name: str, case: str, library: Path, *, ranks: int) -> Any:
    """Run a case with a library; return what it found, text if it failed on any rank."""
    key = f"trainers.{case}"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.pt"
        try:
            run_client(
                python_of(name),
                PROGRAM,
                str(out),
                key,
                ranks=ranks,
                on_accel=False,  # the folder on the path decides
                environ=environ(library),
                folder=Path(folder),
            )
        except AssertionError as error:
            return str(error) or "it ends with an error"
        for failure in Path(folder).glob("out.pt.rank*"):
            return failure.read_text()
        result = torch.load(out, weights_only=True)
    origin = {"accelerate": "accelerate", "accel": "accel_state"}[library.name]
    return result[key] if result["library"] == origin else f"it ran on {result['library']}"


def environ(library: Path) -> dict[str, str]:
    """The variables of a run with one of the libraries."""
    hidden = ("VIRTUAL_ENV", "PYTHONHOME")
    inherited = {
        key: value
        for key, value in os.environ.items()
        if key not in hidden and not key.startswith("ACCELERATE_")
    }
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    return {**inherited, **offline, "PYTHONPATH": str(library)}


if __name__ == "__main__":
    sys.exit(main())
