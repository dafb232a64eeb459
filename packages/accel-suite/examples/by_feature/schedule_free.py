"""Train with an optimizer that needs no learning rate schedule (pip install schedulefree)."""

import torch
from schedulefree import AdamWScheduleFree
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator
from accel.utils import set_seed

accelerator = Accelerator()
set_seed(0)

images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
train, held_out = torch.utils.data.random_split(data, [1440, 357], torch.Generator().manual_seed(0))
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = AdamWScheduleFree(model.parameters(), lr=1e-2, warmup_steps=20)
model, optimizer, train_loader, test_loader = accelerator.prepare(
    model, optimizer, DataLoader(train, batch_size=32, shuffle=True), DataLoader(held_out, batch_size=50)
)

for epoch in range(4):
    model.train()
    optimizer.train()  # use the training weights
    for image, label in train_loader:
        accelerator.backward(nn.functional.cross_entropy(model(image), label))
        optimizer.step()
        optimizer.zero_grad()

    model.eval()
    optimizer.eval()  # use the averaged weights, to evaluate and save them
    correct = seen = 0
    for image, label in test_loader:
        with torch.no_grad():
            guess = model(image).argmax(dim=1)
        guesses, truths = accelerator.gather_for_metrics((guess, label))
        correct += (guesses == truths).sum().item()
        seen += len(truths)
    accelerator.print(f"epoch {epoch}: {correct} of {seen} right")
