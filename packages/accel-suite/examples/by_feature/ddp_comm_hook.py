"""Compress gradients for the all-reduce with a DDP communication hook."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, DDPCommunicationHookType, DistributedDataParallelKwargs
from accel.utils import set_seed

# Half the bytes. POWER_SGD sends two thin matrices for each gradient; comm_state_option has its rank.
ddp = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)
accelerator = Accelerator(kwargs_handlers=[ddp])
set_seed(0)

images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = DataLoader(data, batch_size=32, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for epoch in range(3):
    total = torch.zeros(1, device=accelerator.device)
    for image, label in loader:
        loss = nn.functional.cross_entropy(model(image), label)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
    mean = accelerator.reduce(total / len(loader), "mean").item()
    accelerator.print(f"epoch {epoch}: loss {mean:.3f}")
