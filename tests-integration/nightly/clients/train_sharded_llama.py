"""Train a model that is sharded, when it is loaded or by `ParallelismConfig`, by transformers' Trainer."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import SequentialSampler
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)
from transformers.distributed import DistributedConfig

SAMPLES, LENGTH, VOCABULARY, BATCH = 32, 8, 16, 8


def make_model(*, experts: bool = False) -> PreTrainedModel:
    """Return the model before training, a Llama or a Mixtral."""
    torch.manual_seed(0)
    layers = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes = layers | {"vocab_size": VOCABULARY, "num_key_value_heads": 2}
    if not experts:
        return LlamaForCausalLM(LlamaConfig(**sizes))
    model = MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=4))
    with torch.no_grad():
        for parameter in model.parameters():  # experts are left uninitialised by the constructor
            parameter.normal_(std=0.1)
    return model


def samples() -> list[dict[str, torch.Tensor]]:
    """Return rows of tokens, which are their own labels."""
    torch.manual_seed(1)
    tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH))
    return [{"input_ids": row, "labels": row} for row in tokens]


class InOrder(Trainer):
    """A Trainer that reads the samples in order, as the plain loop does."""

    def _get_train_sampler(self, *_: object) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


def main(folder: str, ranks_with_data: int, *, sp_size: int = 1, **sizes: Any) -> None:
    """Train two epochs, then write losses and weights.

    Args:
        folder: Where to.
        ranks_with_data: Number of ranks that read different batches.
        sp_size: Of a `ParallelismConfig`, if not 1.
        sizes: Arguments of `DistributedConfig`, with which the model is loaded otherwise.
    """
    options: dict[str, Any] = {}
    if sp_size > 1:
        accelerate: Any = import_module("accelerate")  # which is accel here
        options["parallelism_config"] = accelerate.ParallelismConfig(sp_size=sp_size)
        options["lr_scheduler_type"] = "constant"  # the Trainer plans `sp_size` times the steps
        options["fsdp"] = "full_shard auto_wrap"  # it saves shards as such only then
        options["fsdp_config"] = {
            "fsdp_version": 2,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": "FULL_STATE_DICT",
        }
    arguments = TrainingArguments(
        **options,
        output_dir=folder,
        num_train_epochs=2,
        optim="sgd",
        learning_rate=0.5,
        per_device_train_batch_size=BATCH // ranks_with_data,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    if arguments.process_index == 0:
        make_model(experts="ep_size" in sizes).save_pretrained(f"{folder}/model")
    dist.barrier()
    at_load = {"distributed_config": DistributedConfig(**sizes)} if sizes else {}
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/model", **at_load)
    trainer = InOrder(model=model, args=arguments, train_dataset=samples())
    trainer.train()
    trainer.save_model(f"{folder}/trained")
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
        home = type(trainer.accelerator).__module__
        torch.save({"losses": losses, "norms": norms, "home": home}, Path(folder) / "out.pt")
