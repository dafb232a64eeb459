"""Distinguish lines of prose from lines of code: train, evaluate, log, save and resume.

The prose is Python's built-in manual for `help()`, and the code comes from modules.

uv run python packages/accel-suite/examples/complete/text_classification.py
uv run accel launch --cpu --num_processes 2 packages/accel-suite/examples/complete/text_classification.py
"""

import inspect
import textwrap
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.utils.data import DataLoader

from accel import Accelerator
from accel.utils import ProjectConfiguration, set_seed

config = {"learning_rate": 5e-3, "epochs": 3, "batch_size": 32, "seed": 0}
project = ProjectConfiguration("text-run", automatic_checkpoint_naming=True, total_limit=2)
accelerator = Accelerator(log_with="tensorboard", project_config=project)
set_seed(config["seed"])


def lines(text):
    return [line.strip() for line in text.splitlines() if len(line.strip()) > 20]


def collate(rows):
    """Truncate every text or pad it with spaces, and stack the labels."""
    texts, labels = zip(*rows, strict=True)
    size = 60
    padded = [text.encode()[:size].ljust(size) for text in texts]
    return torch.tensor([list(text) for text in padded]), torch.tensor(labels)


prose = lines("\n".join(topics.values()))[:2000]
code = lines("\n".join(inspect.getsource(module) for module in (inspect, textwrap, nn.functional)))[:2000]
rows = [(line, 0) for line in prose] + [(line, 1) for line in code]
held_out, train = rows[::5], [row for number, row in enumerate(rows) if number % 5]
train_loader = DataLoader(train, batch_size=config["batch_size"], shuffle=True, collate_fn=collate)
test_loader = DataLoader(held_out, batch_size=config["batch_size"], collate_fn=collate)


class Classifier(nn.Module):
    """Detect patterns of five bytes anywhere in the line."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, 16)
        self.patterns = nn.Conv1d(16, 64, kernel_size=5)
        self.head = nn.Linear(64, 2)

    def forward(self, text):
        """Score a batch of lines, (N, 60) bytes, as prose and as code: (N, 2)."""
        return self.head(self.patterns(self.embedding(text).transpose(1, 2)).relu().amax(dim=2))


model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=config["learning_rate"])
model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)

if accelerator.has_checkpoint:
    accelerator.load_state()  # also restores the run ids of the trackers
    accelerator.print(f"resuming with epoch {train_loader.iteration}")
accelerator.init_trackers("prose-or-code", config)

while train_loader.iteration < config["epochs"]:
    epoch = train_loader.iteration
    step = epoch * len(train_loader)
    model.train()
    for text, label in train_loader:
        loss = nn.functional.cross_entropy(model(text), label)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        accelerator.log({"train/loss": loss}, step=step)

    model.eval()
    correct = seen = 0
    for text, label in test_loader:
        with torch.no_grad():
            prediction = model(text).argmax(dim=1)
        predictions, truths = accelerator.gather_for_metrics((prediction, label))
        correct += (predictions == truths).sum().item()
        seen += len(truths)
    accelerator.log({"test/accuracy": correct / seen}, step=step)
    accelerator.print(f"epoch {epoch}: {correct} of {seen} right")
    accelerator.save_state()

accelerator.end_training()
