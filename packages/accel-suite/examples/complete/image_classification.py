"""Classify handwritten digits: train, evaluate, log, save and resume.

uv run python packages/accel-suite/examples/complete/image_classification.py
uv run accel launch --cpu --num_processes 2 packages/accel-suite/examples/complete/image_classification.py
"""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator
from accel.utils import ProjectConfiguration, set_seed

config = {"learning_rate": 3e-3, "epochs": 3, "batch_size": 32, "seed": 0}
project = ProjectConfiguration("image-run", automatic_checkpoint_naming=True, total_limit=2)
accelerator = Accelerator(log_with="tensorboard", project_config=project)
set_seed(config["seed"])

images, labels = load_digits(return_X_y=True)
images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
labels = torch.tensor(labels)
train, held_out = train_test_split(range(len(labels)), test_size=0.2, random_state=0, stratify=labels)
train_data, test_data = (TensorDataset(images[rows], labels[rows]) for rows in (train, held_out))
train_loader = DataLoader(train_data, batch_size=config["batch_size"], shuffle=True)
test_loader = DataLoader(test_data, batch_size=config["batch_size"])

model = nn.Sequential(
    nn.Conv2d(1, 16, kernel_size=3, padding=1),
    nn.ReLU(),
    nn.Conv2d(16, 32, kernel_size=3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(32 * 4 * 4, 10),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=config["learning_rate"])
model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)

if accelerator.has_checkpoint:
    accelerator.load_state()  # also restores the run ids of the trackers
    accelerator.print(f"resuming with epoch {train_loader.iteration}")
accelerator.init_trackers("digits", config)

while train_loader.iteration < config["epochs"]:
    epoch = train_loader.iteration
    step = epoch * len(train_loader)
    model.train()
    for image, label in train_loader:
        loss = nn.functional.cross_entropy(model(image), label)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        accelerator.log({"train/loss": loss}, step=step)

    model.eval()
    correct = seen = 0
    for image, label in test_loader:
        with torch.no_grad():
            prediction = model(image).argmax(dim=1)
        predictions, truths = accelerator.gather_for_metrics((prediction, label))
        correct += (predictions == truths).sum().item()
        seen += len(truths)
    accelerator.log({"test/accuracy": correct / seen}, step=step)
    accelerator.print(f"epoch {epoch}: {correct} of {seen} right")
    accelerator.save_state()

accelerator.end_training()
