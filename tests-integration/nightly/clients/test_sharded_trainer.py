"""transformers' Trainer, unchanged, on accel, with models and sequences that are sharded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from harness import chosen_params
from harness.programs import TORCHRUN, Ended, Program, run_programs
from nightly.clients import train_sharded_llama

CASES = {
    "fsdp": (2, {"fsdp_size": 2}),
    "tp": (1, {"tp_size": 2}),
    "fsdp, in chunks": (2, {"fsdp_size": 2}),
    "fsdp x ep": (2, {"fsdp_size": 2, "ep_size": 2}),
    "sp": (1, {"sp_size": 2}),
}
"""The number of ranks that read different batches, and further arguments of `train_sharded_llama.main`."""
CHUNKS = {"ACCELERATE_LOSS_CHUNK_SIZE": "3", "ACCELERATE_MLP_TILE_SIZE": "3"}
SOURCE = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import train_sharded_llama
train_sharded_llama.main(".", {{ranks}}, **{{sizes}})
"""


@pytest.fixture(scope="module")
def ends(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, list[Ended]]]:
    """The folder of the cases that were chosen, and how their ranks ended; all train at once."""
    chosen = {params["case"] for params in chosen_params(request)}
    programs = {
        case: Program(
            SOURCE.format(ranks=ranks, sizes=sizes),
            variables=TORCHRUN | (CHUNKS if "chunks" in case else {}),
        )
        for case, (ranks, sizes) in CASES.items()
        if case in chosen
    }
    base = tmp_path_factory.mktemp("trained")
    imports = ("transformers.trainer", "transformers.models.llama.modeling_llama", "torch.distributed.fsdp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        # `import accelerate` is accel, as for a program that `python -m accel_compat` runs.
        return base, run_programs(programs, base, imports, run_by=("-m", "accel_compat"))


def plain_loop(*, experts: bool, constant: bool):
    """Do what the Trainer's defaults say: a linear schedule, or none; gradients clipped to a norm of 1."""
    model = train_sharded_llama.make_model(experts=experts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    rows = torch.stack([sample["input_ids"] for sample in train_sharded_llama.samples()])
    batches = rows.split(train_sharded_llama.BATCH)
    steps = 2 * len(batches)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 1 if constant else (steps - step) / steps
    )
    losses, norms = [], []
    for tokens in 2 * batches:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        losses.append(loss.item())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return losses, norms, model.state_dict()


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_trainer_of_a_sharded_model_equals_a_plain_loop(
    case: str, ends: tuple[Path, dict[str, list[Ended]]]
) -> None:
    base, ranks = ends
    for end in ranks[case]:
        assert end.code == 0, end.errors
    trained = torch.load(base / case / "out.pt")
    assert trained["home"].startswith("accel_train.")
    options = CASES[case][1]
    losses, norms, weights = plain_loop(experts="ep_size" in options, constant="sp_size" in options)
    assert trained["losses"] == pytest.approx(losses, abs=1e-4)  # it rounds them
    assert trained["norms"] == pytest.approx(norms, rel=1e-4)
    saved = AutoModelForCausalLM.from_pretrained(base / case / "trained").state_dict()
    for name, value in weights.items():
        torch.testing.assert_close(saved[name], value, rtol=0, atol=1e-5, msg=name)
