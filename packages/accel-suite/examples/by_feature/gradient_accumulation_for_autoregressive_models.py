"""Accumulate gradients over sentences of different length, exactly as in one large batch.

The mean of micro-batch means gives a token of a short sentence more weight than a token of a long one. Summed
losses, divided by the number of tokens of all micro-batches and processes, weight all tokens equally.
"""

from importlib.resources import files

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from accel import Accelerator
from accel.utils import set_seed

epochs = 3
micro_batch_size = 8  # per process
accumulation_steps = 2
padding = -100

accelerator = Accelerator(gradient_accumulation_steps=accumulation_steps)
set_seed(0)

# Sentences of scikit-learn's data set descriptions, as bytes.
pages = [page for page in files("sklearn.datasets.descr").iterdir() if page.name.endswith(".rst")]
text = " ".join(" ".join(page.read_text().split()) for page in sorted(pages, key=lambda page: page.name))
sentences = [torch.tensor(list(one.encode()[:200])) for one in text.split(". ") if len(one) > 20]


def collate(batch):
    inputs = pad_sequence([one[:-1] for one in batch], batch_first=True)
    return inputs, pad_sequence([one[1:] for one in batch], batch_first=True, padding_value=padding)


class NextByte(nn.Module):
    """Predict the next byte at every position."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, 32)
        self.recurrent = nn.GRU(32, 64, batch_first=True)
        self.head = nn.Linear(64, 256)

    def forward(self, inputs):
        """Return the logits of the next bytes."""
        return self.head(self.recurrent(self.embedding(inputs))[0])


model = NextByte()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(sentences, batch_size=micro_batch_size, shuffle=True, collate_fn=collate)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for epoch in range(epochs):
    total = torch.zeros(2, device=accelerator.device)
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            logits = model(inputs)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            tokens = (targets != padding).sum()
            accelerator.backward(loss, num_items=tokens)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        total += torch.stack([loss.detach(), tokens])
    loss, tokens = accelerator.reduce(total).tolist()
    accelerator.print(f"epoch {epoch}: loss per byte {loss / tokens:.3f}")
