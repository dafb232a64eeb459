"""Packed weights: what ranks have makes the weights of transformers again, in the layout of megatron-core."""

from __future__ import annotations

import pytest
import torch

from accel_plugins.megatron.engine import MegatronEngine
from accel_plugins.megatron.families import (
    attention,
    attention_in_one,
    gated,
    keys_values,
    same,
    transposed,
    vocabulary,
)
from accel_plugins.megatron.state import MegatronStates
from accel_state.errors import UnsupportedError

HEADS, GROUPS, SIZE, HIDDEN = 8, 4, 3, 5


def tensors(*rows, shape=(HIDDEN,)):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(number, *shape, generator=generator) for number in rows]


CASES = {
    "column": (same(0), tensors(8)),
    "row": (same(1), tensors(5, shape=(8,))),
    "replicated": (same(), tensors(7)),
    "transposed": (transposed(0), tensors(HIDDEN, shape=(8,))),
    "gated": (gated(), tensors(8, 8)),
    "attention": (attention(HEADS, GROUPS, SIZE), tensors(HEADS * SIZE, GROUPS * SIZE, GROUPS * SIZE)),
    "keys and values": (keys_values(HEADS, SIZE), tensors(HEADS * SIZE, HEADS * SIZE)),
    "attention with fewer key-value heads than ranks": (
        attention(HEADS, 2, SIZE),
        tensors(HEADS * SIZE, 2 * SIZE, 2 * SIZE),
    ),
    "attention's biases": (
        attention(HEADS, GROUPS, SIZE),
        tensors(HEADS * SIZE, GROUPS * SIZE, GROUPS * SIZE, shape=()),
    ),
    "attention in one": (
        attention_in_one(HEADS, SIZE, transpose=True),
        tensors(HIDDEN, shape=(3 * HEADS * SIZE,)),
    ),
    "padded vocabulary": (vocabulary(7), tensors(7)),
}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_the_parts_of_all_ranks_make_the_weights_again(case, size):
    packing, weights = CASES[case]
    shards = [packing.shard(packing.pack(weights), rank, size) for rank in range(size)]
    torch.testing.assert_close([*packing.unpack(packing.join(shards))], weights, rtol=0, atol=0)


def test_every_rank_has_its_part_of_the_gate_before_its_part_of_the_other_projection():
    gate, up = torch.arange(4), torch.arange(10, 14)
    packed = gated().pack([gate, up])
    assert [gated().shard(packed, rank, 2).tolist() for rank in range(2)] == [[0, 1, 10, 11], [2, 3, 12, 13]]


def test_a_model_whose_weights_have_no_names_is_not_saved_in_shards():
    engine = MegatronEngine.__new__(MegatronEngine)
    torch.nn.Module.__init__(engine)
    engine.family = None
    with pytest.raises(UnsupportedError, match="custom_model_provider_function"):
        MegatronStates(torch.device("cpu")).model_tensors(engine)
