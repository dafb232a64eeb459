"""A rank that is slower than the others is named, and training is the same with it."""

from __future__ import annotations

import logging
import time
from typing import Any

from harness import distributed

STEPS = 320
PAUSE = 0.012  # seconds that a step takes on every rank, and as long again on the slow one


def train(slow: int | None) -> tuple[list[float], list[str], dict[str, Any]]:
    """Train on this rank; return the losses, the lines about slow ranks, and what trackers get."""
    import torch

    from accel_state import hang_monitor, rank_status
    from accel_train import Accelerator

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger(hang_monitor.__name__).addHandler(handler)
    usual = hang_monitor.SAMPLE_S, hang_monitor.INTERVAL_S, rank_status.LEAST, rank_status.SHARE
    # A machine with other work may keep one rank waiting, but not for a quarter of the time.
    hang_monitor.SAMPLE_S, hang_monitor.INTERVAL_S = 0.004, 0.1  # the run takes some four seconds
    rank_status.LEAST, rank_status.SHARE = 100, 0.25
    try:
        accelerator = Accelerator(cpu=True)
        monitor = hang_monitor.active()
        assert monitor is not None
        torch.manual_seed(accelerator.process_index)
        model = torch.nn.Linear(4, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))

        def step() -> float:
            time.sleep(PAUSE)
            if accelerator.process_index == slow:
                time.sleep(PAUSE)  # decodes an image
            loss = model(torch.randn(2, 4)).sub(1).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        losses = [step() for _ in range(STEPS)]
        assert monitor.sampler is not None
        while not accelerator.reduce(torch.tensor(len(monitor.sampler.report))):
            step()  # on a machine with other work there are fewer samples
        return losses, lines, dict(monitor.sampler.report)
    finally:
        hang_monitor.SAMPLE_S, hang_monitor.INTERVAL_S, rank_status.LEAST, rank_status.SHARE = usual
        logging.getLogger(hang_monitor.__name__).removeHandler(handler)


@distributed(world_size=2)
def test_a_slow_rank_is_named_with_its_line_and_changes_no_loss() -> None:
    import torch.distributed as dist

    slow_losses, lines, report = train(slow=1)
    if dist.get_rank() == 0:
        assert lines, "rank 1 is slow"
        assert all("the others waited for rank 1 in " in line for line in lines), lines
        assert "test_stragglers.py" in lines[-1]
        assert report["system/straggler_rank"] == 1
        assert report["system/straggler_share"] >= 0.1
    else:
        assert not lines, "rank 0 tells"
    losses, lines, report = train(slow=None)
    assert losses == slow_losses
    assert len(set(losses)) > STEPS // 2
    assert not lines, "no rank is slower"
    if dist.get_rank() == 0:
        assert report == {"system/straggler_share": 0.0, "system/straggler_rank": -1}
