from __future__ import annotations

import copy
import inspect
import pickle

import torch

from accel_ops import ConvertOutputsToFp32, convert_outputs_to_fp32, convert_to_fp32


def halve(x: torch.Tensor, *, times: int = 1) -> dict[str, object]:
    """Return low precision."""
    return {
        "half": x.half() * times,
        "brain": [x.bfloat16()],
        "ids": x.int(),
        "double": x.double(),
        "text": "t",
    }


class Model(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).bfloat16()


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


def test_a_decorated_function_can_be_pickled() -> None:
    again = pickle.loads(pickle.dumps(convert_outputs_to_fp32(halve)))
    assert isinstance(again, ConvertOutputsToFp32)
    assert again(torch.ones(1))["half"].dtype == torch.float32
    assert again.__wrapped__ is halve


def test_a_model_with_a_decorated_forward_can_be_pickled_and_copied() -> None:
    model = Model(2, 2)
    model.forward = convert_outputs_to_fp32(model.forward)
    x = torch.ones(1, 2)
    assert model(x).dtype == torch.float32
    for again in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(again(x), model(x))
        torch.nn.init.zeros_(again.weight)
        torch.nn.init.zeros_(again.bias)
        assert again(x).tolist() == [[0.0, 0.0]]  # its forward is its own, not the original's
