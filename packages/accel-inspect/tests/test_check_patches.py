from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty

from accel_inspect.check.patches import Chunks


@pytest.mark.parametrize(("length", "count"), [(8, 4), (7, 4), (5, 4), (2, 4), (6, 1)])
def test_the_chunks_of_fsdp_are_those_of_torch(length, count):
    tensor = torch.arange(length * 2).reshape(length, 2)
    expected, chunks = _chunk_with_empty(tensor, count, 0), Chunks(tensor, count, 0)
    for rank in range(count):
        assert torch.equal(chunks[rank], expected[rank])
