"""Options of `megatron_generate`: values, and which have an effect."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from accel_plugins.megatron.generate import check_options, choice_of
from accel_state.errors import SettingsError, UnsupportedError


@pytest.mark.parametrize(
    "options",
    [
        {"eos_token_id": "x"},
        {"eos_token_id": [1, "x"]},
        {"eos_token_id": 1.5},
        {"eos_token_id": True},
        {"pad_token_id": "x"},
        {"pad_token_id": [1]},
        {"random_seed": "x", "top_k": 3},
        {"random_seed": 2**63, "top_k": 3},
        {"top_p": 2},
        {"num_beams": 0},
        {"length_penalty": "x"},
    ],
    ids=str,
)
def test_a_value_of_the_wrong_kind_is_refused_with_its_name(options):
    (name, value), *_ = options.items()
    with pytest.raises(SettingsError) as caught:
        check_options(options)
    assert str(caught.value).startswith(f"megatron_generate({name}={value!r}): expected ")


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({"random_seed": 3}, "do_sample=True, temperature, top_k or top_p"),
        ({"random_seed": 0, "num_beams": 2}, "do_sample=True, temperature, top_k or top_p"),
        ({"random_seed": 3, "do_sample": False}, "do_sample=True, temperature, top_k or top_p"),
        ({"temperature": 0.5, "do_sample": False}, "do_sample=True"),
        ({"top_p_decay": 0.5}, "top_p"),
        ({"top_p_decay": 0.5, "top_k": 3}, "top_p"),
        ({"top_p_bound": 0.5, "top_p": 0.9}, "top_p_decay"),
        ({"length_penalty": 2.0}, "num_beams of 2 or more"),
    ],
    ids=str,
)
def test_an_option_without_effect_is_refused_with_what_it_needs(options, needed):
    (name, value), *_ = options.items()
    with pytest.raises(UnsupportedError) as caught:
        check_options(options)
    assert str(caught.value) == (
        f"megatron_generate({name}={value!r}) has no effect without {needed}: add it, or remove this option."
    )


@pytest.mark.parametrize(
    "options",
    [
        {"random_seed": 3, "do_sample": True},
        {"random_seed": -3, "top_k": 0},
        {"top_p": 0.9, "top_p_decay": 0.5, "top_p_bound": 0.1},
        {"top_p_decay": 0.0, "top_p_bound": 0.0, "length_penalty": 1.0},
        {"num_beams": 2, "length_penalty": 0.0},
        {"eos_token_id": [], "pad_token_id": -1},
        {"random_seed": None, "temperature": None},
    ],
    ids=str,
)
def test_options_that_have_one_or_are_at_their_default_are_taken(options):
    assert check_options(options) == {name: value for name, value in options.items() if value is not None}


def test_ends_are_those_of_the_call_then_of_the_model():
    config, model = SimpleNamespace(eos_token_id=[5, 6]), SimpleNamespace(eos_token_id=7, pad_token_id=8)
    assert choice_of({"eos_token_id": 4}, config, model).ends == (4,)
    choice = choice_of({}, config, model)
    assert (choice.ends, choice.pad) == ((5, 6), 8)
    assert choice_of({}, None, model).ends == (7,)
    assert choice_of({"eos_token_id": []}, config, None).ends == ()
