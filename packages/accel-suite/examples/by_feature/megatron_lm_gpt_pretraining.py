"""Pretrain a small GPT-2 on bytes; the launch config selects the parallelism.

accel launch --num_processes 2 megatron_lm_gpt_pretraining.py
accel launch --use_megatron_lm --megatron_lm_tp_degree 2 --num_processes 2 megatron_lm_gpt_pretraining.py
"""

from importlib.resources import files

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from accel import Accelerator
from accel.utils import DataLoaderConfiguration, set_seed

length, steps, batch_size = 64, 40, 16  # the batch size is that of all processes together


def read_rows():
    """Return scikit-learn's data set descriptions as rows of bytes."""
    pages = [page for page in files("sklearn.datasets.descr").iterdir() if page.name.endswith(".rst")]
    text = "\n".join(page.read_text() for page in sorted(pages, key=lambda page: page.name))
    tokens = torch.tensor(list(text.encode()))
    rows = tokens[: len(tokens) // length * length].view(-1, length)
    return [{"input_ids": row, "labels": row} for row in rows]


def main():
    """Train, evaluate, and save the model for transformers."""
    loading = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True, data_seed=0)
    accelerator = Accelerator(dataloader_config=loading)
    set_seed(0)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": length, "vocab_size": 256}
    config = GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rows = read_rows()
    training = DataLoader(rows[batch_size:], batch_size=batch_size, shuffle=True, drop_last=True)
    held_out = DataLoader(rows[:batch_size], batch_size=batch_size)
    model, optimizer, training, held_out = accelerator.prepare(model, optimizer, training, held_out)

    for step, batch in enumerate(training):
        if step == steps:
            break
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    model.eval()
    with torch.no_grad():
        losses = [model(**batch).loss for batch in held_out]
    mean = accelerator.reduce(torch.stack(losses).mean(), "mean")
    accelerator.print(f"held-out loss {mean:.3f} after {steps} steps")

    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained("gpt2-of-bytes", state_dict=state)
        again = GPT2LMHeadModel.from_pretrained("gpt2-of-bytes").eval()
        batch = torch.stack([row["input_ids"] for row in rows[:batch_size]])
        with torch.no_grad():
            loss = again(input_ids=batch, labels=batch).loss
        accelerator.print(f"held-out loss {loss:.3f} in transformers")
    accelerator.free_memory()


if __name__ == "__main__":
    main()
