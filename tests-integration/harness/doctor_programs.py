"""Scripts for `accel doctor`: right ones, and ones with one mistake each, which is to be found by name."""

from __future__ import annotations

from dataclasses import dataclass, field

BASE = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator
from accel.utils import DataLoaderConfiguration, GradScalerKwargs, set_seed

set_seed(0)
accelerator = Accelerator({accelerator})
rank, ranks = accelerator.process_index, accelerator.num_processes
inputs, targets = torch.randn(45, 6), torch.randn(45, 1)
dataset = TensorDataset(inputs, targets)
model = {model}
optimizer = torch.optim.{optimizer}
loader = DataLoader(dataset, batch_size=4, {loader})
{schedule}
{prepare}
{after}
for epoch in range(2):
    {epoch}
    for batch, wanted in {read}:
        with accelerator.accumulate(model):
            {before}
            loss = {loss}
            {backward}
            {clip}
            optimizer.step()
            {step}
            optimizer.zero_grad()
{end}
"""
PARTS = {
    "accelerator": "",
    "model": "nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))",
    "optimizer": "AdamW(model.parameters(), lr=0.01)",
    "loader": "shuffle=True",
    "schedule": "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)",
    "prepare": (
        "model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)"
    ),
    "after": "",
    "epoch": "model.train()",
    "read": "loader",
    "before": "",
    "loss": "nn.functional.mse_loss(model(batch), wanted)",
    "backward": "accelerator.backward(loss)",
    "clip": "",
    "step": "scheduler.step()",
    "end": "",
}

TOKENS = """\
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from accel import Accelerator
from accel.utils import set_seed

set_seed(0)
accelerator = Accelerator({accelerator})
rows = [torch.randint(1, 20, (3 + 5 * index % 11,)) for index in range(40)]

def collate(rows):
    tokens = pad_sequence(rows, batch_first=True)
    labels = pad_sequence(rows, batch_first=True, padding_value={ignored})
    return {{"tokens": tokens, "labels": labels}}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        {mask}
        return self.head(hidden + hidden.sum(1, keepdim=True))

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(rows, batch_size=4, shuffle=True, collate_fn=collate)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(2):
    for batch in loader:
        with accelerator.accumulate(model):
            logits, labels = model(batch["tokens"]), batch["labels"]
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(){reduction})
            accelerator.backward(loss{items})
            optimizer.step()
            optimizer.zero_grad()
"""
TOKEN_PARTS = {
    "accelerator": "",
    "ignored": "-100",
    "mask": "hidden = hidden * (tokens != 0).unsqueeze(-1)",
    "reduction": ', reduction="sum"',
    "items": ", num_items=(labels != -100).sum()",
}


@dataclass(frozen=True, kw_only=True)
class Program:
    """A script.

    Args:
        parts: The parts that differ from those of `PARTS`, or of `TOKEN_PARTS`.
        name: The diagnosis that is to be found; empty for a right script.
        words: Settings of the command.
        base: The text of the script.
    """

    parts: dict[str, str] = field(default_factory=dict)
    name: str = ""
    words: tuple[str, ...] = ()
    base: str = BASE

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments of the command before the script; without a resumed run where that shows nothing."""
        is_resumed = not self.name or self.name.startswith("resume")
        return self.words if is_resumed else ("--no_resume", *self.words)

    @property
    def source(self) -> str:
        """The script."""
        defaults = TOKEN_PARTS if self.base is TOKENS else PARTS
        assert not self.parts.keys() - defaults.keys()
        return self.base.format(**(defaults | self.parts))


def lines(*texts: str, indent: int = 0) -> str:
    """Join lines of a part that begins at an indentation."""
    return ("\n" + " " * indent).join(texts)


EVALUATE = lines(
    "model.eval()",
    "held_out = accelerator.prepare_data_loader(DataLoader(dataset, batch_size=4))",
    "for batch, wanted in held_out:",
    "    with torch.no_grad():",
    "        gathered = accelerator.{}((model(batch), wanted))",
)

FSDP = ("--use_fsdp", "--fsdp_version", "2", "--num_processes", "2")

LAYERS = lines(
    "None",
    "class Layers(nn.Module):",
    "    def __init__(self):",
    "        super().__init__()",
    "        self.layers, self.head = nn.ModuleList(nn.Linear(6, 6) for _ in range(5)), nn.Linear(6, 1)",
    "    def forward(self, batch):",
    "        for layer in self.layers:",
    "            batch = batch + layer(batch).tanh()",
    "        return self.head(batch)",
    "model = Layers()",
)

RIGHT = {
    "plain": Program(),
    "accumulation": Program(parts={"accelerator": "gradient_accumulation_steps=2"}),
    "clipping": Program(
        parts={
            "accelerator": "gradient_accumulation_steps=2",
            "clip": lines(
                "if accelerator.sync_gradients:",
                "    accelerator.clip_grad_norm_(model.parameters(), 0.1)",
                indent=12,
            ),
        }
    ),
    "tokens": Program(base=TOKENS),
    "evaluation": Program(parts={"end": EVALUATE.format("gather_for_metrics")}),
    "split batches": Program(
        parts={"accelerator": "dataloader_config=DataLoaderConfiguration(split_batches=True)"}
    ),
    "noise in the loop": Program(
        parts={"loss": "nn.functional.mse_loss(model(batch + 0.1 * torch.randn_like(batch)), wanted)"}
    ),
    "augmentation": Program(
        parts={
            "loader": lines(
                "shuffle=True)",
                "class Noisy(torch.utils.data.Dataset):",
                "    def __len__(self):",
                "        return 45",
                "    def __getitem__(self, index):",
                "        return inputs[index] + torch.randn(6), targets[index]",
                "loader = DataLoader(Noisy(), batch_size=4, shuffle=True",
            )
        }
    ),
    "resumes where it stopped": Program(
        parts={
            "accelerator": "dataloader_config=DataLoaderConfiguration(resume_mid_epoch=True)",
            "after": "if accelerator.has_checkpoint:\n    accelerator.load_state('saved')",
            "step": lines("scheduler.step()", "accelerator.save_state('saved')", indent=12),
        }
    ),
    "saves at the end of an epoch": Program(
        parts={
            "after": "if accelerator.has_checkpoint:\n    accelerator.load_state('saved')",
            "end": "    accelerator.save_state('saved')\naccelerator.load_state('saved')",
        }
    ),
    "a schedule per update": Program(
        parts={"accelerator": "gradient_accumulation_steps=2, step_scheduler_per='update'"}
    ),
    "a sampler with weights": Program(
        parts={"loader": "sampler=torch.utils.data.WeightedRandomSampler(torch.ones(45), 45)"}
    ),
    "batches from workers": Program(parts={"loader": "shuffle=True, num_workers=2"}),
    "last batch left out": Program(parts={"loader": "shuffle=True, drop_last=True"}),
    "float64": Program(
        parts={
            "model": "nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()",
            "loss": "nn.functional.mse_loss(model(batch.double()), wanted.double())",
        }
    ),
    "bf16": Program(parts={"accelerator": "mixed_precision='bf16'"}),
    "FSDP": Program(words=FSDP),
    "layers left out": Program(parts={"model": LAYERS}, words=("--blocks", "2")),
    "layers left out under FSDP": Program(parts={"model": LAYERS}, words=(*FSDP, "--blocks", "2")),
    "on the devices": Program(words=("--on_device", "--cpu", "--num_processes", "2")),
}
"""Scripts that are right."""

TWO_MODELS = lines(
    "other = nn.Linear(6, 1)",
    "second = torch.optim.SGD(other.parameters(), lr=0.1)",
    "model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)",
    "other = accelerator.prepare(other)",
)
BRANCHES = lines(
    "None",
    "class Branches(nn.Module):",
    "    def __init__(self):",
    "        super().__init__()",
    "        self.usual, self.seldom = nn.Linear(6, 1), nn.Linear(6, 1)",
    "    def forward(self, batch):",
    "        return self.usual(batch) if batch.sum() < 1e3 else self.seldom(batch)",
    "model = Branches()",
)
STREAM = lines(
    "shuffle=False)",
    "class Stream(torch.utils.data.IterableDataset):",
    "    def __iter__(self):",
    "        return ((inputs[index], targets[index]) for index in range(45))",
    "loader = DataLoader(Stream(), batch_size=4",
)
NOISY = lines(
    "shuffle=True)",
    "class Noisy(torch.utils.data.Dataset):",
    "    def __init__(self):",
    "        self.generator = torch.Generator().manual_seed(0)",
    "    def __len__(self):",
    "        return 45",
    "    def __getitem__(self, index):",
    "        return inputs[index] + torch.randn(6, generator=self.generator), targets[index]",
    "loader = DataLoader(Noisy(), batch_size=4, num_workers=2",
)

DEFECTS = {
    "loader not prepared": Program(
        name="loader-not-prepared",
        parts={"prepare": "model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)"},
    ),
    "sharded twice": Program(name="sharded-twice", parts={"loader": "sampler=[*range(45)][rank::ranks]"}),
    "another order on each rank": Program(
        name="other-samples-per-rank",
        parts={"loader": "sampler=torch.randperm(45, generator=torch.Generator().manual_seed(rank))"},
    ),
    "another split on each rank": Program(
        name="other-samples-per-rank",
        parts={
            "after": lines(
                "set_seed(0, device_specific=True)",
                "dataset, _ = torch.utils.data.random_split(dataset, [30, 15])",
                "loader = accelerator.prepare(DataLoader(dataset, batch_size=4, shuffle=True))",
            )
        },
    ),
    "drop_last on one rank": Program(name="uneven-batches", parts={"loader": "drop_last=rank == 1"}),
    "an iterable that every rank reads in full": Program(
        name="stream-read-in-full",
        parts={
            "accelerator": "dataloader_config=DataLoaderConfiguration(already_sharded=True)",
            "loader": STREAM,
        },
    ),
    "epoch not set": Program(
        name="epoch-not-set",
        parts={
            "loader": "sampler=torch.utils.data.DistributedSampler(dataset, ranks, rank)",
            "prepare": "model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)",
        },
    ),
    "generator shared by workers": Program(name="generator-in-workers", parts={"loader": NOISY}),
    "metric on padded samples": Program(name="metric-on-padding", parts={"end": EVALUATE.format("gather")}),
    "model not prepared": Program(
        name="gradients-not-synchronised",
        parts={"prepare": "optimizer, scheduler, loader = accelerator.prepare(optimizer, scheduler, loader)"},
    ),
    "called without its wrapper": Program(
        name="gradients-not-synchronised",
        parts={"loss": "nn.functional.mse_loss(accelerator.unwrap_model(model)(batch), wanted)"},
    ),
    "no_sync around the step": Program(
        name="gradients-not-synchronised",
        parts={
            "loss": lines(
                "None",
                "with accelerator.no_sync(model):",
                "    loss = nn.functional.mse_loss(model(batch), wanted)",
                "    accelerator.backward(loss)",
                indent=12,
            ),
            "backward": "",
        },
    ),
    "mean of means": Program(name="mean-of-means", base=TOKENS, parts={"reduction": "", "items": ""}),
    "dropped mask": Program(
        name="mask-dropped", base=TOKENS, parts={"ignored": "0", "reduction": "", "items": ""}
    ),
    "dropped mask of a sum over positions": Program(
        name="mask-dropped", base=TOKENS, parts={"mask": "hidden = hidden + 1"}
    ),
    "num_items of all ranks": Program(
        name="gradients-scaled",
        base=TOKENS,
        parts={"items": ", num_items=accelerator.gather((labels != -100).sum()).sum()"},
    ),
    "loss times the number of processes": Program(
        name="gradients-scaled", parts={"backward": "accelerator.backward(loss * ranks)"}
    ),
    "loss over samples of other ranks": Program(
        name="gradients-differ",
        parts={"loss": "nn.functional.mse_loss(model(batch) - model(batch).mean(), wanted)"},
    ),
    "BatchNorm of few samples": Program(
        name="batchnorm-per-rank",
        parts={"model": "nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))"},
    ),
    "unused branch": Program(name="unused-parameters", parts={"model": BRANCHES, "loader": "shuffle=True"}),
    "autocast around the loss": Program(
        name="loss-in-low-precision",
        parts={
            "accelerator": "mixed_precision='bf16'",
            "loss": lines(
                "None",
                "with accelerator.autocast():",
                "    loss = (model(batch) @ torch.ones(1, 1) - wanted).bfloat16().square().mean()",
                indent=12,
            ),
        },
    ),
    "in-place update under FSDP": Program(
        name="weights-differ",
        words=FSDP,
        parts={
            "schedule": lines(PARTS["schedule"], "stale = [*model.parameters()]"),
            "step": lines(
                "scheduler.step()",
                "with torch.no_grad():",
                "    for parameter in stale:",
                "        parameter.mul_(0.9)",
                indent=12,
            ),
        },
    ),
    "tied weights untied": Program(
        name="weights-untied",
        parts={
            "model": lines(
                "nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))",
                "model[2].weight = model[0].weight",
                "if ranks > 1:",
                "    model[2].weight = nn.Parameter(model[0].weight.clone())",
            )
        },
    ),
    "optimizer not prepared": Program(
        name="optimizer-not-prepared",
        parts={
            "accelerator": "gradient_accumulation_steps=2",
            "prepare": TWO_MODELS,
            "loss": "nn.functional.mse_loss(model(batch) + other(batch), wanted)",
            "step": lines("second.step()", "second.zero_grad()", "scheduler.step()", indent=12),
        },
    ),
    "scheduler not prepared": Program(
        name="scheduler-not-prepared",
        parts={"prepare": "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"},
    ),
    "schedule counts updates": Program(
        name="schedule-per-process",
        parts={
            "schedule": "",
            "prepare": lines(
                "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
                "scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, total_iters=2 * len(loader))",
                "scheduler = accelerator.prepare(scheduler)",
            ),
        },
    ),
    "clip within the window": Program(
        name="clip-within-window",
        parts={
            "accelerator": "gradient_accumulation_steps=2",
            "clip": "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)",
        },
    ),
    "clip before unscale": Program(
        name="clip-before-unscale",
        parts={
            "accelerator": "mixed_precision='fp16', kwargs_handlers=[GradScalerKwargs()]",
            "clip": "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)",
        },
    ),
    "resume without skipping": Program(
        name="resume-other-samples",
        parts={
            "after": "if accelerator.has_checkpoint:\n    accelerator.load_state('saved')",
            "step": lines("scheduler.step()", "accelerator.save_state('saved')", indent=12),
        },
    ),
    "state that is not saved": Program(
        name="resume-other-numbers",
        parts={
            "schedule": lines(PARTS["schedule"], "weight = 1.0"),
            "before": "weight = 0.5 * weight",
            "loss": "weight * nn.functional.mse_loss(model(batch), wanted)",
        },
    ),
}
"""Scripts with one mistake each."""
