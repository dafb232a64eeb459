"""Checkpoints of Megatron's dist_checkpointing are converted, with its names or those of transformers."""

from __future__ import annotations

import json
import pickle
import warnings
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from accel_convert import convert_checkpoint
from accel_convert.read import open_checkpoint
from accel_plugins.megatron.library import core
from accel_state.errors import CheckpointError, SettingsError
from distributed.megatron.test_checkpoints import build, train
from harness import distributed
from harness.cuda_names import cuda_answered_by_cpu
from harness.engines import new_groups_end

LAYERS, WIDTH, TOKENS = 2, 16, 32


def megatron_model(tp: int, *, is_half: bool):
    """Return a GPT of megatron-core, the same wrapped by its DDP, and its Adam."""
    core("parallel_state").initialize_model_parallel(tensor_model_parallel_size=tp)
    core("tensor_parallel").model_parallel_cuda_manual_seed(1)
    dtype = torch.bfloat16 if is_half else torch.float32
    config = core("transformer.transformer_config").TransformerConfig(
        num_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=4, use_cpu_initialization=True,
        gradient_accumulation_fusion=False, masked_softmax_fusion=False, bias_dropout_fusion=False,
        hidden_dropout=0.0, attention_dropout=0.0, params_dtype=dtype, bf16=is_half,
    )  # fmt: skip
    spec = core("models.gpt.gpt_layer_specs").get_gpt_layer_local_spec()
    model = core("models.gpt.gpt_model").GPTModel(config, spec, vocab_size=TOKENS, max_sequence_length=16)
    distributed_ = core("distributed")
    settings = distributed_.DistributedDataParallelConfig(use_distributed_optimizer=tp == 1)
    wrapped = distributed_.DistributedDataParallel(config, settings, model)
    wrapped = wrapped.bfloat16() if is_half else wrapped
    optimizers = core("optimizer")
    optimizer = optimizers.get_megatron_optimizer(
        optimizers.OptimizerConfig(
            optimizer="adam", lr=0.01, use_distributed_optimizer=tp == 1, bf16=is_half, params_dtype=dtype
        ),
        [wrapped],
    )
    return model, wrapped, optimizer


@distributed(world_size=2)
def save_by_megatron(tp: int, folder: Path, *, is_half: bool) -> None:
    """Train two steps with megatron-core alone, and save as Megatron-LM does; keep what each rank has."""
    with cuda_answered_by_cpu(), new_groups_end(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of megatron-core
        model, wrapped, optimizer = megatron_model(tp, is_half=is_half)
        for step in range(2):
            wrapped.zero_grad_buffer()
            tokens = torch.randint(0, TOKENS, (2, 8), generator=torch.Generator().manual_seed(step))
            mask = ~torch.ones(8, 8, dtype=torch.bool).tril()[None, None]
            positions = torch.arange(8).expand(2, 8)
            wrapped(tokens, positions, mask, labels=tokens).mean().backward()
            core("distributed").finalize_model_grads([wrapped])
            optimizer.step()
        state = {"model": model.sharded_state_dict(), "iteration": 2, "args": Namespace(hidden_size=WIDTH)}
        kind = {"distrib_optim_sharding_type": "fully_reshardable"}
        options = {"metadata": kind} if tp == 1 else {}
        state["optimizer"] = optimizer.sharded_state_dict(state["model"], **options)
        target = folder / "iter_0000002"
        target.mkdir(exist_ok=True)
        dist.barrier()
        core("dist_checkpointing").save(state, str(target))
        moments = {}
        if tp == 2:  # every rank has its own states
            inner = optimizer.chained_optimizers[0].optimizer.state
            moments = {name: inner[value]["exp_avg"] for name, value in model.named_parameters()}
        weights = {name: value.detach() for name, value in model.named_parameters()}
        torch.save((weights, moments), folder / f"right{dist.get_rank()}.pt")
        (folder / "latest_checkpointed_iteration.txt").write_text("2")
        dist.barrier()
        core("parallel_state").destroy_model_parallel()


ROWS = (
    "word_embeddings.weight",
    "output_layer.weight",
    "linear_qkv.weight",
    "linear_qkv.bias",
    "linear_fc1.weight",
)
"""What tensor parallelism splits by rows, in a model without gates; by columns, `COLUMNS`."""
COLUMNS = ("linear_proj.weight", "linear_fc2.weight")


def joined(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    if name.endswith((*ROWS, "linear_fc1.bias")):
        return torch.cat(parts)
    return torch.cat(parts, dim=1) if name.endswith(COLUMNS) else parts[0]


def test_shards_of_megatron_are_full_tensors_of_its_names(tmp_path):
    save_by_megatron(tp=2, folder=tmp_path, is_half=False)
    convert_checkpoint(tmp_path, tmp_path / "out", to="full")
    ranks = [torch.load(tmp_path / f"right{rank}.pt") for rank in range(2)]
    weights = load_file(tmp_path / "out" / "model.safetensors")
    contents = open_checkpoint(tmp_path / "out")
    assert weights.keys() == ranks[0][0].keys()
    for name, value in weights.items():
        assert torch.equal(value, joined(name, [rank[0][name] for rank in ranks])), name
    state = open_checkpoint(tmp_path).optimizers[0]
    for name, values in state.states.items():
        assert torch.equal(values["exp_avg"].full(), joined(name, [rank[1][name] for rank in ranks])), name
        assert values["step"].full() == 2
    decaying, other = state.groups
    assert (decaying["weight_decay"], other["weight_decay"]) == (0.01, 0.0)
    assert all(weights[name].ndim == 2 for name in decaying["params"])
    assert all(weights[name].ndim == 1 for name in other["params"])
    assert len(contents.optimizers[0].states) == len(weights)


def test_masters_of_a_distributed_optimizer_are_the_weights(tmp_path):
    save_by_megatron(tp=1, folder=tmp_path, is_half=True)
    contents = open_checkpoint(tmp_path / "iter_0000002")
    right, _ = torch.load(tmp_path / "right0.pt")
    found = {name: lazy.full() for name, lazy in contents.models[0].items()}
    assert {value.dtype for value in found.values()} == {torch.float32}
    assert {name: value.bfloat16().tolist() for name, value in found.items()} == {
        name: value.tolist() for name, value in right.items()
    }
    assert any(not torch.equal(value, value.bfloat16().float()) for value in found.values())
    assert contents.optimizers[0].states.keys() == right.keys()


@distributed(world_size=2)
def save_of_transformers(name: str, folder: Path) -> None:
    """Train a model of transformers by Megatron; save checkpoints of both libraries, and what is right."""
    with cuda_answered_by_cpu(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of megatron-core
        run = build(name, "tp2")
        accelerator, model, _, _ = run
        train(run, 0)
        accelerator.save_state(folder / "state")
        (folder / "megatron").mkdir(exist_ok=True)
        accelerator.wait_for_everyone()
        state = model.chunks[0].module.sharded_state_dict()
        core("dist_checkpointing").save(state, str(folder / "megatron"))
        weights = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            torch.save(weights, folder / "right.pt")
            model.config.save_pretrained(folder / "base")
        accelerator.wait_for_everyone()
        accelerator.free_memory()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_configuration_gives_names_and_layout_of_transformers(name, tmp_path):
    save_of_transformers(name=name, folder=tmp_path)
    report = convert_checkpoint(
        tmp_path / "megatron", tmp_path / "out", to="safetensors", base=tmp_path / "base"
    )
    right, found = torch.load(tmp_path / "right.pt"), load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() <= right.keys()
    assert right.keys() - found.keys() <= {"lm_head.weight"}  # tied
    for key, value in found.items():
        assert torch.equal(value, right[key]), key
    assert "config.json" in report.files
    convert_checkpoint(tmp_path / "state", tmp_path / "full", to="full")
    state = load_file(tmp_path / "full" / "model.safetensors")
    assert state.keys() - found.keys() <= {"lm_head.weight"}
    assert all(torch.equal(state[key], value) for key, value in found.items())
    moments = open_checkpoint(tmp_path / "state").optimizers[0].states
    assert moments.keys() == found.keys()
    assert all(moments[key]["exp_avg"].full().any() for key in found)
    with pytest.raises(SettingsError, match="no configuration of transformers"):
        open_checkpoint(tmp_path / "megatron", tmp_path / "out.nowhere")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    other = "gpt2" if name == "llama" else "llama"
    (tmp_path / "base" / "config.json").write_text(json.dumps({**config, "model_type": other}))
    with pytest.raises(CheckpointError, match=r"is not in a model|does not fit"):
        open_checkpoint(tmp_path / "megatron", tmp_path / "base")


def test_other_backends_and_code_are_refused(tmp_path):
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(CheckpointError, match="'zarr'"):
        open_checkpoint(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("../../secret")
    with pytest.raises(CheckpointError, match="not an iteration"):
        open_checkpoint(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (tmp_path / ".metadata").write_bytes(pickle.dumps(print))
    with pytest.raises(CheckpointError, match="not allowed"):
        open_checkpoint(tmp_path)
