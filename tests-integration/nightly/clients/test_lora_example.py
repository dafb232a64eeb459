"""The example of LoRA trains with peft, whose `import accelerate` is accel, and saves the adapter alone."""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open

from harness.clients import run_client

EXAMPLE = Path(__file__).resolve().parents[3] / "packages/accel-suite/examples/by_feature/lora.py"


def test_the_adapter_that_is_saved_has_low_rank_matrices_alone(python, clients_environ, tmp_path):
    run_client(python, EXAMPLE, ranks=2, on_accel=True, environ=clients_environ, folder=tmp_path)
    with safe_open(tmp_path / "adapter/adapter_model.safetensors", "pt") as weights:
        names = list(weights.keys())
    assert len(names) == 2 * 2 * 7  # two matrices for each of seven linear layers of two blocks
    assert all("lora_" in name for name in names)
