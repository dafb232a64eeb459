"""transformers' Trainer, unchanged, on accel: what it trains and reports equals a plain loop."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from clients.running import run_client

PROGRAM = Path(__file__).with_name("train_bert.py")


TRAIN_SIZE = 48


def plain_loop(train_bert, processes: int, eval_size: int):
    """Do what the Trainer's defaults say: a linear schedule, gradients clipped to a norm of 1.

    The Trainer of several processes multiplies losses by their number, on Accelerate as on accel.
    """
    model = train_bert.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(train_bert.Sums(TRAIN_SIZE), batch_size=8 * processes)
    steps = 2 * len(loader)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (steps - step) / steps)
    samples = train_bert.Sums(eval_size)
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
    ("processes", "eval_size", "stage"),
    [
        pytest.param(1, 21, 0, id="ragged, alone"),
        pytest.param(2, 32, 0, id="two ranks"),
        pytest.param(2, 32, 2, id="ZeRO-2", marks=pytest.mark.thorough),
        pytest.param(2, 32, 3, id="ZeRO-3", marks=pytest.mark.thorough),
    ],
)
def test_trainer_equals_a_plain_loop(
    processes: int, eval_size: int, stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_client(
        *(sys.executable, PROGRAM, str(tmp_path), str(TRAIN_SIZE), str(eval_size), str(stage)),
        ranks=processes,
        on_accel=True,
        environ={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        folder=tmp_path,
    )
    found = torch.load(tmp_path / "out.pt")
    assert found["home"].startswith("accel_train.")
    monkeypatch.syspath_prepend(str(PROGRAM.parent))
    import train_bert

    evals, weights = plain_loop(train_bert, processes, eval_size)
    assert found["eval"] == pytest.approx(evals, abs=1e-6)
    assert found["weights"].keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(found["weights"][name], value, rtol=0, atol=1e-6, msg=name)
