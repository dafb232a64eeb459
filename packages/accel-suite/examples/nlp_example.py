"""Fine-tune a BERT to decide whether two sentences mean the same.

By default a small BERT with random weights learns from generated sentences, so that nothing is downloaded.
`--real` fine-tunes bert-base-cased on MRPC (`pip install datasets`).

    accel launch nlp_example.py
    accel launch --cpu --num_processes 2 nlp_example.py
    accel launch nlp_example.py --real --mixed_precision bf16
"""

import argparse
import random

import torch
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    get_linear_schedule_with_warmup,
)

from accel import Accelerator
from accel.utils import set_seed

WORDS = {  # pairs of synonyms
    "buy": "purchase", "begin": "start", "big": "large", "fast": "quick", "finish": "complete",
    "fix": "repair", "help": "assist", "keep": "retain", "choose": "select", "show": "display",
    "use": "employ", "end": "stop",
}  # fmt: skip


class WordTokenizer:
    """Tokenize sentence pairs by word: 0 is padding, 1 the start, 2 the separator."""

    def __init__(self):
        words = sorted({*WORDS, *WORDS.values(), "not"})
        self.ids = {word: number for number, word in enumerate(words, start=3)}

    def __call__(self, first, second):
        """Encode two lists of sentences as (N, length) ids, types and masks."""
        rows = [
            [1, *map(self.ids.get, a.split()), 2, *map(self.ids.get, b.split()), 2]
            for a, b in zip(first, second, strict=True)
        ]
        ids = torch.tensor(rows)
        types = (ids == 2).cumsum(1).clamp(max=1) * (ids != 2)
        return {"input_ids": ids, "token_type_ids": types, "attention_mask": torch.ones_like(ids)}


def made_up_pairs(count, seed):
    """Generate sentences of four words and paraphrases, half of them negated by a "not"."""
    draw = random.Random(seed)
    pairs = []
    for number in range(count):
        words = draw.sample([*WORDS], 4)
        others = [WORDS[word] for word in words]
        if number % 2 == 0:
            others[draw.randrange(4)] = "not"
        pairs.append({"first": " ".join(words), "second": " ".join(others), "label": number % 2})
    return pairs


def get_dataloaders(accelerator, batch_size, real):
    """Return the training and evaluation loaders, and the vocabulary size."""
    if real:
        from datasets import load_dataset

        with accelerator.main_process_first():
            data = load_dataset("glue", "mrpc").rename_columns({"sentence1": "first", "sentence2": "second"})
            tokenizer = AutoTokenizer.from_pretrained("bert-base-cased")
        train, test, size = data["train"], data["validation"], len(tokenizer)
    else:
        tokenizer = WordTokenizer()
        train, test, size = made_up_pairs(2000, seed=0), made_up_pairs(200, seed=1), len(tokenizer.ids) + 3

    def collate(rows):
        pair = [row["first"] for row in rows], [row["second"] for row in rows]
        batch = (
            tokenizer(*pair, truncation=True, padding=True, return_tensors="pt") if real else tokenizer(*pair)
        )
        return {**batch, "labels": torch.tensor([row["label"] for row in rows])}

    train_loader = DataLoader(train, batch_size=batch_size, shuffle=True, collate_fn=collate, drop_last=True)
    return train_loader, DataLoader(test, batch_size=32, collate_fn=collate), size


def make_model(real, vocab_size):
    """Return a pretrained BERT, or a small one with random weights."""
    if real:
        return AutoModelForSequenceClassification.from_pretrained("bert-base-cased", num_labels=2)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    config = BertConfig(**sizes, vocab_size=vocab_size, max_position_embeddings=32, num_labels=2)
    return BertForSequenceClassification(config)


def evaluate(accelerator, model, loader):
    """Return the accuracy over all processes, each sample once."""
    model.eval()
    correct = total = 0
    for batch in loader:
        with torch.no_grad():
            predictions = model(**batch).logits.argmax(dim=-1)
        predictions, labels = accelerator.gather_for_metrics((predictions, batch["labels"]))
        correct += (predictions == labels).sum().item()
        total += len(labels)
    return correct / total


def training_function(config, args):
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    set_seed(config["seed"])
    train_loader, test_loader, vocab_size = get_dataloaders(accelerator, config["batch_size"], args.real)
    model = make_model(args.real, vocab_size)
    optimizer = AdamW(model.parameters(), lr=config["lr"])
    steps = len(train_loader) * config["num_epochs"]
    scheduler = get_linear_schedule_with_warmup(
        optimizer, num_warmup_steps=steps // 10, num_training_steps=steps
    )

    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, test_loader, scheduler
    )

    for epoch in range(config["num_epochs"]):
        model.train()
        for batch in train_loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: accuracy {evaluate(accelerator, model, test_loader):.3f}")
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16", "fp8"])
    parser.add_argument("--cpu", action="store_true", help="train on the CPU")
    parser.add_argument("--real", action="store_true", help="fine-tune bert-base-cased on MRPC")
    args = parser.parse_args()
    made_up = {"lr": 1e-3, "num_epochs": 3, "seed": 42, "batch_size": 32}
    training_function(
        {**made_up, "lr": 2e-5, "num_epochs": 3, "batch_size": 16} if args.real else made_up, args
    )


if __name__ == "__main__":
    main()
