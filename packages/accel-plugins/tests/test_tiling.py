"""The cross-entropy in chunks and the MLP in tiles, against plain PyTorch in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from accel_plugins import TilingKwargs, chunked_cross_entropy, chunked_log_probs, tiled_mlp, tiling
from accel_state.environ import patch_environment
from accel_state.errors import SettingsError, UnsupportedError

IGNORED = -100


def plain_cross_entropy(hidden, weight, labels, bias, *, scale, cap, **options):
    logits = functional.linear(hidden, weight, bias) * scale
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), **options)


def tensors(rows, classes, width, *, dtype=torch.float64, biased=True):
    torch.manual_seed(0)
    hidden = torch.randn(2, rows, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(classes, width, dtype=dtype, requires_grad=True)
    bias = torch.randn(classes, dtype=dtype, requires_grad=True) if biased else None
    labels = torch.randint(classes, (2, rows))
    labels[0, : rows // 2] = IGNORED
    return hidden, weight, bias, labels


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 9),
    chunk=st.integers(1, 20),
    biased=st.booleans(),
    scale=st.sampled_from([1.0, 0.25]),
    cap=st.sampled_from([None, 1.5]),
    smoothing=st.sampled_from([0.0, 0.1]),
    reduction=st.sampled_from(["mean", "sum"]),
)
def test_the_loss_and_all_gradients_are_those_of_plain_pytorch(
    rows, chunk, biased, scale, cap, smoothing, reduction
):
    hidden, weight, bias, labels = tensors(rows, 7, 5, biased=biased)
    inputs = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    options = {"label_smoothing": smoothing, "reduction": reduction}
    expected = plain_cross_entropy(hidden, weight, labels, bias, scale=scale, cap=cap, **options)
    loss = chunked_cross_entropy(
        hidden, weight, labels, bias=bias, chunk_size=chunk, logit_scale=scale, logit_softcap=cap, **options
    )
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for gradient, right in zip(
        torch.autograd.grad(3 * loss, inputs), torch.autograd.grad(3 * expected, inputs), strict=True
    ):
        torch.testing.assert_close(gradient, right, rtol=1e-11, atol=1e-12)


def test_without_any_label_the_loss_is_that_of_plain_pytorch():
    hidden, weight, bias, labels = tensors(3, 7, 5)
    ignored = torch.full_like(labels, IGNORED)
    loss = chunked_cross_entropy(hidden, weight, ignored, bias=bias)
    summed = chunked_cross_entropy(hidden, weight, ignored, bias=bias, reduction="sum") / 0
    assert torch.isnan(loss)
    for inputs in (torch.autograd.grad(value, (hidden, weight, bias)) for value in (loss, summed)):
        assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in inputs)


def test_only_what_needs_gradients_gets_them():
    hidden, weight, _, labels = tensors(6, 7, 5)
    chunked_cross_entropy(hidden, weight.detach(), labels, chunk_size=4).backward()
    assert hidden.grad is not None
    assert weight.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_the_loss_is_that_of_plain_pytorch(dtype):
    hidden, weight, bias, labels = tensors(40, 30, 16, dtype=torch.float32)
    inputs = (hidden, weight, bias)
    with torch.autocast("cpu", dtype):
        loss = chunked_cross_entropy(hidden, weight, labels, bias=bias, chunk_size=16)
        logits = functional.linear(hidden, weight, bias)
        expected = functional.cross_entropy(logits.float().flatten(0, -2), labels.flatten())
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    for gradient, right in zip(
        torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs), strict=True
    ):
        assert gradient.dtype is torch.float32
        torch.testing.assert_close(gradient, right, rtol=0.02, atol=2e-3)


def test_the_gradient_of_a_bfloat16_weight_is_summed_in_float32():
    torch.manual_seed(0)
    hidden = torch.randn(4096, 8, dtype=torch.bfloat16)
    weight = torch.randn(5, 8, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(5, (4096,))
    exact = weight.detach().double().requires_grad_()
    chunked_cross_entropy(hidden, weight, labels, chunk_size=8).backward()
    functional.cross_entropy(hidden.double() @ exact.T, labels).backward()
    assert weight.grad.dtype is torch.bfloat16
    error = (weight.grad.double() - exact.grad).abs().max() / exact.grad.abs().max()
    assert error < 2**-8


def test_a_label_that_is_no_class_is_an_error():
    hidden, weight, _, labels = tensors(3, 7, 5)
    with pytest.raises(RuntimeError, match="out of bounds"):
        chunked_cross_entropy(hidden, weight, torch.full_like(labels, 7))


def test_shapes_that_do_not_fit_are_named():
    hidden, weight, _, labels = tensors(3, 7, 5)
    for function in (chunked_cross_entropy, chunked_log_probs):
        with pytest.raises(ValueError, match=rf"{function.__name__}: .*labels of \(2, 2\)"):
            function(hidden, weight, labels[:, 1:])


def test_a_second_backward_pass_says_why_there_is_none():
    hidden, weight, _, labels = tensors(3, 7, 5)
    loss = chunked_cross_entropy(hidden, weight, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass"):
        loss.backward()


def plain_log_probs(hidden, weight, labels, bias, *, scale=1.0, cap=None):
    logits = functional.linear(hidden, weight, bias) * scale
    logs = (logits if cap is None else cap * torch.tanh(logits / cap)).log_softmax(-1)
    counts = labels != IGNORED
    index = torch.where(counts, labels, 0)[..., None]
    entropy = -(logs.exp() * torch.where(logs.isneginf(), 0, logs)).sum(-1)
    return torch.where(counts, logs.gather(-1, index)[..., 0], 0), torch.where(counts, entropy, 0)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 9),
    chunk=st.integers(1, 20),
    biased=st.booleans(),
    scale=st.sampled_from([1.0, 0.25]),
    cap=st.sampled_from([None, 1.5]),
    used=st.sampled_from([(1, 0), (0, 1), (1, 1)]),
)
def test_log_probs_entropies_and_their_gradients_are_those_of_plain_pytorch(
    rows, chunk, biased, scale, cap, used
):
    hidden, weight, bias, labels = tensors(rows, 7, 5, biased=biased)
    inputs = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    expected = plain_log_probs(hidden, weight, labels, bias, scale=scale, cap=cap)
    values = chunked_log_probs(
        hidden, weight, labels, bias=bias, chunk_size=chunk, logit_scale=scale, logit_softcap=cap
    )
    factors = torch.randn(labels.shape, dtype=hidden.dtype)  # another gradient for each row
    gradients = []
    for pair in (values, expected):
        parts = [(part * factors.roll(i)).sum() for i, part in enumerate(pair) if used[i]]
        gradients.append(torch.autograd.grad(sum(parts), inputs))
    for value, right in zip((*values, *gradients[0]), (*expected, *gradients[1]), strict=True):
        torch.testing.assert_close(value, right, rtol=1e-11, atol=1e-12)


def test_a_class_that_cannot_occur_has_no_part_in_the_entropy():
    hidden, weight, _, labels = tensors(3, 7, 5)
    labels = labels.clamp(0, 5)
    bias = torch.tensor([0.0] * 6 + [-torch.inf], dtype=torch.float64)
    values = chunked_log_probs(hidden, weight, labels, bias=bias)
    right = plain_log_probs(hidden, weight[:6], labels, bias[:6])
    for value, expected in zip(values, right, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    for gradient, expected in zip(
        torch.autograd.grad(values[0].sum() + values[1].sum(), (hidden, weight)),
        torch.autograd.grad(right[0].sum() + right[1].sum(), (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(gradient, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_log_probs_are_those_of_plain_pytorch(dtype):
    hidden, weight, bias, labels = tensors(40, 30, 16, dtype=torch.float32)
    with torch.autocast("cpu", dtype):
        values = chunked_log_probs(hidden, weight, labels, bias=bias, chunk_size=16)
        expected = plain_log_probs(hidden, weight, labels, bias)
    for value, right in zip(values, expected, strict=True):
        assert value.dtype is torch.float32
        torch.testing.assert_close(value, right.float(), rtol=1e-2, atol=1e-2)


class Largest(TorchDispatchMode):
    """Record the number of elements of the largest tensor that an operator returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("function", [chunked_cross_entropy, chunked_log_probs])
def test_no_tensor_is_larger_than_the_logits_of_a_chunk(function):
    hidden, weight, bias, labels = tensors(200, 50, 4)
    with Largest() as largest:
        values = function(hidden, weight, labels, bias=bias, chunk_size=40)
        sum(value.sum() for value in (values if isinstance(values, tuple) else (values,))).backward()
    assert largest.elements == 40 * 50
    assert hidden.grad is not None


class Mlp(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(4, 12), nn.Linear(12, 4), nn.Dropout(dropout)

    def forward(self, hidden):
        return self.dropout(self.down(functional.gelu(self.up(hidden))))


@pytest.mark.parametrize("tile_size", [1, 3, 7, 9])
def test_an_mlp_in_tiles_is_the_mlp(tile_size):
    torch.manual_seed(0)
    mlp, hidden = Mlp().double(), torch.randn(2, 7, 4, dtype=torch.float64, requires_grad=True)
    inputs = [hidden, *mlp.parameters()]
    output, expected = tiled_mlp(mlp, hidden, tile_size=tile_size), mlp(hidden)
    torch.testing.assert_close(output, expected, rtol=1e-13, atol=1e-13)
    for gradient, right in zip(
        torch.autograd.grad(output.square().sum(), inputs),
        torch.autograd.grad(expected.square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(gradient, right, rtol=1e-12, atol=1e-12)


def test_hooks_of_parameters_run_once_in_a_backward_pass_and_dropout_is_drawn_once():
    torch.manual_seed(0)
    mlp, calls = Mlp(dropout=0.5), []
    for name, parameter in mlp.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))
    hidden = torch.ones(1, 8, 4, requires_grad=True)
    output = tiled_mlp(mlp, hidden, tile_size=2)
    output.sum().backward()
    assert sorted(calls) == sorted(name for name, _ in mlp.named_parameters())
    kept = (output != 0).sum((0, 1)) * 2.0  # what dropout keeps is doubled
    torch.testing.assert_close(mlp.down.bias.grad, kept)


class Blocks(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({"mlp": make()}) for _ in range(2)])

    def forward(self, hidden):
        for block in self.blocks:
            hidden = hidden + block["mlp"](hidden)
        return hidden


def test_the_mlps_of_blocks_are_tiled_in_place_and_copies_have_their_own():
    torch.manual_seed(0)
    model, hidden, lengths = Blocks(Mlp), torch.randn(2, 7, 4), []
    expected = model(hidden)
    tiling.tile_mlps(model, 3)
    copied = copy.deepcopy(model)
    for name, part in (("model", model), ("copy", copied)):
        for block in part.blocks:
            block["mlp"].up.register_forward_pre_hook(
                lambda _, args, name=name: lengths.append((name, args[0].shape[1]))
            )
    torch.testing.assert_close(copied(hidden), expected)
    assert lengths == [("copy", length) for _ in range(2) for length in (3, 3, 1)]
    assert [name for name, _ in model.named_parameters()] == [
        name for name, _ in Blocks(Mlp).named_parameters()
    ]


class Experts(Mlp):
    def __init__(self):
        super().__init__()
        self.experts = nn.Linear(4, 4)


class Residual(Mlp):
    def forward(self, hidden, residual):
        return super().forward(hidden) + residual


@pytest.mark.parametrize(
    ("make", "reason"), [(Experts, r"'blocks.0.mlp'.*experts"), (Residual, "more than hidden states")]
)
def test_an_mlp_that_tiles_would_change_is_refused(make, reason):
    with pytest.raises(UnsupportedError, match=reason):
        tiling.tile_mlps(Blocks(make), 3)


def test_a_model_without_blocks_or_without_a_head_is_refused():
    with pytest.raises(UnsupportedError, match="no blocks with a module 'mlp'"):
        tiling.tile_mlps(Mlp(), 3)
    with pytest.raises(UnsupportedError, match="not a causal language model"):
        tiling.chunk_loss(Mlp(), 3)


def test_sizes_come_from_the_environment_and_an_argument_wins():
    with patch_environment(accelerate_loss_chunk_size="64", accelerate_mlp_tile_size="32"):
        assert TilingKwargs(mlp_tile_size=16) == TilingKwargs(64, 16)
    assert TilingKwargs() == TilingKwargs(None, None)


def test_a_size_is_a_positive_number():
    with pytest.raises(SettingsError, match="loss_chunk_size=0"):
        TilingKwargs(loss_chunk_size=0)
