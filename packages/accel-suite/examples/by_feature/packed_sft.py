"""Fine-tune on packed prompts and answers, in batches by a budget of tokens that are balanced over processes.

Lengths differ by two orders of magnitude. Each batch is one row of at most `max_tokens` tokens, without
padding, and all processes have as many, of about as many tokens. A step is exactly that of one large batch.
"""

from importlib.resources import files

import torch
from torch import nn
from torch.utils.data import DataLoader

from accel import Accelerator, PartialState
from accel.utils import set_seed
from accel_train import TokenBudgetBatchSampler

max_tokens = 256
micro_batches = 4  # of all processes in a step
epochs = 3
ignored = -100

processes = PartialState().num_processes
accelerator = Accelerator(gradient_accumulation_steps=max(1, micro_batches // processes))
set_seed(0)

# Paragraphs of scikit-learn's data set descriptions, as bytes: the first words ask for the others.
pages = [page for page in files("sklearn.datasets.descr").iterdir() if page.name.endswith(".rst")]
text = "\n\n".join(page.read_text() for page in sorted(pages, key=lambda page: page.name))
samples = []
for paragraph in text[:20_000].split("\n\n"):
    content = torch.tensor(list(paragraph.encode()[: max_tokens + 1]))
    labels = content[1:].clone()
    labels[: min(len(labels) // 2, 20)] = ignored
    if len(labels) > 0:
        samples.append({"tokens": content[:-1], "labels": labels})


def pack(batch):
    """Concatenate samples; `sample` is the number of each token's own one."""
    lengths = torch.tensor([len(sample["tokens"]) for sample in batch])
    return {
        "tokens": torch.cat([sample["tokens"] for sample in batch]),
        "labels": torch.cat([sample["labels"] for sample in batch]),
        "positions": torch.cat([torch.arange(int(length)) for length in lengths]),
        "sample": torch.repeat_interleave(lengths),
    }


class Transformer(nn.Module):
    """Predict the next byte at every position of packed samples."""

    def __init__(self, width=64):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(256, width), nn.Embedding(max_tokens, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens, positions, sample):
        """Return the logits of the next bytes, of shape `(tokens, 256)`."""
        is_earlier = torch.ones(len(tokens), len(tokens), dtype=torch.bool, device=tokens.device).tril()
        is_seen = is_earlier & (sample[:, None] == sample)
        hidden = (self.embedding(tokens) + self.positions(positions))[None]
        return self.head(self.blocks(hidden, mask=~is_seen))[0]


model = Transformer()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
# Attention takes the square of a length; a round is a step, so that a run may resume on 1, 2 or 4 processes.
batches = TokenBudgetBatchSampler(
    [len(sample["tokens"]) for sample in samples],
    max_tokens,
    cost=lambda length: 64 * length + length**2,
    multiple_of=micro_batches,
)
loader = DataLoader(samples, batch_sampler=batches, collate_fn=pack)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for epoch in range(epochs):
    total = torch.zeros(2, device=accelerator.device)
    for batch in loader:
        labels = batch.pop("labels")
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(**batch), labels, ignore_index=ignored, reduction="sum")
            answered = (labels != ignored).sum()
            accelerator.backward(loss, num_items=answered)
            optimizer.step()
            optimizer.zero_grad()
        total += torch.stack([loss.detach(), answered])
    loss, answered = accelerator.reduce(total).tolist()
    accelerator.print(f"epoch {epoch}: loss per byte {loss / answered:.3f} of {answered:.0f} bytes")
