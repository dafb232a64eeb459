"""The options of FSDP (`FullyShardedDataParallelPlugin`), and how each field is read for versions 1 and 2."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from accel_plugins.fsdp.blocks import POLICIES, classes_named, size_policy
from accel_plugins.kwargs import expect, expect_counts, expect_flags, resolve_fields
from accel_plugins.sharding.state import StateForm
from accel_state import environ
from accel_state.errors import SettingsError, did_you_mean
from accel_state.libraries import is_torch_version
from accel_state.logging import get_logger
from accel_state.settings.engines import FsdpSettings
from accel_state.settings.model import Settings

logger = get_logger(__name__)

EnumT = TypeVar("EnumT", bound=Enum)

# The defaults of fields that neither an argument nor the environment sets.
_DEFAULTS: dict[str, Any] = {
    "fsdp_version": 1,
    "backward_prefetch": "NO_PREFETCH",
    "auto_wrap_policy": "NO_WRAP",
    "cpu_offload": False,
    "use_orig_params": True,
    "sync_module_states": True,
    "forward_prefetch": False,
    "activation_checkpointing": False,
    "activation_checkpointing_offload": False,
    "activation_checkpointing_every": 1,
    "cpu_ram_efficient_loading": False,
    "min_num_params": 0,
    "xla": False,
    "xla_fsdp_v2": False,
    "xla_fsdp_grad_ckpt": False,
}
_POLICY_OF = {
    "transformer_cls_names_to_wrap": "transformer_based_wrap",
    "min_num_params": "size_based_wrap",
}
"""The policies that read these fields."""
_VERSION_2: dict[str, tuple[Any, ...]] = {
    "backward_prefetch": ("NO_PREFETCH", "BACKWARD_PRE"),
    "limit_all_gathers": (True,),
    "sync_module_states": (True,),
    "use_orig_params": (True,),
    "state_dict_config": (),
    "optim_state_dict_config": (),
}
"""Fields that version 2 does not read, with the values that it behaves by."""

RESHARDS = {
    ShardingStrategy.FULL_SHARD: True,
    ShardingStrategy.SHARD_GRAD_OP: False,
    ShardingStrategy.HYBRID_SHARD: True,
    ShardingStrategy._HYBRID_SHARD_ZERO2: False,
    ShardingStrategy.NO_SHARD: False,
}
"""Whether parameters are freed after the forward pass under each strategy of version 1."""


@dataclass
class FullyShardedDataParallelPlugin:
    """Options of FSDP. Arguments take precedence over `FSDP_*` in the environment, these over defaults.

    Args:
        fsdp_version: 1 for `FullyShardedDataParallel`, 2 for `fully_shard`; default 1.
        sharding_strategy: Version 1: a `ShardingStrategy`, its name or number; default `FULL_SHARD`. In
            version 2, use `reshard_after_forward`, and `ParallelismConfig(dp_replicate_size=…)` for hybrid
            sharding.
        reshard_after_forward: Version 2: whether parameters are freed after the forward pass and all-gathered
            again for the backward pass; or the number of ranks over which they are resharded in between.
        backward_prefetch: Version 1: a `BackwardPrefetch`, its name, or `"NO_PREFETCH"`. Version 2 always
            prefetches in the backward pass.
        mixed_precision_policy: A `MixedPrecision` (version 1) or `MixedPrecisionPolicy` (version 2), or a
            dictionary of its arguments in which dtypes may be names; derived from `mixed_precision` if
            `None`.
        float32_modules: Version 2: modules that compute in float32 under mixed precision, such as norms,
            routers and heads: names of their classes, or regular expressions that match their full names.
        auto_wrap_policy: The modules to shard separately: `"transformer_based_wrap"`, `"size_based_wrap"`,
            `"no_wrap"`, or a function (version 1: as for `FullyShardedDataParallel`; else of a module).
        cpu_offload: Whether parameters, gradients and optimizer state are offloaded to the CPU; or a
            `CPUOffload` (version 1) or `CPUOffloadPolicy` (version 2).
        ignored_modules: Modules whose parameters are not sharded and whose gradients are not reduced; or a
            regular expression that matches their full names.
        state_dict_type: The form of checkpoints: `"FULL_STATE_DICT"` or `"SHARDED_STATE_DICT"`. Version 1
            writes shards for `"LOCAL_STATE_DICT"`, too, and warns.
        state_dict_config: Version 1: a `StateDictConfig`; derived from the type if `None`.
        optim_state_dict_config: Version 1: an `OptimStateDictConfig`; likewise.
        limit_all_gathers: Version 1: whether the CPU waits so that only two all-gathers are in flight.
        use_orig_params: Version 1: whether the original parameters stay visible; version 2 always keeps them.
        param_init_fn: Version 1: materialises a module on the meta device.
        sync_module_states: Version 1: whether rank 0 broadcasts its weights; version 2 always does.
        forward_prefetch: Whether the next block's parameters are prefetched in the forward pass.
        activation_checkpointing: Whether blocks recompute their activations in the backward pass.
        activation_checkpointing_offload: Whether saved activations are offloaded to the CPU.
        activation_checkpointing_modules: Version 2: the modules to which these two apply, instead of blocks:
            names of classes, and regular expressions that match full names.
        activation_checkpointing_every: Version 2: apply them to every n-th of these modules or blocks only.
        cpu_ram_efficient_loading: Whether only rank 0 loads the weights before `prepare`.
        transformer_cls_names_to_wrap: Names of the classes that `"transformer_based_wrap"` shards; the
            model's `_no_split_modules` if `None`.
        min_num_params: Least number of parameters of a module that `"size_based_wrap"` shards.
        xla: Whether the model is sharded over XLA devices.
        xla_fsdp_v2: With `xla`: whether the compiler shards (SPMD), in one process for all devices.
        xla_fsdp_grad_ckpt: With `xla`: whether blocks recompute their activations in the backward pass.

    Raises:
        SettingsError: The value of a field, or of its variable, is invalid, or not supported in the version.

    Example:
        >>> plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="size_based_wrap")
        >>> plugin.reshard_after_forward, plugin.state_dict_type.name
        (True, 'SHARDED_STATE_DICT')
    """

    fsdp_version: int | None = None
    sharding_strategy: ShardingStrategy | str | None = None
    reshard_after_forward: ShardingStrategy | str | bool | int | None = None
    backward_prefetch: BackwardPrefetch | str | None = None
    mixed_precision_policy: MixedPrecision | MixedPrecisionPolicy | dict[str, Any] | None = None
    auto_wrap_policy: Callable[..., Any] | str | None = None
    cpu_offload: CPUOffload | CPUOffloadPolicy | OffloadPolicy | bool | None = None
    ignored_modules: Iterable[nn.Module] | str | None = None
    state_dict_type: StateDictType | str | None = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Callable[[nn.Module], None] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: list[str] | None = None
    min_num_params: int | None = None
    xla: bool | None = None
    xla_fsdp_v2: bool | None = None
    xla_fsdp_grad_ckpt: bool | None = None
    float32_modules: Iterable[str] | str | None = None
    activation_checkpointing_modules: Sequence[str] | None = None
    activation_checkpointing_every: int | None = None

    def __post_init__(self) -> None:
        # The launcher exports these from config files and its defaults even if the policy ignores them.
        unset = {name for name in _POLICY_OF if not getattr(self, name)}
        resolve_fields(self, "fsdp", _DEFAULTS)
        expect(self, "fsdp_version", "1 or 2", self.fsdp_version in {1, 2})
        expect_flags(self)
        if isinstance(self.transformer_cls_names_to_wrap, str):
            names = str(self.transformer_cls_names_to_wrap).split(",")
            self.transformer_cls_names_to_wrap = [name.strip() for name in names if name.strip()]
        elif self.transformer_cls_names_to_wrap is not None:
            self.transformer_cls_names_to_wrap = [*self.transformer_cls_names_to_wrap]
        expect_counts(self, "activation_checkpointing_every")
        names, every = self.activation_checkpointing_modules, self.activation_checkpointing_every
        is_list = names is None or (isinstance(names, (list, tuple)) and len(names) > 0)
        expect(self, "activation_checkpointing_modules", "a list of names, or None", is_list)
        is_used = self.activation_checkpointing or self.activation_checkpointing_offload
        if not is_used or self.version == 1 or self.xla:
            wanted = "with activation_checkpointing=True and fsdp_version=2, and without xla"
            expect(self, "activation_checkpointing_modules", f"None, or a list {wanted}", names is None)
            expect(self, "activation_checkpointing_every", f"1, or more {wanted}", every == 1)
        self._resolve_sharding()
        self._resolve_policy()
        self.set_cpu_offload()
        self.set_state_dict_type(self.state_dict_type)  # pyright: ignore[reportArgumentType]
        if self.mixed_precision_policy is not None:
            self.mixed_precision_policy = policy_of(self.mixed_precision_policy, self.version)
            self.validate_mixed_precision_policy()
            policy: Any = self.mixed_precision_policy
            is_unset = self.version == 2 and policy.param_dtype is not None and policy.reduce_dtype is None
            if is_unset and is_torch_version(">=", "2.15"):
                logger.warning_once(
                    "FullyShardedDataParallelPlugin: mixed_precision_policy has no reduce_dtype. torch 2.15 "
                    "reduces gradients in the dtype of the sharded parameters, older versions in "
                    f"{policy.param_dtype}: set reduce_dtype to choose one."
                )
        wanted = (
            "None with fsdp_version=2: materialise the model on rank 0, with cpu_ram_efficient_loading=True"
        )
        expect(self, "param_init_fn", wanted, self.version == 1 or self.param_init_fn is None)
        wanted = "None with fsdp_version=1"
        expect(self, "float32_modules", wanted, self.version == 2 or not self.float32_modules)
        if self.float32_modules is not None:
            given = self.float32_modules
            self.float32_modules = [given] if isinstance(given, str) else [*given]
        for name, policy in _POLICY_OF.items():
            if name not in unset and self.auto_wrap_policy != policy:
                logger.warning("%s has no effect without auto_wrap_policy=%r.", self._field_of(name), policy)
        for name, values in _VERSION_2.items() if self.version == 2 else ():
            value = getattr(self, name)
            if value is not None and getattr(value, "name", value) not in values:
                logger.warning("%s has no effect with fsdp_version=2.", self._field_of(name))
        if self.cpu_ram_efficient_loading:
            wanted = "True with cpu_ram_efficient_loading, since only rank 0 has the weights"
            expect(self, "sync_module_states", wanted, bool(self.sync_module_states))
            enable_fsdp_ram_efficient_loading()

    @property
    def version(self) -> int:
        """FSDP version, 1 or 2."""
        return cast("int", self.fsdp_version)

    def to_settings(self, settings: Settings) -> Settings:
        """Return the settings with the fields by which the strategy is chosen."""
        chosen = {"fsdp_version": self.version, "xla": self.xla, "xla_fsdp_v2": self.xla_fsdp_v2}
        return replace(settings, fsdp=replace(settings.fsdp or FsdpSettings(), **chosen))

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Replace the name in `auto_wrap_policy` by the policy's function for a model.

        Raises:
            SettingsError: The model has no module of a class to wrap.
        """
        if self.auto_wrap_policy == "transformer_based_wrap":
            kinds = classes_named(model, self.transformer_cls_names_to_wrap)
            self.auto_wrap_policy = partial(transformer_auto_wrap_policy, transformer_layer_cls=kinds)
            if self.version == 2:
                self.auto_wrap_policy = lambda module: isinstance(module, (*kinds,))
        elif self.auto_wrap_policy == "size_based_wrap":
            least = self.min_num_params or 0
            self.auto_wrap_policy = partial(size_based_auto_wrap_policy, min_num_params=least)
            if self.version == 2:
                self.auto_wrap_policy = size_policy(least)
        elif self.auto_wrap_policy == "no_wrap":
            self.auto_wrap_policy = None

    def set_mixed_precision(
        self, mixed_precision: torch.dtype | str, buffer_autocast: bool = False, override: bool = False
    ) -> None:
        """Derive `mixed_precision_policy` from a precision, unless it is set.

        Args:
            mixed_precision: `"fp16"`, `"bf16"`, or a dtype; `"no"` changes nothing.
            buffer_autocast: Version 1: whether buffers stay in float32.
            override: Whether to replace a policy that is set.
        """
        dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16, "no": None}
        dtype = dtypes.get(mixed_precision, "") if isinstance(mixed_precision, str) else mixed_precision
        if isinstance(dtype, str):
            raise SettingsError(
                f"set_mixed_precision({mixed_precision!r}): expected a torch.dtype or {[*dtypes]}."
            )
        if dtype is None or (self.mixed_precision_policy is not None and not override):
            return
        if self.version == 2:
            # Gradients summed over many ranks lose too much in bfloat16, and overflow in float16.
            self.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        else:
            buffers = torch.float32 if buffer_autocast else dtype
            self.mixed_precision_policy = MixedPrecision(
                param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=buffers
            )

    def validate_mixed_precision_policy(self) -> None:
        """Check that the precision policy is of this FSDP version's class.

        Raises:
            SettingsError: The policy is of the other version.
        """
        kind = MixedPrecisionPolicy if self.version == 2 else MixedPrecision
        wanted = f"a {kind.__name__} with fsdp_version={self.version}"
        expect(self, "mixed_precision_policy", wanted, isinstance(self.mixed_precision_policy, kind | None))

    def set_state_dict_type(self, state_dict_type: StateDictType | str | None = None) -> None:
        """Set the form of checkpoints, and the two configurations that are not set.

        Args:
            state_dict_type: A `StateDictType`, its name or number; the current one if `None`.

        Raises:
            SettingsError: torch has no such type, or this version does not support it.
        """
        chosen = self.state_dict_type if state_dict_type is None else state_dict_type
        if chosen is None:
            chosen = "SHARDED_STATE_DICT" if self.version == 2 and not self.xla else "FULL_STATE_DICT"
        changed = chosen is not self.state_dict_type and isinstance(self.state_dict_type, StateDictType)
        self.state_dict_type = member_of(StateDictType, chosen, "state_dict_type")
        is_local = self.state_dict_type is StateDictType.LOCAL_STATE_DICT
        wanted = "'SHARDED_STATE_DICT' or 'FULL_STATE_DICT' with fsdp_version=2"
        expect(self, "state_dict_type", wanted, self.version == 1 or not is_local)
        if is_local:
            logger.warning(
                "FullyShardedDataParallelPlugin(state_dict_type='LOCAL_STATE_DICT'): checkpoints have shards "
                "that any number of processes can read, as with 'SHARDED_STATE_DICT'."
            )
        elif self.version == 1:
            kinds: Any = (ShardedStateDictConfig, ShardedOptimStateDictConfig)
            options = {"offload_to_cpu": True}
            if self.state_dict_type is StateDictType.FULL_STATE_DICT:
                kinds, options["rank0_only"] = (FullStateDictConfig, FullOptimStateDictConfig), True
            for name, kind in zip(("state_dict_config", "optim_state_dict_config"), kinds, strict=True):
                if changed or getattr(self, name) is None:
                    setattr(self, name, kind(**options))

    def set_cpu_offload(self) -> None:
        """Replace a flag in `cpu_offload` by the offload policy of this FSDP version."""
        wanted = self.cpu_offload
        if isinstance(wanted, bool):
            self.cpu_offload = (
                (CPUOffloadPolicy() if wanted else OffloadPolicy())
                if self.version == 2
                else CPUOffload(offload_params=wanted)
            )
        self.validate_cpu_offload()

    def validate_cpu_offload(self) -> None:
        """Check that the offload policy is of this FSDP version's class.

        Raises:
            SettingsError: The policy is of the other version.
        """
        kind = OffloadPolicy if self.version == 2 else CPUOffload
        name = "CPUOffloadPolicy" if self.version == 2 else "CPUOffload"
        wanted = f"True, False or a {name} with fsdp_version={self.version}"
        expect(self, "cpu_offload", wanted, isinstance(self.cpu_offload, kind))

    def _resolve_sharding(self) -> None:
        strategy, reshard = self.sharding_strategy, self.reshard_after_forward
        if self.version == 1:
            if strategy is None:  # config files of version 1 store it under version 2's key
                names = {None: "FULL_SHARD", True: "FULL_SHARD", False: "SHARD_GRAD_OP"}
                strategy = names.get(cast("Any", reshard), cast("Any", reshard))
            self.sharding_strategy = member_of(ShardingStrategy, strategy, "sharding_strategy")
            self.reshard_after_forward = RESHARDS[self.sharding_strategy]
            prefetch = self.backward_prefetch
            is_none = prefetch is None or str(prefetch).upper() == "NO_PREFETCH"
            self.backward_prefetch = (
                None if is_none else member_of(BackwardPrefetch, prefetch, "backward_prefetch")
            )
            return
        if strategy is not None:
            self.sharding_strategy = member_of(ShardingStrategy, strategy, "sharding_strategy")
            wanted = "FULL_SHARD or SHARD_GRAD_OP with fsdp_version=2; for hybrid sharding, use "
            wanted += "ParallelismConfig(dp_replicate_size=…, dp_shard_size=…)"
            known = {ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP}
            expect(self, "sharding_strategy", wanted, self.sharding_strategy in known)
            reshard = RESHARDS[self.sharding_strategy] if reshard is None else reshard
        if str(reshard).lower() in {"true", "false"}:
            reshard = str(reshard).lower() == "true"
        elif isinstance(reshard, (str, ShardingStrategy)):  # a strategy of version 1
            reshard = RESHARDS[member_of(ShardingStrategy, reshard, "reshard_after_forward")]
        self.reshard_after_forward = True if reshard is None else reshard
        is_number = isinstance(self.reshard_after_forward, int)
        expect(self, "reshard_after_forward", "True, False or a number of ranks", is_number)

    def _resolve_policy(self) -> None:
        policy = self.auto_wrap_policy
        policy = policy.lower() if isinstance(policy, str) else policy
        wanted = f"a function or one of {[*POLICIES]}"
        expect(self, "auto_wrap_policy", wanted, callable(policy) or policy in POLICIES)
        self.auto_wrap_policy = policy
        if policy == "size_based_wrap":
            expect_counts(self, "min_num_params", least=0)

    def _field_of(self, name: str) -> str:
        return f"FullyShardedDataParallelPlugin({name}={getattr(self, name)!r})"


def member_of(kind: type[EnumT], value: Any, field: str) -> EnumT:
    """Return a member of one of torch's enumerations, from the member, its name or its number."""
    if isinstance(value, kind):
        return value
    names = {member.name: member for member in kind} | {str(member.value): member for member in kind}
    name = str(value).upper()
    member = names.get(name) or names.get(f"_{name}")
    if member is None:
        hint = did_you_mean(name, names, f"there are {[member.name for member in kind]}.")
        raise SettingsError(
            f"FullyShardedDataParallelPlugin({field}={value!r}): no such {kind.__name__}; {hint}"
        )
    return member


_SHORT = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "half": "float16", "float": "float32"}


def policy_of(policy: Any, version: int) -> Any:
    """Build an FSDP precision policy from a dictionary of its arguments, in which dtypes may be names."""
    if not isinstance(policy, Mapping):
        return policy
    kind = MixedPrecisionPolicy if version == 2 else MixedPrecision
    arguments: dict[str, Any] = dict(policy)
    for name, value in policy.items():
        if str(name).endswith("_dtype") and isinstance(value, str):
            dtype = getattr(torch, _SHORT.get(value, value).removeprefix("torch."), None)
            if not isinstance(dtype, torch.dtype):
                raise SettingsError(
                    f"FullyShardedDataParallelPlugin(mixed_precision_policy={{{name!r}: {value!r}}}): torch "
                    "has no such dtype. Use 'float32', 'bfloat16' or 'float16'."
                )
            arguments[name] = dtype
    return kind(**arguments)


def form_of(plugin: FullyShardedDataParallelPlugin) -> StateForm:
    """Return the form of the plugin's current `state_dict_type`, which may be changed later."""
    return StateForm.FULL if plugin.state_dict_type is StateDictType.FULL_STATE_DICT else StateForm.SHARDED


_RAM_EFFICIENT = "FSDP_CPU_RAM_EFFICIENT_LOADING"


def enable_fsdp_ram_efficient_loading() -> None:
    """Make `from_pretrained` of transformers read weights on rank 0 only, from now on."""
    environ.publish({"ACCELERATE_USE_FSDP": "true", _RAM_EFFICIENT: "true"})


def disable_fsdp_ram_efficient_loading() -> None:
    """Make `from_pretrained` of transformers read weights on every rank, from now on."""
    environ.publish({_RAM_EFFICIENT: "false"})
