"""Plain and flat configurations, and values that are logged."""

from __future__ import annotations

import argparse
import copy
import enum
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_state.errors import UnsupportedError
from accel_trackers.values import join_keys, split, to_finite, to_flat, to_images, to_number, to_plain


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Optimizer:
    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)
    extra: dict[str, object] = field(default_factory=lambda: {"path": Path("a/b")})


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=50)
@given(st.dictionaries(st.text(max_size=3), PLAIN, max_size=3))
def test_plain_data_is_copied_and_stays_equal(config):
    before = copy.deepcopy(config)
    assert to_plain(config) == config == before


@settings(max_examples=50)
@given(st.dictionaries(st.text(max_size=3), PLAIN, max_size=3))
def test_a_flat_configuration_has_one_level(config):
    for value in to_flat(config).values():
        assert value is None or isinstance(value, bool | int | float | str)


def test_everything_becomes_plain_in_the_documented_way():
    config = {
        "optimizer": Optimizer(),
        "colour": Colour.RED,
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "one": torch.tensor(2.5),
        "few": np.arange(3),
        "many": torch.zeros(5, 10),
        "set": {3, 1},
        "args": argparse.Namespace(seed=7, kind=int),
        1: None,
    }
    assert to_plain(config) == {
        "optimizer": {"lr": 0.1, "betas": [0.9, 0.99], "extra": {"path": "a/b"}},
        "colour": "red",
        "dtype": "torch.bfloat16",
        "device": "cpu",
        "one": 2.5,
        "few": [0, 1, 2],
        "many": "Tensor(shape=(5, 10), dtype=torch.float32)",
        "set": [1, 3],
        "args": {"seed": 7, "kind": "builtins.int"},
        "1": None,
    }
    assert to_flat(config)["optimizer.extra.path"] == "a/b"
    assert to_flat(config)["optimizer.betas"] == "[0.9, 0.99]"


def test_subclasses_of_built_in_types_become_these():
    plain = to_plain({"a": np.float64(1.5), "b": torch.Size([2])})
    assert plain == {"a": 1.5, "b": [2]}
    assert type(plain["a"]) is float


def test_keys_of_inner_dictionaries_are_joined():
    assert join_keys({"a": {"b": {"c": 1}}, "d": 2}) == {"a.b.c": 1, "d": 2}


@pytest.mark.parametrize(
    "value", [torch.tensor(0.5), torch.tensor([0.5], requires_grad=True), np.float32(0.5), np.array([[0.5]])]
)
def test_one_element_becomes_a_number(value):
    assert to_number(value) == 0.5
    assert type(to_number(value)) is float


@pytest.mark.parametrize(
    "value", [torch.zeros(3), np.zeros(0), torch.zeros((), device="meta"), "a", None, [1]], ids=repr
)
def test_what_is_no_single_number_stays(value):
    assert to_number(value) is value


def test_values_become_numbers_texts_and_vectors():
    vector = torch.zeros(3)
    numbers, texts, vectors = split(
        "mlflow", {"a": {"b": torch.ones(1), "c": vector}, "d": True, "e": "text"}
    )
    assert (numbers, texts) == ({"a.b": 1.0, "d": True}, {"e": "text"})
    assert vectors["a.c"] is vector


@pytest.mark.parametrize(
    ("value", "what"),
    [(None, "None"), (object(), "a builtins.object"), ([1, 2], "a builtins.list"), (1j, "a")],
)
def test_what_is_neither_number_nor_text_is_skipped_with_a_warning(value, what, caplog):
    name = f"name of {what}"
    for _ in range(3):
        assert split("mlflow", {"x": {name: value}, "y": 1}) == ({"y": 1}, {}, {})
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"The tracker 'mlflow' cannot log 'x.{name}', which is {what}")


@pytest.mark.parametrize(
    ("vector", "finite"),
    [
        (torch.tensor([[1.0, 2.0], [float("nan"), float("-inf")]], requires_grad=True), [1.0, 2.0]),
        (torch.tensor([True, False]), [1.0, 0.0]),
        (torch.ones(2, dtype=torch.bfloat16), [1.0, 1.0]),
        (np.array([[3, 4]], dtype=np.int8), [3.0, 4.0]),
        (torch.ones(2, device="meta"), []),
        (torch.ones(2, dtype=torch.complex64), []),
        (np.array(["a", "b"]), []),
    ],
)
def test_a_histogram_has_the_finite_elements(vector, finite):
    assert to_finite(vector).tolist() == finite


@pytest.mark.parametrize(
    ("shape", "dataformats", "result"),
    [
        ((5, 7), None, [(5, 7, 1)]),
        ((5, 7, 3), None, [(5, 7, 3)]),
        ((4, 5, 7), None, [(5, 7, 4)]),
        ((2, 5, 7, 1), None, [(5, 7, 1)] * 2),
        ((2, 3, 5, 7), None, [(5, 7, 3)] * 2),
        ((3, 5, 3), "CHW", [(5, 3, 3)]),
    ],
)
def test_images_of_every_layout_have_one(shape, dataformats, result):
    images = to_images("x", torch.rand(shape), dataformats)
    assert [image.shape for image in images] == result
    assert all(image.dtype == np.uint8 for image in images)


def test_pixels_keep_their_place_and_value():
    image = torch.zeros(3, 2, 2)
    image[1, 0, 1] = 1.0
    (array,) = to_images("x", image)
    assert array[0, 1].tolist() == [0, 255, 0]
    assert array.sum() == 255
    (mask,) = to_images("x", image[1] > 0)
    assert mask[..., 0].tolist() == [[0, 255], [0, 0]]


def test_images_of_pil_have_their_colours_whatever_their_mode():
    pil = pytest.importorskip("PIL.Image")
    red = pil.new("RGB", (2, 2), (255, 0, 0))
    (array,) = to_images("x", red.quantize(4))  # indices of a palette
    assert array.tolist() == [[[255, 0, 0]] * 2] * 2
    (array,) = to_images("x", pil.new("1", (2, 2), 1))
    assert array.tolist() == [[[255]] * 2] * 2
    (array,) = to_images("x", pil.new("LA", (2, 2), (7, 9)))
    assert array.tolist() == [[[7, 7, 7, 9]] * 2] * 2
    (array,) = to_images("x", pil.new("CMYK", (2, 2), (0, 255, 255, 0)))
    assert array.tolist() == [[[255, 0, 0]] * 2] * 2
    (array,) = to_images("x", [pil.new("L", (2, 2), 3)])
    assert array.tolist() == [[[3]] * 2] * 2


@pytest.mark.parametrize(("shape", "dataformats"), [((5, 7, 9), None), ((5,), None), ((5, 7), "CHW")])
def test_what_is_no_image_is_named(shape, dataformats):
    with pytest.raises(UnsupportedError, match="'x' of shape"):
        to_images("x", np.zeros(shape), dataformats)
