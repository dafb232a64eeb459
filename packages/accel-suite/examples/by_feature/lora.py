"""Fine-tune a language model with LoRA: peft trains and saves only small adapters.

By default a small Llama with random weights learns one sentence; `--model_name` adapts a model of the hub.

    accel launch --as_accelerate lora.py        # peft imports accelerate, which resolves to accel
    accel launch --as_accelerate lora.py --model_name meta-llama/Llama-3.2-1B
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from accel import Accelerator
from accel.utils import set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--model_name", help="a model of the hub or a folder")
args = parser.parse_args()

accelerator = Accelerator()
set_seed(0)

if args.model_name:
    base = AutoModelForCausalLM.from_pretrained(args.model_name)
else:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    base = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=256, max_position_embeddings=64))
model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear"))
trained, total = model.get_nb_trainable_parameters()
accelerator.print(f"training {trained:,} of {total:,} parameters")

sentence = torch.tensor(list(b"the quick brown fox jumps over the lazy dog. " * 3))
windows = sentence.unfold(0, 32, 1)
loader = torch.utils.data.DataLoader(windows, batch_size=8, shuffle=True)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for epoch in range(6):
    for batch in loader:
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    mean = accelerator.reduce(loss.detach(), "mean").item()
    accelerator.print(f"epoch {epoch}: loss {mean:.2f}")

# Only the adapter is saved: `PeftModel.from_pretrained(base, "adapter")` loads it.
accelerator.unwrap_model(model).save_pretrained(
    "adapter", is_main_process=accelerator.is_main_process, state_dict=accelerator.get_state_dict(model)
)
