"""Pipelines of torch: numbers of one process for every schedule, checkpoints, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.parallelism.config import ParallelismConfig, TorchPipelineParallelConfig
from accel_state.accelerator_state import AcceleratorState
from accel_state.errors import SettingsError
from accel_train import Accelerator
from harness import distributed
from harness.small_llama import make_llama

WIDTH, LAYERS, TOKENS, LENGTH, ROWS = 8, 8, 17, 6, 8
STEPS, WINDOW, MAX_NORM = 2, 2, 0.5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
        )

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """A model of no library: its loss is a mean over tokens, and it takes a mask by name."""

    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Embedding(TOKENS, WIDTH), nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, input_ids, labels=None, attention_mask=None):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def make(kind):
    torch.manual_seed(0)
    if kind == "plain":
        return Net().double()
    return make_llama(num_hidden_layers=LAYERS, tie_word_embeddings=kind == "tied").double()


def samples(*, is_padded):
    generator = torch.Generator().manual_seed(1)
    rows = []
    for index in range(STEPS * WINDOW * ROWS):
        tokens = torch.randint(0, TOKENS, (LENGTH,), generator=generator)
        labels, mask = tokens.clone(), torch.ones_like(tokens)
        if is_padded and index % 3 == 0:  # micro-batches have different numbers of labels
            labels[2:], mask[4:] = -100, 0
        rows.append({"input_ids": tokens, "labels": labels, "attention_mask": mask})
    return rows


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def prepared(kind, sizes, *, is_padded, **options):
    config = ParallelismConfig(**sizes, pp_handler=TorchPipelineParallelConfig(**options))
    accelerator = Accelerator(cpu=True, parallelism_config=config, gradient_accumulation_steps=WINDOW)
    model = make(kind)
    loader = DataLoader(samples(is_padded=is_padded), batch_size=ROWS // config.data_parallel_size)
    return accelerator, *accelerator.prepare(model, optimizer_of(model), loader)


def train(accelerator, model, optimizer, loader):
    losses, norms = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            losses.append(accelerator.reduce(loss, "mean").item())
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM).item())
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms


def train_alone(kind, *, is_padded):
    model = make(kind)
    optimizer = optimizer_of(model)
    losses, norms = [], []
    for index, batch in enumerate(DataLoader(samples(is_padded=is_padded), batch_size=ROWS)):
        loss = model(**batch)["loss"]
        (loss / WINDOW).backward()
        losses.append(loss.item())
        if (index + 1) % WINDOW == 0:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer, losses, norms


def check_equal_to_one_process(kind, sizes, **options):
    is_padded = set(sizes) == {"pp_size"}  # ranks with other batches average their mean losses
    accelerator, model, optimizer, loader = prepared(kind, sizes, is_padded=is_padded, **options)
    losses, norms = train(accelerator, model, optimizer, loader)
    alone, alone_optimizer, expected, expected_norms = train_alone(kind, is_padded=is_padded)
    # Losses of transformers are computed in float32.
    precise = {"rtol": 1e-12, "atol": 1e-12} if kind == "plain" else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(losses, expected, **precise)
    torch.testing.assert_close(norms, expected_norms, **precise)
    state, wanted = accelerator.get_state_dict(model), alone.state_dict()
    if accelerator.is_main_process:
        assert [*state] == [*wanted]
        for name, value in wanted.items():
            torch.testing.assert_close(state[name], value, **precise)
    check_evaluation(accelerator, model, alone)
    check_optimizer(accelerator, model, optimizer, alone_optimizer, precise)
    return accelerator, model, optimizer, alone


def check_evaluation(accelerator, model, alone):
    rows = samples(is_padded=False)[: ROWS - 1]  # no multiple of the micro-batches
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    model.eval()
    alone.eval()
    with torch.no_grad():
        output, expected = model(**batch), alone(**batch)
    torch.testing.assert_close(output["logits"], expected["logits"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output["loss"], expected["loss"], rtol=1e-5, atol=1e-5)
    loader = accelerator.prepare_data_loader(DataLoader(rows, batch_size=4))
    gathered = []
    for part in loader:
        with torch.no_grad():
            gathered.append(accelerator.gather_for_metrics(model(**part)["logits"]))
    torch.testing.assert_close(torch.cat(gathered), expected["logits"], rtol=1e-5, atol=1e-5)
    model.train()
    alone.train()


def check_optimizer(accelerator, model, optimizer, alone, precise):
    full = accelerator._parts.strategy.persister.full_optimizer_state(optimizer.optimizer, [model])
    wanted = alone.state_dict()
    assert full["state"].keys() == wanted["state"].keys()
    for index, values in wanted["state"].items():
        torch.testing.assert_close(full["state"][index]["exp_avg"], values["exp_avg"], **precise)
    assert [group["params"] for group in full["param_groups"]] == [
        group["params"] for group in wanted["param_groups"]
    ]


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("kind", "schedule"),
    [
        ("plain", "1F1B"),
        ("tied", "GPipe"),
        ("llama", "1F1B"),
        ("tied", "Interleaved1F1B"),
        ("plain", "InterleavedZeroBubble"),
        ("tied", "ZBVZeroBubble"),
    ],
)
def test_two_stages_train_as_one_process(tmp_path, kind, schedule):
    check_equal_to_one_process(kind, {"pp_size": 2}, pp_schedule=schedule, pp_num_microbatches=4)


@distributed(world_size=4)
def test_four_stages_train_as_one_process(tmp_path):
    check_equal_to_one_process("plain", {"pp_size": 4}, pp_schedule="1F1B")


@distributed(world_size=2)
def test_a_checkpoint_loads_without_pipelines_and_the_reverse(tmp_path):
    accelerator, model, optimizer, loader = prepared("tied", {"pp_size": 2}, is_padded=True)
    train(accelerator, model, optimizer, loader)
    accelerator.save_state(tmp_path / "pipeline")
    accelerator.save_model(model, tmp_path / "model")
    state = accelerator.get_state_dict(model)
    accelerator.free_memory()
    AcceleratorState._reset_state(True)
    # 1. Load it by DDP, and save.
    plain = Accelerator(cpu=True)
    copy = make("tied")
    copy, copy_optimizer = plain.prepare(copy, optimizer_of(copy))
    plain.load_state(tmp_path / "pipeline")
    loaded = plain.get_state_dict(copy)
    if plain.is_main_process:
        torch.testing.assert_close({name: loaded[name] for name in state}, dict(state))
    moments = {index: values["exp_avg"] for index, values in copy_optimizer.state_dict()["state"].items()}
    plain.save_state(tmp_path / "ddp")
    plain.free_memory()
    AcceleratorState._reset_state(True)
    # 2. Load that by two stages on each rank, cut by name.
    accelerator, model, optimizer, loader = prepared(
        "tied", {"pp_size": 2}, is_padded=True, pp_schedule="interleaved1f1b"
    )
    accelerator.load_state(tmp_path / "ddp")
    again = accelerator.get_state_dict(model)
    full = accelerator._parts.strategy.persister.full_optimizer_state(optimizer.optimizer, [model])
    if accelerator.is_main_process:
        torch.testing.assert_close(dict(again), dict(state))
        assert (tmp_path / "model" / "model.safetensors").is_file()
    torch.testing.assert_close({index: values["exp_avg"] for index, values in full["state"].items()}, moments)
    train(accelerator, model, optimizer, loader)


@distributed(world_size=2)
def test_generation_computes_tokens_without_a_cache(tmp_path):
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2))
    model, alone = make("llama"), make("llama")
    model = accelerator.prepare(model)
    prompts = samples(is_padded=False)[0]["input_ids"][None, :3]
    model.eval()
    wanted = alone.eval().generate(prompts, max_new_tokens=4, do_sample=False)
    assert torch.equal(model.generate(prompts, max_new_tokens=4, do_sample=False), wanted)
    assert len([*model.parameters()]) < len([*alone.parameters()])


class TwoStates(Net):
    def forward(self, input_ids, labels=None):
        embedded = x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x) + embedded
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Reversed(Net):
    def forward(self, input_ids, labels=None):
        x = self.embed(input_ids)
        for layer in reversed(self.layers):
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class NoLoss(Net):
    def forward(self, input_ids, labels=None):
        return super().forward(input_ids)


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("kind", "expected"),
    [(TwoStates, "beside the activation"), (Reversed, "in the order in which"), (NoLoss, "no loss")],
)
def test_what_cannot_be_cut_is_refused_with_the_first_batch(tmp_path, kind, expected):
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2))
    model = accelerator.prepare(kind())
    tokens = torch.zeros(4, LENGTH, dtype=torch.int64)
    with pytest.raises(SettingsError, match=expected):  # on both ranks, though one of them sees it
        model(input_ids=tokens, labels=tokens)


@distributed(world_size=2)
def test_the_strategy_can_be_selected_by_name_and_refuses_fsdp(tmp_path):
    config = ParallelismConfig(pp_size=2)
    accelerator = Accelerator(cpu=True, strategy="pipeline", parallelism_config=config)
    model = accelerator.prepare(make("plain"))
    tokens = torch.zeros(4, LENGTH, dtype=torch.int64)
    loss = model(input_ids=tokens, labels=tokens)["loss"]
    accelerator.backward(loss)
    assert all(parameter.grad is not None for parameter in model.parameters())
    AcceleratorState._reset_state(True)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    with pytest.raises(SettingsError, match="cannot be combined with pp_size=2: leave the plugin out"):
        Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=config)


@distributed(world_size=2)
def test_models_and_options_that_have_no_stages_are_refused_by_name(tmp_path):
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2))
    with pytest.raises(SettingsError, match="1 modules in a row"):
        accelerator.prepare(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(SettingsError, match="cannot be cut into pp_num_microbatches=2"):
        accelerator.prepare(make("plain"))(input_ids=torch.zeros(3, LENGTH, dtype=torch.int64))
    handler = TorchPipelineParallelConfig(pp_split_points="layers.99")
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2, pp_handler=handler))
    with pytest.raises(SettingsError, match=r"no module 'layers\.99'"):
        accelerator.prepare(make("plain"))


@pytest.mark.parametrize(
    "options",
    [{"pp_schedule": "fifo"}, {"pp_num_microbatches": 0}, {"pp_schedule": "1F1B", "pp_stages_per_rank": 2}],
)
def test_options_are_checked(options):
    with pytest.raises(SettingsError, match=next(reversed(options))):
        TorchPipelineParallelConfig(**options)


def test_axes_that_pipelines_do_not_go_with_are_refused():
    with pytest.raises(SettingsError, match="tp_size=2"):
        ParallelismConfig(pp_size=2, tp_size=2)
