"""A run of Ray Train with accel inside, as a program: a rank kills itself right after it has reported.

The argument is a folder. Prints what every rank did, and the result. With a second argument, `elastic`, the
run begins with two workers on two nodes, and one node is removed after the report: `num_workers=(1, 2)`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any


def loop(config: dict[str, Any]) -> None:
    import torch

    from accel import Accelerator
    from accel_train.ray import load_state, report, shard_loader

    class Step:
        done = 0

        def state_dict(self) -> dict[str, int]:
            return {"done": self.done}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.done = state["done"]

    accelerator, step, folder = Accelerator(cpu=True), Step(), Path(config["folder"])
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.register_for_checkpointing(step)
    loader = accelerator.prepare(shard_loader(accelerator, batch_size=4))
    resumed = load_state(accelerator)
    lines = [f"rank {accelerator.process_index}/{accelerator.num_processes} {resumed} from {step.done}"]
    for epoch in range(step.done // 2, 2):
        rows = []
        for batch in loader:
            rows += batch["x"][:, 0].tolist()
            accelerator.backward(model(batch["x"]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            step.done += 1
        lines.append(f"epoch {epoch} rows {sorted(int(row) for row in rows)}")
        report(accelerator, {"step": step.done}, accelerator.save_state(str(folder / f"step-{step.done}")))
        if config["is_elastic"] and not resumed:
            (folder / "reported").touch()
            time.sleep(600)  # until the node of a rank is removed
        if accelerator.process_index == 1 and not resumed:
            os.kill(os.getpid(), signal.SIGKILL)
    (folder / f"rank-{accelerator.process_index}.txt").write_text("\n".join(lines))


if __name__ == "__main__":
    import numpy as np
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    is_elastic, cluster = sys.argv[2:] == ["elastic"], None
    if is_elastic:
        from ray.cluster_utils import Cluster

        # The workers have the CPUs of the nodes, and the head everything else.
        head = {"num_cpus": 2, "include_dashboard": False}
        nodes_of = cluster = Cluster(initialize_head=True, connect=True, head_node_args=head)
        nodes = [cluster.add_node(num_cpus=1, resources={"worker": 1}) for _ in range(2)]

        def remove_node() -> None:
            while not (Path(sys.argv[1]) / "reported").exists():
                time.sleep(0.1)
            nodes_of.remove_node(nodes[1], allow_graceful=False)

        threading.Thread(target=remove_node, daemon=True).start()
    else:
        ray.init(num_cpus=4, include_dashboard=False)
    rows = np.arange(64, dtype=np.float32).reshape(16, 4)
    result = TorchTrainer(
        loop,
        train_loop_config={"folder": sys.argv[1], "is_elastic": is_elastic},
        scaling_config=ScalingConfig(
            num_workers=(1, 2) if is_elastic else 2,
            resources_per_worker={"CPU": 1, "worker": 1} if is_elastic else None,
        ),
        torch_config=TorchConfig(backend="gloo"),
        datasets={"train": ray.data.from_numpy([rows[:8], rows[8:]]).map_batches(lambda b: {"x": b["data"]})},
        run_config=RunConfig(
            storage_path=f"{sys.argv[1]}/out", name="run", failure_config=FailureConfig(max_failures=1)
        ),
    ).fit()
    assert result.checkpoint is not None
    print("result", result.metrics, [path.name for path in Path(result.checkpoint.path).iterdir()])
    sys.stdout.flush()
    if cluster is not None:
        ray.shutdown()
        cluster.shutdown()
