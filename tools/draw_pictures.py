"""Draw the pictures of the documentation: what a viewer shows after an example.

    uv run tools/draw_pictures.py [--chromium PATH]

Runs examples/by_feature/tracking.py in a folder that is removed, starts TensorBoard's viewer on the loopback
interface, photographs it with a headless Chromium, and writes docs/guides/tracking.png.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "packages/accel-suite/examples/by_feature/tracking.py"
PICTURE = ROOT / "packages/accel-suite/docs/guides/tracking.png"
MOST_BYTES = 200_000


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def wait_until_loaded(base: str, tag: str) -> None:
    """Wait until the viewer has read the run."""
    for _ in range(600):
        try:
            with urllib.request.urlopen(f"{base}/data/plugin/scalars/tags") as answer:
                if tag in answer.read().decode():
                    return
        except OSError:
            pass
        time.sleep(0.2)
    sys.exit(f"{base} never showed {tag}")


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chromium", default=shutil.which("chromium"), help="the browser")
    chromium = parser.parse_args().chromium
    if chromium is None:
        sys.exit("There is no Chromium here: install it, or say where it is with --chromium.")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, str(EXAMPLE)],
            check=True,
            cwd=folder,
            env={**os.environ, "ACCELERATE_USE_CPU": "true"},
        )
        port = free_port()
        viewer = [sys.executable, "-m", "tensorboard.main", "--logdir", "tracking-run"]
        viewer += ["--host", "127.0.0.1", "--port", str(port), "--load_fast", "false"]
        process = subprocess.Popen(viewer, cwd=folder, stderr=subprocess.DEVNULL)
        try:
            base = f"http://127.0.0.1:{port}"
            wait_until_loaded(base, "train/loss")
            photograph(chromium, f"{base}/?darkMode=false#scalars", PICTURE, Path(folder) / "profile")
        finally:
            process.terminate()
            process.wait()
    size = PICTURE.stat().st_size
    print(f"wrote {PICTURE.relative_to(ROOT)}, {size} bytes")
    if size > MOST_BYTES:
        sys.exit(f"more than {MOST_BYTES} bytes: choose a smaller window")


if __name__ == "__main__":
    main()
