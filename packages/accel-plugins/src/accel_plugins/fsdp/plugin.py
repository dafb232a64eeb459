"""The documented plugin of fully sharded data parallelism, for both versions of it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, cast

import torch
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

from accel_plugins.fsdp.autowrap import (
    POLICIES,
    classes_named,
    size_policy,
    transformer_policy,
)
from accel_plugins.fsdp.dtypes import policy_of
from accel_plugins.fsdp.env_flags import SWITCH, enable_fsdp_ram_efficient_loading
from accel_plugins.fsdp.fields import RESHARDS, member_of, prefetch_of, reshard_of
from accel_plugins.kwargs.base import expect_flags, is_count
from accel_state import environ
from accel_state.errors import SettingsError
from accel_state.settings.engines import FsdpSettings
from accel_state.settings.environ import from_environ

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from torch import nn

    from accel_state.settings.model import Settings

logger = logging.getLogger(__name__)

# What holds where neither an argument nor the environment says anything.
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
    "cpu_ram_efficient_loading": False,
    "min_num_params": 0,
}
_STATE_DICTS = {1: "FULL_STATE_DICT", 2: "SHARDED_STATE_DICT"}
_OF_BOTH_VERSIONS = {ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP}
# Fields of version 1 that version 2 has no use for, with the values that say what it does anyhow.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "backward_prefetch": ("NO_PREFETCH", "BACKWARD_PRE", BackwardPrefetch.BACKWARD_PRE),
    "limit_all_gathers": (True,),
    "state_dict_config": (),
    "optim_state_dict_config": (),
    "sync_module_states": (True,),
    "use_orig_params": (True,),
}
_OF_POLICIES = {
    "transformer_cls_names_to_wrap": "transformer_based_wrap",
    "min_num_params": "size_based_wrap",
}
_FLAGS = (
    "cpu_ram_efficient_loading",
    "use_orig_params",
    "sync_module_states",
    "forward_prefetch",
    "activation_checkpointing",
    "activation_checkpointing_offload",
    "limit_all_gathers",
)


@dataclass
class FullyShardedDataParallelPlugin:
    """How models are sharded. What is left out comes from `FSDP_*` in the environment, then the default.

    Args:
        fsdp_version: 1 for `FullyShardedDataParallel`, 2 for `fully_shard`; 1 if nothing is said.
        sharding_strategy: Version 1: a `ShardingStrategy`, its name or number; `FULL_SHARD` if nothing is
            said. Version 2 says the same with `reshard_after_forward`; hybrid sharding is a matter of
            `ParallelismConfig(dp_replicate_size=…)`.
        reshard_after_forward: Version 2: whether parameters are freed after the forward pass and gathered
            again for the backward pass; or the number of ranks to which they are resharded in between.
        backward_prefetch: Version 1: a `BackwardPrefetch`, its name, or `"NO_PREFETCH"`. Version 2 always
            gathers the next parameters early.
        mixed_precision_policy: A `MixedPrecision` (version 1) or `MixedPrecisionPolicy` (version 2), or a
            dictionary of its arguments in which dtypes may be names; else `mixed_precision` decides.
        auto_wrap_policy: Which modules are sharded on their own: `"transformer_based_wrap"`,
            `"size_based_wrap"`, `"no_wrap"`, or a function: of a module in version 2, as of
            `FullyShardedDataParallel` in version 1.
        cpu_offload: Whether parameters, gradients and the optimizer stay on the CPU; or a `CPUOffload`
            (version 1) or `CPUOffloadPolicy` (version 2).
        ignored_modules: Modules that are not sharded, or a regular expression that their names match. Their
            gradients stay on their process.
        state_dict_type: What checkpoints hold: `"FULL_STATE_DICT"`, `"SHARDED_STATE_DICT"`, or
            `"LOCAL_STATE_DICT"` (version 1).
        state_dict_config: Version 1: a `StateDictConfig`; made to suit the type if `None`.
        optim_state_dict_config: Version 1: an `OptimStateDictConfig`; made to suit the type if `None`.
        limit_all_gathers: Version 1: whether the CPU waits so that not too much is gathered at once.
        use_orig_params: Version 1: whether parameters stay visible one by one; version 2 always does that.
        param_init_fn: Version 1: gives values to the parameters of a module on the meta device.
        sync_module_states: Version 1: whether all ranks take over the values of rank 0; version 2 always
            does.
        forward_prefetch: Whether the parameters of the next block are gathered during the forward pass of
            one.
        activation_checkpointing: Whether blocks keep only their inputs for the backward pass, and compute the
            rest again.
        activation_checkpointing_offload: Whether what is kept goes to the CPU.
        cpu_ram_efficient_loading: Whether only rank 0 has the values of the model before `prepare`.
        transformer_cls_names_to_wrap: The names of the classes that `"transformer_based_wrap"` looks for;
            what the model itself names in `_no_split_modules` if nothing is said.
        min_num_params: How many parameters a module has at least that `"size_based_wrap"` shards on its own.

    Raises:
        SettingsError: A field, or the variable that stands for it, cannot be used, or not with this version.

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

    def __post_init__(self) -> None:
        given = {name for name in _OF_POLICIES if getattr(self, name)}
        from_outside = from_environ({**environ.read(), SWITCH: "true"}).fsdp or FsdpSettings()
        field_names = {one.name for one in fields(from_outside)}
        for name in (one.name for one in fields(self)):
            if getattr(self, name) is None and name in field_names:
                setattr(self, name, getattr(from_outside, name))
        for name, default in _DEFAULTS.items():
            if getattr(self, name) is None:
                setattr(self, name, default)
        if self.fsdp_version not in {1, 2}:
            raise SettingsError(f"{self._field_of('fsdp_version')}: there are the versions 1 and 2.")
        expect_flags(self, *_FLAGS)
        if isinstance(self.transformer_cls_names_to_wrap, str):
            names = str(self.transformer_cls_names_to_wrap).split(",")
            self.transformer_cls_names_to_wrap = [name.strip() for name in names if name.strip()]
        elif self.transformer_cls_names_to_wrap is not None:
            self.transformer_cls_names_to_wrap = [*self.transformer_cls_names_to_wrap]
        self._resolve_sharding()
        self._resolve_wrapping(given)
        self.set_cpu_offload()
        self.set_state_dict_type(self.state_dict_type)  # pyright: ignore[reportArgumentType]
        if self.mixed_precision_policy is not None:
            self.mixed_precision_policy = policy_of(self.mixed_precision_policy, self.version)
            self.validate_mixed_precision_policy()
        self._check_torch_version()
        if self.cpu_ram_efficient_loading:
            if not self.sync_module_states:
                raise SettingsError(
                    "FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=True, "
                    "sync_module_states=False): "
                    "values that only rank 0 has must be sent to the others; leave sync_module_states out."
                )
            enable_fsdp_ram_efficient_loading()

    @property
    def version(self) -> int:
        """1 or 2."""
        return cast("int", self.fsdp_version)

    @property
    def block_policy(self) -> str | Callable[..., Any]:
        """The name of a policy, or a function."""
        return cast("Any", self.auto_wrap_policy)

    def to_settings(self, settings: Settings) -> Settings:
        """The settings with what the choice of a strategy needs to know."""
        section = replace(settings.fsdp or FsdpSettings(), fsdp_version=self.version)
        return replace(settings, fsdp=section)

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Make the function of `auto_wrap_policy` for a model, where a name stands there.

        Raises:
            SettingsError: A class that is to be wrapped does not occur in the model.
        """
        if self.auto_wrap_policy == "transformer_based_wrap":
            names = self.transformer_cls_names_to_wrap
            self.auto_wrap_policy = transformer_policy(classes_named(model, names), self.version)
        elif self.auto_wrap_policy == "size_based_wrap":
            self.auto_wrap_policy = size_policy(cast("int", self.min_num_params), self.version)
        elif self.auto_wrap_policy == "no_wrap":
            self.auto_wrap_policy = None

    def set_mixed_precision(
        self,
        mixed_precision: torch.dtype | str,
        buffer_autocast: bool = False,
        override: bool = False,
    ) -> None:
        """Compute in a precision, unless `mixed_precision_policy` says how already.

        Args:
            mixed_precision: `"fp16"`, `"bf16"`, or a dtype; `"no"` changes nothing.
            buffer_autocast: Version 1: whether buffers stay in float32.
            override: Whether a policy that was given is replaced.
        """
        dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16, "no": None}
        if isinstance(mixed_precision, str) and mixed_precision not in dtypes:
            raise SettingsError(
                f"set_mixed_precision({mixed_precision!r}): expected one of {[*dtypes]} or a torch.dtype."
            )
        dtype = dtypes[mixed_precision] if isinstance(mixed_precision, str) else mixed_precision
        if dtype is None or (self.mixed_precision_policy is not None and not override):
            return
        if self.version == 2:
            # Sums of gradients over many ranks lose too much in eight bits, and overflow in float16.
            self.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        else:
            buffers = torch.float32 if buffer_autocast else dtype
            self.mixed_precision_policy = MixedPrecision(
                param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=buffers
            )

    def validate_mixed_precision_policy(self) -> None:
        """Refuse a policy of the other version.

        Raises:
            SettingsError: It is one.
        """
        kind = MixedPrecisionPolicy if self.version == 2 else MixedPrecision
        if self.mixed_precision_policy is not None and not isinstance(self.mixed_precision_policy, kind):
            raise SettingsError(
                f"{self._field_of('mixed_precision_policy')}: with fsdp_version={self.version} it must be a "
                f"{kind.__name__}."
            )

    def set_state_dict_type(self, state_dict_type: StateDictType | str | None = None) -> None:
        """Choose what checkpoints hold, and with it the two configurations that were not given.

        Args:
            state_dict_type: One, or its name or number; the present one if `None`.

        Raises:
            SettingsError: There is no such type, or not in this version.
        """
        chosen = self.state_dict_type if state_dict_type is None else state_dict_type
        if chosen is None:
            chosen = _STATE_DICTS[self.version]
        changed = chosen is not self.state_dict_type and isinstance(self.state_dict_type, StateDictType)
        self.state_dict_type = member_of(StateDictType, chosen, "state_dict_type")
        if self.version == 2:
            if self.state_dict_type is StateDictType.LOCAL_STATE_DICT:
                raise SettingsError(
                    "FullyShardedDataParallelPlugin(state_dict_type='LOCAL_STATE_DICT', fsdp_version=2): "
                    "there "
                    "are no flat parameters in version 2; use 'SHARDED_STATE_DICT'."
                )
            return
        if self.state_dict_type is StateDictType.FULL_STATE_DICT:
            made = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
            made_optim = FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True)
        elif self.state_dict_type is StateDictType.SHARDED_STATE_DICT:
            made = ShardedStateDictConfig(offload_to_cpu=True)
            made_optim = ShardedOptimStateDictConfig(offload_to_cpu=True)
        else:
            return
        if changed or self.state_dict_config is None:
            self.state_dict_config = made
        if changed or self.optim_state_dict_config is None:
            self.optim_state_dict_config = made_optim

    def set_cpu_offload(self) -> None:
        """Make the offloading policy of the version out of a truth value."""
        wanted = self.cpu_offload
        if isinstance(wanted, bool):
            self.cpu_offload = (
                (CPUOffloadPolicy() if wanted else OffloadPolicy())
                if self.version == 2
                else CPUOffload(offload_params=wanted)
            )
        self.validate_cpu_offload()

    def validate_cpu_offload(self) -> None:
        """Refuse an offloading policy of the other version.

        Raises:
            SettingsError: It is one.
        """
        kind = OffloadPolicy if self.version == 2 else CPUOffload
        if not isinstance(self.cpu_offload, kind):
            raise SettingsError(
                f"{self._field_of('cpu_offload')}: with fsdp_version={self.version} it must be True, False "
                f"or a {'CPUOffloadPolicy' if self.version == 2 else 'CPUOffload'}."
            )

    def _resolve_sharding(self) -> None:
        given, reshard = self.sharding_strategy, self.reshard_after_forward
        if self.version == 1:
            # Config files of version 1 say it under the name of version 2.
            if given is None and reshard is not None and not isinstance(reshard, bool):
                given, reshard = cast("Any", reshard), None
            if given is None and reshard is False:
                given = ShardingStrategy.SHARD_GRAD_OP
            self.sharding_strategy = member_of(
                ShardingStrategy, "FULL_SHARD" if given is None else given, "sharding_strategy"
            )
            self.reshard_after_forward = RESHARDS[self.sharding_strategy]
            self.backward_prefetch = prefetch_of(self.backward_prefetch)
            return
        if given is not None:
            self.sharding_strategy = member_of(ShardingStrategy, given, "sharding_strategy")
            if self.sharding_strategy not in _OF_BOTH_VERSIONS:
                raise SettingsError(
                    f"{self._field_of('sharding_strategy')} with fsdp_version=2: hybrid sharding is "
                    "ParallelismConfig(dp_replicate_size=…, dp_shard_size=…), and no sharding at all is an "
                    "Accelerator without fsdp_plugin."
                )
            reshard = RESHARDS[self.sharding_strategy] if reshard is None else reshard
        if isinstance(reshard, (str, ShardingStrategy)):
            reshard = reshard_of(reshard)
        self.reshard_after_forward = True if reshard is None else reshard
        if not isinstance(self.reshard_after_forward, int):
            raise SettingsError(
                f"{self._field_of('reshard_after_forward')}: expected True, False or a number of ranks."
            )

    def _resolve_wrapping(self, given: Collection[str]) -> None:
        self._resolve_policy()
        for name, policy in _OF_POLICIES.items():
            # A launcher exports what a file or its own defaults say, whether or not that has a use.
            if name in given and self.auto_wrap_policy != policy:
                logger.warning("%s has no effect without auto_wrap_policy=%r.", self._field_of(name), policy)

    def _resolve_policy(self) -> None:
        policy = self.auto_wrap_policy
        if isinstance(policy, str):
            name = policy.lower()
            if name not in POLICIES:
                near = get_close_matches(name, POLICIES, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are {[*POLICIES]}."
                raise SettingsError(f"{self._field_of('auto_wrap_policy')}: no such policy; {hint}")
            self.auto_wrap_policy = name
            if name == "size_based_wrap" and not is_count(self.min_num_params, least=0):
                raise SettingsError(
                    f"{self._field_of('min_num_params')}: expected a whole number of 0 or more."
                )
        elif not callable(policy):
            raise SettingsError(
                f"{self._field_of('auto_wrap_policy')}: expected a function or one of {[*POLICIES]}."
            )

    def _check_torch_version(self) -> None:
        if self.version == 1:
            return
        if self.param_init_fn is not None:
            raise SettingsError(
                f"{self._field_of('param_init_fn')} with fsdp_version=2: give rank 0 a model with values, "
                "and set "
                "cpu_ram_efficient_loading=True; or use version 1."
            )
        for name, silent in _WITHOUT_EFFECT.items():
            value = getattr(self, name)
            if value is not None and value not in silent:
                logger.warning("%s has no effect with fsdp_version=2.", self._field_of(name))

    def _field_of(self, name: str) -> str:
        return f"FullyShardedDataParallelPlugin({name}={getattr(self, name)!r})"
