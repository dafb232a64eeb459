"""Train on sequences sharded across processes: context or sequence parallelism with FSDP2.

With one process nothing is sharded. With several, `--axis cp` shards sequences and exchanges keys and values.
`--axis sp` shards sequences outside of attention, and heads within it (Ulysses).

    accel launch --cpu --num_processes 2 long_context.py --axis sp
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from accel import Accelerator, PartialState
from accel.utils import FullyShardedDataParallelPlugin, ParallelismConfig, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--axis", choices=["cp", "sp"], default="sp")
parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
args = parser.parse_args()

options = {}
if PartialState().num_processes > 1:
    options["parallelism_config"] = ParallelismConfig(**{f"{args.axis}_size": PartialState().num_processes})
    options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)
accelerator = Accelerator(**options)
set_seed(0)

sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, max_position_embeddings=args.length))
period = torch.randint(0, 64, (16, 8)).repeat(1, args.length // 8)  # each sequence repeats eight tokens
rows = [{"input_ids": row, "labels": row, "position_ids": torch.arange(args.length)} for row in period]
loader = torch.utils.data.DataLoader(rows, batch_size=4)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for epoch in range(5):
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    mean = accelerator.reduce(loss.detach(), "mean").item()
    accelerator.print(f"epoch {epoch}: loss {mean:.2f}")
