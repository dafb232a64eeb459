"""Peak memory and time of training on long sequences sharded across ranks (`sp_size`, `cp_size`).

    uv run python tools/benchmarks/sequence_memory.py [--what memory|time] [--deepspeed]

A small Llama is trained on the CPU. Memory: the bytes of all live tensors of a rank at their peak (by the
tracker of `accel check`), for plain PyTorch in one process, `sp_size` (Ulysses) and `cp_size` (ring
attention) with FSDP2, and DeepSpeed's Ulysses with ZeRO-3. Ranks can save no more than one process needs,
divided by their number. Time: `Accelerator` and a program by hand, with `fully_shard` and an all-to-all
around the same attention, alternate within one job of two ranks; printed is the median ratio of their steps.
Claim: at most 1.05.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from alternating import alternate, run_on_ranks
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_to_all_single
from torch.utils.data import DataLoader

TIME_CLAIM = 1.05
LENGTHS, STEPS, ROUNDS, TIMED_LENGTH, TOKENS = (512, 1024, 2048, 4096), 3, 9, 1024, 512
BUCKET = 1 << 20
DEEPSPEED_CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": BUCKET,
        "stage3_prefetch_bucket_size": BUCKET,
        "sub_group_size": BUCKET,
    },
}
ACCEL, RING, BY_HAND = "accel sp", "accel cp", "by hand"
JOBS = (("plain", 1), (ACCEL, 2), (ACCEL, 4), (RING, 2), (RING, 4))

Step = Callable[[], None]
"""A step of training on the next batch."""


def make_model() -> Any:
    """Return a Llama, the same on all ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    options: dict[str, Any] = {"attn_implementation": "sdpa"}
    config = LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=max(LENGTHS),
        **options,
    )
    return LlamaForCausalLM(config)


def batches(length: int) -> DataLoader[Any]:
    """Return more batches of one row than any job needs."""
    torch.manual_seed(1)
    rows = [torch.randint(0, TOKENS, (length,)) for _ in range(STEPS * (ROUNDS + 2))]
    samples: Any = [{"input_ids": row, "labels": row} for row in rows]
    return DataLoader(samples, batch_size=1)


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    """Return AdamW for a model."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


def plain(length: int) -> tuple[Any, Step]:
    """PyTorch in one process."""
    model = make_model()
    optimizer, data = optimizer_of(model), iter(batches(length))

    def step() -> None:
        model(**next(data), use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def by_hand(length: int) -> tuple[Any, Step]:
    """FSDP2, an all-to-all around attention, and the loss of a shard over the tokens of all."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    model, ranks, rank = make_model(), dist.get_world_size(), dist.get_rank()

    def exchange(heads: torch.Tensor) -> torch.Tensor:
        parts = heads.unflatten(1, (ranks, -1)).movedim(1, 0).contiguous()
        received = all_to_all_single(torch.empty_like(parts), parts)
        return received.movedim(0, 2).flatten(2, 3)

    def attention(module: Any, query: Any, key: Any, value: Any, _: Any, **kwargs: Any) -> Any:
        query, key, value = exchange(query), exchange(key), exchange(value)
        return exchange(sdpa_attention_forward(module, query, key, value, None, **kwargs)[0]), None

    AttentionInterface.register("by_hand", attention)
    model.set_attn_implementation("by_hand")
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer, data = optimizer_of(model), iter(batches(length))
    shard = slice(rank * length // ranks, (rank + 1) * length // ranks)

    def step() -> None:
        batch = next(data)
        labels = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
        count = (labels != -100).sum() / ranks
        model(
            input_ids=batch["input_ids"][:, shard],
            position_ids=torch.arange(length)[None, shard],
            labels=labels[:, shard],
            shift_labels=labels[:, shard].contiguous(),
            num_items_in_batch=count,
            use_cache=False,
        ).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def prepared(length: int, **sizes: Any) -> tuple[Any, Any, Any, Iterator[Any]]:
    """Return an `Accelerator` with FSDP2, and the model, the optimizer and the batches that it prepared."""
    from accel import Accelerator
    from accel.utils import FullyShardedDataParallelPlugin, ParallelismConfig

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=ParallelismConfig(**sizes))
    model = make_model()
    model, optimizer, loader = accelerator.prepare(model, optimizer_of(model), batches(length))
    return accelerator, model, optimizer, iter(loader)


def through_accel(length: int) -> tuple[Any, Step]:
    """`Accelerator`, by configuration."""
    accelerator, model, optimizer, data = prepared(length, sp_size=dist.get_world_size())

    def step() -> None:
        accelerator.backward(model(**next(data)).loss)
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def through_ring(length: int) -> tuple[Any, Step]:
    """`Accelerator`, with ring attention within the context of shards."""
    ranks = dist.get_world_size()
    accelerator, model, optimizer, data = prepared(length, cp_size=ranks)

    def step() -> None:
        tokens = next(data)["input_ids"]
        labels = torch.nn.functional.pad(tokens, (0, 1), value=-100)[:, 1:].contiguous()
        positions = torch.arange(length)[None].repeat(len(tokens), 1)
        count = (labels != -100).sum() / ranks
        buffers = [tokens, labels, positions]
        with accelerator.maybe_context_parallel(buffers, [1, 1, 1], {*buffers}):
            loss = model(
                input_ids=tokens,
                position_ids=positions,
                labels=labels,
                shift_labels=labels,
                num_items_in_batch=count,
                use_cache=False,
            ).loss
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def through_deepspeed(length: int) -> tuple[Any, Step]:
    """DeepSpeed's Ulysses with ZeRO-3, with buckets of 1 Mi elements in place of 500 M."""
    from accel import Accelerator
    from accel.utils import DeepSpeedPlugin, ParallelismConfig

    ranks = dist.get_world_size()
    accelerator = Accelerator(
        cpu=True,
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=DEEPSPEED_CONFIG),
        parallelism_config=ParallelismConfig(sp_size=ranks),
    )
    model = make_model()
    model, optimizer, loader = accelerator.prepare(model, optimizer_of(model), batches(length))
    data: Iterator[Any] = iter(loader)

    def step() -> None:
        batch = next(data)
        labels = batch.pop("shift_labels")
        tokens = (labels != -100).sum()
        dist.all_reduce(tokens)
        logits = model(**batch, use_cache=False).logits.flatten(0, 1)
        losses = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
        accelerator.backward(losses / tokens * ranks)
        optimizer.step()
        optimizer.zero_grad()

    return model, step


WAYS = {
    "plain": plain,
    BY_HAND: by_hand,
    ACCEL: through_accel,
    RING: through_ring,
    "deepspeed": through_deepspeed,
}


def measure_memory(way: str, length: int) -> float:
    """Return the MiB of live tensors at the peak of two steps."""
    from accel.state import AcceleratorState
    from accel_cli.commands.check.recorder import RankMemoryTracker

    AcceleratorState._reset_state()  # pyright: ignore[reportPrivateUsage] - documented for such uses
    model, step = WAYS[way](length)
    tracker = RankMemoryTracker(None)
    with tracker:
        tracker.add(model)
        for _ in range(2):
            step()
        return sum(tracker.parts.values()) / 2**20


def measure_time() -> float:
    """Return the median ratio of the time of a step to that of the program by hand."""
    steps = {BY_HAND: by_hand(TIMED_LENGTH)[1], ACCEL: through_accel(TIMED_LENGTH)[1]}
    times = alternate(steps, rounds=ROUNDS, calls=STEPS)
    return statistics.median(a / b for a, b in zip(times[ACCEL], times[BY_HAND], strict=True))


def worker(way: str) -> None:
    """One rank of a job; rank 0 prints the worst values of all ranks: peaks by length, or the ratio."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    values = [measure_time()] if way == "time" else [measure_memory(way, length) for length in LENGTHS]
    worst = torch.tensor(values)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(json.dumps(worst.tolist()), flush=True)
    dist.destroy_process_group()


def main() -> int:
    """Print the peaks by length, and the ratio of times; returns 1 if the claim does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--what", choices=["time", "memory"])
    parser.add_argument("--deepspeed", action="store_true", help="measure DeepSpeed's Ulysses, too")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker)
        return 0
    if options.what != "time":
        jobs = [*JOBS, *([("deepspeed", 2)] if options.deepspeed else [])]
        print("MiB of live tensors at the peak, by length: " + ", ".join(map(str, LENGTHS)))
        for way, ranks in jobs:
            peaks = run_on_ranks(__file__, ranks, way)
            print(f"{way:10} {ranks} rank(s) " + " ".join(f"{peak:9.1f}" for peak in peaks), flush=True)
    if options.what == "memory":
        return 0
    (ratio,) = run_on_ranks(__file__, 2, "time")
    print(f"a step over one by hand, two ranks, length {TIMED_LENGTH}: {ratio:.3f} (claim {TIME_CLAIM})")
    return 0 if ratio <= TIME_CLAIM else 1


if __name__ == "__main__":
    sys.exit(main())
