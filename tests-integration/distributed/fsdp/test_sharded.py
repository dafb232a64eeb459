"""Training with sharded models: numbers of one process, data, checkpoints, bad input."""

from __future__ import annotations

import copy
import functools
import sys
import time
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from accel_ops.tree import is_dtensor
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.kwargs import GradScalerKwargs
from accel_plugins.parallelism.config import (
    ParallelismConfig,
    TorchContextParallelConfig,
    TorchTensorParallelPlugin,
)
from accel_state.environ import patch_environment
from accel_state.errors import SettingsError
from accel_train import Accelerator
from harness import cases, distributed

WIDTH, HEADS, TOKENS, LENGTH = 16, 4, 11, 8
PLAN = {
    "blocks.*.query": "colwise",
    "blocks.*.key": "colwise",
    "blocks.*.value": "colwise",
    "blocks.*.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
}
LAYOUTS = {
    "shards": {"dp_shard_size": 2},
    "copies of shards": {"dp_replicate_size": 2, "dp_shard_size": 2},
    "layers": {"tp_size": 2},
    "shards of layers": {"dp_shard_size": 2, "tp_size": 2},
    "copies of layers": {"dp_replicate_size": 2, "tp_size": 2},
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)  # the gradient of a bias would be rounding alone
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.norm(x)
        heads = [
            part(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        ]
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Language(nn.Module):
    """A causal language model with tied embeddings."""

    def __init__(self, tied=True):
        super().__init__()
        self.embed, self.place = nn.Embedding(TOKENS, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(1), persistent=False)
        self.tp_plan = PLAN

    def forward(self, tokens, positions=None):
        if positions is None:
            positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        x = self.embed(tokens) + self.place(positions) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_model(**options):
    torch.manual_seed(0)
    return Language(**options)


def make_optimizer(model, **options):
    # Its eps is such that rounding is not divided by zero.
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, **options)


def make_data(rows=48):
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randint(0, TOKENS, (rows, LENGTH + 1), generator=generator))


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())


def plugin(**options):
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        **options,
    )


def make_accelerator(layout, **options):
    sizes = LAYOUTS[layout]
    if set(sizes) != {"tp_size"}:
        options.setdefault("fsdp_plugin", plugin())
    return Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes), **options)


def train(
    accelerator, batch_size, *, accumulation=1, clip=None, steps=4, model=None, shuffle=False, optimizer=None
):
    """Steps through `accelerator`; returns the prepared model and optimizer and what was clipped."""
    torch.manual_seed(5)
    model = make_model() if model is None else model
    optimizer = make_optimizer(model) if optimizer is None else optimizer
    loader = DataLoader(make_data(), batch_size=batch_size, shuffle=shuffle)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.gradient_accumulation_steps = accumulation
    norms, done = [], 0
    while done < steps * accumulation:
        for (batch,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                if clip is not None and accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), clip))
                optimizer.step()
                optimizer.zero_grad()
            done += 1
            if done == steps * accumulation:
                break
    return model, optimizer, norms


@functools.cache
def train_alone(batch_size, *, accumulation=1, clip=None, steps=4):
    """The same with plain PyTorch on whole batches."""
    model = make_model()
    optimizer = make_optimizer(model)
    rows = make_data().tensors[0]
    norms, position = [], 0
    for _ in range(steps):
        for _ in range(accumulation):
            batch = rows[position : position + batch_size]
            position = (position + batch_size) % len(rows)
            (loss_of(model, batch) / accumulation).backward()
        if clip is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip))
        optimizer.step()
        optimizer.zero_grad()
    return model, norms


def whole(accelerator, model):
    return accelerator._parts.strategy.states.full_state_dict(model)


def check_equal(layout, *, accumulation=1, clip=None, tolerance=1e-6, **options):
    accelerator = make_accelerator(layout, **options)
    shards = accelerator._parts.strategy.sharding.num_shards
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*returned a view tensor")
        model, _, norms = train(accelerator, 4, accumulation=accumulation, clip=clip)
    right, right_norms = train_alone(4 * shards, accumulation=accumulation, clip=clip)
    found = whole(accelerator, model)
    assert list(found) == list(right.state_dict())
    for name, value in right.state_dict().items():
        assert (found[name] - value).abs().max() <= tolerance, (name, (found[name] - value).abs().max())
    for norm, expected in zip(norms, right_norms, strict=True):
        assert abs(norm - expected) <= 100 * tolerance
    assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("layout", ["shards", "layers"])
@distributed(world_size=2)
def test_two_processes_train_as_one(layout, clip, accumulation):
    check_equal(layout, accumulation=accumulation, clip=clip)


@distributed(world_size=2)
def test_a_plugin_of_fsdp2_beside_tensor_parallelism_alone_has_one_shard():
    check_equal("layers", accumulation=3, clip=0.5, fsdp_plugin=plugin())
    mesh = make_accelerator("layers", fsdp_plugin=plugin()).torch_device_mesh
    assert dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True)) == {"dp_shard": 1, "tp": 2}


@pytest.mark.parametrize(
    "layout",
    cases(
        ["copies of shards", "shards of layers", "copies of layers"],
        always={"copies of shards", "shards of layers"},
    ),
)
@distributed(world_size=4)
def test_four_processes_train_as_one(layout):
    check_equal(layout, accumulation=3, clip=0.5)


@distributed(world_size=2)
def test_bfloat16_stays_within_the_rounding_of_its_eight_bits():
    check_equal("shards", mixed_precision="bf16", tolerance=0.04)  # 4 steps of at most 0.01 each


@distributed(world_size=2)
def test_parameters_stay_on_the_cpu_and_blocks_are_computed_twice():
    check_equal("shards", fsdp_plugin=plugin(cpu_offload=True, activation_checkpointing=True))


@distributed(world_size=2)
def test_saved_activations_wait_on_the_cpu():
    check_equal("shards", fsdp_plugin=plugin(activation_checkpointing_offload=True))


@distributed(world_size=2)
def test_tied_embeddings_are_in_one_group_although_each_layer_is_to_have_its_own():
    wanted = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block", "Embedding", "Linear"],
    )
    check_equal("shards", fsdp_plugin=wanted)
    model = make_accelerator("shards", fsdp_plugin=wanted).prepare(make_model())
    groups = [name for name, part in model.named_modules() if isinstance(part, FSDPModule)]
    assert {"embed", "head"} & {*groups} == set()
    assert {"", "place", "blocks.0", "blocks.0.up"} <= {*groups}
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("norm_type", [2, float("inf")])
@distributed(world_size=2)
def test_gradients_of_shards_and_of_plain_parameters_are_clipped_by_one_norm(norm_type):
    accelerator = make_accelerator("shards", fsdp_plugin=plugin(ignored_modules="place"))
    model, alone, batch = accelerator.prepare(make_model()), make_model(), make_data().tensors[0][:4]
    assert {type(parameter.data).__name__ for parameter in model.parameters()} == {"DTensor", "Tensor"}
    accelerator.backward(loss_of(model, batch))
    loss_of(alone, batch).backward()
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.01, norm_type)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(alone.parameters(), 0.01, norm_type))
    for parameter, expected in zip(model.parameters(), alone.parameters(), strict=True):
        gradient = parameter.grad
        full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        torch.testing.assert_close(full, expected.grad)


@distributed(world_size=2)
def test_clipping_calls_no_function_of_ours_for_every_gradient():
    accelerator = make_accelerator("shards", fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(50)])
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    accelerator.backward(model(torch.ones(1, 4)).sum())
    called = []

    def note(frame, event, _):
        if event == "call" and "accel_" in frame.f_code.co_filename:
            called.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    finally:
        sys.setprofile(None)
    assert "clip_grad_norm" in called
    assert len(called) <= 100, called


@distributed(world_size=2)
def test_an_infinite_gradient_on_one_rank_skips_the_step_on_all():
    accelerator = make_accelerator(
        "shards", mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=8.0)]
    )
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    before = whole(accelerator, model)
    batch = make_data().tensors[0][:4]
    factor = float("inf") if dist.get_rank() == 1 else 1.0
    accelerator.backward(loss_of(model, batch) * factor)
    optimizer.step()
    assert optimizer.step_was_skipped
    assert accelerator.scaler.get_scale() == 4.0
    for name, value in whole(accelerator, model).items():
        assert torch.equal(value, before[name])
    optimizer.zero_grad()
    accelerator.backward(loss_of(model, batch))
    optimizer.step()
    assert not optimizer.step_was_skipped


@pytest.mark.parametrize("layout", ["shards", "layers"])
@distributed(world_size=2)
def test_a_checkpoint_goes_on_where_it_was(layout, tmp_path):
    with_full = {"fsdp_plugin": plugin(state_dict_type="FULL_STATE_DICT")} if layout == "shards" else {}
    accelerator = make_accelerator(layout, **with_full)
    model, optimizer, _ = train(accelerator, 4, steps=2)
    accelerator.save_state(tmp_path / "here", flush=False)
    batch = make_data().tensors[0][:4]

    def step():
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
        return whole(accelerator, model)

    right = step()
    step()
    accelerator.load_state(tmp_path / "here")
    for name, value in step().items():
        assert torch.equal(value, right[name])
    accelerator.save_model(model, tmp_path / "weights")
    accelerator.save_model(model, tmp_path / "cut", max_shard_size=1000)
    accelerator.wait_for_everyone()
    alone = make_model()
    from accel_ops.weights.read import load_state_dict

    found = load_state_dict(tmp_path / "weights" / "model.safetensors")
    alone.load_state_dict(found, strict=False)
    assert torch.equal(alone.blocks[0].up.weight, right["blocks.0.up.weight"])
    files = [*(tmp_path / "cut").glob("*.safetensors")]
    cut = {name: value for file in files for name, value in load_state_dict(file).items()}
    assert len(files) > 1
    assert cut.keys() == found.keys()
    assert all(torch.equal(cut[name], found[name]) for name in cut)
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        accelerator.save_model(model, tmp_path / "file")
    (tmp_path / "folder" / "model.safetensors").mkdir(parents=True, exist_ok=True)
    fails = pytest.raises(IsADirectoryError) if accelerator.is_main_process else nullcontext()
    with fails:  # and nobody waits for the main process
        accelerator.save_model(model, tmp_path / "folder")
    accelerator.wait_for_everyone()


@distributed(world_size=4)
def test_tensor_parallel_ranks_have_the_same_samples_and_count_once():
    accelerator = make_accelerator("shards of layers")
    loader = accelerator.prepare(DataLoader(torch.arange(10), batch_size=3, shuffle=True))
    for _ in range(2):
        rows = [accelerator.gather_for_metrics(batch) for batch in loader]
        assert sorted(torch.cat(rows).tolist()) == list(range(10))
        names = [accelerator.gather_for_metrics([str(int(one)) for one in batch]) for batch in loader]
        assert sorted(int(one) for part in names for one in part) == list(range(10))
    mine = torch.cat(list(loader))
    everyone = accelerator.gather(mine).reshape(4, -1)
    assert torch.equal(everyone[0], everyone[1])
    assert torch.equal(everyone[2], everyone[3])
    assert not torch.equal(everyone[0], everyone[2])
    assert accelerator.tensor_parallel_rank == dist.get_rank() % 2
    assert accelerator.data_parallel_shard_rank == dist.get_rank() // 2
    assert accelerator.data_parallel_rank == accelerator.context_parallel_rank == 0
    assert accelerator.is_fsdp2
    assert accelerator.is_composable_parallelism_enabled
    assert accelerator.should_save_model
    assert accelerator.torch_device_mesh.mesh_dim_names == ("dp_shard", "tp")
    assert accelerator.parallelism_config.total_size == 4


@distributed(world_size=2)
def test_streams_are_read_once_and_sent_to_tensor_parallel_ranks():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(torch.arange(6))

    accelerator = make_accelerator("layers")
    loader = accelerator.prepare(DataLoader(Stream(), batch_size=2))
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
    assert [accelerator.gather_for_metrics(batch).tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("rotation", ["allgather", "alltoall"])
@distributed(world_size=2)
def test_context_parallel_ranks_train_as_one(rotation):
    config = ParallelismConfig(cp_size=2, cp_handler=TorchContextParallelConfig(rotation))
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin(), parallelism_config=config)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    right = make_model()
    right_optimizer = torch.optim.SGD(right.parameters(), lr=0.1)
    rows = make_data().tensors[0]
    for step in range(3):
        batch = rows[4 * step : 4 * step + 4]
        loss_of(right, batch).backward()
        right_optimizer.step()
        right_optimizer.zero_grad()
        inputs, labels = batch[:, :-1].clone(), batch[:, 1:].clone()
        positions = torch.arange(LENGTH).repeat(4, 1)
        buffers = [inputs, labels, positions]
        with accelerator.maybe_context_parallel(buffers, [1, 1, 1], set(buffers)):
            assert inputs.shape == (4, LENGTH // 2)
            logits = model(inputs, positions)
            accelerator.backward(nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))
        optimizer.step()
        optimizer.zero_grad()
    found = whole(accelerator, model)
    for name, value in right.state_dict().items():
        assert (found[name] - value).abs().max() <= 1e-6, name


@distributed(world_size=2)
def test_optimizers_made_before_or_after_follow():
    accelerator = make_accelerator("shards")
    model = make_model()
    early = torch.optim.AdamW(model.parameters(), lr=0.01)
    model = accelerator.prepare(model)
    late = torch.optim.AdamW(model.parameters(), lr=0.01)
    for optimizer in (early, late):
        prepared = accelerator.prepare(optimizer)
        held = [one for group in prepared.param_groups for one in group["params"]]
        assert all(mine is own for mine, own in zip(held, model.parameters(), strict=True))
        assert all(is_dtensor(one) for one in held)


@pytest.mark.parametrize("together", [True, False])
@distributed(world_size=2)
def test_a_second_accelerator_trains_the_model_that_the_first_one_has_sharded(together):
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)

    def train(accelerators):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        for _ in range(accelerators):
            accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if together:
                model, optimizer = accelerator.prepare(model, optimizer)
            else:
                model = accelerator.prepare(model)
                optimizer = accelerator.prepare(optimizer)
            for _ in range(2 // accelerators):
                accelerator.backward(model(torch.ones(2, 4)).sum())
                optimizer.step()
                optimizer.zero_grad()
        return accelerator.get_state_dict(model)

    first, second = train(1), train(2)
    assert all(torch.equal(second[name], value) for name, value in first.items())


@distributed(world_size=2)
def test_blocks_are_compiled_one_by_one():
    accelerator = make_accelerator("shards", dynamo_backend="eager")
    accelerator._parts.compiler.use_regional_compilation = True
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute")  # that torch's compiler asks for
        model, _, _ = train(accelerator, 4, steps=2)
    right, _ = train_alone(8, steps=2)
    for name, value in whole(accelerator, model).items():
        assert (right.state_dict()[name] - value).abs().max() <= 1e-6


@distributed(world_size=2)
def test_rank_0_alone_reads_the_model():
    with patch_environment(ACCELERATE_USE_FSDP="false", FSDP_CPU_RAM_EFFICIENT_LOADING="false"):
        accelerator = make_accelerator("shards", fsdp_plugin=plugin(cpu_ram_efficient_loading=True))
        if accelerator.is_main_process:
            model = make_model()
        else:
            with torch.device("meta"):
                model = Language()
        right = make_model().state_dict()
        model = accelerator.prepare(model)
        found = whole(accelerator, model)
        assert all(torch.equal(found[name], value) for name, value in right.items())
        assert model.scale.item() == 1.0


@pytest.mark.parametrize("layout", ["shards", "layers"])
@distributed(world_size=2)
def test_the_values_of_rank_0_count_whatever_the_others_have(layout):
    accelerator = make_accelerator(layout)
    right, model = make_model().state_dict(), make_model()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(accelerator.process_index)
    found = whole(accelerator, accelerator.prepare(model))
    assert all(torch.equal(found[name], value) for name, value in right.items())


@distributed(world_size=2)
def test_bad_input_is_one_error_on_every_rank():
    with pytest.raises(SettingsError, match=r"dp_shard_size=3 makes 3 processes, but the world size is 2"):
        Accelerator(cpu=True, parallelism_config=ParallelismConfig(dp_shard_size=3))
    wrong = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Blok"],
    )
    with pytest.raises(SettingsError, match=r"no module of a class 'Blok'; did you mean 'Block'"):
        Accelerator(cpu=True, fsdp_plugin=wrong).prepare(make_model())
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model = make_model()
    stranger = torch.optim.SGD(copy.deepcopy(model).parameters(), lr=0.1)
    with pytest.raises(SettingsError, match=r"32 of the 32 parameters of SGD.*belong to no model"):
        accelerator.prepare(model, stranger)
    with pytest.raises(SettingsError, match=r"got other models on rank 1 than on rank 0"):
        accelerator.prepare(nn.Linear(2, 2 + accelerator.process_index))
    odd = nn.Linear(2, 2, device="meta" if accelerator.process_index == 1 else "cpu")
    with pytest.raises(SettingsError, match=r"other models on the meta device on rank 1 than on rank 0"):
        accelerator.prepare(odd)
    odd = nn.Linear(2, 2)
    if accelerator.process_index == 1:
        odd.weight = nn.Parameter(torch.empty(2, 2, device="meta"))
        text = "the parameter 'weight' is on the meta device on rank 1"
    else:
        text = "rank 1: Linear: the parameter 'weight' is on the meta device"
    with pytest.raises(SettingsError, match=text):
        accelerator.prepare(odd)
    flat = nn.Linear(2, 2)
    flat.temperature = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(SettingsError, match=r"'temperature' of shape \(\) has no dim"):
        accelerator.prepare(flat)


@distributed(world_size=2)
def test_bad_plans_are_one_error_on_every_rank():
    accelerator = Accelerator(cpu=True, torch_tp_plugin=TorchTensorParallelPlugin(tp_size=2))
    model = make_model()
    for plan, text in (
        (None, "Language has no tp_plan"),
        ({"blocks.*.quary": "colwise"}, r"names 'blocks.\*.quary'.*did you mean 'blocks.\d.query'"),
        ({"blocks.*.query": "colwize"}, r"'colwize'.*did you mean 'colwise'"),
    ):
        model.tp_plan = plan
        with pytest.raises(SettingsError, match=text):
            accelerator.prepare(model)


@distributed(world_size=2)
def test_other_ranks_never_hold_more_than_their_shard_and_one_block():
    """Counts the bytes of all living tensors whenever a full tensor has just arrived."""
    import gc

    width, depth = 256, 4
    with patch_environment(ACCELERATE_USE_FSDP="false", FSDP_CPU_RAM_EFFICIENT_LOADING="false"):
        wide = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            cpu_ram_efficient_loading=True,
            auto_wrap_policy="size_based_wrap",
            min_num_params=1,
        )
        accelerator = Accelerator(cpu=True, fsdp_plugin=wide)
        with torch.device("cpu" if accelerator.is_main_process else "meta"):
            model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(depth)])

        def living():
            gc.collect()
            return [
                get_object
                for get_object in gc.get_objects()
                if type(get_object) in {torch.Tensor, nn.Parameter} and get_object.device.type == "cpu"
            ]

        def storages(tensors):
            return {
                tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors
            }

        # What other tests of this process left is held here: nothing of it can go while we count.
        collectives, left = accelerator.state.runtime.collectives, living()
        before, peaks, send = storages(left), [], type(collectives).broadcast
        block = 4 * width * width

        def new_bytes():
            return sum(size for at, size in storages(living()).items() if at not in before)

        def broadcast(self, tensor, src):
            send(self, tensor, src)
            # gloo's thread may hold what it received a little longer than the call lasts.
            deadline, size = time.monotonic() + 10, new_bytes()
            while size > (len(peaks) + 2) * block // 2 and time.monotonic() < deadline:
                time.sleep(0.01)
                size = new_bytes()
            peaks.append(size)

        type(collectives).broadcast = broadcast
        try:
            model = accelerator.prepare(model)
        finally:
            type(collectives).broadcast = send
        assert len(peaks) == depth
        if not accelerator.is_main_process:
            assert (depth - 1) * block // 2 + block <= max(peaks) <= depth * block // 2 + block


class Updates(TorchDispatchMode):
    """Counts calls that update parameters: of kernels for lists of them, and for single ones."""

    def __init__(self):
        super().__init__()
        self.of_lists = self.of_single = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.of_lists += "_fused_adamw_" in str(function) or "_foreach_addcdiv" in str(function)
        self.of_single += str(function).startswith("aten.addcdiv")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("how", ["foreach", "fused"])
@pytest.mark.parametrize(
    ("layout", "meshes"),
    [
        pytest.param("layers", 2, marks=pytest.mark.thorough),
        ("shards of layers", 2),
        pytest.param("shards", 1, marks=pytest.mark.thorough),
    ],
)
@distributed(world_size=4)
def test_parameters_on_several_meshes_are_updated_in_lists(layout, meshes, how):
    if layout == "layers":
        accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=4))
    elif layout == "shards":
        accelerator = Accelerator(
            cpu=True, fsdp_plugin=plugin(), parallelism_config=ParallelismConfig(dp_shard_size=4)
        )
    else:
        accelerator = make_accelerator(layout)
    model = make_model()
    given = make_optimizer(model, **{how: True})
    groups = given.param_groups[0]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*returned a view tensor")
        model, optimizer, _ = train(accelerator, 4, steps=3, model=model, optimizer=given)
        right, _ = train_alone(4 * accelerator._parts.strategy.sharding.num_shards, steps=3)
        for name, value in whole(accelerator, model).items():
            torch.testing.assert_close(value, right.state_dict()[name], rtol=0, atol=1e-6)
        accelerator.backward(loss_of(model, make_data().tensors[0][:4]))
        with Updates() as updates:
            optimizer.step()
    assert updates.of_single == 0
    assert updates.of_lists >= meshes
    assert optimizer.param_groups == [groups], "the groups are those that the user has made"
    assert groups[how] is True
