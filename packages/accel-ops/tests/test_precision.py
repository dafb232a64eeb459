from __future__ import annotations

import inspect

import torch

from accel_ops import convert_outputs_to_fp32, convert_to_fp32


def halve(x: torch.Tensor, *, times: int = 1) -> dict[str, object]:
    """Return low precision."""
    return {
        "half": x.half() * times,
        "brain": [x.bfloat16()],
        "ids": x.int(),
        "double": x.double(),
        "text": "t",
    }


def test_only_half_precision_is_converted() -> None:
    found = convert_to_fp32(halve(torch.ones(1)))
    assert found["half"].dtype == found["brain"][0].dtype == torch.float32
    assert (found["ids"].dtype, found["double"].dtype, found["text"]) == (torch.int32, torch.float64, "t")


def test_gradients_flow_through_the_conversion() -> None:
    x = torch.ones(2, requires_grad=True)
    convert_to_fp32(x.bfloat16()).sum().backward()
    assert x.grad.tolist() == [1.0, 1.0]


def test_a_decorated_function_keeps_its_name_documentation_and_signature() -> None:
    wrapped = convert_outputs_to_fp32(halve)
    assert wrapped(torch.ones(1), times=3)["half"].tolist() == [3.0]
    assert (wrapped.__name__, wrapped.__doc__) == (halve.__name__, halve.__doc__)
    assert wrapped.__wrapped__ is halve
    assert list(inspect.signature(wrapped).parameters) == ["x", "times"]
