from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty
from torch.utils._python_dispatch import TorchDispatchMode

from accel_inspect.check.patches import Chunks


class Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("number", [1, 2, 3, 5, 8, 100])
@pytest.mark.parametrize("shape", [(8, 3), (7, 5), (1, 8), (0, 4)])
@pytest.mark.parametrize("dim", [0, 1])
def test_chunks_are_those_of_fsdp2(shape, number, dim):
    tensor = torch.arange(shape[0] * shape[1]).view(shape)
    chunks = Chunks(tensor, number, dim)
    for rank, chunk in enumerate(_chunk_with_empty(tensor, number, dim)):
        assert (chunks[rank].shape, chunks[rank].stride()) == (chunk.shape, chunk.stride()), rank
        assert chunks[rank].equal(chunk), rank


def test_a_chunk_of_thousands_is_one_operation():
    with Counted() as counted:
        Chunks(torch.empty(8192, 3), 4096, dim=0)[4095]
    assert counted.operations == [torch.ops.aten.empty.memory_format, torch.ops.aten.slice.Tensor]
