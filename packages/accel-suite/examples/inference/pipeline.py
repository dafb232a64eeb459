"""Split the layers of a model across processes, and run micro-batches through them.

accel launch --cpu --num_processes 2 packages/accel-suite/examples/inference/pipeline.py
"""

import torch
from torch import nn

from accel import PartialState
from accel.inference import prepare_pippy
from accel.utils import set_seed

state = PartialState()
set_seed(0)
layers = [nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0) for _ in range(4)]
model = nn.Sequential(nn.Embedding(64, 32), *layers).eval()
inputs = torch.randint(0, 64, (8, 12))
with torch.no_grad():
    expected = model(inputs)

model = prepare_pippy(model, example_args=(inputs[:4],), no_split_module_classes=["TransformerEncoderLayer"])
with torch.no_grad():
    output = model(inputs.to(state.device))  # the inputs of the first process are used

if state.is_last_process:  # it has the output; gather_output=True returns it on all
    print(f"{tuple(output.shape)}, equal to one process: {torch.allclose(output.cpu(), expected, atol=1e-5)}")
