"""Train with a DeepSpeed configuration file that defines the optimizer and the schedule.

accel launch --cpu --num_processes 2 packages/accel-suite/examples/by_feature/deepspeed_with_config_support.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, DeepSpeedPlugin
from accel.utils import DummyScheduler, set_seed

config = {  # or the path of a file
    "train_micro_batch_size_per_gpu": 32,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 500_000},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-3, "warmup_num_steps": 20},
    },
}
accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
set_seed(0)

images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # DummyOptim if the configuration has an optimizer
scheduler = DummyScheduler(optimizer)  # the configuration describes it
loader = DataLoader(data, batch_size=32, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

for epoch in range(3):
    total = torch.zeros(1, device=accelerator.device)
    for image, label in loader:
        loss = nn.functional.cross_entropy(model(image), label)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        total += loss.detach()
    mean = accelerator.reduce(total / len(loader), "mean").item()
    accelerator.print(f"epoch {epoch}: loss {mean:.3f}, gradient norm {model.get_global_grad_norm():.2f}")
