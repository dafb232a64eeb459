"""Generate text for many prompts, split across processes.

The model is tiny and trained briefly on one sentence, so that its output can be checked. Replace it with
`from_pretrained` in real use.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from accel import PartialState
from accel.utils import gather_object, set_seed

sentence = "the quick brown fox jumps over the lazy dog. "
prompts = ["the quick", "brown fox j", "over the la", "lazy dog. t", "fox jumps"]
batch_size = 2

state = PartialState()
set_seed(0)


def encode(text):
    return torch.tensor(list(text.encode()), device=state.device)


config = GPT2Config(
    vocab_size=128, n_positions=64, n_embd=64, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
)
model = GPT2LMHeadModel(config).to(state.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
text = encode(sentence * 2)
windows = torch.stack([text[start : start + 30] for start in range(len(sentence))])
for _ in range(60):
    model(input_ids=windows, labels=windows).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
model.eval()

with state.split_between_processes(prompts) as mine:
    # Prompts of equal length need no padding: sort by length, and batch equal lengths.
    order = sorted(range(len(mine)), key=lambda i: len(mine[i]))
    written = [""] * len(mine)
    for begin in range(0, len(order), batch_size):
        chosen = order[begin : begin + batch_size]
        width = max(len(mine[i]) for i in chosen)
        batch = torch.stack([encode(mine[i].rjust(width)) for i in chosen])
        mask = torch.stack([encode(mine[i].rjust(width, "\0")) for i in chosen]) != 0
        output = model.generate(
            batch, attention_mask=mask.long(), max_new_tokens=12, do_sample=False, pad_token_id=0
        )
        for i, tokens in zip(chosen, output[:, width:].tolist(), strict=True):
            written[i] = bytes(tokens).decode()

written = gather_object(written)  # in the order of the prompts
if state.is_main_process:
    for prompt, continued in zip(prompts, written, strict=True):
        print(f"{prompt!r} goes on {continued!r}")
