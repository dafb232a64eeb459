"""Accumulate gradients over four batches per optimizer step."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator
from accel.utils import set_seed

accelerator = Accelerator(gradient_accumulation_steps=4)
set_seed(0)

images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = DataLoader(data, batch_size=16, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for epoch in range(4):
    steps, total = 0, torch.zeros(1, device=accelerator.device)
    for image, label in loader:
        with accelerator.accumulate(model):  # every fourth batch reduces gradients and steps the optimizer
            loss = nn.functional.cross_entropy(model(image), label)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                steps += 1
            optimizer.step()
            optimizer.zero_grad()
        total += loss.detach()
    mean = accelerator.reduce(total / len(loader), "mean").item()
    accelerator.print(f"epoch {epoch}: {steps} steps of {len(loader)} batches, loss {mean:.3f}")
