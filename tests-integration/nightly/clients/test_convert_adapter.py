"""`accel convert-checkpoint` merges adapters that peft saved, as peft merges them."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.clients import run_client

PROGRAM = Path(__file__).with_name("convert_adapter.py")
ADAPTERS = ("llama", "gpt2", "bf16", "dora", "dora gpt2", "convolution")


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_saved_adapter_is_merged_as_peft_does(kind, python, clients_environ, tmp_path):
    run_client(python, PROGRAM, kind, ranks=1, on_accel=False, environ=clients_environ, folder=tmp_path)
