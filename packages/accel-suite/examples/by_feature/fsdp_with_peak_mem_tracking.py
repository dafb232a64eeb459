"""Shard a model with FSDP2, and print the peak memory of each phase.

On a GPU, the allocator reports the peak. On a CPU, only parameters, gradients and optimizer state count.
"""

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from accel import Accelerator, FullyShardedDataParallelPlugin
from accel.utils import set_seed

plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Linear"]
)
accelerator = Accelerator(fsdp_plugin=plugin)
set_seed(0)


def peak():
    """Return the peak memory of the device since the last call, in MiB."""
    if accelerator.device.type == "cuda":
        most = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return most / 2**20
    tensors = [*model.parameters(), *(one.grad for one in model.parameters() if one.grad is not None)]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    local = [one.to_local() if isinstance(one, DTensor) else one for one in tensors]
    return sum(one.nbytes for one in local) / 2**20


model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
size = sum(parameter.nbytes for parameter in model.parameters()) / 2**20
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(torch.randn(64, 256), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.print(f"weights: {size:.2f} MiB; prepared: {peak():.2f} MiB on this rank")

for batch in loader:
    loss = model(batch).square().mean()
    accelerator.backward(loss)
    after_backward = peak()
    optimizer.step()
    after_step = peak()
    optimizer.zero_grad()

accelerator.print(f"backward: {after_backward:.2f} MiB, optimizer step: {after_step:.2f} MiB")
