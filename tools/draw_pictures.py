"""Draw the pictures of the documentation: what viewers show after an example.

    uv run tools/draw_pictures.py [--chromium PATH] [--viewers NAME ...]

For each viewer, runs examples/by_feature/tracking.py with its tracker in a folder that is removed, starts the
viewer on the loopback interface, photographs it with a headless Chromium, and writes the picture of
docs/guides: tracking.png for TensorBoard, tracking_trackio.png for Trackio.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from accel_state.topology import free_port

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "packages/accel-suite/examples/by_feature/tracking.py"
GUIDES = ROOT / "packages/accel-suite/docs/guides"
MOST_BYTES = 200_000
SHOW_TRACKIO = """
import sys, trackio
port = int(sys.argv[1])
trackio.show(project="digits", host="127.0.0.1", server_port=port, open_browser=False, block_thread=True)
"""


@dataclass(frozen=True, kw_only=True)
class Viewer:
    """The viewer of a tracker."""

    picture: str
    command: tuple[str, ...]  # of Python; `{port}` stands for its port
    is_loaded: tuple[str, str]  # a path whose answer contains a text when the run can be shown
    page: str


VIEWERS = {
    "tensorboard": Viewer(
        picture="tracking.png",
        command=(
            *("-m", "tensorboard.main", "--logdir", "tracking-run", "--host", "127.0.0.1"),
            *("--port", "{port}", "--load_fast", "false"),
        ),
        is_loaded=("data/plugin/scalars/tags", "train/loss"),
        page="?darkMode=false#scalars",
    ),
    "trackio": Viewer(
        picture="tracking_trackio.png",
        command=("-c", SHOW_TRACKIO, "{port}"),
        is_loaded=("", "Trackio"),
        page="?project=digits",
    ),
}


def wait_until_loaded(address: str, text: str) -> None:
    """Wait until the viewer has read the run."""
    for _ in range(600):
        try:
            with urllib.request.urlopen(address) as answer:
                if text in answer.read().decode():
                    return
        except OSError:
            pass
        time.sleep(0.2)
    sys.exit(f"{address} never showed {text}")


def photograph(chromium: str, page: str, picture: Path, profile: Path) -> None:
    command = [
        chromium,
        "--headless=new",
        "--no-sandbox",
        "--use-angle=swiftshader",
        "--enable-unsafe-swiftshader",
        "--hide-scrollbars",
        "--force-device-scale-factor=1",
        f"--user-data-dir={profile}",
        "--window-size=1720,860",
        "--virtual-time-budget=30000",
        f"--screenshot={picture}",
        page,
    ]
    subprocess.run(command, check=True, capture_output=True)


def draw(name: str, viewer: Viewer, chromium: str) -> Path:
    """Run the example with a tracker and photograph what its viewer shows; return the picture."""
    picture = GUIDES / viewer.picture
    with tempfile.TemporaryDirectory() as folder:
        example = Path(folder) / EXAMPLE.name
        example.write_text(EXAMPLE.read_text().replace('"tensorboard"', repr(name)))
        environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "TRACKIO_DIR": f"{folder}/trackio"}
        subprocess.run([sys.executable, str(example)], check=True, cwd=folder, env=environment)
        port = free_port()
        command = [sys.executable, *(part.replace("{port}", str(port)) for part in viewer.command)]
        process = subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.DEVNULL)
        try:
            base = f"http://127.0.0.1:{port}/"
            path, text = viewer.is_loaded
            wait_until_loaded(base + path, text)
            photograph(chromium, base + viewer.page, picture, Path(folder) / "profile")
        finally:
            process.terminate()
            process.wait()
    return picture


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chromium", default=shutil.which("chromium"), help="the browser")
    parser.add_argument("--viewers", nargs="+", default=[*VIEWERS], choices=[*VIEWERS], metavar="NAME")
    arguments = parser.parse_args()
    if arguments.chromium is None:
        sys.exit("There is no Chromium here: install it, or say where it is with --chromium.")
    for name in arguments.viewers:
        picture = draw(name, VIEWERS[name], arguments.chromium)
        size = picture.stat().st_size
        print(f"wrote {picture.relative_to(ROOT)}, {size} bytes")
        if size > MOST_BYTES:
            sys.exit(f"more than {MOST_BYTES} bytes: choose a smaller window")


if __name__ == "__main__":
    main()
