# ruff: noqa: INP001 - a script
"""Draw the learning rates of one schedule by each clock, as the library steps them on four processes.

uv run python packages/accel-suite/docs/src/schedule_clocks.py packages/accel-suite/docs/guides/schedules.svg
"""

import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from accel import Accelerator, debug_launcher

SAMPLES, BATCH, EPOCHS, PROCESSES = 1600, 8, 4, 4
COLORS = {"process": "#c0392b", "update": "#2467a8"}


def rates(step_per: str) -> list[float]:
    """The learning rate of every optimizer step of a run, by a schedule for as many optimizer steps."""
    accelerator = Accelerator(step_scheduler_per=step_per)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    loader = accelerator.prepare(DataLoader(torch.zeros(SAMPLES), batch_size=BATCH))
    steps = EPOCHS * len(loader)
    warm = steps // 10
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, max(0, steps - step) / (steps - warm))
    )
    optimizer, schedule = accelerator.prepare(optimizer, schedule)
    seen = []
    for _ in range(EPOCHS):
        for _ in loader:
            seen.append(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
    return seen


def draw(curves: dict[str, list[float]]) -> str:
    """The curves as an SVG picture."""
    width, height, left, top = 560, 220, 50, 30
    size = f'width="{width + 80}" height="{height + 80}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<path d="M{left} {top}V{top + height}H{left + width}" fill="none" stroke="black"/>',
        f'<text x="{left + width / 2}" y="{top + height + 35}" text-anchor="middle">optimizer step</text>',
        f'<text x="{left}" y="{top - 10}">learning rate</text>',
    ]
    for row, (name, values) in enumerate(curves.items()):
        last = len(values) - 1
        points = " ".join(
            f"{left + width * step / last:.1f},{top + height * (1 - value):.1f}"
            for step, value in enumerate(values)
        )
        place = f'x="{left + width - 210}" y="{top + 20 + 20 * row}"'
        lines += [
            f'<polyline points="{points}" fill="none" stroke="{COLORS[name]}" stroke-width="2"/>',
            f'<text {place} fill="{COLORS[name]}">step_scheduler_per="{name}"</text>',
        ]
    for share in (0, 0.5, 1):
        place = f'x="{left + width * share:.0f}" y="{top + height + 16}" text-anchor="middle"'
        lines.append(f"<text {place}>{share * last:.0f}</text>")
    return "\n".join([*lines, "</svg>", ""])


def clocks() -> dict[str, list[float]]:
    """What every process sees, by each clock."""
    return {step_per: rates(step_per) for step_per in COLORS}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(draw(debug_launcher(clocks, num_processes=PROCESSES)[0]))
