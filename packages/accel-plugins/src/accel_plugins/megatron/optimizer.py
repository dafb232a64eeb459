"""megatron-core's optimizer in place of one of PyTorch, whose parameter groups users and schedules change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_plugins.megatron.configs import optimizer_config
from accel_plugins.megatron.library import core
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn
    from torch.optim import Optimizer

    from accel_plugins.megatron.plugin import MegatronLMPlugin
    from accel_plugins.megatron.weights import Placed

_GROUP = "torch_group"


def group_of(placed: Sequence[Placed], model: nn.Module, optimizer: Optimizer) -> dict[nn.Parameter, int]:
    """Return the parameter group of the optimizer for every parameter of this rank; those in none are frozen.

    Args:
        placed: The rank's parameters.
        model: The model of transformers.
        optimizer: Has its parameters.

    Raises:
        SettingsError: Weights that are one parameter of Megatron are in several groups.
    """
    indices = {
        parameter: index
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    named = dict(model.named_parameters(remove_duplicate=False))
    found: dict[nn.Parameter, int] = {}
    for one in placed:
        trained = {
            name: indices.get(named[name]) if named[name].requires_grad else None for name in one.names
        }
        if len({*trained.values()}) > 1:
            raise SettingsError(
                f"{', '.join(trained)} are one parameter of Megatron, but not in one parameter group of the "
                "optimizer (or some are frozen): put them into one group."
            )
        index = next(iter(trained.values()))
        if index is None:
            one.parameter.requires_grad_(False)  # noqa: FBT003 - as torch has it
        else:
            found[one.parameter] = index
    return found


def names_of(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Return the first names of the parameters of each group of an optimizer.

    Args:
        model: The model of transformers.
        optimizer: Has its parameters.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [[names[one] for one in group["params"] if one in names] for group in optimizer.param_groups]


def make_optimizer(
    plugin: MegatronLMPlugin,
    optimizer: Optimizer,
    chunks: Sequence[nn.Module],
    groups: dict[nn.Parameter, int],
    precision: str,
) -> Any:
    """Make megatron-core's optimizer with the groups of PyTorch's, which gets this rank's parameters.

    Args:
        plugin: May have conditions for weight decay and learning rate.
        optimizer: The optimizer of PyTorch.
        chunks: The wrapped stages.
        groups: Group of every parameter.
        precision: `"no"`, `"bf16"` or `"fp16"`.
    """
    optimizers = core("optimizer")
    config = core("optimizer.optimizer_config")
    kinds: dict[tuple[int, float, float], set[int]] = {}
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if parameter.requires_grad:
                kind = (groups[parameter], *parameter_factors(plugin, name, parameter))
                kinds.setdefault(kind, set()).add(id(parameter))
    overrides = {
        config.ParamKey(
            with_name_predicate=config.ParamWithNamePredicate(
                name=repr(kind), fn=lambda parameter, _, members=members: id(parameter) in members
            )
        ): {_GROUP: kind[0], "wd_mult": kind[1], "lr_mult": kind[2]}
        for kind, members in kinds.items()
    }
    made = optimizers.get_megatron_optimizer(
        optimizer_config(plugin, optimizer, precision),
        [*chunks],
        config_overrides=overrides,
        use_gloo_process_groups=False,
    )
    for index, group in enumerate(optimizer.param_groups):
        group["params"] = [parameter for parameter, own in groups.items() if own == index]
    return made


def parameter_factors(plugin: MegatronLMPlugin, name: str, parameter: nn.Parameter) -> tuple[float, float]:
    """Return the factors of weight decay and learning rate of a parameter.

    Args:
        plugin: May have conditions for them.
        name: Name of the parameter within its stage.
        parameter: The parameter.
    """
    without, scaled = plugin.no_wd_decay_cond, plugin.scale_lr_cond
    decay = 0.0 if without is not None and without(name, parameter) else 1.0
    return decay, plugin.lr_mult if scaled is not None and scaled(name, parameter) else 1.0


def copy_hyperparameters(source: Optimizer, target: Any) -> None:
    """Copy what schedules and users change of an optimizer of PyTorch to megatron-core's.

    Args:
        source: The optimizer of PyTorch.
        target: megatron-core's.
    """
    for group in target.param_groups:
        own = source.param_groups[group[_GROUP]]
        for name in own.keys() & group.keys() - {"params", "lr", "weight_decay"}:
            group[name] = own[name]
        group["lr"] = own["lr"] * group["lr_mult"]
        group["weight_decay"] = own["weight_decay"] * group["wd_mult"]


def clip(optimizer: Any, max_norm: float) -> float:
    """Clip gradients that are ready to a norm over all groups; return the norm before that.

    Args:
        optimizer: megatron-core's.
        max_norm: The largest norm.
    """
    norm = optimizer.get_grad_norm()
    scale = core("optimizer.clip_grads").clip_grad_by_total_norm_fp32
    for one in optimizer.chained_optimizers:
        if parameters := one.get_parameters():
            scale(parameters, max_norm, norm, one.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8)
    return float(norm)
