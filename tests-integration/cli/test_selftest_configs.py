"""What `accel test` checks of training passes under every configuration file of the examples."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml

from accel_cli.commands import selftest_checks
from accel_state.environ import patch_environment
from accel_state.settings.file import parse_file
from accel_state.settings.model import merge_layers, to_environ
from accel_train.accelerator import Accelerator
from harness import cases, distributed
from harness.engines import deepspeed_process

FOLDER = Path(__file__).resolve().parents[2] / "packages/accel-suite/examples/strategies/configs"
CHECKS = (
    selftest_checks.data_loader,
    selftest_checks.training,
    selftest_checks.mixed_precision,
    selftest_checks.checkpoint,
)


def check(config: str, folder: Path, accumulation: int) -> list[str]:
    path = FOLDER / f"{config}.yaml"
    content = yaml.safe_load(path.read_text())
    if "deepspeed_config" in content:
        content["deepspeed_config"]["gradient_accumulation_steps"] = accumulation
    settings = merge_layers(parse_file(content, str(path))).settings
    environ = to_environ(settings) | {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": str(accumulation)}
    engine = deepspeed_process() if "deepspeed_config" in content else nullcontext()
    with engine, warnings.catch_warnings(), patch_environment(**environ):
        # Tensor-parallel layers return views; nothing changes them in place here.
        warnings.filterwarnings("ignore", message=".*returned a view tensor")
        accelerator = Accelerator()
        session = selftest_checks.Session(
            accelerator=accelerator, precision=settings.precision.mixed_precision, folder=folder
        )
        details = [run(session) for run in CHECKS]
        accelerator.free_memory()
    return details


@pytest.mark.parametrize(
    "config",
    cases(
        ["ddp", "bf16", "fsdp1", "fsdp2", "tp", "zero1", "zero2", "zero3"],
        always={"bf16", "fsdp1", "tp", "zero3"},
    ),
)
@distributed(world_size=2)
def test_a_configuration_passes(config: str, tmp_path: Path) -> None:
    details = check(config, tmp_path, accumulation=1)
    assert details[1] == f"{8 if config == 'tp' else 4} steps equal those of one process"
    assert details[2] == ("bf16 trains" if config == "bf16" else "")


@pytest.mark.parametrize("features", [32, 8])
@distributed(world_size=2)
def test_layers_are_converted_to_fp8_or_the_check_fails(features: int, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selftest_checks, "_FEATURES", features)
        session = selftest_checks.Session(accelerator=Accelerator(), precision="fp8", folder=tmp_path)
        refused = pytest.raises(selftest_checks.DiffersError, match="no layer has been converted to fp8")
        with nullcontext() if features == 32 else refused:
            assert selftest_checks.mixed_precision(session) == "fp8 trains"


@pytest.mark.parametrize("config", cases(["hsdp", "fsdp2_tp"], always={"fsdp2_tp"}))
@distributed(world_size=4)
def test_a_configuration_of_several_axes_passes(config: str, tmp_path: Path) -> None:
    check(config, tmp_path, accumulation=1)


@pytest.mark.parametrize("config", ["fsdp2", "zero2"])
@distributed(world_size=2)
def test_micro_batches_of_a_configuration_are_accumulated(config: str, tmp_path: Path) -> None:
    details = check(config, tmp_path, accumulation=3)
    assert details[1] == "12 steps equal those of one process"
