"""What a rank of a large world asks the store for while it starts, and connects to as it communicates."""

from __future__ import annotations

import subprocess
import sys

import pytest

from harness.programs import TORCHRUN, Program, run_programs

ALONE = """\
import sys
from collections import Counter
import torch.distributed as dist
from accel_state import PartialState
from accel_plugins.parallelism.config import mesh_of
asked = Counter()
class Store(dist.Store):
    def set(self, key, value): asked["set"] += 1
    def get(self, key): asked["get"] += 1; return b""
    def wait(self, keys, timeout=None): asked["wait"] += 1
    def multi_get(self, keys): asked["multi_get"] += 1; return [b""] * len(keys)
    def has_extended_api(self): return True
    def clone(self): raise RuntimeError("not in this test")
world = int(sys.argv[1])
PartialState(cpu=True, store=Store(), rank=world - 1, world_size=world)
print(dict(asked))
mesh_of("cpu", {"dp_replicate": world // 64, "dp_shard": 64})
print(asked.total())
"""


@pytest.mark.parametrize("world_size", [128, 1024])
def test_a_rank_of_many_sends_one_request_for_each_of_its_groups(world_size) -> None:
    run = [sys.executable, "-c", ALONE, str(world_size)]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "{'set': 1}\n3\n"), done.stderr


TOGETHER = """\
import torch
from accel_state import PartialState
state = PartialState(cpu=True)
ranks = state.runtime.collectives
out, total = torch.empty(4), torch.ones(3)
for _ in range(2):
    ranks.barrier()
    ranks.all_gather_into(out, torch.tensor([float(state.process_index)]))
ranks.all_reduce(total)
ranks.broadcast(total, src=3)
print(out.tolist(), total.tolist(), ranks.all_gather_object("x" * state.process_index))
"""


def test_ranks_that_connect_late_communicate_like_any_others(tmp_path) -> None:
    program = Program(TOGETHER, 4, {**TORCHRUN, "TORCH_GLOO_LAZY_INIT": "1"})
    for end in run_programs({"late": program}, tmp_path)["late"]:
        assert (end.code, end.errors) == (0, "")
        assert end.output == "[0.0, 1.0, 2.0, 3.0] [4.0, 4.0, 4.0] ['', 'x', 'xx', 'xxx']\n"
