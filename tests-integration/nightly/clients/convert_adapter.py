"""Merge a saved LoRA adapter into its base by `convert_checkpoint`, and compare with peft's own merge.

convert_adapter.py KIND, in a process with peft.
"""

import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from accel_convert import convert_checkpoint

LLAMA = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def make(kind):
    """Return a model and the configuration of its adapter."""
    torch.manual_seed(0)
    if "gpt2" in kind:  # its matrices are transposed
        options = {"fan_in_fan_out": True, "use_dora": "dora" in kind}
        config = LoraConfig(r=3, lora_alpha=5, target_modules=["c_attn", "c_proj"], **options)
        return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=4)), config
    if kind == "convolution":
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 24}
        model = ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4))
        return model, LoraConfig(r=3, target_modules=["projection", "query"])
    model = LlamaForCausalLM(LlamaConfig(**LLAMA)).to(torch.bfloat16 if kind == "bf16" else torch.float32)
    patterns = {"rank_pattern": {"layers.1.mlp.up_proj": 2}, "alpha_pattern": {"q_proj": 7}}
    if kind == "dora":
        return model, LoraConfig(r=4, target_modules=["q_proj", "up_proj"], use_dora=True)
    return model, LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=["q_proj", "up_proj", "embed_tokens"],
        modules_to_save=["lm_head"],
        use_rslora=True,
        **patterns,
    )


def main(kind):
    model, config = make(kind)
    model.save_pretrained("base", max_shard_size="8KB")
    tuned = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.copy_(torch.randn_like(parameter) + ("magnitude" in name))
    tuned.save_pretrained("adapter")
    report = convert_checkpoint("adapter", "merged", to="safetensors", base="base", max_memory="4MB")
    assert report.dropped == []
    found = type(model).from_pretrained("merged", dtype="auto").state_dict()
    wanted = tuned.merge_and_unload().state_dict()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-2 if kind == "bf16" else 1e-6, atol=1e-6)
    assert Path("merged/config.json").is_file()


if __name__ == "__main__":
    main(sys.argv[1])
