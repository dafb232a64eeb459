"""Expert parallelism: shard the experts of a layer over ranks, and exchange tokens by all-to-all.

A module of experts is recognised by its form, as in transformers 5:

- it sets `num_experts`, and has direct parameters, at least one of them 3-D, all with the experts in
  dim 0; its submodules have none;
- `forward(hidden, indices, weights)` takes tokens of shape `(tokens, hidden_size)`, and the indices and
  weights of the experts of each, of shape `(tokens, top_k)`. It returns, in the shape of `hidden`, the
  outputs of a token's experts, multiplied by their weights and summed. It reads `num_experts` and the
  parameters when it is called: it then sees those of this rank.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from accel_ops.modules import replaced_attributes, wrap_forward
from accel_plugins.parallelism.exchange import all_to_all
from accel_state import hang_monitor
from accel_state.errors import SettingsError
from accel_state.frozen import frozen

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of experts of a model by name: those with a 3-D parameter of `num_experts` rows.

    Example:
        >>> class Experts(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.num_experts, self.up = 4, nn.Parameter(torch.ones(4, 2, 2))
        >>> list(experts_of(nn.Sequential(nn.Linear(2, 2), Experts())))
        ['1']
    """
    return {
        name: module
        for name, module in model.named_modules()
        if (number := vars(module).get("num_experts")) is not None
        and any(p.dim() == 3 and p.shape[0] == number for p in module.parameters(recurse=False))
    }


@frozen
class ExpertParallel:
    """Shard experts over ranks with different tokens, and their weights by FSDP2 over further ranks.

    Args:
        mesh: Axes `"efsdp"` and `"ep"`, after `"pp"` if there are stages and `"dp_replicate"` if there are
            replicas: all ranks.
        num_batches: Number of ranks over which FSDP2 averages the gradients of other parameters.
        tensor: Mesh of the ranks that have the same tokens, if any; each sends its share of them.
    """

    mesh: DeviceMesh
    num_batches: int
    tensor: DeviceMesh | None = None

    @property
    def size(self) -> int:
        """Number of ranks that share the experts of a layer."""
        return self.mesh["ep"].size()

    def validate(self, model: nn.Module) -> None:
        """Check that a model has experts, and that all of them can be sharded."""
        setting, kind = f"ParallelismConfig(ep_size={self.size})", type(model).__name__
        experts = experts_of(model)
        for name, module in model.named_modules():
            problem, is_stack = "", type(module).__name__.endswith("Experts")
            if name in experts:
                problem = find_problem(module, self.size)
            elif isinstance(module, nn.ModuleList) and name.rpartition(".")[2] == "experts":
                problem = "each is a module of its own; 3-D parameters with the experts in dim 0 are needed"
            elif is_stack and any(parameter.dim() > 2 for parameter in module.parameters(recurse=False)):
                problem = "its attribute num_experts is not the size of dim 0 of a 3-D parameter"
            if problem:
                raise SettingsError(
                    f"{setting}: the experts in {name!r} ({type(module).__name__}) of {kind} cannot be "
                    f"sharded: {problem}."
                )
        if not experts:
            raise SettingsError(
                f"{setting}: {kind} has no module of experts, with num_experts, 3-D parameters that have the "
                "experts in dim 0, and forward(hidden, indices, weights). Leave out ep_size."
            )

    def __call__(self, model: nn.Module) -> None:
        """Keep this rank's experts of each layer, and exchange tokens with the ranks that have the others."""
        for module in experts_of(model).values():
            for name, parameter in [*module.named_parameters(recurse=False)]:
                sharded = distribute_tensor(
                    parameter.detach(), self.mesh["ep"], [Shard(0)], src_data_rank=None
                )
                module.register_parameter(name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))
            wrap_forward(module, self._dispatching(module))

    def fully_shard(self, model: nn.Module, reshard: bool | int, **options: Any) -> None:
        """Shard the weights of this rank's experts by FSDP2, with options of `torch.distributed.fsdp`."""
        options["mesh"] = self.mesh[self._copies]
        # The weights of a token's experts keep their dtype.
        options["mp_policy"] = replace(options["mp_policy"], cast_forward_inputs=False, output_dtype=None)
        for module in experts_of(model).values():
            fully_shard(module, reshard_after_forward=reshard, shard_placement_fn=self._placement, **options)

    @property
    def _copies(self) -> Any:
        """The axes of the ranks that have the same experts."""
        return tuple(name for name in self.mesh.mesh_dim_names or () if name not in {"pp", "ep"})

    def _placement(self, parameter: nn.Parameter) -> Shard | None:
        """Shard dim 1 if the experts of a rank are fewer than the ranks, some of which would get none."""
        shards = self.mesh["efsdp"].size()
        is_uneven = parameter.shape[0] // self.size % shards
        return Shard(1) if is_uneven and parameter.shape[1] % shards == 0 else None

    def _dispatching(self, module: nn.Module) -> Callable[..., Tensor]:
        """Return a call of a forward that applies the experts of this rank, which applies all of them."""
        ranks, group = self.size, self.mesh.get_group("ep")
        names = [*inspect.signature(module.forward).parameters][:3]
        # FSDP2 averages over the ranks with the same experts, each of which gets tokens of several ranks.
        scale = math.prod(self.mesh[name].size() for name in self._copies) / self.num_batches

        def dispatch(forward: Callable[..., Tensor], module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            hidden, indices, weights = (*args, *(kwargs[name] for name in names[len(args) :]))
            rows, indices, weights = (_share(part, self.tensor) for part in (hidden, indices, weights))
            # 1. Send each token to the ranks of its experts, once for each expert.
            num_experts, top_k = vars(module)["num_experts"], indices.shape[-1]
            num_local = num_experts // ranks
            sorted_indices, order = indices.reshape(-1).sort(stable=True)
            send, receive, received_counts = exchange_counts(sorted_indices, num_experts, group)
            received = all_to_all(
                rows[order // top_k], group, "experts", receive=receive, send=send, factor=1 / scale
            )
            # 2. Apply the experts of this rank; to a row of zeros if it got none: FSDP2 needs gradients.
            experts = torch.arange(num_local, device=rows.device).repeat(ranks)
            experts = experts.repeat_interleave(received_counts.reshape(-1), output_size=sum(receive))
            is_empty = not sum(receive)
            if is_empty:
                received, experts = received.sum(dim=0, keepdim=True), experts.new_zeros(1)
            experts = experts.unsqueeze(-1)
            with local_experts(module, num_local):
                outputs = forward(module, received, experts, torch.ones_like(experts, dtype=rows.dtype))
            outputs = outputs[:0] if is_empty else outputs
            # 3. Return the outputs, and sum them per token.
            returned = all_to_all(outputs, group, "experts", receive=send, send=receive, factor=scale)
            of_tokens = torch.empty_like(returned).index_copy(0, order, returned)
            of_tokens = of_tokens.view(*indices.shape, of_tokens.shape[-1])
            combined = (of_tokens * weights.unsqueeze(-1)).sum(dim=1).to(hidden.dtype)
            return combined if self.tensor is None else _gather(combined, self.tensor, len(hidden))

        return dispatch


def find_problem(module: nn.Module, size: int) -> str:
    """Return why experts cannot be sharded across ranks; empty if they can."""
    number = vars(module)["num_experts"]
    named = [*module.named_parameters(recurse=False)]
    nested = [name for name, _ in module.named_parameters() if "." in name]
    others = nested + [name for name, parameter in named if parameter.shape[:1] != (number,)]
    parameters = [*inspect.signature(module.forward).parameters.values()]
    needed = [parameter for parameter in parameters[3:] if parameter.default is parameter.empty]
    if others:
        return f"its parameter {others[0]!r} does not have the experts in dim 0"
    if len(parameters) < 3 or needed:
        names = ", ".join(parameter.name for parameter in parameters)
        return f"its forward({names}) does not take the tokens, the indices of their experts, and the weights"
    if number % size:
        return f"it has {number}, which {size} ranks cannot share evenly; choose a divisor of {number}"
    return ""


@contextmanager
def local_experts(module: nn.Module, num_local: int) -> Generator[None]:
    """Make a module of experts see only this rank's parameters within the block."""
    local = {
        name: cast("Any", parameter).to_local() for name, parameter in module.named_parameters(recurse=False)
    }
    with replaced_attributes(module, {**local, "num_experts": num_local}):
        yield


def exchange_counts(
    experts: Tensor, num_experts: int, group: ProcessGroup
) -> tuple[list[int], list[int], Tensor]:
    """Exchange the numbers of tokens that ranks send to each other. A collective over the group.

    Args:
        experts: The expert of each token to send; int64, of one dim.
        num_experts: Number of experts of the layer.
        group: The ranks that share the experts.

    Returns:
        The number of tokens to send to each rank, to receive from each, and the counts of the latter by
        expert, of shape `(ranks, experts per rank)`.
    """
    counts = torch.bincount(experts, minlength=num_experts).view(group.size(), -1)
    received = torch.empty_like(counts)
    with hang_monitor.collective_scope("all_to_all of experts"):
        dist.all_to_all_single(received, counts, group=group)
        send, receive = torch.stack([counts.sum(dim=1), received.sum(dim=1)]).tolist()
    return send, receive, received


def _share(rows: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Return this rank's share of rows that all ranks of a mesh have."""
    if mesh is None:
        return rows
    replicated = DTensor.from_local(rows, mesh, [Replicate()], run_check=False)
    return replicated.redistribute(placements=[Shard(0)]).to_local()


def _gather(share: Tensor, mesh: DeviceMesh, num_rows: int) -> Tensor:
    """All-gather the rows that are split over a mesh."""
    shape = torch.Size((num_rows, share.shape[1]))
    sharded = DTensor.from_local(
        share.contiguous(), mesh, [Shard(0)], run_check=False, shape=shape, stride=(shape[1], 1)
    )
    return sharded.full_tensor().clone()  # FSDP2 warns of outputs that are views
