"""Muon for matrices, with AdamW for everything else, in one optimizer; parameters may be sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from accel_ops.tree import is_dtensor, local_part
from accel_plugins import optimizers
from accel_state.errors import SettingsError
from accel_state.torch_private import adjust_muon_lr, orthogonalize_matrix

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from accel_plugins.optimizers.matrices import ShardLayout

Params: TypeAlias = "nn.Module | Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]"
ALGORITHMS = ("muon", "adamw")
"""The values of `"algorithm"` in a group of parameters."""


class Muon(torch.optim.Optimizer):
    """Muon for matrices and AdamW for everything else, on plain and on sharded parameters.

    The updates are those of `torch.optim.Muon` and `torch.optim.AdamW`. Parameters may be DTensors, as under
    FSDP2 and tensor parallelism: momentum is sharded like the parameters, and each matrix is gathered by one
    rank, which orthogonalises it and scatters the result. A parameter of three dims, such as the weights of
    experts, is as many matrices as its first dim has elements, each with a separate update.

    `state_dict` has the usual form: `save_state` and `load_state` shard it like the parameters.

    Args:
        params: A model, of which embeddings, the output layer that a model of transformers names,
            convolutions, biases of experts and parameters that are no matrices are trained by AdamW; or
            parameters or groups, which are split by their number of dims: two or three for Muon. A group with
            `"algorithm"`, `"muon"` or `"adamw"`, is not split.
        lr: Learning rate of Muon.
        weight_decay: Decoupled weight decay of Muon.
        momentum: Momentum of Muon.
        nesterov: Whether the momentum is Nesterov's.
        ns_coefficients: The coefficients of the Newton-Schulz iteration.
        eps: The smallest norm by which a matrix is divided.
        ns_steps: Number of Newton-Schulz steps.
        adjust_lr_fn: How the learning rate depends on a matrix's shape; as for `torch.optim.Muon`.
        adamw: Options of `torch.optim.AdamW`, its learning rate included; torch's defaults for the others.
        exclude: Patterns of names (`*` matches anything) of further parameters of a model to train by AdamW,
            such as those of a classifier.

    Raises:
        SettingsError: The algorithm is unknown, `exclude` matches nothing, or a parameter for Muon is no
            matrix.
        ValueError: torch rejects an option.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 2))
        >>> optimizer = Muon(model, lr=0.02, adamw={"lr": 3e-4})
        >>> [(group["algorithm"], group["lr"], len(group["params"])) for group in optimizer.param_groups]
        [('muon', 0.02, 1), ('adamw', 0.0003, 2)]
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        adamw: Mapping[str, Any] | None = None,
        exclude: Sequence[str] = (),
    ) -> None:
        # torch's optimizers check their options, and complete them.
        options: Any = lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn
        muon: dict[str, Any] = torch.optim.Muon([torch.empty(1, 1)], *options).defaults
        completed = torch.optim.AdamW([torch.empty(1)], **(adamw or {})).defaults
        self._options = {"muon": muon, "adamw": completed}
        self._layouts: dict[Any, ShardLayout] = {}
        if isinstance(params, nn.Module):
            params = _groups_of(params, exclude)
        elif exclude:
            raise SettingsError(
                f"Muon(exclude={exclude!r}) names parameters of a model: pass the model instead of its "
                "parameters, or groups with 'algorithm': 'adamw'."
            )
        super().__init__(cast("Any", params), {"lr": lr})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, or two where a group without `"algorithm"` has matrices and other parameters.

        Args:
            param_group: `"params"`, and any option of the group's algorithm.
        """
        params = param_group["params"]
        members: list[Any] = [params] if isinstance(params, Tensor) else [*params]
        by_algorithm: dict[str, list[Any]] = {}
        for member in members:
            tensor = member[1] if isinstance(member, tuple) else member
            algorithm = param_group.get("algorithm") or ("muon" if tensor.ndim in (2, 3) else "adamw")
            if algorithm not in ALGORITHMS:
                raise SettingsError(f"'algorithm': {algorithm!r} of a group: expected one of {ALGORITHMS}.")
            if algorithm == "muon" and tensor.ndim not in (2, 3):
                raise SettingsError(
                    f"Muon cannot train a parameter of shape {tuple(tensor.shape)}, which is not a "
                    "matrix. Train it with AdamW: set 'algorithm': 'adamw' in its group."
                )
            by_algorithm.setdefault(algorithm, []).append(member)
        for algorithm in ALGORITHMS:
            if algorithm in by_algorithm:
                own = {"params": by_algorithm[algorithm], "algorithm": algorithm}
                super().add_param_group({**self._options[algorithm], **param_group, **own})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take one step; a collective over the ranks of sharded matrices. Return the result of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        by_adamw = [group for group in self.param_groups if group["algorithm"] == "adamw"]
        if by_adamw:
            adamw = torch.optim.AdamW([torch.empty(1)])
            adamw.param_groups, adamw.state = by_adamw, self.state
            adamw.step()
        for group in self.param_groups:
            if group["algorithm"] == "muon":
                by_mesh: dict[Any, list[Tensor]] = {}
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        mesh = cast("DTensor", parameter).device_mesh if is_dtensor(parameter) else None
                        by_mesh.setdefault(mesh, []).append(parameter)
                for mesh, parameters in by_mesh.items():
                    self._step_by_muon(group, mesh, parameters)
        return loss

    def _step_by_muon(self, group: dict[str, Any], mesh: Any, parameters: Sequence[Tensor]) -> None:
        """Step matrices of a group, all of them on one mesh, or on none."""
        lr, momentum = float(group["lr"]), group["momentum"]
        gradients = [gradient_of(parameter) for parameter in parameters]
        momenta: list[Tensor] = []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(gradient)
            momenta.append(state["momentum_buffer"])
            local_part(momenta[-1]).lerp_(local_part(gradient), 1 - momentum)

        def read(index: int, at: Any) -> Tensor:
            gradient, buffer = local_part(gradients[index])[at], local_part(momenta[index])[at]
            # torch orthogonalises in bfloat16
            return (gradient.lerp(buffer, momentum) if group["nesterov"] else buffer).bfloat16()

        def orthogonalize(matrix: Tensor) -> Tensor:
            return orthogonalize_matrix(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])

        def write(index: int, at: Any, result: Tensor) -> None:
            rate = adjust_muon_lr(lr, group["adjust_lr_fn"], parameters[index].shape[-2:])
            part = local_part(parameters[index].detach())[at]
            part.mul_(1 - lr * group["weight_decay"])
            part.add_(result.to(part.device), alpha=-rate)

        if mesh is None:
            for index, parameter in enumerate(parameters):
                for at in [...] if parameter.ndim == 2 else range(parameter.shape[0]):
                    write(index, at, orthogonalize(read(index, at)))
        else:
            optimizers.matrices.orthogonalize_sharded(
                cast("list[DTensor]", parameters),
                self._layouts,
                read=read,
                orthogonalize=orthogonalize,
                write=write,
            )

    def __getstate__(self) -> dict[str, Any]:
        # The layouts have process groups, and are rebuilt.
        return {**super().__getstate__(), "_options": self._options, "_layouts": {}}


def gradient_of(parameter: Tensor) -> Tensor:
    """Return the gradient of a parameter, sharded like it."""
    gradient, like = cast("Any", parameter.grad), cast("Any", parameter)
    if is_dtensor(like) and gradient.placements != like.placements:
        return gradient.redistribute(placements=like.placements)
    return gradient


def _groups_of(model: nn.Module, exclude: Sequence[str]) -> list[dict[str, Any]]:
    """Return a model's trained parameters in a group for each algorithm, with their names."""
    head = getattr(model, "get_output_embeddings", lambda: None)()  # of transformers
    by_adamw: set[int] = set() if head is None else {id(parameter) for parameter in head.parameters()}
    for module in model.modules():
        own = [*module.parameters(recurse=False)]
        if isinstance(module, nn.Embedding | nn.EmbeddingBag | nn.modules.conv._ConvNd):
            by_adamw |= {id(parameter) for parameter in own}
        stacks = {parameter.shape[0] for parameter in own if parameter.ndim == 3}
        by_adamw |= {  # the biases of a stack of matrices are vectors
            id(parameter) for parameter in own if parameter.ndim == 2 and parameter.shape[0] in stacks
        }
    unused, names = {*exclude}, list[str]()
    groups: dict[str, list[Tensor]] = {"muon": [], "adamw": []}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        matching = {pattern for pattern in exclude if fnmatchcase(name, pattern)}
        unused -= matching
        is_matrix = parameter.ndim in (2, 3) and id(parameter) not in by_adamw and not matching
        groups["muon" if is_matrix else "adamw"].append(parameter)
        names.append(name)
    if unused:
        raise SettingsError(
            f"Muon(exclude={[*exclude]!r}): {sorted(unused)} match no trained parameter of "
            f"{type(model).__name__}, which has {names[:5]} and {max(len(names) - 5, 0)} more."
        )
    return [{"params": params, "algorithm": algorithm} for algorithm, params in groups.items() if params]
