"""Pipeline-parallel inference gives the results of the model on one rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accel_bigmodel.device_map import generate_device_map
from accel_bigmodel.pipeline import find_pippy_batch_size, pippy_forward, prepare_pippy
from accel_state.errors import SettingsError
from accel_state.partial_state import PartialState
from harness import distributed


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Takes a keyword argument, returns a dictionary; the head is tied to the embedding."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(blocks))
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, scale: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        if scale is not None:
            logits = logits * scale[:, None, None]
        return {"logits": logits, "mean": logits.mean(dim=(1, 2))}


def tokens(rows: int) -> torch.Tensor:
    return torch.randint(0, 10, (rows, 5), generator=torch.Generator().manual_seed(rows))


def check(found: dict[str, torch.Tensor], rows: int, **kwargs: torch.Tensor) -> None:
    with torch.no_grad():
        right = Net().eval()(tokens(rows), **kwargs)
    assert found.keys() == right.keys()
    for name, value in right.items():
        torch.testing.assert_close(found[name], value)


@pytest.mark.parametrize("chunks", [None, 3])
@distributed(world_size=2)
def test_two_processes_give_what_the_whole_model_gives(chunks: int | None) -> None:
    PartialState(cpu=True)
    model = prepare_pippy(
        Net().eval(), no_split_module_classes=["Block"], example_args=(tokens(4),), num_chunks=chunks
    )
    assert model.hf_split_points == ["blocks.2"]
    for rows in (4, 1, 7, 12):  # as the example, fewer, more, several rounds
        output = model(tokens(rows))
        if dist.get_rank() == 1:
            check(output, rows)
        else:
            assert output is None


@distributed(world_size=4)
def test_every_process_gets_the_output_if_it_is_gathered() -> None:
    PartialState(cpu=True)
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0])
    model = prepare_pippy(
        Net().eval(),
        no_split_module_classes="Block",
        example_kwargs={"tokens": tokens(4), "scale": scale},
        gather_output=True,
    )
    # What the other processes give does not count.
    mine = tokens(4) if dist.get_rank() == 0 else tokens(4) * 0
    check(model(tokens=mine, scale=scale), 4, scale=scale)


@distributed(world_size=2)
def test_points_to_cut_at_may_be_named() -> None:
    PartialState(cpu=True)
    model = prepare_pippy(
        Net().eval(), split_points=["blocks.1"], example_args=(tokens(2),), gather_output=True
    )
    assert model.hf_split_points == ["blocks.1"]
    check(model(tokens(2)), 2)


@distributed(world_size=2)
def test_what_cannot_be_cut_is_said() -> None:
    PartialState(cpu=True)
    with pytest.raises(SettingsError, match=r"not a module of Net"):
        prepare_pippy(Net(), split_points=["blocks.9"], example_args=(tokens(2),))
    with pytest.raises(SettingsError, match=r"makes 3 stages, but there are 2 processes"):
        prepare_pippy(Net(), split_points=["blocks.1", "blocks.2"], example_args=(tokens(2),))
    with pytest.raises(SettingsError, match=r"pass example_args or example_kwargs"):
        prepare_pippy(Net())


@distributed(world_size=2)
def test_the_documented_function_pads_and_trims() -> None:
    state = PartialState(cpu=True)

    def step(*args: torch.Tensor) -> torch.Tensor | None:
        if state.is_main_process:
            assert args[0].shape == (6, 5), "three chunks of two"
        return torch.arange(6.0) if state.is_last_process else None

    output = pippy_forward(step, 3, True, tokens(5))
    assert torch.equal(output, torch.arange(5.0))
    assert find_pippy_batch_size((1,), {"x": tokens(5)}) == 5


def test_shares_are_as_even_as_can_be_and_nobody_goes_without() -> None:
    model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(5)])
    assert generate_device_map(model, 4) == {"0": 0, "1": 0, "2": 1, "3": 2, "4": 3}
    with pytest.raises(SettingsError, match=r"has 5 layers that are not split, fewer than the 6 processes"):
        generate_device_map(model, 6)
    with pytest.raises(SettingsError, match=r"cannot hold Sequential, of 320 bytes"):
        generate_device_map(model, 2, max_memory={0: 64, 1: 64})
