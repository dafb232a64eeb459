"""What can be read and set of Accelerate's objects can be read and set of accel's.

attributes.json has the attributes that objects of the reference show, by class, and whether they can be set,
as attributes.py finds there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.clients import run_client

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).parent
PROGRAM = HERE / "programs" / "attributes.py"
TABLE = HERE / "attributes.json"
ATTRIBUTES: dict[str, dict[str, bool]] = json.loads(TABLE.read_text())

_TORCH = "torch's loaders, of which ours are, compute it; an assignment has no effect on the reference's"
LEFT_OUT = {
    **{
        f"Accelerator.{name}": "a private step of Accelerate's methods, which no known library uses"
        for name in (
            *("_clip_grad_norm_dtensor_aware", "_do_sync", "_get_devices", "_get_named_parameters"),
            *("_prepare_ao", "_prepare_deepspeed", "_prepare_device_mesh", "_prepare_megatron_lm"),
            *("_prepare_msamp", "_prepare_one", "_prepare_te", "_prepare_tp"),
        )
    },
    "AlignDevicesHook.tied_params_names": "bookkeeping between the two halves of a forward",
    **{
        f"{loader}.{name}": _TORCH
        for loader in ("DataLoaderDispatcher", "DataLoaderShard")
        for name in ("_auto_collation", "_index_sampler")
    },
    "DataLoaderDispatcher._stop_iteration": "bookkeeping of a pass",
    "DataLoaderDispatcher.state": "a process has one: PartialState()",
    **{
        f"{loader}.base_dataloader": "it is the loader itself, or torchdata's"
        for loader in ("DataLoaderDispatcher", "DataLoaderShard")
    },
    **{
        f"DataLoaderDispatcher.submesh_{axis}": "torch_device_mesh says which ranks have the same batches"
        for axis in ("dp", "fsdp", "tp")
    },
    "GradientState._dataloader_references_ref": "assign dataloader_references",
    "DeepSpeedPlugin._deepspeed_config_checks": "the command refuses flags that contradict the engine's file",
}
"""What differs on purpose, and why."""


@pytest.fixture(scope="module")
def look(python: Path, clients_environ: dict[str, str], tmp_path_factory: Any) -> Callable[..., Any]:
    """Run the program on a table."""

    def run(table: Path, *, on_accel: bool) -> dict[str, dict[str, str]]:
        folder = tmp_path_factory.mktemp("attributes")
        run_client(
            python,
            PROGRAM,
            str(folder / "out.json"),
            str(table),
            ranks=1,
            on_accel=on_accel,
            environ=clients_environ,
            folder=folder,
        )
        return json.loads((folder / "out.json").read_text())

    return run


def test_what_the_reference_lets_read_and_set_accel_does(look: Callable[..., Any]) -> None:
    happened = look(TABLE, on_accel=True)
    refused = {
        f"{kind}.{name}": error
        for kind, names in ATTRIBUTES.items()
        for name, can_be_set in names.items()
        if (error := happened[kind][name]) and (can_be_set or error.startswith("read: "))
    }
    assert {name: error for name, error in refused.items() if name not in LEFT_OUT} == {}
    assert LEFT_OUT.keys() - refused.keys() == set(), "rows that work by now"


@pytest.mark.thorough
def test_the_table_is_that_of_the_reference(look: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "none.json").write_text("{}")
    happened = look(tmp_path / "none.json", on_accel=False)
    assert {
        kind: {name: not error for name, error in names.items() if not error.startswith("read: ")}
        for kind, names in happened.items()
    } == ATTRIBUTES
