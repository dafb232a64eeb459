"""What libraries that import `accelerate` gain on accel, without a change to them.

Claim: the same scripts take no longer on accel than on Accelerate: starting up, loading a model of which most
lies on the disk and generating with it, evaluating with `Trainer`, saving and loading a state.

    uv run python tools/benchmarks/clients.py

The environment build/clients, which tests-integration/clients makes, has the libraries and Accelerate. Each
script runs there alternately with Accelerate and with accel; the medians are printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / "build" / "clients" / "bin" / "python"
ROUNDS = 3

START = """
import time; begin = time.perf_counter()
import accelerate
print('{"import accelerate": %f}' % (time.perf_counter() - begin))
"""

WORK = """
import gc, json, tempfile, time, warnings
warnings.simplefilter("ignore")
begin = time.perf_counter()
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


def main(argv: list[str] | None = None) -> int:
    """Measure alternately; print medians and ratios."""
    parser = argparse.ArgumentParser(description="Measure libraries on accel beside Accelerate.")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--python", type=Path, default=PYTHON, help="of an environment with both")
    arguments = parser.parse_args(argv)
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
    return 0


def run(python: Path, script: str, *, on_accel: bool) -> dict[str, float]:
    """Run a script; return the seconds that it prints on its last line, by name."""
    start = "import accel_compat; accel_compat.install()\n" if on_accel else ""
    done = subprocess.run([python, "-c", start + script], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
