"""Run cases, in one process or as the ranks of several, and write what they found to a file.

    python run_cases.py OUT.pt trainer:basic adapters:lora
    python -m accel_compat run_cases.py OUT.pt trainer:basic adapters:lora

A case is a function of a module beside this one. It gets a folder that is not there yet, and
returns plain data and tensors. What other ranks than the first raise is written to OUT.pt.rankN.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
import warnings
from pathlib import Path

import torch

warnings.simplefilter("ignore")
torch.set_num_threads(1)


def main(out: str, *cases: str) -> None:
    """Run the cases one after the other; a failure is what the case found, and the next one runs."""
    sys.path.insert(0, str(Path(__file__).parent))
    from accelerate.state import AcceleratorState, GradientState, PartialState

    found: dict[str, object] = {"library": AcceleratorState.__module__.partition(".")[0]}
    for case in cases:
        module, _, name = case.partition(":")
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        torch.manual_seed(0)
        folder = Path(f"{out}.{case.replace(':', '.')}")  # the same on all ranks
        try:
            found[case] = getattr(importlib.import_module(module), name)(folder)
        except Exception:  # noqa: BLE001 - whatever a case raises is what it found
            found[case] = traceback.format_exc()
            if rank := int(os.environ.get("RANK", "0")):
                Path(f"{out}.rank{rank}").write_text(f"{case}: {found[case]}")
    if PartialState().is_main_process:
        torch.save(found, out)
    PartialState().destroy_process_group()


if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"}
    main(*sys.argv[1:])
