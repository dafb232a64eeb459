"""A script for `accel check`: a Llama 3.1 405B with FSDP2 over 128 ranks and TP over 8, and its checkpoint.

    uv run accel check --world 1024 --memory 141GB tools/benchmarks/check_405b.py

With the argument `differ`, the last rank alone gathers after its second step.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from accel import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig, init_empty_weights

if __name__ == "__main__":
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type="SHARDED_STATE_DICT",
    )
    axes = ParallelismConfig(dp_shard_size=128, tp_size=8)
    accelerator = Accelerator(mixed_precision="bf16", parallelism_config=axes, fsdp_plugin=plugin)
    sizes: Any = {
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "vocab_size": 128256,
    }
    with init_empty_weights():
        model = LlamaForCausalLM(LlamaConfig(num_attention_heads=128, num_key_value_heads=8, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), fused=False)
    row = torch.ones(4096, dtype=torch.long)
    rows: Any = [{"input_ids": row, "labels": row}] * 4096
    loader = DataLoader(rows)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for number, batch in enumerate(loader):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if "differ" in sys.argv and number == 1 and accelerator.process_index == 1023:
            accelerator.gather(loss.detach())
    accelerator.save_state("checkpoint")
