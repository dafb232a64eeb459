"""Fine-tune a model whose weights have 4 bits and are sharded by FSDP2: QLoRA without a patch.

Each process keeps its part of the packed values and the scales; small matrices beside them are trained. The
run is saved and resumed, and at the end the matrices are merged into weights of the model's own dtype.

accel launch --cpu --num_processes 2 packages/accel-suite/examples/by_feature/qlora.py
"""

import bitsandbytes as bnb
import torch
from bitsandbytes.functional import QuantState, dequantize_4bit
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from accel import Accelerator, FullyShardedDataParallelPlugin, init_empty_weights
from accel.utils import BnbQuantizationConfig, load_and_quantize_model, set_seed
from accel_ops.weights.write import save_state_dict

rank_of_adapters, epochs = 8, 6
plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
accelerator = Accelerator(fsdp_plugin=plugin)
quantization = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", torch_dtype="fp32")
set_seed(0)


class Adapter(nn.Module):
    """A frozen quantised layer, and a product of two small matrices beside it; peft's layers do as well."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank_of_adapters, bias=False)
        self.up = nn.Linear(rank_of_adapters, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        """Return the output of the adapted layer."""
        return self.base(x) + self.up(self.down(x))


def make_base():
    """Return a small Llama with random weights, before it is quantised."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=256, max_position_embeddings=64))


def start():
    """Return a prepared quantised model with adapters, their optimizer, and the batches."""
    with init_empty_weights():
        empty = make_base()
    model = load_and_quantize_model(empty, quantization, "base", device_map={"": accelerator.device})
    model.requires_grad_(requires_grad=False)
    quantised = {name: layer for name, layer in model.named_modules() if isinstance(layer, bnb.nn.Linear4bit)}
    for name, layer in quantised.items():
        model.set_submodule(name, Adapter(layer).to(accelerator.device))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    return accelerator.prepare(model, optimizer, DataLoader(windows, batch_size=8))


def train(model, optimizer, loader, epochs):
    """Train, and return the mean loss of the last batches of all processes."""
    for _ in range(epochs):
        for batch in loader:
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.reduce(loss.detach(), "mean").item()


def merge(state):
    """Return a state dict of the model without adapters, from one with them and quantised weights."""
    merged = {name: value for name, value in state.items() if ".base." not in name}
    for where in [name for name in state if name.endswith(".base.weight")]:
        scales = {
            name.removeprefix(f"{where}."): state[name] for name in state if name.startswith(f"{where}.")
        }
        weight = dequantize_4bit(state[where], QuantState.from_dict(scales, device=state[where].device))
        prefix = where.removesuffix("base.weight")
        product = merged.pop(f"{prefix}up.weight") @ merged.pop(f"{prefix}down.weight")
        merged[f"{prefix}weight"] = weight + product
    return merged


if accelerator.is_main_process:
    save_state_dict(make_base().state_dict(), "base")
accelerator.wait_for_everyone()

sentence = torch.tensor(list(b"the quick brown fox jumps over the lazy dog. " * 3))
windows = sentence.unfold(0, 32, 1)
model, optimizer, loader = start()
packed = [parameter for name, parameter in model.named_parameters() if name.endswith(".base.weight")]
own = sum(getattr(parameter, "_local_tensor", parameter).nbytes for parameter in packed)
accelerator.print(
    f"{own:,} of {sum(parameter.nbytes for parameter in packed):,} packed bytes on this process"
)

accelerator.print(f"loss {train(model, optimizer, loader, epochs):.3f}")
accelerator.save_state("checkpoint")
expected = train(model, optimizer, loader, 1)

model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
model, optimizer, loader = start()  # as another run would
accelerator.load_state("checkpoint")
resumed = train(model, optimizer, loader, 1)
accelerator.print(f"loss {resumed:.3f} after resuming, {expected:.3f} without interruption")

state = accelerator.get_state_dict(model)
logits = model(input_ids=windows[:1].to(accelerator.device)).logits
if accelerator.is_main_process:
    alone = make_base()
    alone.load_state_dict(merge(state))
    difference = (alone(input_ids=windows[:1]).logits - logits.cpu()).abs().max().item()
    print(f"merged: logits differ by at most {difference:.0e}")
