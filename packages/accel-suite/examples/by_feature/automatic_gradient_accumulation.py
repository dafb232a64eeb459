"""Keep the batch size of a step when memory runs out, with more and smaller micro-batches."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator
from accel.utils import find_executable_batch_size, set_seed

wanted = 256  # samples of a step on each process
accelerator = Accelerator()
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
# A CPU swaps long before it raises an error, so the example sets a limit there.
limit = 100 if accelerator.device.type == "cpu" else len(data)
size = wanted


def half():
    global size  # noqa: PLW0603 - shared by the search and the loop
    size //= 2
    return size


@find_executable_batch_size(starting_batch_size=wanted, reduce_batch_size_fn=half)
def train(batch_size):
    accelerator.free_memory()  # release the memory of a previous attempt
    accelerator.gradient_accumulation_steps = wanted // batch_size
    set_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(data, batch_size=batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = 0
    for image, label in loader:
        if len(image) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(image), label))
            steps += accelerator.sync_gradients
            optimizer.step()
            optimizer.zero_grad()
    return batch_size, steps


batch_size, steps = train()
count = accelerator.gradient_accumulation_steps
accelerator.print(f"{steps} steps of {count} micro-batches of {batch_size}")
