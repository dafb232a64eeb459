"""Train, let an engine have the device, and send it the weights that changed: reinforcement learning.

accel launch --cpu --num_processes 2 packages/accel-suite/examples/by_feature/weight_sync.py
"""

import zlib

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, FullyShardedDataParallelPlugin
from accel.utils import set_seed

images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


def make_model():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


class Engine:
    """What stands in for an inference engine: it allocates, is filled, and applies patches."""

    def __init__(self, metadata):
        self.weights = {spec.name: torch.empty(spec.shape, dtype=spec.dtype) for spec in metadata}
        self.version = 0

    def load(self, tensors):
        for name, tensor in tensors:
            self.weights[name].copy_(tensor)
        self.version = 1
        return sum(weight.nbytes for weight in self.weights.values())

    def apply(self, patches):
        size = 0
        for patch in patches:
            if patch.version != self.version + 1:
                raise ValueError(f"a patch of version {patch.version} cannot follow version {self.version}")
            checksum = zlib.crc32(f"{patch.name} {patch.version}".encode())
            for tensor in (patch.indices, patch.values):
                checksum = zlib.crc32(tensor.cpu().view(torch.uint8).numpy(), checksum)
            if checksum != patch.checksum:
                raise ValueError(f"the patch of {patch.name} is damaged")
            self.weights[patch.name].view(-1)[patch.indices.long()] = patch.values.cpu()
            size += patch.nbytes
        self.version += 1
        return size

    def count_right(self):
        model = make_model().bfloat16()
        model.load_state_dict(self.weights)
        with torch.no_grad():
            return (model(images.bfloat16()).argmax(dim=1) == labels).sum().item()


accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
set_seed(0)
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = DataLoader(TensorDataset(images, labels), batch_size=64, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
source = accelerator.weight_source(model, dtype=torch.bfloat16, to_main_only=True, track_changes=True)
metadata = source.metadata()  # no weight is read
engine = Engine(metadata) if accelerator.is_main_process else None
for epoch in range(4):
    for image, label in loader:
        accelerator.backward(nn.functional.cross_entropy(model(image), label))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.offload_states(["gradients", "optimizer"])  # the weights are still needed
    if epoch == 0:
        tensors = dict(source)  # all weights, on every process
        size = engine.load(tensors.items()) if engine else 0
    else:
        patches = [*source.changes()]
        size = engine.apply(patches) if engine else 0
    accelerator.offload_states()  # now the engine may have the whole device
    if engine:
        print(f"epoch {epoch}: {size:,} bytes sent, the engine has {engine.count_right()} of 1797 right")
    accelerator.reload_states()
    for group in optimizer.param_groups:
        group["lr"] = 1e-6  # as in reinforcement learning: most weights stay the same in bfloat16
