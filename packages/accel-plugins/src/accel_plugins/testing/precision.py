"""The checks of a precision policy, in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from accel_ops.modules import extract_model_from_parallel
from accel_plugins.kwargs import AutocastKwargs
from accel_plugins.strategy import Bundle, PrecisionPolicy
from accel_plugins.testing.strategy import ConformanceError, Problem, demand, demand_equal, loss_of, sgd
from accel_state.frozen import frozen
from accel_state.labels import PrecisionType

if TYPE_CHECKING:
    from torch.optim import Optimizer


@frozen
class PrecisionSubject:
    """A precision policy to check.

    Args:
        make: Builds a new policy.
        device: The device on which it computes.
        tolerance: Largest difference of outputs and gradients from float32's; 0.05 suits formats with eight
            significant bits.
    """

    make: Callable[[], PrecisionPolicy]
    device: torch.device
    tolerance: float = 0.05

    def problem(self) -> Problem:
        """The training problem, on one process, in float32."""
        return Problem(dtype=torch.float32, device=self.device, num_shards=1, shard_index=0)


def the_name_is_documented(subject: PrecisionSubject) -> None:
    """The name is one that `mixed_precision` accepts."""
    name = subject.make().name
    demand(name in PrecisionType, f"{name!r} is not one of {PrecisionType.list()}.")


def converted_models_return_float32(subject: PrecisionSubject) -> None:
    """Outputs are float32 and near those computed in float32; names in state dicts are unchanged."""
    _, model, _ = _prepare(subject)
    plain = subject.problem().model().to(subject.device)
    output = model(subject.problem().shard(0)[0])
    demand(output.dtype is torch.float32, f"the output is {output.dtype} where it should be float32.")
    right = plain(subject.problem().shard(0)[0])
    demand_equal({"output": output.cpu()}, {"output": right.cpu()}, subject.tolerance, "the output")
    demand([*model.state_dict()] == [*plain.state_dict()], "convert changed the names in the state dict.")


def conversion_can_be_undone(subject: PrecisionSubject) -> None:
    """Converting twice equals converting once, and unwrapping without the float32 wrapper undoes it."""
    policy, model, optimizer = _prepare(subject)
    policy.convert(Bundle(models=[model], optimizers=[optimizer]))
    plain = extract_model_from_parallel(model, keep_fp32_wrapper=False)
    demand(plain is model, "unwrapping gives another model.")
    demand("forward" not in vars(plain), "unwrapping leaves a changed `forward`.")
    inputs = subject.problem().shard(0)[0]
    right = subject.problem().model().to(subject.device)(inputs)
    demand(torch.equal(plain(inputs), right), "the unwrapped model does not compute as it did before.")


def copies_are_independent(subject: PrecisionSubject) -> None:
    """A deep copy of a converted model uses its own parameters."""
    _, model, _ = _prepare(subject)
    inputs = subject.problem().shard(0)[0]
    before, twin = model(inputs), copy.deepcopy(model)
    for parameter in twin.parameters():
        nn.init.zeros_(parameter)
    demand(not twin(inputs).any(), "a copy whose parameters are 0 does not return 0.")
    demand(torch.equal(model(inputs), before), "changing a copy changed the model.")


def autocast_can_be_switched_off(subject: PrecisionSubject) -> None:
    """`AutocastKwargs(enabled=False)` makes operations run in the dtype of their inputs."""
    ones = torch.ones(2, 2, device=subject.device)
    with subject.make().autocast(AutocastKwargs(enabled=False)):
        demand((ones @ ones).dtype is torch.float32, "autocast is on although it was switched off.")


def unscaled_gradients_are_those_of_the_loss(subject: PrecisionSubject) -> None:
    """Gradients of the scaled loss are those of the loss once unscaled, however often `unscale` runs."""
    policy, model, optimizer = _prepare(subject)
    policy.scale(loss_of(model, subject.problem().shard(0))).backward()
    policy.unscale([optimizer])
    policy.unscale([optimizer])
    plain = subject.problem().model()
    loss_of(plain, subject.problem().batch(0)).backward()
    demand_equal(
        {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None},
        {name: p.grad for name, p in plain.named_parameters() if p.grad is not None},
        subject.tolerance,
        "the unscaled gradients",
    )


def a_step_is_that_of_the_loss(subject: PrecisionSubject) -> None:
    """A step moves the parameters by the gradients of the unscaled loss, and returns True."""
    policy, model, optimizer = _prepare(subject)
    for step in range(2):
        optimizer.zero_grad()
        policy.scale(loss_of(model, subject.problem().shard(step))).backward()
        demand(policy.step(optimizer), "step returned False although all gradients were finite.")
    right = subject.problem().solve(2, sgd).state_dict()
    demand_equal(model.state_dict(), right, subject.tolerance, "two steps")


def a_step_with_infinite_gradients_is_skipped(subject: PrecisionSubject) -> None:
    """A loss scaler skips a step whose gradients are not finite, returns False, and lowers the scale."""
    policy, model, optimizer = _prepare(subject)
    if policy.scaler is None:
        return
    scale = policy.scaler.get_scale()
    before = copy.deepcopy(model.state_dict())
    policy.scale(loss_of(model, subject.problem().shard(0)) * float("inf")).backward()
    demand(not policy.step(optimizer), "step returned True although gradients were not finite.")
    demand_equal(model.state_dict(), {k: v.cpu() for k, v in before.items()}, 0.0, "a skipped step")
    demand(policy.scaler.get_scale() < scale, "the scale did not fall after infinite gradients.")


def the_state_is_restored(subject: PrecisionSubject) -> None:
    """A policy that loads the state of another continues like it."""
    policy, model, optimizer = _prepare(subject)
    policy.scale(loss_of(model, subject.problem().shard(0)) * float("inf")).backward()
    policy.step(optimizer)
    other = subject.make()
    other.load_state_dict(policy.state_dict())
    demand(other.state_dict() == policy.state_dict(), "a loaded state differs from the saved one.")
    demand(
        bool(policy.state_dict()) == (policy.scaler is not None),
        "a state without a scaler, or a scaler without.",
    )


PRECISION_CHECKS: Mapping[str, Callable[[PrecisionSubject], None]] = {
    check.__name__: check
    for check in (
        the_name_is_documented,
        converted_models_return_float32,
        conversion_can_be_undone,
        copies_are_independent,
        autocast_can_be_switched_off,
        unscaled_gradients_are_those_of_the_loss,
        a_step_is_that_of_the_loss,
        a_step_with_infinite_gradients_is_skipped,
        the_state_is_restored,
    )
}
"""Every check by name."""


def check_precision(subject: PrecisionSubject) -> None:
    """Run every check.

    Raises:
        ConformanceError: At least one check failed; the message has all of them.
    """
    failures: list[str] = []
    for name, check in PRECISION_CHECKS.items():
        try:
            check(subject)
        except ConformanceError as error:
            failures.append(f"{name}: {error}")
    if failures:
        raise ConformanceError(f"{subject.make().name!r} does not conform:\n" + "\n".join(failures))


def _prepare(subject: PrecisionSubject) -> tuple[PrecisionPolicy, nn.Module, Optimizer]:
    policy, model = subject.make(), subject.problem().model().to(subject.device)
    bundle = policy.convert(Bundle(models=[model], optimizers=[sgd([*model.parameters()])]))
    return policy, bundle.models[0], bundle.optimizers[0]
