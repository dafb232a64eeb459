"""Profile some training steps, with a Chrome trace for every process (open them at https://ui.perfetto.dev)."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, ProfileKwargs
from accel.utils import set_seed

profile = ProfileKwargs(
    activities=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"],
    schedule_option={"wait": 2, "warmup": 1, "active": 3, "repeat": 1},
    record_shapes=True,
    output_trace_dir="traces",
)
accelerator = Accelerator(kwargs_handlers=[profile])
set_seed(0)

images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer, loader = accelerator.prepare(
    model, optimizer, DataLoader(data, batch_size=64, shuffle=True)
)

with accelerator.profile() as profiler:
    for image, label in loader:
        accelerator.backward(nn.functional.cross_entropy(model(image), label))
        optimizer.step()
        optimizer.zero_grad()
        profiler.step()

accelerator.print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=5))
