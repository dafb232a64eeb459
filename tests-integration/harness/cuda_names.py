"""Answer the CUDA names that megatron-core uses without asking by the CPU, so that it runs on gloo."""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch.utils._device import _device_constructors

from accel_plugins.megatron.library import core

if TYPE_CHECKING:
    from collections.abc import Generator


def _mapped(value: Any) -> Any:
    is_device = isinstance(value, (str, torch.device))
    return "cpu" if is_device and str(value).startswith("cuda") else value


def _on_cpu(make: Any) -> Any:
    """Return the constructor of a tensor with "cpu" for the device "cuda", in memory that is not pinned."""

    def made(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return make(*args, **{name: _mapped(value) for name, value in kwargs.items()})

    return made


_plain_to = torch.Tensor.to


def _to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return _plain_to(self, *map(_mapped, args), **{name: _mapped(value) for name, value in kwargs.items()})


def _constructors() -> dict[tuple[Any, str], Any]:
    makers = {make.__name__ for make in _device_constructors()}
    makers |= {f"{name}_like" for name in ("empty", "zeros", "ones", "full", "rand", "randn")}
    return {(torch, name): _on_cpu(getattr(torch, name)) for name in makers if hasattr(torch, name)}


class _NoStream:
    def wait_stream(self, other: Any) -> None:
        del other

    def synchronize(self) -> None:
        """Do nothing: the CPU computes at once."""


_plain_type = torch.Tensor.type


def _cuda_type(self: torch.Tensor, dtype: Any = None, **kwargs: Any) -> Any:
    """Return the name of a CUDA tensor's type, which optimizers of megatron-core compare."""
    if dtype is not None:
        return _plain_type(self, dtype, **kwargs)
    name = _plain_type(self)
    return name if "cuda" in name else name.replace("torch.", "torch.cuda.")


def _causal_mask(length: int) -> torch.Tensor:
    """Return the mask of the future; modes are off where a backward pass recomputes."""
    return torch.ones(length, length, dtype=torch.bool).triu(1)


@contextmanager
def cuda_answered_by_cpu() -> Generator[None]:
    """Answer CUDA's names by the CPU within the block."""
    random = core("tensor_parallel.random")
    stream = _NoStream()
    answers: dict[tuple[Any, str], Any] = {
        (torch.cuda, "current_device"): lambda: torch.device("cpu"),
        (torch.cuda, "get_rng_state"): lambda device=None: torch.get_rng_state(),
        (torch.cuda, "set_rng_state"): lambda state, device=None: torch.set_rng_state(state),
        (torch.cuda, "manual_seed"): torch.manual_seed,
        (torch.cuda, "synchronize"): lambda *_: None,
        (torch.cuda, "current_stream"): lambda *_: stream,
        (random, "_set_cuda_rng_state"): lambda state, device=-1, graph_safe=False: torch.set_rng_state(
            state
        ),
        (random, "_get_cuda_rng_state"): lambda device=-1, clone=False, graph_safe=False: (
            torch.get_rng_state()
        ),
        (core("fusions.fused_softmax"), "get_default_causal_mask"): _causal_mask,
        (torch.Tensor, "type"): _cuda_type,
        (torch.Tensor, "to"): _to,
        (torch.Tensor, "cuda"): lambda self, *_, **__: self,
        **_constructors(),
    }
    with ExitStack() as stack, patch.dict(os.environ):  # megatron-core sets variables
        for (owner, name), answer in answers.items():
            stack.enter_context(patch.object(owner, name, answer))
        yield
