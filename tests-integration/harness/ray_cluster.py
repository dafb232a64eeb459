"""A cluster of Ray with two nodes of one CPU each on this machine, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

SKIP = "" if find_spec("ray") else "needs ray: `uv sync --group dev`"

PROGRAM = """\
import sys
from ray.cluster_utils import Cluster
# Ray itself waits 30 seconds for each node, which is too short on a busy machine.
cluster = Cluster(True, head_node_args={"num_cpus": 1, "include_dashboard": False, "wait": False})
cluster.add_node(wait=False, num_cpus=1)
while True:
    try:
        cluster.wait_for_nodes()
        break
    except TimeoutError:
        pass
print("address", cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
# Slow machines: an agent needs many seconds to import what it needs.
ENVIRON = {
    "RAY_agent_register_timeout_ms": "180000",
    "RAY_gcs_server_port_wait_time_s": "180",
    "RAY_USAGE_STATS_ENABLED": "0",
}
IN_THIS_FOLDER = {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
"""For programs below `uv run`, whose folder Ray otherwise copies to every node."""


class LocalRay:
    """Two nodes; a context manager.

    Attributes:
        address (str): The address of the cluster.
    """

    def __enter__(self) -> LocalRay:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], env={**os.environ, **ENVIRON},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("address "):
                self.address = line.split()[1]
                return self
        raise RuntimeError(f"Ray has ended with {self._process.wait()}")

    def __exit__(self, *_: Any) -> None:
        self._process.communicate()  # closes its input, at which it ends
