"""Generate with a model larger than memory: weights on the device, on the CPU and on the disk.

By default, a small Llama is saved, and loaded with two of its layers in memory. `--model_name` loads a model
of the hub onto the GPUs, the CPU and the disk of this machine.

    python big_model.py
    python big_model.py --model_name meta-llama/Llama-3.1-70B --offload_folder offload
"""

import argparse

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from accel import init_empty_weights, load_checkpoint_and_dispatch
from accel.utils import set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--model_name", help="a model of the hub or a folder")
parser.add_argument("--offload_folder", default="offload", help="folder of the weights on the disk")
parser.add_argument("--prompt", default="The quick brown fox")
args = parser.parse_args()

if args.model_name:
    from huggingface_hub import snapshot_download

    folder = snapshot_download(args.model_name)
    config, max_memory = AutoConfig.from_pretrained(folder), None
    encode = AutoTokenizer.from_pretrained(folder)
    prompt = encode(args.prompt, return_tensors="pt").input_ids
else:
    set_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4}
    config, folder = LlamaConfig(**sizes, vocab_size=256, max_position_embeddings=64), "small-llama"
    full = LlamaForCausalLM(config).eval()
    full.save_pretrained(folder)
    max_memory = {"cpu": "500KB"}
    prompt = torch.tensor([list(args.prompt.encode())])

with init_empty_weights():  # the model takes no memory
    model = AutoModelForCausalLM.from_config(config)
model.tie_weights()
model = load_checkpoint_and_dispatch(
    model,
    folder,
    device_map="auto",
    max_memory=max_memory,
    no_split_module_classes=model._no_split_modules,
    offload_folder=args.offload_folder,
).eval()
places = list(model.hf_device_map.values())
print(", ".join(f"{places.count(place)} modules on {place}" for place in dict.fromkeys(places)))

tokens = model.generate(prompt, max_new_tokens=16, do_sample=False)
if args.model_name:
    print(encode.decode(tokens[0]))
else:
    same = torch.equal(tokens, full.generate(prompt, max_new_tokens=16, do_sample=False))
    print(f"{tokens.shape[1] - prompt.shape[1]} new tokens, equal to those of the model in memory: {same}")
