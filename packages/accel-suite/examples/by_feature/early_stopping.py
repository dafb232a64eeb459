"""Stop all processes when one of them meets the stopping condition."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator
from accel.utils import set_seed

enough = 0.3  # mean loss over the last batches of this process
accelerator = Accelerator()
set_seed(0)

images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = DataLoader(data, batch_size=32, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

recent, steps = 2.3, 0
for _ in range(20):
    for image, label in loader:
        loss = nn.functional.cross_entropy(model(image), label)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        recent = 0.9 * recent + 0.1 * loss.item()
        if recent < enough:
            accelerator.set_trigger()
        stop = accelerator.check_trigger()  # the same answer on all processes
        if stop:
            break
    if stop:
        break

accelerator.print(f"stopped after {steps} steps")
