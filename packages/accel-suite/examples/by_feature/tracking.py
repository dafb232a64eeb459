"""Log hyperparameters, losses, images and histograms with experiment trackers.

Every process makes every call, and the main process logs. View the result with

    tensorboard --logdir tracking-run
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator
from accel.utils import set_seed

config = {"learning_rate": 3e-3, "epochs": 4, "model": {"hidden": 64}}
accelerator = Accelerator(log_with="tensorboard", project_dir="tracking-run", log_system_metrics=True)
accelerator.init_trackers("digits", config)
set_seed(0)

images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
hidden = config["model"]["hidden"]
model = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=config["learning_rate"])
loader = DataLoader(data, batch_size=32, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

tracker = accelerator.get_tracker("tensorboard")
tracker.log_images({"samples": data.tensors[0][:8].reshape(8, 1, 8, 8)}, step=0)
step = 0
for epoch in range(config["epochs"]):
    for image, label in loader:
        loss = nn.functional.cross_entropy(model(image), label)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        accelerator.log({"train/loss": loss, "train/epoch": epoch}, step=step)  # does not wait for the device
    tracker.log_histograms({"weights": accelerator.unwrap_model(model)[0].weight}, step=step)

accelerator.print(f"logged {step} steps, the last loss is {loss.item():.3f}")
accelerator.end_training()
