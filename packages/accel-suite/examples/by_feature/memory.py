"""Start with a batch size that is too large, and reduce it until it fits into memory."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator
from accel.utils import find_executable_batch_size, set_seed

accelerator = Accelerator()
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
# A CPU swaps long before it raises an error, so the example sets a limit there.
limit = 200 if accelerator.device.type == "cpu" else len(data)


@find_executable_batch_size(starting_batch_size=1024)
def train(batch_size):
    accelerator.free_memory()  # release the memory of a previous attempt
    set_seed(0)
    accelerator.print(f"trying batches of {batch_size}")
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(data, batch_size=batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for image, label in loader:
        if len(image) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        accelerator.backward(nn.functional.cross_entropy(model(image), label))
        optimizer.step()
        optimizer.zero_grad()
    return batch_size


accelerator.print(f"trained with batches of {train()}")
