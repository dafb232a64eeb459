"""Speed of unchanged libraries that import `accelerate`, on accel relative to Accelerate.

Claim: the same scripts take no longer on accel than on Accelerate: starting up, loading a model of which most
lies on the disk and generating with it, evaluating with `Trainer`, saving and loading a state. On two ranks
`Trainer.predict` returns every row once, and `Trainer.evaluate` issues no more collectives.

    uv run python tools/benchmarks/clients.py
    uv run python tools/benchmarks/clients.py --part evaluation

The environment build/clients, which tests-integration/clients makes, has the libraries and Accelerate. Each
script runs there alternately with Accelerate and with accel; the medians are printed, and of the evaluations,
which need no repetition, what they return.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / "build" / "clients" / "bin" / "python"
ROUNDS = 3

START = """
import accelerate
print('{"import accelerate": %f}' % (time.perf_counter() - begin))
"""

WORK = """
import gc, json, tempfile, time, warnings
warnings.simplefilter("ignore")
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from accelerate import Accelerator
found = {"import Trainer": time.perf_counter() - begin}
torch.set_num_threads(1)

def timed(name, work, times=1):
    gc.collect()  # else it falls into whatever part is measured at the time
    begin = time.perf_counter()
    for _ in range(times):
        result = work()
    found[name] = (time.perf_counter() - begin) / times
    return result

folder = tempfile.mkdtemp()
config = LlamaConfig(vocab_size=1000, hidden_size=512, intermediate_size=1408, num_hidden_layers=12,
                     num_attention_heads=8, num_key_value_heads=8, pad_token_id=0, tie_word_embeddings=False)
torch.manual_seed(0)
model = LlamaForCausalLM(config)
model.save_pretrained(folder + "/model")
prompt = torch.arange(3, 19)[None]
options = {"device_map": "auto", "max_memory": {"cpu": 30_000_000}, "offload_folder": folder + "/offload"}
loaded = timed("load, most on the disk",
               lambda: AutoModelForCausalLM.from_pretrained(folder + "/model", **options))
timed("generate 8 tokens, most on the disk", lambda: loaded.generate(
    prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, min_new_tokens=8, do_sample=False))

class Rows(torch.utils.data.Dataset):
    def __len__(self): return 203
    def __getitem__(self, index):
        return {"input_ids": torch.full((4,), index), "labels": torch.full((4,), index)}

small = LlamaForCausalLM(LlamaConfig(**{**config.to_dict(), "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}))
arguments = TrainingArguments(folder, per_device_eval_batch_size=4, report_to=[], disable_tqdm=True,
                              use_cpu=True)
trainer = Trainer(model=small, args=arguments, eval_dataset=Rows())
trainer.evaluate()
timed("Trainer.evaluate, 51 batches", trainer.evaluate, times=3)

accelerator = Accelerator(cpu=True)
optimizer = torch.optim.AdamW(model.parameters())
prepared, optimizer = accelerator.prepare(model, optimizer)
prepared(prompt, labels=prompt).loss.backward()
optimizer.step()
timed("save_state, 410 MB", lambda: accelerator.save_state(folder + "/state"))
timed("load_state, 410 MB", lambda: accelerator.load_state(folder + "/state"))
print(json.dumps(found))
"""

EVALUATION = """
import json, tempfile, warnings
warnings.simplefilter("ignore")
import torch
from torch.utils.data import Dataset, IterableDataset
from transformers import Trainer, TrainingArguments
torch.set_num_threads(1)

class Rows(Dataset):
    def __init__(self, size): self.size = size
    def __len__(self): return self.size
    def __getitem__(self, index):
        return {"x": torch.tensor([float(index)]), "labels": torch.tensor(float(index))}

class Stream(IterableDataset):
    def __init__(self, size): self.rows = Rows(size)
    def __iter__(self): return (self.rows[index] for index in range(self.rows.size))

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
    def forward(self, x, labels):
        return {"loss": labels.mean() * self.weight, "logits": x * self.weight}

CASES = {
    "203 rows": (Rows, 203, {}),
    "203 rows, split_batches": (Rows, 203, {"split_batches": True}),
    "a stream of 203": (Stream, 203, {}),
    "a stream of 203, dispatch_batches=False": (Stream, 203, {"dispatch_batches": False}),
    "3 rows": (Rows, 3, {}),
    "a stream of 3": (Stream, 3, {}),
}
found = {}
for name, (data, size, options) in CASES.items():
    arguments = TrainingArguments(tempfile.mkdtemp(), per_device_eval_batch_size=4, report_to=[],
                                  disable_tqdm=True, use_cpu=True, accelerator_config=options)
    trainer = Trainer(model=Model(), args=arguments, eval_dataset=data(size),
                      compute_metrics=lambda outputs: {"mean": float(outputs.label_ids.mean())})
    predicted = trainer.predict(data(size))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        evaluated = trainer.evaluate()
    found[name] = {
        "samples": len(predicted.predictions),
        "mean of the labels": predicted.metrics["test_mean"],
        "eval_loss": evaluated["eval_loss"],
        "collectives": sum(event.name.startswith("c10d::") for event in profile.events()),
    }
if trainer.accelerator.is_main_process:
    print(json.dumps(found))
"""


def main(argv: list[str] | None = None) -> int:
    """Measure alternately; print medians and ratios, and what evaluation returns."""
    parser = argparse.ArgumentParser(description="Measure libraries on accel beside Accelerate.")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--python", type=Path, default=PYTHON, help="of an environment with both")
    parser.add_argument("--part", choices=("all", "time", "evaluation"), default="all")
    arguments = parser.parse_args(argv)
    if arguments.part != "evaluation":
        print_times(arguments)
    if arguments.part != "time":
        print_evaluations(arguments.python)
    return 0


def print_times(arguments: argparse.Namespace) -> None:
    """Print how long each step takes with either library."""
    figures: dict[str, dict[bool, list[float]]] = {}
    for _ in range(arguments.rounds):
        for script in (START, WORK):
            for on_accel in (False, True):
                for name, seconds in run(arguments.python, script, on_accel=on_accel).items():
                    figures.setdefault(name, {False: [], True: []})[on_accel].append(seconds)
    print(f"{'':<38}{'accelerate':>12}{'accel':>12}{'ratio':>8}")
    for name, found in figures.items():
        reference, ours = (statistics.median(found[on_accel]) for on_accel in (False, True))
        print(f"{name:<38}{reference:>10.3f} s{ours:>10.3f} s{reference / ours:>8.2f}")


def print_evaluations(python: Path) -> None:
    """Print what `Trainer` returns on two ranks with either library, and how many collectives it takes."""
    reference, ours = (run(python, EVALUATION, on_accel=on_accel, ranks=2) for on_accel in (False, True))
    print(f"{'two ranks':<60}{'accelerate':>12}{'accel':>12}")
    for case, figures in reference.items():
        for name, value in figures.items():
            print(f"{f'{case}: {name}':<60}{value:>12.6g}{ours[case][name]:>12.6g}")


def run(python: Path, script: str, *, on_accel: bool, ranks: int = 1) -> dict[str, Any]:
    """Run a script, which counts time from before the alias; return what it prints on its last line."""
    begin = "import time; begin = time.perf_counter()\n"
    install = "import accel_compat; accel_compat.install()\n" if on_accel else ""
    several = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--standalone"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "script.py"
        path.write_text(begin + install + script)
        line = [python, *(several if ranks > 1 else []), path]
        done = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
