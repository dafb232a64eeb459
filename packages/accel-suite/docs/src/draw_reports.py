# ruff: noqa: D103, INP001 - a script
"""Draw what the software draws by itself, as pictures of the documentation.

    uv run python packages/accel-suite/docs/src/draw_reports.py [--chromium PATH]

Writes docs/pictures: photographs of the HTML reports of `accel check`,
`accel test` and `accelerator.profile()`, taken by a headless Chromium.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

from accel import Accelerator, ProfileKwargs

PICTURES = Path(__file__).resolve().parents[1] / "pictures"
SCRIPT = """
import torch
from torch import nn

from accel import Accelerator

accelerator = Accelerator()
model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)])
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(torch.randn(512, 1024), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    loss = model(batch).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.gather(loss.detach())
if accelerator.is_main_process:
    accelerator.save_state("state")  # a mistake: on one rank only
accelerator.gather(loss.detach())
"""


def accel(*words: str, folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "accel_cli", *words], cwd=folder, check=False)


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
        (folder / "train.py").write_text(SCRIPT)
        accel("check", "--world", "16", "--memory", "1GiB", "--html", "check.html", "train.py", folder=folder)
        accel("test", "--cpu", "--num_processes", "2", "--html", "test.html", folder=folder)
        profile(folder)
        photograph(folder / "check.html", "check.png", chromium, height=720)
        photograph(folder / "test.html", "test.png", chromium, height=760)
        photograph(folder / "profile_0.html", "flame.png", chromium, height=520)


if __name__ == "__main__":
    main()
