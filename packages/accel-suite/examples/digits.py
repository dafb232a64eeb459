"""Train a small convolutional network on scikit-learn's handwritten digits.

The same file runs in one process, in several, and on a GPU:

    uv run python packages/accel-suite/examples/digits.py
    uv run accel launch --cpu --num_processes 2 packages/accel-suite/examples/digits.py
    uv run torchrun --nproc_per_node 2 packages/accel-suite/examples/digits.py
"""

import time

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator
from accel.utils import set_seed, tqdm

epochs = 8
batch_size = 32  # per process
learning_rate = 3e-3

started = time.perf_counter()
# The schedule below counts the batches of one process.
accelerator = Accelerator(step_scheduler_per="process")
set_seed(0)

# 1,797 images of 8x8 pixels with values 0 ... 16; a fifth is held out
images, labels = load_digits(return_X_y=True)
images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
labels = torch.tensor(labels)
train, held_out = train_test_split(range(len(labels)), test_size=0.2, random_state=0, stratify=labels)
train_loader = DataLoader(TensorDataset(images[train], labels[train]), batch_size=batch_size, shuffle=True)
test_loader = DataLoader(TensorDataset(images[held_out], labels[held_out]), batch_size=batch_size)

model = nn.Sequential(
    nn.Conv2d(1, 32, kernel_size=3, padding=1),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.Conv2d(32, 64, kernel_size=3, padding=1),
    nn.BatchNorm2d(64),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Dropout(0.5),
    nn.Linear(64 * 4 * 4, 10),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
scheduler = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, max_lr=learning_rate, total_steps=epochs * len(train_loader)
)
model, optimizer, scheduler, train_loader, test_loader = accelerator.prepare(
    model, optimizer, scheduler, train_loader, test_loader
)

progress = tqdm(total=epochs * len(train_loader), desc="training")
for _ in range(epochs):
    model.train()
    for image, label in train_loader:
        loss = nn.functional.cross_entropy(model(image), label)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        progress.update()
progress.close()

model.eval()
correct = seen = 0
for image, label in test_loader:
    with torch.no_grad():
        prediction = model(image).argmax(dim=1)
    # every held-out image exactly once, on any number of processes
    predictions, truths = accelerator.gather_for_metrics((prediction, label))
    correct += (predictions == truths).sum().item()
    seen += len(truths)

accelerator.print(f"held-out accuracy {correct / seen:.4f} ({correct} of {seen} images)")
accelerator.print(f"wall time {time.perf_counter() - started:.1f} s, {accelerator.num_processes} process(es)")
