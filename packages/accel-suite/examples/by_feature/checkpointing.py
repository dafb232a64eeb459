"""Save the state of training regularly, and resume from the newest checkpoint.

The script resumes after an interruption, after a worker was killed (`accel launch --max_restarts 3`), and on
another number of processes. A preemption by a scheduler loses no step.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator
from accel.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed

epochs = 3
project = ProjectConfiguration(
    "digits-run", automatic_checkpoint_naming=True, total_limit=2, save_on_preemption=True
)
loading = DataLoaderConfiguration(resume_mid_epoch=True)  # no batches to skip by hand
accelerator = Accelerator(project_config=project, dataloader_config=loading)
set_seed(0)

images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = DataLoader(data, batch_size=32, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

if accelerator.has_checkpoint:
    accelerator.load_state()
    accelerator.print(f"resuming in epoch {loader.iteration}")

step = 0
while loader.iteration < epochs:  # the loader tracks its epoch and the remaining samples
    for image, label in loader:
        accelerator.backward(nn.functional.cross_entropy(model(image), label))
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 20 == 0:
            accelerator.save_state()

accelerator.save_state()
accelerator.print(f"done after {step} steps in this life")
