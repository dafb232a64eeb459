"""Train a small language model; the configuration file alone selects the strategy.

    accel launch --config_file configs/ddp.yaml language_model.py
    accel launch --config_file configs/fsdp2.yaml language_model.py

A run can be stopped and go on under another strategy, with another number of processes:

    accel launch --config_file configs/fsdp2.yaml language_model.py --steps 60 --save half
    accel launch --config_file configs/ddp.yaml language_model.py --resume half
"""

import argparse
from importlib.resources import files

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from accel import Accelerator
from accel.utils import DataLoaderConfiguration, set_seed

length, width, head_width, depth = 64, 64, 16, 2
batch_size = 16  # of all processes together


class Block(nn.Module):
    """Attention to earlier bytes, then a small network on every byte."""

    def __init__(self):
        super().__init__()
        self.attention_norm, self.network_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        """Return as many vectors as were given."""
        normed = self.attention_norm(x)
        # as many heads as there are here: tensor parallelism gives each process some of them
        heads = [part(normed).unflatten(-1, (-1, head_width)).transpose(1, 2) for part in self.inner]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(functional.gelu(self.up(self.network_norm(x))))

    @property
    def inner(self):
        """What makes queries, keys and values."""
        return self.query, self.key, self.value


class LanguageModel(nn.Module):
    """Predicts every next byte."""

    _no_split_modules = ("Block",)  # what sharding treats as one piece
    _tp_plan = {  # noqa: RUF012 - as transformers has it: how tensor parallelism shards the layers
        "blocks.*.query": "colwise",
        "blocks.*.key": "colwise",
        "blocks.*.value": "colwise",
        "blocks.*.out": "rowwise",
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
    }

    def __init__(self):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens, positions=None):
        """Give the logits of the next bytes; `positions` where a process has a part of each sequence."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Progress:
    """Counts optimizer steps, also those before a run was stopped."""

    step = 0

    def state_dict(self):
        """What is saved."""
        return {"step": self.step}

    def load_state_dict(self, state):
        """Go on counting."""
        self.step = state["step"]


def read_data():
    """Give the descriptions that scikit-learn ships with its data sets, as rows of bytes."""
    pages = [page for page in files("sklearn.datasets.descr").iterdir() if page.name.endswith(".rst")]
    text = "\n".join(page.read_text() for page in sorted(pages, key=lambda page: page.name))
    tokens = torch.tensor(list(text.encode()))
    return tokens[: len(tokens) // (length + 1) * (length + 1)].view(-1, length + 1)


def main():
    """Train, and say the loss."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120, help="when to stop")
    parser.add_argument("--save", help="a folder to save the state to at the end")
    parser.add_argument("--resume", help="a folder to go on from")
    arguments = parser.parse_args()

    loading = DataLoaderConfiguration(split_batches=True, resume_mid_epoch=True)
    accelerator = Accelerator(dataloader_config=loading, step_scheduler_per="update")
    set_seed(0)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    loader = DataLoader(read_data(), batch_size=batch_size, shuffle=True, drop_last=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if arguments.resume:
        accelerator.load_state(arguments.resume)

    while progress.step < arguments.steps:
        for batch in loader:
            with accelerator.accumulate(model):
                logits = model(batch[:, :-1])
                loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            progress.step += accelerator.sync_gradients
            if progress.step >= arguments.steps:
                break

    mean = accelerator.reduce(loss.detach().float(), "mean")
    accelerator.print(f"{accelerator.num_processes} process(es), loss {mean:.2f} after {progress.step} steps")
    if arguments.save:
        accelerator.save_state(arguments.save)


if __name__ == "__main__":
    main()
