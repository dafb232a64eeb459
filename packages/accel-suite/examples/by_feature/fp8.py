"""Train in FP8: torchao computes the matrix products of linear layers in 8 bits.

A GPU of compute capability 8.9 or newer computes in FP8. Elsewhere, `emulate` rounds as FP8 does, which shows
whether a model tolerates it.

    accel launch fp8.py
"""

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig

from accel import Accelerator
from accel.utils import AORecipeKwargs, set_seed

has_fp8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
recipe = AORecipeKwargs(config=Float8LinearConfig(emulate=not has_fp8))
accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe])
set_seed(0)

model = nn.Sequential(
    nn.Linear(32, 64),
    nn.ReLU(),
    nn.Linear(64, 64),
    nn.ReLU(),
    nn.Linear(64, 64),
    nn.ReLU(),
    nn.Linear(64, 16),
)
inputs = torch.randn(512, 32)
targets = inputs @ torch.randn(32, 16) / 32**0.5
loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(inputs, targets), batch_size=32, shuffle=True
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
converted = sum("Float8" in type(layer).__name__ for layer in model.modules())
accelerator.print(f"{converted} of 4 linear layers in FP8")  # the first and last layers stay in bfloat16

for epoch in range(4):
    total = 0.0
    for batch, wanted in loader:
        loss = nn.functional.mse_loss(model(batch).float(), wanted)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        total += loss.item() / len(loader)
    accelerator.print(f"epoch {epoch}: loss {total:.3f}")
