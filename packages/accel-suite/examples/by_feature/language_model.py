"""Train a small transformer on text from an installed package, with a warm-up counted in optimizer steps."""

from importlib.resources import files

import torch
from torch import nn
from torch.utils.data import DataLoader

from accel import Accelerator
from accel.utils import set_seed

length, width, batch_size, steps = 64, 64, 16, 120

# One step of the schedule is one optimizer step, on any number of processes.
accelerator = Accelerator(step_scheduler_per="update")
set_seed(0)

# scikit-learn's data set descriptions, as bytes.
pages = [page for page in files("sklearn.datasets.descr").iterdir() if page.name.endswith(".rst")]
text = "\n".join(page.read_text() for page in sorted(pages, key=lambda page: page.name))
tokens = torch.tensor(list(text.encode()))
data = tokens[: len(tokens) // (length + 1) * (length + 1)].view(-1, length + 1)


class Transformer(nn.Module):
    """Predict the next byte at every position."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, inputs):
        """Return the logits of the next bytes."""
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1], device=inputs.device)
        return self.head(self.blocks(self.embedding(inputs) + self.positions, mask=mask, is_causal=True))


model = Transformer()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
warm_up = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min(1, (step + 1) / 10) * (1 - step / (steps + 1))
)
loader = DataLoader(data, batch_size=batch_size, shuffle=True, drop_last=True)
model, optimizer, loader, warm_up = accelerator.prepare(model, optimizer, loader, warm_up)

step = 0
while step < steps:
    for batch in loader:
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warm_up.step()
        optimizer.zero_grad()
        if step % 40 == 0:
            mean = accelerator.reduce(loss.detach(), "mean")
            accelerator.print(f"step {step}: loss {mean:.2f}, learning rate {warm_up.get_last_lr()[0]:.1e}")
        step += 1
        if step == steps:
            break

accelerator.print(f"loss at the end {accelerator.reduce(loss.detach(), 'mean'):.2f}")
