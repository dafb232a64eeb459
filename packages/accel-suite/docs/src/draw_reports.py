# ruff: noqa: D103, INP001 - a script
"""Draw what the software draws by itself, as pictures of the documentation.

    uv run python packages/accel-suite/docs/src/draw_reports.py [--chromium PATH]

Writes docs/pictures/flame.png: a photograph of the page of `accelerator.profile()`, by a headless Chromium.
"""

import argparse
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import nn

from accel import Accelerator, ProfileKwargs

PICTURES = Path(__file__).resolve().parents[1] / "pictures"


def profile(folder: Path) -> None:
    handler = ProfileKwargs(activities=["cpu"], output_trace_dir=str(folder), flame_graph=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    batch = torch.randn(64, 256)
    with accelerator.profile():
        for _ in range(20):
            with torch.profiler.record_function("forward"):
                loss = model(batch).square().mean()
            with torch.profiler.record_function("backward"):
                accelerator.backward(loss)
            with torch.profiler.record_function("optimizer"):
                optimizer.step()
                optimizer.zero_grad()


def photograph(page: Path, picture: str, chromium: str, *, height: int) -> None:
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=8000"]
    size = [f"--window-size=1000,{height}", f"--screenshot={PICTURES / picture}"]
    subprocess.run([chromium, *flags, *size, page.as_uri()], check=True, capture_output=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw what the software draws by itself.")
    parser.add_argument("--chromium", default="chromium")
    chromium = parser.parse_args().chromium
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        profile(folder)
        photograph(folder / "profile_0.html", "flame.png", chromium, height=520)


if __name__ == "__main__":
    main()
