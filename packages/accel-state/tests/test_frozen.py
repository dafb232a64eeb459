"""`frozen` behaves as the dataclasses of the standard library do, with the same options."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace
from typing import Any

import pytest

from accel_state.frozen import frozen


@frozen
class Point:
    """A record with each kind of field."""

    x: int
    y: list[int] = field(default_factory=list[int])
    label: str = field(default="a", repr=False)
    cost: float = field(default=0.0, compare=False)
    total: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", self.x + sum(self.y))


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The same, by the standard library."""

    x: int
    y: list[int] = field(default_factory=list[int])
    label: str = field(default="a", repr=False)
    cost: float = field(default=0.0, compare=False)
    total: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", self.x + sum(self.y))


@frozen
class Wide(Point):
    """A record that has the fields of another and its own."""

    z: int = 3


@frozen
class Key:
    """A record that can be a key."""

    name: str
    sizes: tuple[int, ...] = ()


@frozen
class Empty:
    """A record without fields."""


KINDS: tuple[Any, ...] = (Point, Model)


def test_a_record_shows_its_values_as_a_dataclass_does() -> None:
    shown = [repr(kind(x=1, y=[2])).replace(kind.__name__, "") for kind in KINDS]
    assert shown == ["(x=1, y=[2], cost=0.0, total=3)"] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_records_are_equal_by_the_values_that_are_compared(kind: Any) -> None:
    assert kind(x=1, cost=2.0) == kind(x=1)
    assert kind(x=1) != kind(x=2)
    assert kind(x=1) != 1


def test_records_of_two_classes_differ_although_their_values_are_equal() -> None:
    assert Point(x=1) != Wide(x=1)
    assert Empty() == Empty()


def test_equal_records_are_one_key() -> None:
    assert len({Key(name="a", sizes=(1,)), Key(name="a", sizes=(1,)), Key(name="a")}) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_field_cannot_be_set_nor_deleted(kind: Any) -> None:
    point = kind(x=1)
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'x'"):
        point.x = 2
    with pytest.raises(FrozenInstanceError, match="cannot delete field 'x'"):
        del point.x
    assert not hasattr(point, "__dict__")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arguments", [{}, {"x": 1, "total": 2}, {"x": 1, "other": 2}])
def test_an_argument_that_is_absent_or_unknown_is_refused(kind: Any, arguments: dict[str, int]) -> None:
    with pytest.raises(TypeError, match=rf"{kind.__name__}.__init__\(\)"):
        kind(**arguments)


def test_the_signature_is_that_of_a_dataclass() -> None:
    assert str(inspect.signature(Point)) == str(inspect.signature(Model))


def test_a_default_factory_makes_a_value_for_each_record() -> None:
    first, second = Point(x=1), Point(x=1)
    first.y.append(5)
    assert second.y == []


def test_replace_and_fields_know_a_record() -> None:
    assert replace(Wide(x=1), x=2, z=4) == Wide(x=2, z=4)
    assert [item.name for item in fields(Wide)] == ["x", "y", "label", "cost", "total", "z"]


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda point: pickle.loads(pickle.dumps(point))])
def test_a_copy_equals_its_record(again: Any) -> None:
    assert again(Wide(x=1, y=[2], z=7)) == Wide(x=1, y=[2], z=7)


def test_methods_of_the_class_stay() -> None:
    @frozen
    class Loud:
        word: str

        def __repr__(self) -> str:
            return self.word.upper()

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Loud) and other.word.lower() == self.word.lower()

        def __hash__(self) -> int:
            return hash(self.word.lower())

    assert repr(Loud(word="a")) == "A"
    assert Loud(word="a") == Loud(word="A")
    assert len({Loud(word="a"), Loud(word="A")}) == 1


def test_classes_derive_from_each_other_and_from_frozen_dataclasses():
    @frozen
    class Base:
        a: int

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Derived(Base):
        b: int = 2

    @frozen
    class Below(Derived):
        c: int = 3

    assert Derived(a=1) == Derived(a=1, b=2) != Derived(a=2)
    assert repr(Below(a=1)).endswith("Below(a=1, b=2, c=3)")
    for record in (Base(a=1), Derived(a=1), Below(a=1)):
        with pytest.raises(FrozenInstanceError):
            record.a = 2
