"""The checks of a strategy, in one process or on every rank, against plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from accel_ops.tree import full_tensor
from accel_plugins.kwargs import StepGuard
from accel_plugins.sharding.state import StateForm
from accel_plugins.step_guard import guard_steps
from accel_plugins.strategy import Bundle, Feature, Strategy
from accel_state.errors import AccelError
from accel_state.frozen import frozen

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_state.runtime import Runtime

FEATURES, HIDDEN, TARGETS, ROWS = 6, 5, 3, 12  # ROWS: samples per shard, divisible by 2, 3 and 4
STEPS = 4


class ConformanceError(AccelError, AssertionError):
    """An implementation violates the contract of its interface."""


def demand(condition: object, message: str) -> None:
    """Raise `ConformanceError` with a message unless a condition holds."""
    if not condition:
        raise ConformanceError(message)


@frozen
class StrategySubject:
    """A strategy to check.

    Args:
        make: Builds a new strategy, with the precision policy `"no"`.
        runtime: The runtime for which the strategy is built.
        directory: An empty directory that all ranks share.
        tolerance: Largest difference from the result of one process.
        dtype: Dtype of the parameters; engines without float64 need float32 and a tolerance for it.
        norm_types: The norms by which gradients can be clipped.
    """

    make: Callable[[], Strategy]
    runtime: Runtime
    directory: Path
    tolerance: float = 1e-10
    dtype: torch.dtype = torch.float64
    norm_types: tuple[float, ...] = (2.0, 1.0, float("inf"))

    def model(self, seed: int = 0) -> nn.Module:
        """Return a new network on the CPU, the same for the same seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Network().to(self.dtype)

    def demand_equal(self, results: Mapping[str, Any], wanted: Mapping[str, Tensor], what: str) -> None:
        """Demand that named tensors have the same names, shapes and, within the tolerance, values."""
        found = {name: full(value) for name, value in results.items()}
        try:
            torch.testing.assert_close(found, {**wanted}, rtol=0, atol=self.tolerance, check_dtype=False)
        except AssertionError as error:
            raise ConformanceError(f"{what}: {error}") from None


class Network(nn.Sequential):
    """Two layers; called with targets, it returns its loss, as engines that own the forward pass need it."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, TARGETS))

    def forward(self, input: Tensor, targets: Tensor | None = None) -> Tensor:  # noqa: A002 - as Sequential
        """Return outputs, or the mean squared error."""
        outputs = super().forward(input)
        return outputs if targets is None else nn.functional.mse_loss(outputs, targets)


def sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer without state, whose steps show the gradients."""
    return torch.optim.SGD(parameters, lr=0.5)


def adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer with state."""
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)


def full(tensor: Any) -> Tensor:
    """Return the full tensor on the CPU, gathered if it is a `DTensor`."""
    return full_tensor(tensor).cpu()


def gradients(model: nn.Module) -> dict[str, Any]:
    """Return the full gradients by parameter name; `None` for parameters without one."""
    return {name: None if p.grad is None else full(p.grad) for name, p in model.named_parameters()}


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A model prepared by a strategy, with its optimizer; its regression problem has sharded samples."""

    subject: StrategySubject
    strategy: Strategy
    model: nn.Module
    optimizer: Optimizer

    def batch(self, step: int) -> list[Tensor]:
        """Return inputs and targets of all shards for one step, on the CPU."""
        generator = torch.Generator().manual_seed(1000 + step)
        rows, dtype = ROWS * self.strategy.sharding.num_shards, self.subject.dtype
        return [
            torch.randn(rows, columns, generator=generator, dtype=dtype) for columns in (FEATURES, TARGETS)
        ]

    def rows(self, step: int, index: int, count: int = ROWS) -> list[Tensor]:
        """Return the first rows of a shard of a step's batch, on the CPU."""
        return [tensor[ROWS * index : ROWS * index + count] for tensor in self.batch(step)]

    def shard(self, step: int, count: int = ROWS) -> list[Tensor]:
        """Return the first rows of this rank's shard of a step's batch, on the device."""
        rows = self.rows(step, self.strategy.sharding.shard_index, count)
        return [tensor.to(self.subject.runtime.device) for tensor in rows]

    def backward(
        self, batch: Sequence[Tensor], *, accumulation: int = 1, sync: bool = True, items: int = 1
    ) -> None:
        """Run a micro-batch, without `sync` inside `no_sync`; its loss, a mean, is multiplied by `items`."""
        if self.strategy.owns_forward:
            self.strategy.train_step(
                self.model, self.model.forward, (*batch,), {}, accumulation=accumulation, sync=sync
            )
            return
        may_hold = Feature.NO_SYNC in self.strategy.features
        with nullcontext() if sync or not may_hold else self.strategy.no_sync(self.model):
            loss = self.model(*batch) * items
            self.strategy.backward(loss, accumulation=accumulation, sync=sync)

    def step(self) -> None:
        """Step and clear the gradients."""
        demand(self.strategy.step(self.optimizer), "step returned False, although all gradients were finite.")
        self.optimizer.zero_grad()

    def solve(
        self,
        steps: int,
        make: Callable[[Sequence[nn.Parameter]], Optimizer] = sgd,
        before_step: Callable[[nn.Module], Any] = lambda _: None,
    ) -> nn.Module:
        """Train the network of seed 0 on full batches with plain PyTorch."""
        model = self.subject.model()
        optimizer = make([*model.parameters()])
        for step in range(steps):
            optimizer.zero_grad()
            model(*self.batch(step)).backward()
            before_step(model)
            optimizer.step()
        return model

    def state(self) -> dict[str, Tensor]:
        """The full state dict on the CPU."""
        return {name: full(value) for name, value in self.strategy.states.full_state_dict(self.model).items()}

    def demand_state(self, right: nn.Module, what: str) -> None:
        """Demand that the parameters are those of a model of plain PyTorch."""
        self.subject.demand_equal(self.state(), right.state_dict(), what)

    def demand_local_gradients(self, what: str) -> None:
        """Demand the gradients of this rank's first shard; some strategies keep them in buffers."""
        local, alone = gradients(self.strategy.unwrap(self.model)), self.subject.model()
        if all(gradient is not None for gradient in local.values()):
            alone(*self.rows(0, self.strategy.sharding.shard_index)).backward()
            self.subject.demand_equal(local, gradients(alone), what)


def start(
    subject: StrategySubject,
    make: Callable[[Sequence[nn.Parameter]], Optimizer] = sgd,
    seed: int = 0,
) -> PreparedRun:
    """Check and wrap a new model with its optimizer by a new strategy."""
    strategy, model = subject.make(), subject.model(seed)
    bundle = Bundle(models=[model], optimizers=[make([*model.parameters()])])
    strategy.check(bundle)
    bundle = strategy.wrap(bundle)
    return PreparedRun(subject, strategy, bundle.models[0], bundle.optimizers[0])


STRATEGY_CHECKS: dict[str, Callable[[StrategySubject], None]] = {}
"""Every check by name."""

NEEDS: dict[str, Feature] = {}
"""The feature of each check; it is skipped for strategies that do not declare it."""


_Check: TypeAlias = "Callable[[StrategySubject], None]"


def _check(needs: Feature | None = None) -> Callable[[_Check], _Check]:
    """Add a check to the suite, with the feature that it needs, if any."""

    def add(check: _Check) -> _Check:
        STRATEGY_CHECKS[check.__name__] = check
        if needs is not None:
            NEEDS[check.__name__] = needs
        return check

    return add


@_check()
def sharding_covers_every_shard(subject: StrategySubject) -> None:
    """Every rank has the same number of shards, and together they cover all of them."""
    own = subject.make().sharding
    shards = subject.runtime.collectives.all_gather_object((own.num_shards, own.shard_index))
    wanted = {(own.num_shards, index) for index in range(own.num_shards)}
    demand(
        {*shards} == wanted, f"the ranks have (num_shards, shard_index) of {shards}, not {sorted(wanted)}."
    )


@_check()
def unwrapping_undoes_wrapping(subject: StrategySubject) -> None:
    """`wrap` keeps order and number; `unwrap` returns the model with its names, and others unchanged."""
    strategy, model, frozen = subject.make(), subject.model(), subject.model()
    frozen.requires_grad_(requires_grad=False)
    names = [*model.state_dict()]
    bundle = Bundle(models=[model], optimizers=[sgd([*model.parameters()])], dataloaders=["a"], others=["c"])
    strategy.check(bundle)
    wrapped = strategy.wrap(bundle)
    core, others = strategy.unwrap(wrapped.models[0]), [*wrapped.dataloaders, *wrapped.others]
    full_names = [*strategy.states.full_state_dict(wrapped.models[0])]
    own = [name for name in names if name in core.state_dict()]  # an engine may have parts on other ranks
    is_renamed = full_names != names or [*core.state_dict()] != own
    demand(others == ["a", "c"], "wrap changed an object that it should pass through.")
    demand(core is model, "unwrap(wrap(model)) is not the model.")
    demand(not is_renamed, "wrap changed the names in the model's state dict.")
    demand(strategy.unwrap(core) is core, "unwrap changed a model that is not wrapped.")
    again = strategy.wrap(wrapped)
    demand(again.models[0] is wrapped.models[0], "wrap wrapped a model that was already wrapped.")
    still = strategy.unwrap(strategy.wrap(Bundle(models=[frozen])).models[0])
    demand(still is frozen, "unwrap(wrap(model)) is not a model without trainable parameters.")


@_check()
def ranks_start_equal(subject: StrategySubject) -> None:
    """Wrapped models have rank 0's values on every rank, however they were initialised."""
    run = start(replace(subject, tolerance=0.0), seed=subject.runtime.topology.rank)
    run.demand_state(subject.model(), "the wrapped model")


@_check()
def training_equals_one_process(subject: StrategySubject) -> None:
    """Several steps on shards give the parameters of one process on full batches."""
    for make in (sgd, adamw):
        run = start(subject, make)
        for step in range(STEPS):
            run.backward(run.shard(step))
            run.step()
        run.demand_state(run.solve(STEPS, make), f"after {STEPS} steps of {make.__name__}")


@_check()
def micro_batches_equal_one_batch(subject: StrategySubject) -> None:
    """K micro-batches with `accumulation=k` give the same step as one batch."""
    for count in (2, 3):
        run = start(subject)
        for step in range(2):
            micro_batches = zip(*(tensor.chunk(count) for tensor in run.shard(step)), strict=True)
            for number, micro_batch in enumerate(micro_batches, start=1):
                run.backward(micro_batch, accumulation=count, sync=number == count)
            run.step()
        run.demand_state(run.solve(2), f"with {count} micro-batches")


@_check(Feature.NO_SYNC)
def gradients_stay_local_without_sync(subject: StrategySubject) -> None:
    """Within `no_sync` every rank has the gradients of its own samples; the next pass outside sums all."""
    run, both = start(subject), subject.model()
    run.backward(run.shard(0), sync=False)
    run.demand_local_gradients("one rank's gradients within no_sync")
    run.backward(run.shard(1))
    for step in (0, 1):
        both(*run.batch(step)).backward()
    core = run.strategy.unwrap(run.model)
    subject.demand_equal(gradients(core), gradients(both), "the gradients after no_sync")


@_check()
def clipping_by_norm_equals_one_process(subject: StrategySubject) -> None:
    """`clip_grad_norm` returns the norm over all parameters and ranks, and scales the gradients to it."""
    for kind in subject.norm_types:
        run, norms = start(subject), list[Tensor]()

        def clip(model: nn.Module, kind: float = kind, norms: list[Tensor] = norms) -> None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05, kind))

        right = run.solve(1, sgd, clip)
        run.backward(run.shard(0))
        norm = run.strategy.clip_grad_norm(run.model.parameters(), 0.05, kind, optimizers=[run.optimizer])
        if norm is not None:
            subject.demand_equal({"norm": norm}, {"norm": norms[0]}, f"the {kind}-norm")
        run.step()
        run.demand_state(right, f"after clipping the {kind}-norm")


@_check(Feature.STEP_GUARD)
def guarded_steps_are_skipped(subject: StrategySubject) -> None:
    """A step whose gradients are too large changes nothing, and `step` says so."""
    run = start(subject, adamw)
    if run.strategy.precision.scaling is not None:
        return  # losses are scaled
    guard_steps(run.strategy, StepGuard(max_norm=1e-9))
    run.backward(run.shard(0))
    demand(not run.strategy.step(run.optimizer), "step() does not say that the step was skipped.")
    run.demand_state(subject.model(), "after a step that was skipped")


@_check(Feature.CLIP_GRAD_VALUE)
def clipping_by_value_equals_one_process(subject: StrategySubject) -> None:
    """`clip_grad_value` clamps every gradient."""
    run = start(subject)
    run.backward(run.shard(0))
    run.strategy.clip_grad_value(run.model.parameters(), 0.01, optimizers=[run.optimizer])
    run.step()
    right = run.solve(1, sgd, lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01))
    run.demand_state(right, "after clipping values")


@_check(Feature.NO_SYNC)
def backward_passes_its_arguments_on(subject: StrategySubject) -> None:
    """Two backward passes through one retained graph give the gradients twice."""
    run = start(subject)
    with run.strategy.no_sync(run.model):
        loss = run.model(*run.shard(0))
        run.strategy.backward(loss, accumulation=2, sync=False, retain_graph=True)
        run.strategy.backward(loss, accumulation=2, sync=False)
    run.demand_local_gradients("the gradients of two passes")


@_check(Feature.ITEM_COUNTS)
def gradients_can_be_divided_by_items(subject: StrategySubject) -> None:
    """Gradients of summed losses, divided after they were all-reduced, are those of one big batch.

    Every rank and micro-batch has a different number of items; gradients are averaged over the ranks.
    """
    run, right = start(subject), subject.model()
    items = torch.zeros((), device=subject.runtime.device)
    for step in (0, 1):
        count = 1 + run.strategy.sharding.shard_index + 2 * step
        run.backward(run.shard(step, count), sync=step == 1, items=count)
        items += count
    subject.runtime.collectives.all_reduce(items)
    for group in run.optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:  # a rank may have no part of it
                parameter.grad.div_(items / subject.runtime.topology.world_size)
    run.step()
    shards = range(run.strategy.sharding.num_shards)
    counts = {(step, index): 1 + index + 2 * step for step in (0, 1) for index in shards}
    for (step, index), count in counts.items():
        (right(*run.rows(step, index, count)) * count / sum(counts.values())).backward()
    sgd([*right.parameters()]).step()
    run.demand_state(right, "after division by items")


@_check()
def saved_state_is_loaded(subject: StrategySubject) -> None:
    """Model and optimizer continue after loading as without a save and load."""
    run, exact = start(subject, adamw), replace(subject, tolerance=0.0)
    file, states, keep = subject.directory / "full.bin", run.strategy.states, subject.runtime.topology.is_main
    run.backward(run.shard(0))
    run.step()
    before = run.state()
    parts = [item for part in states.iter_full_state_dict(run.model) for item in part.items()]
    exact.demand_equal(dict(parts), before, "the state dict in parts")
    weights = states.full_state_dict(run.model, keep=keep)
    optimizer = states.full_optimizer_state(run.optimizer, [run.model], keep=keep)
    if keep:
        torch.save([weights, optimizer], file)
    is_native = states.is_sharded and states.form() is StateForm.NATIVE
    for index in (0, 1) if is_native else ():  # as for two models and optimizers
        states.save_native(run.model, subject.directory, index)
    subject.runtime.collectives.barrier()
    resumed = [start(subject, adamw, seed=7) for _ in ("full", "native")[: 1 + is_native]]
    for position, other in enumerate(resumed):
        other.backward(other.shard(3))
        other.step()
        loading = other.strategy.states
        if position == 0:
            weights, optimizer = torch.load(file, map_location="cpu", weights_only=True)
            loading.load_full_state_dict(other.model, weights)
            loading.load_full_optimizer_state(other.optimizer, [other.model], optimizer)
        for index in (1, 0) if position == 1 else ():
            loading.load_native(other.model, subject.directory, index)
        subject.runtime.collectives.barrier()
        exact.demand_equal(other.state(), before, "the loaded model")
    for each in (run, *resumed):
        each.backward(each.shard(1))
        each.step()
    for other in resumed:
        subject.demand_equal(other.state(), run.state(), "a step after loading")


@_check(Feature.UNEVEN_INPUTS)
def ranks_may_run_out_of_batches(subject: StrategySubject) -> None:
    """Within `join` ranks with more batches continue, and all end with the same parameters."""
    run, right = start(subject), subject.model()
    with run.strategy.join([run.model]):
        for step in range(run.strategy.sharding.shard_index + 1):
            run.backward(run.shard(step))
            run.step()
    optimizer = sgd([*right.parameters()])
    shards = run.strategy.sharding.num_shards
    for step in range(shards):
        optimizer.zero_grad()
        for index in range(step, shards):  # those that still have batches
            (right(*run.rows(step, index)) / shards).backward()
        optimizer.step()
    run.demand_state(right, "after uneven numbers of batches")


@_check()
def evaluation_needs_no_training(subject: StrategySubject) -> None:
    """A model wrapped for evaluation computes the same as the plain model."""
    run = start(subject)
    model = run.strategy.wrap(Bundle(models=[subject.model()]), evaluation=True).models[0].eval()
    inputs, _ = run.shard(0)
    with torch.no_grad():
        output, right = model(inputs), subject.model()(inputs.cpu())
    subject.demand_equal({"output": output}, {"output": right}, "evaluation")


@_check(Feature.MULTIPLE_MODELS)
def several_models_are_trained(subject: StrategySubject) -> None:
    """Two models of one bundle, each with its optimizer, are trained independently."""
    strategy, models = subject.make(), [subject.model(0), subject.model(1)]
    bundle = strategy.wrap(Bundle(models=models, optimizers=[sgd([*m.parameters()]) for m in models]))
    runs = [
        PreparedRun(subject, strategy, model, optimizer)
        for model, optimizer in zip(bundle.models, bundle.optimizers, strict=True)
    ]
    for run in runs:
        run.backward(run.shard(0))
    for seed, run in enumerate(runs):
        run.step()
        right = subject.model(seed)
        right(*run.batch(0)).backward()
        sgd([*right.parameters()]).step()
        run.demand_state(right, "one of two models")


@_check(Feature.CUSTOM_DEVICE_PLACEMENT)
def a_model_may_stay_where_it_is(subject: StrategySubject) -> None:
    """A model that may not be placed is not moved."""
    strategy = subject.make()
    bundle = strategy.wrap(Bundle(models=[subject.model()], placements=[False]))
    device_types = {p.device.type for p in strategy.unwrap(bundle.models[0]).parameters()}
    demand(device_types == {"cpu"}, f"a model that was to stay on the CPU is on {sorted(device_types)}.")


def check_strategy(subject: StrategySubject) -> None:
    """Run every check of the declared features, on every rank.

    Raises:
        ConformanceError: At least one check failed on some rank; the message has all of them.
    """
    features = subject.make().features
    failures: list[str] = []
    for name, check in STRATEGY_CHECKS.items():
        if name in NEEDS and NEEDS[name] not in features:
            continue
        folder = subject.directory / name
        folder.mkdir(parents=True, exist_ok=True)
        try:
            check(replace(subject, directory=folder))
            failed = None
        except ConformanceError as error:
            failed = f"{name}: {error}"
        heard = subject.runtime.collectives.all_gather_object(failed)
        failures += [f"rank {rank}: {text}" for rank, text in enumerate(heard) if text is not None]
    if failures:
        raise ConformanceError(f"{subject.make().name!r} does not conform:\n" + "\n".join(failures))
