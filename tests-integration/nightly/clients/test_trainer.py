"""transformers' Trainer, unchanged, on accel: what it trains and reports equals a plain loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from harness import chosen_params
from harness.programs import TORCHRUN, Ended, Program, run_programs
from nightly.clients import small_bert

TRAIN_SIZE = 48
SOURCE = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import train_bert
train_bert.main(".", {TRAIN_SIZE}, {{eval_size}}, {{stage}})
"""
CASES = {
    "ragged, alone": (1, 21, 0),
    "two ranks": (2, 32, 0),
    "ZeRO-2": (2, 32, 2),
    "ZeRO-3": (2, 32, 3),
}
"""The number of processes and of samples to evaluate, and DeepSpeed's stage, 0 for none."""
THOROUGH = ("ZeRO-2", "ZeRO-3")


@pytest.fixture(scope="module")
def ends(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, list[Ended]]]:
    """The folder of the cases that were chosen, and how their ranks ended; all train at once."""
    chosen = {params["case"] for params in chosen_params(request)}
    programs = {
        case: Program(
            SOURCE.format(eval_size=eval_size, stage=stage),
            world_size=processes,
            variables=TORCHRUN if processes > 1 else {},
        )
        for case, (processes, eval_size, stage) in CASES.items()
        if case in chosen
    }
    base = tmp_path_factory.mktemp("trained")
    # `import accelerate` is accel, as for a program that `python -m accel_compat` runs.
    imports = (
        "transformers.trainer",
        "transformers.models.bert.modeling_bert",
        "accel_train.accelerator.build",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        return base, run_programs(programs, base, imports, run_by=("-m", "accel_compat"))


def plain_loop(processes: int, eval_size: int):
    """Do what the Trainer's defaults say: a linear schedule, gradients clipped to a norm of 1.

    The Trainer of several processes multiplies losses by their number, on Accelerate as on accel.
    """
    model = small_bert.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(small_bert.Sums(TRAIN_SIZE), batch_size=8 * processes)
    steps = 2 * len(loader)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (steps - step) / steps)
    samples = small_bert.Sums(eval_size)
    evals = []
    for _ in range(2):
        model.train()
        for batch in loader:
            (processes * model(**batch).loss).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            losses = [model(**{key: value[None] for key, value in sample.items()}).loss for sample in samples]
        evals.append(processes * torch.stack(losses).mean().item())
    return evals, model.state_dict()


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.thorough] * (case in THOROUGH)) for case in CASES]
)
def test_trainer_equals_a_plain_loop(case: str, ends: tuple[Path, dict[str, list[Ended]]]) -> None:
    base, ranks = ends
    for end in ranks[case]:
        assert end.code == 0, end.errors
    found = torch.load(base / case / "out.pt")
    assert found["home"].startswith("accel_train.")
    processes, eval_size, _ = CASES[case]
    evals, weights = plain_loop(processes, eval_size)
    assert found["eval"] == pytest.approx(evals, abs=1e-6)
    assert found["weights"].keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(found["weights"][name], value, rtol=0, atol=1e-6, msg=name)
