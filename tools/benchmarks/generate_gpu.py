"""Generation by an offloaded 8B Llama, relative to the reference and to the same model on the GPU.

    python tools/benchmarks/generate_gpu.py [--tokens N] [--small]

The model is that of a configuration of Llama 3 8B, with random weights in bfloat16 (16 GB). All its layers
are on the CPU and run on the GPU; each library generates greedily in a process of its own. The model is
then generated from on the GPU alone, if it fits.

Claims: the tokens are those of the model on the GPU; a token takes at most half of the reference's time,
and at most 1 / 0.85 of the time in which a plain pinned copy moves the weights. `--small`: a tiny one, on
the CPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from bigmodel_case import claim
from gpu_facts import copy_bandwidth, device_for, synchronize
from transformers import LlamaConfig, LlamaForCausalLM

EIGHT: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
PROMPT = (1, 2, 3, 4, 5, 6, 7, 8)


def make_model(sizes: dict[str, Any], device: torch.device) -> Any:
    """Make the model on the CPU; its weights are drawn on the device, which is faster."""
    config = LlamaConfig(**sizes, max_position_embeddings=256, tie_word_embeddings=False, dtype="bfloat16")
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16)
    model.to_empty(device="cpu")
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1)
            else:
                drawn = torch.randn(parameter.shape, device=device, dtype=torch.bfloat16, generator=generator)
                parameter.copy_(drawn * 0.02)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffer has no values after `to_empty`
    return model.eval()


def generate(model: Any, tokens: int, device: torch.device) -> tuple[list[int], float]:
    """Return the tokens and the seconds for each."""
    prompt = torch.tensor([PROMPT], device=device)
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    options["attention_mask"] = torch.ones_like(prompt)
    model.generate(prompt, max_new_tokens=2, **options)
    synchronize(device)
    start = time.perf_counter()
    found = model.generate(prompt, max_new_tokens=tokens, min_new_tokens=tokens, **options)
    synchronize(device)
    return found[0, len(PROMPT) :].tolist(), (time.perf_counter() - start) / tokens


def run(role: str, tokens: int, device: torch.device, sizes: dict[str, Any]) -> dict[str, Any]:
    """Generate with a library, or on the device alone."""
    model: Any = make_model(sizes, device)
    moved = sum(parameter.nbytes for parameter in model.model.layers.parameters())
    if role == "resident":
        model = model.to(device)
    else:
        main_device: int | str = "cpu" if device.type == "cpu" else 0
        names = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
        layers = {f"model.layers.{index}": "cpu" for index in range(sizes["num_hidden_layers"])}
        device_map = {**dict.fromkeys(names, main_device), **layers}
        model = import_module(role).dispatch_model(model, device_map=device_map, force_hooks=True)
    text, seconds = generate(model, tokens, device)
    copy = copy_bandwidth(min(moved, 1 << 28), device)
    return {"text": text, "seconds": seconds, "moved": moved, "copy": copy}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=64, help="how many are generated")
    parser.add_argument("--small", action="store_true", help="a tiny model, on the CPU")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        device = device_for(small=options.small)
        print(json.dumps(run(options.role, options.tokens, device, TINY if options.small else EIGHT)))
        return 0
    found: dict[str, dict[str, Any]] = {}
    for role in ("accel", "resident", *(["accelerate"] if find_spec("accelerate") else [])):
        # The reference may take seconds for a token.
        tokens = min(options.tokens, 16) if role == "accelerate" else options.tokens
        command = [sys.executable, __file__, "--role", role, "--tokens", str(tokens)]
        command += ["--small"] if options.small else []
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"MISSED  {role}: {done.stderr[-2000:]}", flush=True)
            continue
        found[role] = json.loads(done.stdout.strip().splitlines()[-1])
        one = found[role]
        print(
            f"{role}: {one['seconds']:.4f} s per token, {1 / one['seconds']:.2f} tokens per second",
            flush=True,
        )
    if "accel" not in found:
        return 1
    ours = found["accel"]
    rate = ours["moved"] / ours["seconds"]
    print(f"{ours['moved'] / 1e9:.2f} GB per token: {rate / 1e9:.2f} GB/s of {ours['copy'] / 1e9:.2f} pinned")
    good = claim("pinned copy over a token", ours["copy"] / rate, 1 / 0.85)
    if "resident" in found:
        differing = sum(a != b for a, b in zip(ours["text"], found["resident"]["text"], strict=True))
        good &= claim("tokens that differ from those on the GPU", differing, 0)
    if "accelerate" in found:
        good &= claim("a token over the reference's", ours["seconds"] / found["accelerate"]["seconds"], 0.5)
    return int(not good and not options.small)


if __name__ == "__main__":
    sys.exit(main())
