"""Compile a model: `prepare` compiles each repeated block once (regional compilation).

The default backend `aot_eager` traces without generating code, which takes seconds.
`--backend inductor` generates fast code.

    accel launch compile.py --backend inductor
"""

import argparse
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from accel import Accelerator
from accel.utils import TorchDynamoPlugin, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="aot_eager", help="a backend of torch.compile")
args = parser.parse_args()

plugin = TorchDynamoPlugin(backend=args.backend, use_regional_compilation=True)
accelerator = Accelerator(dynamo_plugin=plugin)
set_seed(0)

sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=256, max_position_embeddings=64))
tokens = torch.randint(0, 256, (64, 32))
loader = torch.utils.data.DataLoader(tokens, batch_size=8)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for epoch in range(3):
    started = time.perf_counter()
    for batch in loader:
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    took = time.perf_counter() - started  # the first epoch compiles
    accelerator.print(f"epoch {epoch}: loss {loss.item():.2f} in {took:.1f} s")
