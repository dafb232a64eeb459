"""Train a language model with its layers split across processes: pipeline parallelism.

The loop is the same as on one process: the forward call runs the schedule with all micro-batches.

    accel launch --cpu --num_processes 2 pipeline_training.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from accel import Accelerator, PartialState
from accel.utils import ParallelismConfig, TorchPipelineParallelConfig, set_seed

processes = PartialState().num_processes
options = {}
if processes > 1:
    handler = TorchPipelineParallelConfig(pp_schedule="1F1B", pp_num_microbatches=4)
    options["parallelism_config"] = ParallelismConfig(pp_size=processes, pp_handler=handler)
accelerator = Accelerator(**options)
set_seed(0)

sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, max_position_embeddings=64))
total = sum(parameter.numel() for parameter in model.parameters())
period = torch.randint(0, 64, (64, 8)).repeat(1, 4)  # each sequence repeats eight tokens
loader = torch.utils.data.DataLoader([{"input_ids": row, "labels": row} for row in period], batch_size=8)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for epoch in range(4):
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(f"epoch {epoch}: loss {loss.item():.2f}")
