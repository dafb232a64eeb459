"""What programs import from `accelerate.commands.estimate`, with the numbers of Accelerate 1.15."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

from accel_cli.commands.estimate import hub_models
from accel_cli.commands.estimate.hub_models import (
    check_has_model,
    create_ascii_table,
    create_empty_model,
    estimate_training_usage,
    gather_data,
    verify_on_hub,
)
from accel_state.errors import SettingsError


@pytest.fixture
def folder(tmp_path):
    """The configuration of a small BERT."""
    transformers = pytest.importorskip("transformers")
    transformers.BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=100,
        architectures=["BertForMaskedLM"],
    ).save_pretrained(tmp_path)
    return str(tmp_path)


def test_the_sizes_are_those_of_accelerate(folder):
    dtypes = ["float32", "float16", "int8", "int4"]
    args = Namespace(model_name=folder, library_name="transformers", trust_remote_code=False, dtypes=dtypes)
    rows = gather_data(args)
    assert [row[:3] for row in rows] == [
        ["float32", 87040, 159616],
        ["float16", 43520.0, 79808.0],
        ["int8", 21760.0, 39904.0],
        ["int4", 10880.0, 19952.0],
    ]
    assert rows[1][3] == {"model": 159616, "optimizer": 319232, "gradients": 239424, "step": 319232}
    assert set(rows[2][3].values()) == {-1}


def test_a_model_has_no_memory_and_no_head(folder):
    model = create_empty_model(folder, "transformers")
    assert type(model).__name__ == "BertModel"
    assert {(parameter.device.type, parameter.dtype) for parameter in model.parameters()} == {
        ("meta", torch.float32)
    }
    assert sum(parameter.numel() for parameter in model.parameters()) == 37856


def test_timm_knows_its_models_and_what_it_does_not_know():
    timm = pytest.importorskip("timm")
    assert {parameter.device.type for parameter in create_empty_model("resnet18", "timm").parameters()} == {
        "meta"
    }
    with pytest.raises(RuntimeError) as caught:
        timm.create_model("nothing_of_this_name")
    assert check_has_model(caught.value) == "timm"
    assert check_has_model(ValueError("Unknown model")) == "unknown"


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        ("gated", OSError, "gated"),
        ("repo", OSError, "not on the hub"),
        (SimpleNamespace(library_name=None), SettingsError, "pass library_name"),
        (SimpleNamespace(library_name="sklearn"), SettingsError, "'sklearn'"),
    ],
)
def test_the_hub_says_which_library_a_model_is_for(monkeypatch, answer, error, words):
    monkeypatch.setattr(hub_models, "verify_on_hub", lambda *_: answer)
    with pytest.raises(error, match=words):
        create_empty_model("some/model", None)


def test_what_the_hub_refuses_has_a_word(monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    errors = pytest.importorskip("huggingface_hub.errors")
    kinds = {errors.RepositoryNotFoundError: "repo", errors.GatedRepoError: "gated", OSError: "gated"}
    for kind, word in kinds.items():

        def refuse(*_, kind=kind, **__):
            raise kind.__new__(kind)

        monkeypatch.setattr(hub, "model_info", refuse)
        assert verify_on_hub("some/model") == word
    monkeypatch.setattr(hub, "model_info", lambda repo, token: (repo, token))
    assert verify_on_hub("some/model", "secret") == ("some/model", "secret")


def test_a_table_is_that_of_accelerate():
    rows = [["float32", "1.2 GB"], ["int8", "3 MB"]]
    assert create_ascii_table(["dtype", "Largest Layer"], rows, "Mem of x").splitlines() == [
        "┌─────────────────────┐",
        "│       Mem of x      │",
        "├───────┬─────────────┤",
        "│ dtype │Largest Layer│",
        "├───────┼─────────────┤",
        "│float32│    1.2 GB   │",
        "│  int8 │     3 MB    │",
        "└───────┴─────────────┘",
    ]
    wide = create_ascii_table(["dtype", "Largest Layer"], rows, "a title that is longer than the columns")
    assert "│a title that is longer than the columns│" in wide
    assert {len(line) for line in wide.splitlines()} == {41}


def test_estimates_are_those_of_accelerate():
    assert list(estimate_training_usage(1000, "float32").values()) == [1000, 2000, 1000, 4000]
    assert list(estimate_training_usage(1000, "bfloat16").values()) == [1000, 2000, 1500, 2000]
    assert set(estimate_training_usage(1000, "int8").values()) == {-1}
