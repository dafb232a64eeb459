"""Find tensors that outlive their last use, with the cycle collector off: what only it would free stays."""

from __future__ import annotations

import gc
import time
import types
import weakref
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

LINKS = 30  # of a chain of referrers
SHOWN = 6  # survivors whose chains are shown
RELEASE_TIMEOUT = 30.0  # seconds for threads that torch runs to let go of what they have sent


@contextmanager
def collector_off() -> Generator[None]:
    """A block in which nothing is freed by the cycle collector."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def no_survivor(
    walk: str, retained: Callable[[], Iterable[torch.Tensor]] = tuple, *, but: int = 0
) -> Generator[None]:
    """A block after which no tensor made in it is alive, in a `collector_off` block.

    Args:
        walk: What the block does, for the message.
        retained: Returns the tensors that the block may make and leave, as the state of an optimizer.
        but: How many others torch itself keeps.
    """
    assert not gc.isenabled()
    before = {id(tensor): weakref.ref(tensor) for tensor in _tensors()}
    yield
    end = time.monotonic() + RELEASE_TIMEOUT
    while len(made := _made_since(before, retained)) > but:
        # A thread of gloo may hold the last message a moment longer than the call.
        held = sum(gc.get_referrers(tensor) != [made] for tensor in made)
        if held > but or time.monotonic() > end:
            raise AssertionError(_describe(walk, made))
        del made
        time.sleep(0.01)


def _made_since(
    before: dict[int, weakref.ref[torch.Tensor]], retained: Callable[[], Iterable[torch.Tensor]]
) -> list[torch.Tensor]:
    allowed = {*map(id, retained())}
    made: list[torch.Tensor] = []
    for tensor in _tensors():
        known = before.get(id(tensor))
        if (known is None or known() is not tensor) and id(tensor) not in allowed and _has_memory(tensor):
            made.append(tensor)
    return made


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor has bytes of its own; FSDP keeps some whose storage is freed."""
    try:
        return tensor.device.type == "meta" or tensor.untyped_storage().nbytes() > 0
    except (NotImplementedError, RuntimeError):
        return True  # a subclass: its inner tensors count


def _tensors() -> list[torch.Tensor]:
    # `isinstance` would ask lazy objects for their class.
    return [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]


def _describe(walk: str, made: list[torch.Tensor]) -> str:
    gc.unfreeze()  # else what was frozen is no referrer
    kinds = Counter(_what(tensor) for tensor in made)
    lines = [f"{len(made)} tensor(s) made in {walk!r} outlive their last use:"]
    lines += [f"  {count} x {kind}" for kind, count in kinds.most_common()]
    chains: Counter[str] = Counter()
    for index in range(min(SHOWN, len(made))):
        chains["\n  <- ".join(_chain(made[index], made))] += 1
    lines += [f"held ({count} of them): {chain}" for chain, count in chains.items()]
    return "\n".join(lines)


def _chain(tensor: torch.Tensor, ours: list[Any]) -> list[str]:
    """A tensor, who refers to it, who refers to that, and so on, up to a name or back to one of the chain."""
    chain: list[Any] = [tensor]
    while len(chain) < LINKS:
        members = {*map(id, chain)}
        chain.append(_referrer(chain, ours, members))
        if chain[-1] is None or id(chain[-1]) in members or _is_end(chain[-1]):
            break
    return [*map(_what, chain)]


def _referrer(chain: list[Any], ours: list[Any], members: set[int]) -> Any:
    """One that refers to the last member of a chain: a member if there is no other, a frame at last."""
    best, least = None, 4
    for thing in gc.get_referrers(chain[-1]):  # no comprehension: its variables would refer, too
        if thing is chain or thing is ours or _is_of_this_file(thing):
            continue
        rank = 3 if id(thing) in members else 2 if isinstance(thing, types.FrameType) else 1
        if rank < least:
            best, least = thing, rank
    return best


def _is_end(thing: Any) -> bool:
    return isinstance(thing, (types.ModuleType, type)) or _module_of(thing) is not None


def _is_of_this_file(thing: Any) -> bool:
    return isinstance(thing, types.FrameType) and thing.f_code.co_filename == __file__


def _module_of(thing: Any) -> str | None:
    return thing.get("__name__") if type(thing) is dict and "__spec__" in thing else None


def _what(thing: Any) -> str:
    kind = f"{type(thing).__module__}.{type(thing).__qualname__}"
    if issubclass(type(thing), torch.Tensor):
        return f"{type(thing).__name__} {tuple(thing.shape)} {thing.dtype}"
    if isinstance(thing, types.FunctionType):
        return f"function {thing.__qualname__} ({thing.__code__.co_filename}:{thing.__code__.co_firstlineno})"
    if isinstance(thing, types.MethodType):
        return f"method {thing.__func__.__qualname__} of a {type(thing.__self__).__qualname__}"
    if isinstance(thing, types.FrameType):
        return f"frame of {thing.f_code.co_qualname} ({thing.f_code.co_filename}:{thing.f_lineno})"
    if isinstance(thing, types.GeneratorType):
        return f"generator {thing.__qualname__}"
    if thing is None:
        return "nothing that Python sees"
    if isinstance(thing, BaseException):
        return f"{kind}: {str(thing)[:100]}"
    if type(thing) is dict:
        name = _module_of(thing)
        return f"module {name}" if name else f"dict with the keys {[*map(str, thing)][:6]}"
    if type(thing) in (list, tuple):
        return f"{type(thing).__name__} of {len(thing)}"
    return kind
