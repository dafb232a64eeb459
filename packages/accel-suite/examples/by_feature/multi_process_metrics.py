"""Compute a metric over all processes: every held-out sample counts once, for any sharding of batches."""

import torch
from sklearn.datasets import load_digits
from sklearn.metrics import f1_score
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
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer, train_loader, test_loader = accelerator.prepare(
    model, optimizer, DataLoader(train, batch_size=32, shuffle=True), DataLoader(held_out, batch_size=50)
)

for epoch in range(4):
    model.train()
    for image, label in train_loader:
        accelerator.backward(nn.functional.cross_entropy(model(image), label))
        optimizer.step()
        optimizer.zero_grad()

    model.eval()
    guesses, truths = [], []
    for image, label in test_loader:
        with torch.no_grad():
            guess = model(image).argmax(dim=1)
        all_guesses, all_labels = accelerator.gather_for_metrics((guess, label))
        guesses += all_guesses.tolist()
        truths += all_labels.tolist()
    score = f1_score(truths, guesses, average="macro")
    accelerator.print(f"epoch {epoch}: F1 {score:.3f} over {len(truths)} samples")
