from __future__ import annotations

import dataclasses
import enum
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

import accel_ops
from accel_ops import (
    TensorInformation,
    concatenate,
    convert_to_fp32,
    find_batch_size,
    find_device,
    get_data_structure,
    honor_type,
    ignorant_find_batch_size,
    initialize_tensors,
    is_namedtuple,
    is_tensor_information,
    is_torch_tensor,
    listify,
    recursively_apply,
    send_to_device,
    slice_tensors,
)
from accel_ops.tree import walk

Point = namedtuple("Point", "x y")


class Encoding(UserDict):
    """A mapping with a constructor of its own, as tokenizers return."""

    def __init__(self, data: dict | None = None, encoding: str | None = None) -> None:
        super().__init__(data)
        self.encoding = encoding


@dataclasses.dataclass
class Output:
    logits: object
    note: object = "kept"

    def __post_init__(self) -> None:
        self.made = True


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    value: object
    label: object = dataclasses.field(init=False, default="fixed")


class Level(enum.Enum):
    LOW = 1


def test_every_exported_name_resolves() -> None:
    for name in accel_ops.__all__:
        assert getattr(accel_ops, name) is not None
    assert dir(accel_ops) == sorted(accel_ops.__all__)


class Strict(dict[str, Any]):
    def __init__(self, *, size: int, **items: Any) -> None:
        super().__init__(**items)
        self.size = size


class ItemsAsAttributes(dict[str, Any]):
    __getattr__ = dict.__getitem__


class ItemsAreAttributes(dict[str, Any]):
    def __init__(self, *args: Any, **items: Any) -> None:
        super().__init__(*args, **items)
        self.__dict__ = self


@pytest.mark.parametrize(
    "make",
    [
        lambda x: Strict(size=3, x=x),
        lambda x: ItemsAsAttributes(x=x),
        lambda x: ItemsAreAttributes(x=x),
    ],
    ids=lambda make: type(make(0)).__name__,
)
@pytest.mark.parametrize("move", [convert_to_fp32, lambda data: send_to_device(data, "meta")])
def test_containers_whose_constructor_takes_no_items_keep_their_content(make, move) -> None:
    given = make(torch.ones(1, dtype=torch.bfloat16))
    found = move(given)
    assert type(found) is type(given)
    assert len(found) == len(given)
    for (path, left), (other, right) in zip(walk(found), walk(given), strict=True):
        assert path == other
        if isinstance(right, torch.Tensor):
            assert right.dtype is torch.bfloat16
            assert not right.is_meta
            assert left.is_meta or left.dtype is torch.float32
        else:
            assert left == right
    if isinstance(found, Strict):
        assert found.size == 3
    if isinstance(found, ItemsAreAttributes):
        assert found.x is found["x"]


@pytest.mark.parametrize(
    "make",
    [
        lambda x: [x, x],
        lambda x: (x, [x]),
        lambda x: Point(x, (x,)),
        lambda x: {"a": x, "b": {"c": x}},
        lambda x: OrderedDict(b=x, a=x),
        lambda x: UserDict(a=x),
        lambda x: Encoding({"ids": x}),
        lambda x: MappingProxyType({"a": x}),
        lambda x: defaultdict(list, {1: x}),
        lambda x: Output(x, note=[x]),
        lambda x: Frozen([x]),
    ],
    ids=lambda make: type(make(0)).__name__,
)
def test_containers_keep_their_types_and_keys(make) -> None:
    found = recursively_apply(lambda t: t + 1, make(torch.ones(1)))
    wanted = make(torch.full((1,), 2.0))
    assert type(found) is type(wanted)
    for (path, left), (other, right) in zip(walk(found), walk(wanted), strict=True):
        assert path == other
        assert torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right


def test_a_packed_sequence_keeps_its_lengths_on_the_cpu() -> None:
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    found = send_to_device(packed, "meta")
    assert found.data.is_meta
    assert found.batch_sizes.tolist() == packed.batch_sizes.tolist()


def test_a_rebuilt_dataclass_keeps_what_is_no_field_and_a_default_dict_its_factory() -> None:
    output = recursively_apply(lambda t: t, Output(torch.ones(1)))
    assert output.made
    assert recursively_apply(lambda t: t, Frozen(torch.ones(1))).label == "fixed"
    assert recursively_apply(lambda t: t, defaultdict(list, a=1))["new"] == []


def test_the_original_is_not_changed() -> None:
    data = {"a": [torch.zeros(1)], "b": Output(torch.zeros(1))}
    recursively_apply(lambda t: t + 1, data)
    assert data["a"][0].item() == data["b"].logits.item() == 0


def test_arguments_reach_the_function_and_other_leaves_stay() -> None:
    found = recursively_apply(lambda t, a, b=0: t + a + b, [torch.ones(1), "text", None, 7], 2, b=3)
    assert found[0].item() == 6
    assert found[1:] == ["text", None, 7]


def test_another_test_chooses_the_leaves() -> None:
    assert recursively_apply(str.upper, {"a": "x", "b": 1}, test_type=lambda leaf: isinstance(leaf, str)) == {
        "a": "X",
        "b": 1,
    }


def test_a_leaf_of_another_type_is_named_with_its_path() -> None:
    data = {"a": [torch.ones(1), Output(torch.ones(1), note=3)]}

    def increment(t):
        return t + 1

    with pytest.raises(TypeError, match=r"<class 'int'> at data\['a'\]\[1\]\.note passed to `increment`"):
        recursively_apply(increment, data, error_on_other_type=True)


def test_paths_are_the_same_in_every_process() -> None:
    data = {"s": 0, 1: 0, None: 0, ("t", 2): 0, Level.LOW: 0, "p": Point(0, [0])}
    assert [path for path, _ in walk(data)] == [
        "['s']",
        "[1]",
        "[None]",
        "[('t', 2)]",
        "[<Level 4>]",
        "['p'].x",
        "['p'].y[0]",
    ]


def test_honor_type_makes_named_tuples_from_fields() -> None:
    assert honor_type(Point(0, 0), (n for n in (1, 2))) == Point(1, 2)
    assert honor_type([0], (n for n in (1, 2))) == [1, 2]


def test_what_is_a_named_tuple_a_tensor_a_description() -> None:
    assert is_namedtuple(Point(1, 2))
    assert not is_namedtuple((1, 2))
    assert not is_namedtuple(Point)
    assert is_torch_tensor(torch.nn.Parameter(torch.ones(1)))
    assert not is_torch_tensor([1])
    assert is_tensor_information(TensorInformation(torch.Size([1]), torch.float32))
    assert not is_tensor_information(torch.ones(1))


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (torch.ones(3, 2), 3),
        ({"a": "text", "b": [torch.tensor(1.0), torch.ones(4)]}, 4),
        (Point([], torch.ones(0, 2)), 0),
        (Output(torch.ones(5)), 5),
    ],
)
def test_the_batch_size_is_that_of_the_first_tensor_with_a_dimension(data, size: int) -> None:
    assert find_batch_size(data) == ignorant_find_batch_size(data) == size


def test_a_single_structure_keeps_what_is_no_tensor() -> None:
    found = concatenate([{"x": torch.ones(2), "name": "a", "rows": [1, None]}])
    assert (found["x"].tolist(), found["name"], found["rows"]) == ([1.0, 1.0], "a", [1, None])
    assert concatenate([3]) == 3


@pytest.mark.parametrize(
    ("data", "error"),
    [([], ValueError), ({}, ValueError), ("a", TypeError), (None, TypeError), (torch.tensor(1), TypeError)],
)
def test_without_a_batch_size_there_is_an_error_or_none(data, error: type[Exception]) -> None:
    with pytest.raises(error, match="find the batch size"):
        find_batch_size(data)
    assert ignorant_find_batch_size(data) is None


def test_the_device_is_that_of_the_first_tensor() -> None:
    assert find_device(["a", {"b": torch.ones(1, device="meta")}, torch.ones(1)]) == torch.device("meta")
    assert find_device({"a": 1}) is None


def test_a_structure_describes_and_recreates_tensors() -> None:
    data = {"a": torch.ones(2, 3, dtype=torch.int32), "b": [torch.tensor(1.0)], "c": "text"}
    structure = get_data_structure(data)
    assert structure["a"] == TensorInformation(shape=torch.Size([2, 3]), dtype=torch.int32)
    again = initialize_tensors(structure)
    assert get_data_structure(again) == structure
    assert again["c"] == "text"


def test_listify_gives_numbers_for_any_type_and_graph() -> None:
    data = [
        torch.ones(2, dtype=torch.bfloat16),
        torch.tensor(1.5, requires_grad=True),
        torch.tensor([True]),
        "x",
    ]
    assert listify(data) == [[1.0, 1.0], 1.5, [True], "x"]


def test_slicing_leaves_scalars_whole_and_serves_as_a_slice_function() -> None:
    data = {"x": torch.arange(6).view(3, 2), "loss": torch.tensor(1.0)}
    found = slice_tensors(data, slice(1, 3), process_index=0, num_processes=2)
    assert found["x"].tolist() == [[2, 3], [4, 5]]
    assert found["loss"] is data["loss"]


def test_concatenating_goes_leaf_by_leaf() -> None:
    parts = [{"a": torch.ones(1, 2) * i, "b": Point(torch.tensor(i), [torch.ones(1)])} for i in range(3)]
    found = concatenate(parts)
    assert found["a"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert found["b"].x.tolist() == [0, 1, 2]
    assert concatenate([torch.ones(1, 2)] * 2, dim=1).shape == (1, 4)
    assert torch.equal(concatenate([Output(torch.ones(1), note=torch.ones(1))] * 2).logits, torch.ones(2))


@pytest.mark.parametrize(
    ("data", "error"), [([], ValueError), (["a", "b"], TypeError), ([{"a": None}] * 2, TypeError)]
)
def test_what_cannot_be_concatenated_is_an_error(data, error: type[Exception]) -> None:
    with pytest.raises(error, match="oncatenate"):
        concatenate(data)
