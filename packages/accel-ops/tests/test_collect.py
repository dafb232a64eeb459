from __future__ import annotations

import dataclasses
from collections import UserDict, defaultdict, namedtuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accel_ops import (
    DistributedOperationException,
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    reduce,
)

Pair = namedtuple("Pair", "left right")

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    numbers = torch.randint(0, 8, shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(torch.float32).to(dtype)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    alike = left.dtype == right.dtype and left.shape == right.shape
    raw = (part.contiguous().view(-1).view(torch.uint8) for part in (left, right))
    return alike and torch.equal(*raw)


def joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """What gather has to give, leaf by leaf."""
    return torch.cat([part if part.ndim else part.view(1) for part in parts])


def test_a_process_alone_gets_what_it_gives() -> None:
    data = {"x": torch.ones(2), "text": "kept"}
    assert gather(data) is data
    assert broadcast(data) is data
    assert gather_object(["a"]) == ["a"]
    assert broadcast_object_list(["a"]) == ["a"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_element_type_and_shape_gathers(world, dtype: torch.dtype) -> None:
    shapes = [(), (3,), (2, 3), (1, 2, 2), (0,), (0, 3), (4, 0), (5,)]

    def data(rank: int) -> list[torch.Tensor]:
        return [values(shape, dtype, seed=rank * 100 + i) for i, shape in enumerate(shapes)]

    for found in world(3).run(lambda rank: gather(data(rank))):
        for i, leaf in enumerate(found):
            assert same(leaf, joined([data(rank)[i] for rank in range(3)]))


def test_leaves_that_are_not_contiguous_or_conjugated_or_part_of_a_graph_gather(world) -> None:
    def data(rank: int) -> list[torch.Tensor]:
        base = torch.arange(12.0).view(3, 4) + rank
        return [
            base.t(),
            base[:, ::2],
            torch.complex(base, -base).conj(),
            torch.ones(1).expand(3),
            torch.nn.Parameter(base),
            (base.clone().requires_grad_() * 2),
        ]

    for found in world(2).run(lambda rank: gather(data(rank))):
        for i, leaf in enumerate(found):
            assert same(leaf, torch.cat([data(0)[i].detach(), data(1)[i].detach()]).resolve_conj())
            assert not leaf.requires_grad


def test_containers_keep_their_types_keys_and_order(world) -> None:
    def body(rank: int):
        x = torch.full((1,), rank)
        return gather(
            {
                "pair": Pair(x, [x, (x,)]),
                "user": UserDict(a=x),
                "default": defaultdict(list, a=x),
                "output": Output(logits=x, hidden=(x, x)),
                "empty": {},
            }
        )

    for found in world(2).run(body):
        assert list(found) == ["pair", "user", "default", "output", "empty"]
        assert type(found["pair"]) is Pair
        assert type(found["pair"].right[1]) is tuple
        assert type(found["user"]) is UserDict
        assert found["default"].default_factory is list
        assert type(found["output"]) is Output
        assert found["output"].hidden[1].tolist() == [0, 1]
        assert found["user"]["a"].tolist() == [0, 1]


def test_dicts_that_were_built_in_another_order_still_match(world) -> None:
    def body(rank: int):
        items = [("a", torch.tensor([rank])), ("b", torch.tensor([10 + rank]))]
        return gather(dict(items if rank else reversed(items)))

    for rank, found in enumerate(world(2).run(body)):
        assert found["a"].tolist() == [0, 1]
        assert found["b"].tolist() == [10, 11]
        assert list(found) == (["a", "b"] if rank else ["b", "a"])


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kinds=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=2).map(tuple)), max_size=6
    ),
    world_size=st.integers(2, 3),
    data=st.data(),
)
def test_any_sizes_of_dimension_0_come_out_in_rank_order(world, kinds, world_size, data) -> None:
    rows = [[data.draw(st.integers(0, 5)) for _ in kinds] for _ in range(world_size)]
    scalar = [data.draw(st.booleans()) for _ in kinds]
    trees = [
        [
            values(() if scalar[i] else (rows[rank][i], *trailing), dtype, seed=31 * rank + i)
            for i, (dtype, trailing) in enumerate(kinds)
        ]
        for rank in range(world_size)
    ]
    for found in world(world_size).run(lambda rank: gather(trees[rank])):
        for i, leaf in enumerate(found):
            assert same(leaf, joined([tree[i] for tree in trees]))


def test_large_leaves_gather_even_and_uneven_among_small_ones(world) -> None:
    def data(rank: int, more: int) -> list[torch.Tensor]:
        return [torch.arange(3.0) + rank, torch.full((300_000 + more * rank,), rank), torch.tensor(rank)]

    for more in (0, 7):
        for found in world(2).run(lambda rank, more=more: gather(data(rank, more))):
            assert all(
                same(leaf, joined([data(0, more)[i], data(1, more)[i]])) for i, leaf in enumerate(found)
            )


def test_results_do_not_share_a_version_counter(world) -> None:
    def body(rank: int):
        first, second = gather([torch.ones(2), torch.ones(2)])
        weight = torch.ones(4, requires_grad=True)
        loss = (weight * first).sum()
        second.zero_()  # would invalidate the graph if both were views of one buffer to autograd
        loss.backward()
        return weight.grad.tolist()

    assert world(2).run(body) == [[1.0] * 4] * 2


def test_gather_inside_and_outside_of_inference_mode_share_their_buffers(world) -> None:
    def body(rank: int):
        found = []
        for inside in (True, False, True):
            with torch.inference_mode(mode=inside):
                found.append(gather({"mode": torch.tensor([rank]), "more": torch.ones(2)})["mode"].tolist())
        return found

    assert world(2).run(body) == [[[0, 1]] * 3] * 2


def test_a_leaf_that_is_no_tensor_is_named(world) -> None:
    for operation in (gather, broadcast, reduce):
        for error in world(2).run(lambda rank, operation=operation: operation({"a": [torch.ones(1), "cat"]})):
            assert isinstance(error, TypeError)
            assert "data['a'][1]" in str(error)
            assert "str" in str(error)
            assert operation.__name__ in str(error)


@pytest.mark.parametrize(
    ("others", "found"),
    [
        ({"x": torch.ones(2, 4)}, "data['x']: float32[*, 4]"),
        ({"x": torch.ones(2, 3).int()}, "data['x']: int32[*, 3]"),
        ({"x": torch.ones(2)}, "data['x']: float32[*]"),
        ({"y": torch.ones(2, 3)}, "data['y']: float32[*, 3]"),
        ({"x": "text"}, "data['x']: str"),
        ({}, "-"),
    ],
)
def test_structures_that_differ_are_an_error_on_every_rank(world, others, found: str) -> None:
    def body(rank: int):
        with pytest.raises(DistributedOperationException) as error:
            gather(others if rank else {"x": torch.ones(2, 3)})
        assert gather(torch.tensor([rank])).tolist() == [0, 1]  # and afterwards all is well
        return str(error.value)

    first, second = world(2).run(body)
    assert first == second
    title, _, one, other = first.splitlines()
    assert "data that differs" in title
    assert one.endswith("data['x']: float32[*, 3]")
    assert other.endswith(found)


def test_object_lists_of_different_lengths_are_joined_in_rank_order(world) -> None:
    found = world(3).run(lambda rank: gather_object([f"item {rank}.{i}" for i in range(rank)]))
    assert found == [["item 1.0", "item 2.0", "item 2.1"]] * 3


def test_gathering_an_object_that_is_no_list_says_what_to_do(world) -> None:
    for error in world(2).run(lambda rank: gather_object({"a": 1})):
        assert isinstance(error, TypeError)
        assert "[object]" in str(error)


@pytest.mark.parametrize("source", [0, 1])
def test_broadcast_overwrites_the_tensors_of_the_others_in_place(world, source: int) -> None:
    def data(rank: int) -> dict[str, object]:
        return {
            "types": [values((2, 3), dtype, seed=rank + i) for i, dtype in enumerate(DTYPES)],
            "scalars": (torch.tensor(rank), torch.tensor(rank + 10)),
            "parameter": torch.nn.Parameter(torch.full((2,), float(rank))),
            "strided": torch.arange(6.0).view(2, 3).t() * rank,
            "large": torch.full((300_000,), float(rank)),
            "large and strided": torch.full((600, 500), float(rank)).t(),
            "empty": torch.empty(0, 2),
        }

    def body(rank: int):
        mine = data(rank)
        result = broadcast(mine, source)
        assert result is mine
        return mine

    wanted = data(source)
    for found in world(2).run(body):
        assert all(same(left, right) for left, right in zip(found["types"], wanted["types"], strict=True))
        assert [leaf.item() for leaf in found["scalars"]] == [source, source + 10]
        for name in ("parameter", "strided", "large", "large and strided", "empty"):
            assert same(found[name].detach(), wanted[name].detach()), name
        assert found["parameter"].requires_grad


@pytest.mark.parametrize("data", [(), torch.ones(0), torch.ones(300_000)], ids=["nothing", "empty", "large"])
def test_one_leaf_or_none_is_a_structure_too(world, data) -> None:
    def body(rank: int):
        return gather(data), broadcast(data, 1), reduce(data, "sum")

    for gathered, sent, summed in world(2).run(body):
        if data == ():
            assert gathered == sent == summed == ()
        else:
            assert same(gathered, torch.cat([data, data]))
            assert same(sent, data)
            assert same(summed, data * 2)


@pytest.mark.parametrize("scale", [1.0, 0.25, 3.0])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_large_leaves_reduce_as_small_ones_do(world, reduction: str, scale: float, world_size: int) -> None:
    def body(rank: int):
        large = torch.linspace(rank, 7, 300_000)
        return (
            reduce(large, reduction, scale),
            reduce(large[:1000], reduction, scale),
            large[0].item() == rank,
        )

    for large, small, kept in world(world_size).run(body):
        torch.testing.assert_close(large[:1000], small, rtol=3e-7, atol=0)
        assert kept


def test_broadcasting_lists_of_objects_fills_them_in_place(world) -> None:
    def body(rank: int):
        mine = [rank, {"name": f"run {rank}"}]
        assert broadcast_object_list(mine, from_process=1) is mine
        return mine

    assert world(2).run(body) == [[1, {"name": "run 1"}]] * 2


@pytest.mark.parametrize(
    "call", [lambda n: broadcast(torch.ones(1), n), lambda n: broadcast_object_list([1], n)]
)
def test_a_source_that_does_not_exist_is_refused(world, call) -> None:
    for number in (2, -1):
        for error in world(2).run(lambda rank, number=number: call(number)):
            assert isinstance(error, ValueError)
            assert f"from_process={number}" in str(error)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world_size", [1, 3])
def test_sums_and_means_equal_those_of_plain_torch(world, dtype: torch.dtype, world_size: int) -> None:
    def data(rank: int) -> list[torch.Tensor]:
        return [values((2, 3), dtype, seed=rank), values((), dtype, seed=rank + 9), values((0, 2), dtype)]

    def body(rank: int):
        mine = data(rank)
        results = reduce(mine, "sum"), reduce(mine, "mean"), reduce(mine, "mean", scale=0.5)
        assert all(same(leaf, kept) for leaf, kept in zip(mine, data(rank), strict=True))
        return results

    wide = torch.complex128 if dtype.is_complex else torch.float64
    floats = dtype.is_floating_point or dtype.is_complex
    for found in world(world_size).run(body):
        for i in range(3):
            total = sum((data(rank)[i].to(wide) for rank in range(world_size)), torch.zeros((), dtype=wide))
            summed, mean, scaled = (result[i] for result in found)
            assert summed.dtype == dtype
            assert mean.dtype == scaled.dtype == (dtype if floats else torch.float32)
            torch.testing.assert_close(summed.to(wide), total.to(dtype).to(wide))
            tolerance = {"rtol": 0.13, "atol": 0.13} if dtype.itemsize == 1 else {"rtol": 1e-2, "atol": 1e-2}
            torch.testing.assert_close(mean.to(wide), total / world_size, **tolerance)
            torch.testing.assert_close(scaled.to(wide), total / world_size / 2, **tolerance)


def test_the_mean_of_integers_is_exact_beyond_their_range(world) -> None:
    for found in world(3).run(lambda rank: reduce(torch.tensor([120 + rank], dtype=torch.int8), "mean")):
        assert found.tolist() == [121.0]


@pytest.mark.parametrize("world_size", [1, 2])
def test_integers_beyond_those_with_a_sign_are_averaged_and_scaled(world, world_size: int) -> None:
    large = torch.tensor([3 << 62], dtype=torch.uint64)
    for found in world(world_size).run(lambda _: (reduce(large, "mean"), reduce(large, "max", scale=0.5))):
        assert [result.tolist() for result in found] == [[3 * 2.0**62], [3 * 2.0**61]]


def test_reduce_has_one_message_per_type_and_takes_large_leaves(world) -> None:
    ranks = world(2)

    def body(rank: int):
        tree = [torch.full((4,), float(rank + i)) for i in range(50)] + [
            torch.full((3,), rank, dtype=torch.int64)
        ]
        tree.insert(7, torch.full((400_000,), float(rank)).view(400, 1000).t())
        return reduce(tree, "mean")

    for found in ranks.run(body):
        assert ranks.messages == ["all_gather_object", *["all_reduce"] * 3]  # the first compares the calls
        assert found.pop(7).unique().tolist() == [0.5]
        assert [leaf.tolist() for leaf in found] == [[i + 0.5] * 4 for i in range(50)] + [[0.5] * 3]


def test_an_unknown_reduction_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'median'.*'sum', 'mean', 'none', 'max', 'min', 'prod'"):
        reduce(torch.ones(1), "median")


def test_calls_that_do_not_fit_together_are_refused(world) -> None:
    def body(rank):
        good = reduce({"a": torch.full((3,), float(rank)), "b": torch.tensor(rank)}, "mean")
        with pytest.raises(
            DistributedOperationException, match=r"0 .*data\['a'\]: float32\[3\]\n1 .*float32\[4\]"
        ):
            reduce({"a": torch.ones(3 + rank), "b": torch.tensor(1)})
        with pytest.raises(
            DistributedOperationException,
            match=r"different operations(.|\n)*\n1 .* broadcast\(from_process=0\) ",
        ):
            (reduce, broadcast)[rank](torch.ones(1))
        large = broadcast([torch.full((2000,), float(rank)), torch.tensor(rank)], 1)
        return good["a"].tolist(), good["b"].item(), large[0].unique().tolist(), large[1].item()

    assert world(2).run(body) == [([0.5] * 3, 0.5, [1.0], 1)] * 2


OF_THREE = {"max": torch.amax, "min": torch.amin, "prod": torch.prod}


@pytest.mark.parametrize("scale", [1.0, 0.5, -2.0])
@pytest.mark.parametrize("reduction", OF_THREE)
def test_maximum_minimum_and_product_over_three_ranks(world, reduction, scale) -> None:
    def data(rank):
        torch.manual_seed(rank)
        return {
            "float": torch.randn(4, 3),
            "half": torch.randn(5).bfloat16(),
            "int": torch.randint(-9, 9, (6,)),
            "short": torch.randint(-9, 9, (2, 2), dtype=torch.int8),
            "bool": torch.rand(8) > 0.5,
            "large": torch.randn(1 << 18) + 1.0,
        }

    everyone = [data(rank) for rank in range(3)]
    for found in world(3).run(lambda rank: reduce(data(rank), reduction, scale)):
        for name, tensor in found.items():
            stacked = torch.stack([one[name] for one in everyone])
            expected = OF_THREE[reduction](stacked.double(), 0) * scale
            integral = not stacked.dtype.is_floating_point
            assert tensor.dtype == (torch.float32 if integral and scale != 1.0 else stacked.dtype), name
            tolerance = {"rtol": 0.02, "atol": 0.02} if name == "half" else {"rtol": 1e-5, "atol": 1e-6}
            torch.testing.assert_close(tensor.double(), expected, **tolerance)


def test_one_process_is_its_own_maximum() -> None:
    assert reduce([torch.tensor([3, 4])], "max", scale=0.5)[0].tolist() == [1.5, 2.0]


def test_complex_numbers_have_no_maximum(world) -> None:
    for error in world(2).run(lambda rank: reduce(torch.ones(2, dtype=torch.complex64), "max")):
        assert isinstance(error, TypeError)
        assert "view_as_real" in str(error)


@pytest.mark.parametrize("operation", [gather, reduce, broadcast])
def test_sparse_and_nested_tensors_are_refused_by_their_path(world, operation) -> None:
    sparse = torch.sparse_coo_tensor([[0]], [1.0], (2,), check_invariants=True)
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    for tensor, remedy in ((sparse, "to_dense"), (nested, "to_padded_tensor")):
        for error in world(2).run(lambda rank, tensor=tensor: operation({"a": [tensor]})):
            assert isinstance(error, TypeError)
            assert "data['a'][0]" in str(error)
            assert remedy in str(error)


def test_none_is_another_name_for_the_sum(world) -> None:
    assert [found.item() for found in world(2).run(lambda rank: reduce(torch.tensor(rank + 1), "none"))] == [
        3,
        3,
    ]


@pytest.mark.parametrize("rows", [(3, 3), (3, 5), (3, 900), (0, 0)])
def test_every_operation_compares_the_calls_and_has_one_message_per_type(world, rows) -> None:
    ranks = world(2)

    def data(rank: int) -> list[torch.Tensor]:
        small = [torch.full((rows[rank], 2), float(rank + i)) for i in range(3)]
        return [*small, torch.tensor([rank], dtype=torch.int16)]

    def body(rank: int):
        found = gather(data(rank)), broadcast(data(0)), reduce(data(0))
        return found[0]

    for found in ranks.run(body):
        assert all(same(leaf, torch.cat([data(0)[i], data(1)[i]])) for i, leaf in enumerate(found))
    gathers, broadcasts, sums = ([name] * 2 for name in ("all_gather_into", "broadcast", "all_reduce"))
    compared = "all_gather_object"
    assert ranks.messages == [compared, *gathers, compared, *broadcasts, compared, *sums]


def test_small_objects_are_sent_with_the_description_of_the_call(world) -> None:
    ranks = world(2)
    assert ranks.run(lambda rank: broadcast_object_list([rank, "a"], 1)) == [[1, "a"]] * 2
    assert ranks.messages == ["all_gather_object"]
    assert ranks.run(lambda rank: broadcast_object_list(["long" * 1000 * rank], 1)) == [["long" * 1000]] * 2
    assert ranks.messages[1:] == ["all_gather_object", "broadcast_object_list"]


@pytest.mark.gpu
def test_leaves_of_several_devices_meet_on_that_of_the_process(world) -> None:
    here = torch.accelerator.current_accelerator()

    def data(rank: int) -> list[torch.Tensor]:
        tree = [values((2, 3), dtype, seed=rank) for dtype in DTYPES] + [torch.full((300_000,), float(rank))]
        return [leaf.to(here) if i % 2 == rank else leaf for i, leaf in enumerate(tree)]

    def body(rank: int):
        mine = data(rank)
        devices = [leaf.device for leaf in mine]
        gathered = gather(mine)
        means = reduce(mine, "mean")
        broadcast(mine, 1)
        assert [leaf.device for leaf in mine] == devices
        return gathered, means, mine

    for gathered, means, sent in world(2, device=torch.device(here.type, 0)).run(body):
        for i, (zero, one) in enumerate(zip(data(0), data(1), strict=True)):
            assert gathered[i].device.type == means[i].device.type == here.type
            assert same(gathered[i].cpu(), torch.cat([zero.cpu(), one.cpu()]))
            assert same(sent[i].cpu(), one.cpu())
