"""peft: adapters on plain, quantised and offloaded models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from big_models import PROMPT
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from small import language_model
from torch.utils.data import Dataset
from trainer import arguments, found
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, set_seed

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Rows of tokens that are their own labels."""

    def __init__(self, size: int = 24) -> None:
        self.rows = torch.randint(3, 64, (size, 8), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def trained(folder: Path, base: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Train an adapter on a model; return the model and what the training left behind."""
    set_seed(0)
    model = get_peft_model(base, LoraConfig(**CONFIG))
    trainer = Trainer(
        model=model,
        args=arguments(folder, num_train_epochs=1, save_strategy="epoch", label_names=["labels"], **options),
        train_dataset=Rows(),
        eval_dataset=Rows(10),
    )
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    result = found(trainer, folder)
    result["weights"] = {name: value for name, value in result["weights"].items() if "lora" in name}
    return model, {**result, "loss": loss}


def lora(folder: Path) -> dict[str, Any]:
    """Train, save, load and merge an adapter."""
    model, result = trained(folder / "training", language_model())
    model.save_pretrained(folder / "adapter")
    again = PeftModel.from_pretrained(language_model(), folder / "adapter")
    merged = again.merge_and_unload()
    with torch.no_grad():
        result["logits"] = model.eval()(PROMPT).logits
        torch.testing.assert_close(merged.eval()(PROMPT).logits, result["logits"], rtol=0, atol=1e-5)
    return result


def qlora(folder: Path, device: str = "cpu", **options: Any) -> dict[str, Any]:
    """Train an adapter on a model in 4 bits."""
    language_model(width=64).save_pretrained(folder / "model")
    quantisation = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    base = AutoModelForCausalLM.from_pretrained(
        folder / "model", quantization_config=quantisation, device_map={"": device}
    )
    return trained(folder / "training", prepare_model_for_kbit_training(base), **options)[1]


def offloaded(folder: Path) -> dict[str, Any]:
    """Put an adapter on a model whose weights are partly on the disk; then merge it."""
    language_model(layers=4).save_pretrained(folder / "model")
    adapter = get_peft_model(language_model(layers=4), LoraConfig(**CONFIG, init_lora_weights=False))
    adapter.save_pretrained(folder / "adapter")
    with torch.no_grad():
        expected = adapter.eval()(PROMPT).logits
    memory = {"cpu": "60KB"}
    base = AutoModelForCausalLM.from_pretrained(
        folder / "model", device_map="auto", max_memory=memory, offload_folder=str(folder / "offload")
    )
    assert "disk" in base.hf_device_map.values()
    model = PeftModel.from_pretrained(
        base, folder / "adapter", max_memory=memory, offload_folder=str(folder / "offload")
    ).eval()
    with torch.no_grad():
        logits = model(PROMPT).logits
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
        tokens = model.generate(input_ids=PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=6)
        merged = model.merge_and_unload()(PROMPT).logits
    torch.testing.assert_close(merged, expected, rtol=0, atol=1e-5)
    return {"logits": logits, "tokens": tokens, "merged": merged}
