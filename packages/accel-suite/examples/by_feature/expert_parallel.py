"""Train a mixture of experts with the experts of each layer sharded across processes (FSDP2 with `ep_size`).

accel launch --cpu --num_processes 2 expert_parallel.py
"""

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from accel import Accelerator, PartialState
from accel.utils import FullyShardedDataParallelPlugin, ParallelismConfig, set_seed

processes = PartialState().num_processes
options = {}
if processes > 1:
    options["parallelism_config"] = ParallelismConfig(dp_shard_size=processes, ep_size=processes)
    options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)
accelerator = Accelerator(**options)
set_seed(0)

sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
model = Qwen3MoeForCausalLM(
    Qwen3MoeConfig(**sizes, **experts, num_key_value_heads=2, vocab_size=64, max_position_embeddings=64)
)
total = sum(parameter.numel() for parameter in model.parameters())
period = torch.randint(0, 64, (64, 8)).repeat(1, 4)  # each sequence repeats eight tokens
loader = torch.utils.data.DataLoader([{"input_ids": row, "labels": row} for row in period], batch_size=8)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
kept = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters())
accelerator.print(f"each process keeps {kept / total:.0%} of {total:,} parameters")

for epoch in range(4):
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    mean = accelerator.reduce(loss.detach(), "mean").item()
    accelerator.print(f"epoch {epoch}: loss {mean:.2f}")
