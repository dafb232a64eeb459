"""The checks of a strategy, in one process or on every rank, against plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accel_plugins.sharding.state import StateForm
from accel_plugins.strategy import Bundle, Feature, Strategy
from accel_state.errors import AccelError
from accel_state.frozen import frozen

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_state.runtime import Runtime

FEATURES, HIDDEN, TARGETS, ROWS = 6, 5, 3, 12  # ROWS: samples per shard, divisible by 2, 3 and 4


class ConformanceError(AccelError, AssertionError):
    """An implementation violates the contract of its interface."""


def demand(condition: object, message: str) -> None:
    """Raise `ConformanceError` with a message unless a condition holds."""
    if not condition:
        raise ConformanceError(message)


def demand_equal(
    results: Mapping[str, Tensor], wanted: Mapping[str, Tensor], tolerance: float, what: str
) -> None:
    """Demand that named tensors have the same names, shapes and, within a tolerance, values."""
    demand([*results] == [*wanted], f"{what}: the names are {[*results]}, but expected are {[*wanted]}.")
    for name, right in wanted.items():
        result = results[name].detach().to("cpu", right.dtype)
        demand(
            result.shape == right.shape,
            f"{what}: {name!r} has the shape {tuple(result.shape)}; expected {tuple(right.shape)}.",
        )
        worst = (result - right).abs().max().item() if right.numel() else 0.0
        demand(worst <= tolerance, f"{what}: {name!r} is off by {worst:.3g} (tolerance {tolerance:.3g}).")


class Network(nn.Sequential):
    """Two layers; called with targets, it returns its loss, as engines that own the forward pass need it."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, TARGETS))

    def forward(self, input: Tensor, targets: Tensor | None = None) -> Tensor:  # noqa: A002 - as Sequential
        """Return outputs, or the mean squared error."""
        outputs = super().forward(input)
        return outputs if targets is None else nn.functional.mse_loss(outputs, targets)


@frozen
class Problem:
    """A regression problem whose samples are sharded."""

    dtype: torch.dtype
    device: torch.device
    num_shards: int
    shard_index: int

    def model(self, seed: int = 0) -> nn.Module:
        """Return a new network on the CPU, the same for the same seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Network().to(self.dtype)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of all shards for one step, on the CPU."""
        generator = torch.Generator().manual_seed(1000 + step)
        rows = ROWS * self.num_shards
        inputs = torch.randn(rows, FEATURES, generator=generator, dtype=self.dtype)
        return inputs, torch.randn(rows, TARGETS, generator=generator, dtype=self.dtype)

    def shard(self, step: int, index: int | None = None) -> tuple[Tensor, Tensor]:
        """Return a shard of a step's batch, this rank's by default, on the device."""
        start = ROWS * (self.shard_index if index is None else index)
        inputs, targets = self.batch(step)
        return inputs[start : start + ROWS].to(self.device), targets[start : start + ROWS].to(self.device)

    def solve(
        self,
        steps: int,
        optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer],
        before_step: Callable[[nn.Module], Any] | None = None,
    ) -> nn.Module:
        """Train the network of seed 0 on full batches with plain PyTorch.

        `before_step` is called with the model between backward pass and step.
        """
        model = self.model()
        stepping = optimizer([*model.parameters()])
        for step in range(steps):
            stepping.zero_grad()
            loss_of(model, self.batch(step)).backward()
            if before_step is not None:
                before_step(model)
            stepping.step()
        return model


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean squared error of a model on a batch."""
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer without state, whose steps show the gradients."""
    return torch.optim.SGD(parameters, lr=0.5)


def adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer with state."""
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A model prepared by a strategy, with its optimizer."""

    strategy: Strategy
    model: nn.Module
    optimizer: Optimizer

    @property
    def core(self) -> nn.Module:
        """The unwrapped model."""
        return self.strategy.unwrap(self.model)

    def backward(
        self, batch: tuple[Tensor, Tensor], *, accumulation: int = 1, sync: bool = True, items: int = 1
    ) -> None:
        """Run forward and backward on a batch; without `sync` inside `no_sync`, if there is one.

        The loss, a mean, is multiplied with the number of `items`.
        """
        if self.strategy.owns_forward:
            self.strategy.train_step(
                self.model, self.model.forward, batch, {}, accumulation=accumulation, sync=sync
            )
            return
        may_hold = Feature.NO_SYNC in self.strategy.features
        with nullcontext() if sync or not may_hold else self.strategy.no_sync(self.model):
            loss = loss_of(self.model, batch) * items
            self.strategy.backward(loss, accumulation=accumulation, sync=sync)

    def step(self) -> bool:
        """Step and clear the gradients; return whether the strategy stepped."""
        stepped = bool(self.strategy.step(self.optimizer))
        self.optimizer.zero_grad()
        return stepped

    def state(self) -> dict[str, Tensor]:
        """The full state dict on the CPU."""
        return {name: full(value) for name, value in self.strategy.states.full_state_dict(self.model).items()}

    def save_full(self, folder: Path, *, keep: bool) -> None:
        """Save the full states on the rank with `keep`."""
        states = self.strategy.states
        weights = states.full_state_dict(self.model, keep=keep)
        optimizer = states.full_optimizer_state(self.optimizer, [self.model], keep=keep)
        if keep:
            torch.save([weights, optimizer], folder / "full.bin")

    def load_full(self, folder: Path) -> None:
        """Load the files of `save_full`."""
        weights, optimizer = torch.load(folder / "full.bin", map_location="cpu", weights_only=True)
        self.strategy.states.load_full_state_dict(self.model, weights)
        self.strategy.states.load_full_optimizer_state(self.optimizer, [self.model], optimizer)

    @property
    def has_native(self) -> bool:
        """Whether the engine has files of its own."""
        states = self.strategy.states
        return states.is_sharded and states.form() is StateForm.NATIVE

    def save_native(self, folder: Path) -> None:
        """Save the strategy's native files, if it has any, as for two models and optimizers."""
        for index in (0, 1) if self.has_native else ():
            self.strategy.states.save_native(self.model, folder, index)

    def load_native(self, folder: Path) -> None:
        """Load the files of `save_native`, the second model first."""
        for index in (1, 0):
            self.strategy.states.load_native(self.model, folder, index)


def prepare(
    strategy: Strategy, model: nn.Module, make: Callable[[Sequence[nn.Parameter]], Optimizer]
) -> PreparedRun:
    """Check and wrap a model with its optimizer by a strategy."""
    bundle = Bundle(models=[model], optimizers=[make([*model.parameters()])])
    strategy.check(bundle)
    bundle = strategy.wrap(bundle)
    return PreparedRun(strategy, bundle.models[0], bundle.optimizers[0])


def accumulate(trained: PreparedRun, batch: tuple[Tensor, Tensor], count: int) -> None:
    """Run backward passes on the micro-batches of a batch; the last one all-reduces gradients."""
    micro_batches = [*zip(*(tensor.chunk(count) for tensor in batch), strict=True)]
    for number, (inputs, targets) in enumerate(micro_batches, start=1):
        trained.backward((inputs, targets), accumulation=count, sync=number == count)


def gradients(model: nn.Module) -> dict[str, Any]:
    """Return the full gradients by parameter name; `None` for parameters without one."""
    return {name: None if p.grad is None else full(p.grad) for name, p in model.named_parameters()}


def gradients_alone(problem: Problem) -> dict[str, Any]:
    """Return the gradients of plain PyTorch on this rank's first shard."""
    model = problem.model()
    inputs, targets = problem.shard(0)
    loss_of(model, (inputs.cpu(), targets.cpu())).backward()
    return gradients(model)


def are_full(gradients: Mapping[str, Any]) -> bool:
    """Return whether gradients are in `.grad` between passes; some strategies keep them in buffers."""
    return all(gradient is not None for gradient in gradients.values())


def full(tensor: Any) -> Any:
    """Return the full tensor on the CPU, gathered if it is a `DTensor`."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu()


_STEPS = 4


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

    def problem(self) -> Problem:
        """Return the training problem, sharded by the strategy's `sharding`."""
        sharding = self.make().sharding
        return Problem(
            dtype=self.dtype,
            device=self.runtime.device,
            num_shards=sharding.num_shards,
            shard_index=sharding.shard_index,
        )


def sharding_covers_every_shard(subject: StrategySubject) -> None:
    """Every rank has the same number of shards, and together they cover all of them."""
    sharding = subject.make().sharding
    shards = subject.runtime.collectives.all_gather_object((sharding.num_shards, sharding.shard_index))
    demand(
        {number for number, _ in shards} == {sharding.num_shards},
        f"the ranks disagree on num_shards: {shards}.",
    )
    missing = {*range(sharding.num_shards)} - {index for _, index in shards}
    demand(not missing, f"no rank has the shards {sorted(missing)} of {sharding.num_shards}.")


def unwrapping_undoes_wrapping(subject: StrategySubject) -> None:
    """`wrap` keeps order and number; `unwrap` returns the model with its names, and others unchanged."""
    strategy, problem = subject.make(), subject.problem()
    model, frozen = problem.model(), problem.model().requires_grad_(requires_grad=False)
    names = [*model.state_dict()]
    bundle = Bundle(
        models=[model], optimizers=[sgd([*model.parameters()])], dataloaders=["a", "b"], others=["c"]
    )
    strategy.check(bundle)
    wrapped = strategy.wrap(bundle)
    demand(
        [*wrapped.dataloaders] == ["a", "b"] and [*wrapped.others] == ["c"],
        "wrap changed an object that it should pass through.",
    )
    core = strategy.unwrap(wrapped.models[0])
    demand(core is model, "unwrap(wrap(model)) is not the model.")
    full_names = [*strategy.states.full_state_dict(wrapped.models[0])]
    own = [name for name in names if name in core.state_dict()]  # an engine may have parts on other ranks
    is_renamed = full_names != names or [*core.state_dict()] != own
    demand(not is_renamed, "wrap changed the names in the model's state dict.")
    demand(strategy.unwrap(core) is core, "unwrap changed a model that is not wrapped.")
    again = strategy.wrap(wrapped)
    demand(again.models[0] is wrapped.models[0], "wrap wrapped a model that was already wrapped.")
    still = strategy.wrap(Bundle(models=[frozen])).models[0]
    demand(
        strategy.unwrap(still) is frozen,
        "unwrap(wrap(model)) is not a model without trainable parameters.",
    )


def ranks_start_equal(subject: StrategySubject) -> None:
    """Wrapped models have rank 0's values on every rank, however they were initialised."""
    problem = subject.problem()
    trained = prepare(subject.make(), problem.model(seed=subject.runtime.topology.rank), sgd)
    demand_equal(trained.state(), problem.model(seed=0).state_dict(), 0.0, "the wrapped model")


def training_equals_one_process(subject: StrategySubject) -> None:
    """Several steps on shards give the parameters of one process on full batches."""
    problem = subject.problem()
    for optimizer in (sgd, adamw):
        trained = prepare(subject.make(), problem.model(), optimizer)
        for step in range(_STEPS):
            trained.backward(problem.shard(step))
            demand(trained.step(), "step returned False although all gradients were finite.")
        right = problem.solve(_STEPS, optimizer).state_dict()
        demand_equal(
            trained.state(), right, subject.tolerance, f"after {_STEPS} steps of {optimizer.__name__}"
        )


def micro_batches_equal_one_batch(subject: StrategySubject) -> None:
    """K micro-batches with `accumulation=k` give the same step as one batch."""
    problem = subject.problem()
    for count in (2, 3):
        trained = prepare(subject.make(), problem.model(), sgd)
        for step in range(2):
            accumulate(trained, problem.shard(step), count)
            trained.step()
        right = problem.solve(2, sgd).state_dict()
        demand_equal(trained.state(), right, subject.tolerance, f"with {count} micro-batches")


def gradients_stay_local_without_sync(subject: StrategySubject) -> None:
    """Within `no_sync` every rank has the gradients of its own samples; the next pass outside sums all."""
    problem = subject.problem()
    trained = prepare(subject.make(), problem.model(), sgd)
    trained.backward(problem.shard(0), sync=False)
    local = gradients(trained.core)
    if are_full(local):
        demand_equal(
            local, gradients_alone(problem), subject.tolerance, "one rank's gradients within no_sync"
        )
    trained.backward(problem.shard(1))
    both = problem.model()
    for step in (0, 1):
        loss_of(both, problem.batch(step)).backward()
    demand_equal(gradients(trained.core), gradients(both), subject.tolerance, "the gradients after no_sync")


def clipping_by_norm_equals_one_process(subject: StrategySubject) -> None:
    """`clip_grad_norm` returns the norm over all parameters and ranks, and scales the gradients to it."""
    problem = subject.problem()
    for norm_type in subject.norm_types:
        norms: list[Tensor] = []

        def clip(model: nn.Module, kind: float = norm_type, norms: list[Tensor] = norms) -> None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=kind))

        right = problem.solve(1, sgd, clip).state_dict()
        trained = prepare(subject.make(), problem.model(), sgd)
        trained.backward(problem.shard(0))
        parameters = trained.model.parameters()
        norm = trained.strategy.clip_grad_norm(parameters, 0.05, norm_type, optimizers=[trained.optimizer])
        if norm is not None:
            demand_equal({"norm": full(norm)}, {"norm": norms[0]}, subject.tolerance, f"the {norm_type}-norm")
        trained.step()
        demand_equal(trained.state(), right, subject.tolerance, f"after clipping the {norm_type}-norm")


def clipping_by_value_equals_one_process(subject: StrategySubject) -> None:
    """`clip_grad_value` clamps every gradient."""
    problem = subject.problem()
    trained = prepare(subject.make(), problem.model(), sgd)
    trained.backward(problem.shard(0))
    trained.strategy.clip_grad_value(trained.model.parameters(), 0.01, optimizers=[trained.optimizer])
    trained.step()

    def clip(model: nn.Module) -> None:
        nn.utils.clip_grad_value_(model.parameters(), 0.01)

    right = problem.solve(1, sgd, clip).state_dict()
    demand_equal(trained.state(), right, subject.tolerance, "after clipping values")


def backward_passes_its_arguments_on(subject: StrategySubject) -> None:
    """Two backward passes through one retained graph give the gradients twice."""
    problem = subject.problem()
    trained = prepare(subject.make(), problem.model(), sgd)
    with trained.strategy.no_sync(trained.model):
        loss = loss_of(trained.model, problem.shard(0))
        trained.strategy.backward(loss, accumulation=2, sync=False, retain_graph=True)
        trained.strategy.backward(loss, accumulation=2, sync=False)
    local = gradients(trained.core)
    if are_full(local):
        demand_equal(local, gradients_alone(problem), subject.tolerance, "the gradients of two passes")


def gradients_can_be_divided_by_items(subject: StrategySubject) -> None:
    """Gradients of summed losses, divided after they were all-reduced, are those of one big batch.

    Every rank and micro-batch has a different number of items; gradients are averaged over the ranks.
    """
    problem = subject.problem()
    trained = prepare(subject.make(), problem.model(), sgd)
    items = torch.zeros((), device=subject.runtime.device)
    for step in (0, 1):
        inputs, targets = (tensor[: 1 + problem.shard_index + 2 * step] for tensor in problem.shard(step))
        trained.backward((inputs, targets), sync=step == 1, items=len(inputs))
        items += len(inputs)
    subject.runtime.collectives.all_reduce(items)
    for group in trained.optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:  # a rank may have no part of it
                parameter.grad.div_(items / subject.runtime.topology.world_size)
    trained.step()
    right = problem.model()
    total = sum(1 + index + 2 * step for step in (0, 1) for index in range(problem.num_shards))
    for step in (0, 1):
        for index in range(problem.num_shards):
            rows = 1 + index + 2 * step
            inputs, targets = (tensor[:rows].cpu() for tensor in problem.shard(step, index))
            (loss_of(right, (inputs, targets)) * rows / total).backward()
    sgd([*right.parameters()]).step()
    demand_equal(trained.state(), right.state_dict(), subject.tolerance, "after division by items")


def saved_state_is_loaded(subject: StrategySubject) -> None:
    """Model and optimizer continue after loading as without a save and load."""
    problem = subject.problem()
    trained = prepare(subject.make(), problem.model(), adamw)
    folder, barrier = subject.directory, subject.runtime.collectives.barrier
    trained.backward(problem.shard(0))
    trained.step()
    before = trained.state()
    one_by_one = {
        name: full(value)
        for part in trained.strategy.states.iter_full_state_dict(trained.model)
        for name, value in part.items()
    }
    demand_equal(one_by_one, before, 0.0, "the state dict in parts")
    loads = [PreparedRun.load_full, *([PreparedRun.load_native] if trained.has_native else [])]
    trained.save_full(folder, keep=subject.runtime.topology.is_main)
    trained.save_native(folder)
    barrier()
    resumed = [prepare(subject.make(), problem.model(seed=7), adamw) for _ in loads]
    for run, load in zip(resumed, loads, strict=True):
        run.backward(problem.shard(3))
        run.step()
        load(run, folder)
        barrier()
        demand_equal(run.state(), before, 0.0, "the loaded model")
    for run in (trained, *resumed):
        run.backward(problem.shard(1))
        run.step()
    for run in resumed:
        demand_equal(run.state(), trained.state(), subject.tolerance, "a step after loading")


def ranks_may_run_out_of_batches(subject: StrategySubject) -> None:
    """Within `join` ranks with more batches continue, and all end with the same parameters."""
    problem = subject.problem()
    trained = prepare(subject.make(), problem.model(), sgd)
    with trained.strategy.join([trained.model]):
        for step in range(problem.shard_index + 1):
            trained.backward(problem.shard(step))
            trained.step()
    right = problem.model()
    optimizer = sgd([*right.parameters()])
    for step in range(problem.num_shards):
        optimizer.zero_grad()
        for index in range(step, problem.num_shards):  # those that still have batches
            inputs, targets = problem.shard(step, index)
            (loss_of(right, (inputs.cpu(), targets.cpu())) / problem.num_shards).backward()
        optimizer.step()
    demand_equal(trained.state(), right.state_dict(), subject.tolerance, "after uneven numbers of batches")


def evaluation_needs_no_training(subject: StrategySubject) -> None:
    """A model wrapped for evaluation computes the same as the plain model."""
    strategy, problem = subject.make(), subject.problem()
    model = strategy.wrap(Bundle(models=[problem.model()]), evaluation=True).models[0].eval()
    inputs, _ = problem.shard(0)
    with torch.no_grad():
        output, right = model(inputs), problem.model()(inputs.cpu())
    demand_equal({"output": full(output)}, {"output": right}, subject.tolerance, "evaluation")


def several_models_are_trained(subject: StrategySubject) -> None:
    """Two models of one bundle, each with its optimizer, are trained independently."""
    strategy, problem = subject.make(), subject.problem()
    models = [problem.model(seed=0), problem.model(seed=1)]
    optimizers = [sgd([*model.parameters()]) for model in models]
    bundle = strategy.wrap(Bundle(models=models, optimizers=optimizers))
    pairs = [
        PreparedRun(strategy, model, optimizer)
        for model, optimizer in zip(bundle.models, bundle.optimizers, strict=True)
    ]
    for trained in pairs:
        trained.backward(problem.shard(0))
    for trained in pairs:
        trained.step()
    right = [problem.model(seed=0), problem.model(seed=1)]
    for model, trained in zip(right, pairs, strict=True):
        loss_of(model, problem.batch(0)).backward()
        sgd([*model.parameters()]).step()
        demand_equal(trained.state(), model.state_dict(), subject.tolerance, "one of two models")


def a_model_may_stay_where_it_is(subject: StrategySubject) -> None:
    """A model that may not be placed is not moved."""
    strategy, problem = subject.make(), subject.problem()
    bundle = strategy.wrap(Bundle(models=[problem.model()], placements=[False]))
    device_types = {p.device.type for p in strategy.unwrap(bundle.models[0]).parameters()}
    demand(device_types == {"cpu"}, f"a model that was to stay on the CPU is on {sorted(device_types)}.")


STRATEGY_CHECKS: Mapping[str, Callable[[StrategySubject], None]] = {
    check.__name__: check
    for check in (
        sharding_covers_every_shard,
        unwrapping_undoes_wrapping,
        ranks_start_equal,
        training_equals_one_process,
        micro_batches_equal_one_batch,
        gradients_stay_local_without_sync,
        clipping_by_norm_equals_one_process,
        clipping_by_value_equals_one_process,
        backward_passes_its_arguments_on,
        gradients_can_be_divided_by_items,
        saved_state_is_loaded,
        ranks_may_run_out_of_batches,
        evaluation_needs_no_training,
        several_models_are_trained,
        a_model_may_stay_where_it_is,
    )
}
"""Every check by name."""

NEEDS: Mapping[str, Feature] = {
    "gradients_stay_local_without_sync": Feature.NO_SYNC,
    "backward_passes_its_arguments_on": Feature.NO_SYNC,
    "gradients_can_be_divided_by_items": Feature.ITEM_COUNTS,
    "clipping_by_value_equals_one_process": Feature.CLIP_GRAD_VALUE,
    "ranks_may_run_out_of_batches": Feature.UNEVEN_INPUTS,
    "several_models_are_trained": Feature.MULTIPLE_MODELS,
    "a_model_may_stay_where_it_is": Feature.CUSTOM_DEVICE_PLACEMENT,
}
"""The feature of each check; it is skipped for strategies that do not declare it."""


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
