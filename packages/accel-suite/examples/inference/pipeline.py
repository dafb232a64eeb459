"""Split the layers of a model across processes, and let micro-batches flow through them.

accel launch --cpu --num_processes 2 packages/accel-suite/examples/inference/pipeline.py
"""

import torch
from transformers import BertConfig, BertModel

from accel import PartialState
from accel.inference import prepare_pippy
from accel.utils import set_seed

state = PartialState()
set_seed(0)
config = BertConfig(
    vocab_size=64, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64
)
model = BertModel(config, add_pooling_layer=False).eval()
inputs = torch.randint(0, 64, (8, 12))
with torch.no_grad():
    expected = model(inputs).last_hidden_state

model = prepare_pippy(model, example_args=(inputs[:4],), no_split_module_classes=["BertLayer"])
with torch.no_grad():
    output = model(inputs.to(state.device))  # what the first process passes counts

if state.is_last_process:  # which has the output; gather_output=True gives it to all
    hidden = output["last_hidden_state"] if isinstance(output, dict) else output[0]
    print(f"{tuple(hidden.shape)}, equal to one process: {torch.allclose(hidden.cpu(), expected, atol=1e-5)}")
