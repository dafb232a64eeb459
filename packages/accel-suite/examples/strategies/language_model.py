"""Train a small language model under the strategy that the config file selects.

    accel launch --config_file configs/ddp.yaml language_model.py
    accel launch --config_file configs/fsdp2.yaml language_model.py
    accel launch --config_file configs/megatron_tp.yaml language_model.py
    accel launch --config_file configs/sp.yaml language_model.py
    accel launch --config_file configs/cp.yaml language_model.py
    accel launch --config_file configs/ep.yaml language_model.py --experts 4

A run can be stopped and resumed under another strategy and number of processes:

    accel launch --config_file configs/fsdp2.yaml language_model.py --steps 60 --save half
    accel launch --config_file configs/ddp.yaml language_model.py --resume half
"""

import argparse
from importlib.resources import files

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.distributed import DistributedConfig

from accel import Accelerator
from accel.utils import DataLoaderConfiguration, set_seed

length = 64
batch_size = 16  # of all processes together


class Progress:
    """Count optimizer steps, including steps before a restart."""

    step = 0

    def state_dict(self):
        """Return the state to save."""
        return {"step": self.step}

    def load_state_dict(self, state):
        """Restore the count."""
        self.step = state["step"]


def read_data():
    """Return scikit-learn's data set descriptions as rows of bytes."""
    pages = [page for page in files("sklearn.datasets.descr").iterdir() if page.name.endswith(".rst")]
    text = "\n".join(page.read_text() for page in sorted(pages, key=lambda page: page.name))
    tokens = torch.tensor(list(text.encode()))
    rows = tokens[: len(tokens) // length * length].view(-1, length)
    return [{"input_ids": row, "labels": row} for row in rows]


def make_model(experts=0):
    """Build a Llama, or a Mixtral if there are experts, with random weights, to predict the next byte."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "intermediate_size": 128}
    sizes |= {"vocab_size": 256, "max_position_embeddings": length}
    if experts:
        mixture = {"num_local_experts": experts, "num_key_value_heads": 4}
        return MixtralForCausalLM(MixtralConfig(**sizes, **mixture))
    return LlamaForCausalLM(LlamaConfig(**sizes))


def with_next_tokens(batch, shards):
    """Add what a rank cannot compute from its shard of a sequence: next tokens and positions."""
    tokens = batch["input_ids"]
    labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
    positions = torch.arange(length, device=tokens.device).repeat(len(tokens), 1)
    return {
        "input_ids": tokens,
        "labels": labels,
        "shift_labels": labels.clone(),
        "position_ids": positions,
        "num_items_in_batch": (labels != -100).sum() / shards,
    }


def main():
    """Train, and print the loss."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120, help="when to stop")
    parser.add_argument("--experts", type=int, default=0, help="experts of a layer, instead of one MLP")
    parser.add_argument("--load", help="a folder of a Llama, which transformers shards as it loads it")
    parser.add_argument("--save", help="a folder to save the state to at the end")
    parser.add_argument("--resume", help="a folder to go on from")
    arguments = parser.parse_args()

    order = {"use_seedable_sampler": True, "data_seed": 0}  # the same under every strategy
    loading = DataLoaderConfiguration(split_batches=True, resume_mid_epoch=True, **order)
    accelerator = Accelerator(dataloader_config=loading, step_scheduler_per="update")
    set_seed(0)
    if arguments.load:
        shards = DistributedConfig(fsdp_size=accelerator.num_processes)
        model = LlamaForCausalLM.from_pretrained(arguments.load, distributed_config=shards)
    else:
        model = make_model(arguments.experts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    loader = DataLoader(read_data(), batch_size=batch_size, shuffle=True, drop_last=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if arguments.resume:
        accelerator.load_state(arguments.resume)

    axes = accelerator.parallelism_config
    shards = axes.cp_size if axes else 1  # with context parallelism, a sequence is sharded below
    while progress.step < arguments.steps:
        for batch in loader:
            inputs = with_next_tokens(batch, shards) if shards > 1 else batch
            parts = [value for value in inputs.values() if value.dim() == 2]
            context = accelerator.maybe_context_parallel(parts, [1] * len(parts), {*parts})
            with accelerator.accumulate(model), context:
                loss = model(**inputs).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            progress.step += accelerator.sync_gradients
            if progress.step >= arguments.steps:
                if arguments.save:  # within the epoch, so that a resumed run starts with the next batch
                    accelerator.save_state(arguments.save)
                break

    mean = accelerator.reduce(loss.detach().float(), "mean").item()
    accelerator.print(f"{accelerator.num_processes} process(es), loss {mean:.2f} after {progress.step} steps")
    accelerator.free_memory()


if __name__ == "__main__":
    main()
