"""LoRA adapters of peft are merged while full parameters are gathered, as peft merges them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness.clients import run_client

if TYPE_CHECKING:
    from collections.abc import Mapping

PROGRAM = Path(__file__).with_name("merge_adapters.py")


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["fsdp2", "ddp", "fsdp1"])
def test_adapters_are_merged_as_peft_does(
    strategy: str, python: Path, clients_environ: Mapping[str, str], tmp_path: Path
) -> None:
    run_client(python, PROGRAM, strategy, ranks=2, on_accel=False, environ=clients_environ, folder=tmp_path)
