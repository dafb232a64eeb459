"""Average models every few steps instead of averaging gradients in each step."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator
from accel.local_sgd import LocalSGD
from accel.utils import set_seed

accelerator = Accelerator()
set_seed(0)

images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
loader = DataLoader(data, batch_size=32, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

with LocalSGD(accelerator, model, local_sgd_steps=8) as local_sgd:
    for _ in range(5):
        for image, label in loader:
            accelerator.backward(nn.functional.cross_entropy(model(image), label))
            optimizer.step()
            optimizer.zero_grad()
            local_sgd.step()

with torch.no_grad():
    pairs = [accelerator.gather_for_metrics((model(image).argmax(1), label)) for image, label in loader]
guessed, true = (torch.cat(parts) for parts in zip(*pairs, strict=True))
accelerator.print(f"{(guessed == true).float().mean():.3f} of {len(true)} digits right")
