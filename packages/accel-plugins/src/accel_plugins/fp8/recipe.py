"""FP8: the options of its libraries, the record `Recipe`, and what both libraries need of models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor, nn

from accel_ops.tree import is_dtensor
from accel_plugins import fp8
from accel_plugins.full_parameters import group_tied_names
from accel_plugins.kwargs import KwargsHandler, expect, expect_counts, expect_flags, resolve_fields
from accel_state.deprecation import deprecated
from accel_state.errors import SettingsError
from accel_state.frozen import frozen
from accel_state.libraries import is_installed
from accel_state.torch_private import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from accel_plugins.strategy import Strategy
    from accel_state.settings.model import Settings

Backend = Literal["MSAMP", "TE"]
"""The libraries that `FP8RecipeKwargs` chooses from."""
FP8Format = Literal["HYBRID", "E4M3", "E5M2"]
"""The formats of TransformerEngine."""
AmaxComputeAlgorithm = Literal["max", "most_recent"]
"""How TransformerEngine computes the scale from the recorded maxima."""
OptLevel = Literal["O1", "O2"]
"""The levels of MS-AMP."""


@frozen
class Recipe:
    """How a run computes in FP8; modules that are not converted compute in bfloat16.

    Args:
        backend: The library that computes, for `Accelerator.fp8_backend`.
        convert: Changes models in place, before they are wrapped or sharded, and returns a map from every
            replaced parameter to its replacement. Modules that shared a parameter share it afterwards.
        compute_scales: Called with the prepared models, still wrapped, after every optimizer step and every
            load: recomputes values that depend on weights.
        reduces_maxima: Whether every forward pass in training is a collective over all ranks.
    """

    backend: str
    convert: Callable[[Sequence[nn.Module]], Mapping[Tensor, Tensor]]
    compute_scales: Callable[[Sequence[nn.Module]], None] | None = None
    reduces_maxima: bool = False


AO_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8")
"""Names that `AORecipeKwargs(config=…)` accepts."""

TE_RECIPES = ("delayed", "current", "mxfp8", "nvfp4")
"""Names that `TERecipeKwargs(recipe=…)` accepts."""


def is_ao_config(value: object) -> bool:
    """Return whether a value is a configuration of torchao's FP8 training, which is slow to import.

    Example:
        >>> is_ao_config({"pad_inner_dim": True})
        False
    """
    names = {"Float8LinearConfig", "MXFP8TrainingOpConfig"}
    return any(
        kind.__name__ in names and kind.__module__.startswith("torchao.") for kind in type(value).__mro__
    )


@dataclass
class AORecipeKwargs(KwargsHandler):
    """Train in FP8 with torchao; pass it to `Accelerator(mixed_precision="fp8", kwargs_handlers=[…])`.

    Args:
        config: A `torchao.float8.Float8LinearConfig`, or the name of a recipe (or torchao's enum of them):
            `"tensorwise"` (fastest), `"rowwise"`, `"rowwise_with_gw_hp"` (gradients of weights in high
            precision; most accurate) or `"mxfp8"` (blocks of 32 values; compute capability 10.0 and newer,
            emulated on a CPU; in one process, with DDP and FSDP2). `None`: `"tensorwise"`, emulated on a
            CPU; the field then has the `Float8LinearConfig` of that recipe if torchao is installed.
        module_filter_func: Called with a module and its name; returns whether to convert it. `None`: linear
            layers whose sizes are divisible by 16 (`"mxfp8"`: 32), except the first and the last one.
        pad_inner_dim: Whether inner dims are padded to multiples of 16 (`"mxfp8"`: the rows of inputs to
            multiples of 32); `ACCELERATE_FP8_PAD_INNER_DIM`, else true.
        enable_fsdp_float8_all_gather: Whether FSDP2 all-gathers converted weights in 8 bits where weights
            are scaled tensorwise; `ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER`, else true. Without FSDP2
            there is no such all-gather.
        force_recompute_fp8_weight_in_bwd: Whether torchao converts weights again in the backward pass instead
            of keeping them from the forward pass, which saves memory; torchao's default if `None`. Recent
            versions of torchao (0.18, for instance) decide this themselves, and ignore it.

    Raises:
        SettingsError: A field is unknown, or contradicts `config`.

    Example:
        >>> AORecipeKwargs(config="rowwise").pad_inner_dim
        True
    """

    config: Any = None
    module_filter_func: Callable[[nn.Module, str], bool] | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None
    force_recompute_fp8_weight_in_bwd: bool | None = None

    def __post_init__(self) -> None:
        flags = ("pad_inner_dim", "enable_fsdp_float8_all_gather", "force_recompute_fp8_weight_in_bwd")
        expect_flags(self, *flags)
        if isinstance(self.config, Enum):
            self.config = self.config.value
        known = self.config is None or self.config in AO_RECIPES or is_ao_config(self.config)
        expect(self, "config", f"a Float8LinearConfig of torchao, or one of {[*AO_RECIPES]}", known)
        is_function = self.module_filter_func is None or callable(self.module_filter_func)
        expect(self, "module_filter_func", "a function of a module and its name", is_function)
        tensorwise = self.config is None or self.config == "tensorwise"
        can_gather = tensorwise or not isinstance(self.config, str) or not self.enable_fsdp_float8_all_gather
        wanted = f"False or None with config={self.config!r}: weights scaled tensorwise alone are so gathered"
        expect(self, "enable_fsdp_float8_all_gather", wanted, can_gather)
        if self.config is None or isinstance(self.config, str):
            resolve_fields(self, "fp8", {"pad_inner_dim": True, "enable_fsdp_float8_all_gather": tensorwise})
            self.enable_fsdp_float8_all_gather = tensorwise and bool(self.enable_fsdp_float8_all_gather)
            if self.config is None and is_installed("torchao"):
                self.config = self._default = import_module("torchao.float8").Float8LinearConfig(
                    pad_inner_dim=bool(self.pad_inner_dim),
                    enable_fsdp_float8_all_gather=self.enable_fsdp_float8_all_gather,
                    force_recompute_fp8_weight_in_bwd=bool(self.force_recompute_fp8_weight_in_bwd),
                )
            return
        for name in flags:
            argument, configured = getattr(self, name), bool(getattr(self.config, name, False))
            agrees = argument is None or bool(argument) == configured
            expect(self, name, f"{configured!r}, as in config", agrees)
            setattr(self, name, configured)

    @property
    def is_default(self) -> bool:
        """Whether `config` is the default that replaced `None`."""
        return self.config is getattr(self, "_default", None)

    @property
    def emulate(self) -> bool:
        """Whether the configuration emulates FP8, without its instructions."""
        preference = str(getattr(self.config, "kernel_preference", ""))
        return bool(getattr(self.config, "emulate", False)) or preference.endswith("EMULATED")


@dataclass
class TERecipeKwargs(KwargsHandler):
    """Train in FP8 with TransformerEngine. `None` means the variable `ACCELERATE_FP8_…`, else as below.

    Args:
        use_autocast_during_eval: Whether evaluation also computes in FP8; default false.
        margin: Margin of the scaling factors, in powers of 2; default 0.
        interval: Steps between two computations of the scaling factors; default 1. TransformerEngine 2
            computes them in every step, and accepts nothing else.
        fp8_format: `"HYBRID"` (E4M3 forward, E5M2 backward), `"E4M3"` or `"E5M2"`; default `"HYBRID"`, which
            block-scaled recipes replace by E4M3.
        amax_history_len: Length of the history of delayed scaling, in steps; default 1024.
        amax_compute_algo: `"max"` or `"most_recent"` of the history; default `"most_recent"`.
        override_linear_precision: Whether fprop, dgrad and wgrad compute in higher precision; default all
            false. TransformerEngine 2 has no such choice.
        use_mxfp8_block_scaling: The same as `recipe="mxfp8"`.
        recipe: `"delayed"` (the default), `"current"` (scales of the current values), `"mxfp8"` or `"nvfp4"`
            (blocks; compute capability 10.0 and newer), as far as the installed version has them.

    Raises:
        SettingsError: A field is unknown, out of its range, or contradicts another one.
    """

    use_autocast_during_eval: bool | None = None
    margin: int | None = None
    interval: int | None = None
    fp8_format: FP8Format | None = None
    amax_history_len: int | None = None
    amax_compute_algo: AmaxComputeAlgorithm | None = None
    override_linear_precision: tuple[bool, bool, bool] | None = None
    use_mxfp8_block_scaling: bool | None = None
    recipe: Literal["delayed", "current", "mxfp8", "nvfp4"] | None = field(default=None, kw_only=True)

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "use_autocast_during_eval": False,
        "margin": 0,
        "interval": 1,
        "fp8_format": "HYBRID",
        "amax_history_len": 1024,
        "amax_compute_algo": "most_recent",
        "override_linear_precision": (False, False, False),
        "use_mxfp8_block_scaling": False,
    }

    def __post_init__(self) -> None:
        blocks = self.use_mxfp8_block_scaling
        resolve_fields(self, "fp8", self.DEFAULTS)
        expect_flags(self)
        expect_counts(self, "margin", least=0)
        expect_counts(self, "interval", "amax_history_len")
        # Checked below.
        self.fp8_format = str(self.fp8_format).upper()  # pyright: ignore[reportAttributeAccessIssue]
        self.amax_compute_algo = str(self.amax_compute_algo).lower()  # pyright: ignore[reportAttributeAccessIssue]
        for name, wanted in {
            "fp8_format": ("HYBRID", "E4M3", "E5M2"),
            "amax_compute_algo": ("max", "most_recent"),
            "recipe": (None, *TE_RECIPES),
        }.items():
            expect(self, name, f"one of {[*wanted]}", getattr(self, name) in wanted)
        precision: Any = self.override_linear_precision
        is_valid = len(precision) == 3 and all(isinstance(flag, bool) for flag in precision)
        expect(self, "override_linear_precision", "three of True and False", is_valid)
        agrees = blocks is None or self.recipe in {None, "mxfp8" if blocks else self.recipe}
        expect(self, "recipe", f"None with use_mxfp8_block_scaling={blocks!r}, which contradicts it", agrees)
        self.recipe = self.recipe or ("mxfp8" if self.use_mxfp8_block_scaling else "delayed")
        self.use_mxfp8_block_scaling = self.recipe == "mxfp8"


@dataclass
class MSAMPRecipeKwargs(KwargsHandler):
    """Options of MS-AMP, which is no longer developed: a run that asks for it is refused.

    Args:
        opt_level: `"O1"` or `"O2"`; `ACCELERATE_FP8_OPT_LEVEL`, else `"O2"`.

    Raises:
        SettingsError: The level does not exist.

    Example:
        >>> MSAMPRecipeKwargs().opt_level
        'O2'
    """

    opt_level: OptLevel | None = None

    def __post_init__(self) -> None:
        resolve_fields(self, "fp8", {"opt_level": "O2"})
        expect(self, "opt_level", "'O1' or 'O2'", self.opt_level in {"O1", "O2"})


@deprecated(
    since="0.1", until="1.0", instead="TERecipeKwargs or MSAMPRecipeKwargs (or AORecipeKwargs, for torchao)"
)
@dataclass
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    """The legacy form of `TERecipeKwargs` and `MSAMPRecipeKwargs`, with the fields of both; use one of these.

    Only the fields of its backend are read.

    Args:
        backend: `"TE"` or `"MSAMP"`; `ACCELERATE_FP8_BACKEND`, else MS-AMP where only that is installed.

    Raises:
        SettingsError: As with these two, or the backend is unknown.
    """

    backend: Backend | None = None

    def __post_init__(self) -> None:
        TERecipeKwargs.__post_init__(self)
        MSAMPRecipeKwargs.__post_init__(self)
        only_msamp = is_installed("msamp") and not is_installed("transformer_engine")
        resolve_fields(self, "fp8", {"backend": "MSAMP" if only_msamp else "TE"})
        self.backend = str(self.backend).upper()  # pyright: ignore[reportAttributeAccessIssue] - checked next
        expect(self, "backend", "'TE' or 'MSAMP'", self.backend in {"TE", "MSAMP"})


FP8_HANDLERS = (FP8RecipeKwargs, AORecipeKwargs, TERecipeKwargs, MSAMPRecipeKwargs)
"""The kwargs handlers of FP8, of which a run has one."""


def build_recipe(precision: str, settings: Settings, strategy: Strategy) -> Recipe | None:
    """Build the recipe of a run; `None` for a precision other than `"fp8"`."""
    if precision == "fp8":
        return fp8.build.build(settings, strategy)
    for kind in FP8_HANDLERS:
        if kind in strategy.handlers:
            raise SettingsError(
                f"kwargs_handlers contains {kind.__name__}, which needs mixed_precision='fp8', but it is "
                f"{precision!r}. Change one of the two."
            )
    return None


def plain_tensor(tensor: Tensor) -> Tensor:
    """Convert a tensor, or a `DTensor`'s shard, from a library's tensor subclass to a plain tensor.

    Example:
        >>> import torch
        >>> plain_tensor(weight := torch.ones(1)) is weight
        True
    """
    detached: Any = tensor.detach()
    if is_dtensor(detached):
        local = detached.to_local()
        plain = plain_tensor(local)
        if plain is local:
            return tensor
        return type(detached)(plain, detached._spec, requires_grad=False)  # as FSDP does
    if not is_traceable_wrapper_subclass(detached):
        return tensor
    return getattr(detached, detached.__tensor_flatten__()[0][0])


def save_plain_weights(model: nn.Module, names: Iterable[str]) -> None:
    """Hook a model so that state dicts have plain weights, and loaded weights get new scales."""

    def save_plain(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for name, _ in module.named_parameters(recurse=False):
            if prefix + name in state:
                state[prefix + name] = plain_tensor(state[prefix + name])

    def clear_scale(module: nn.Module, _: Any) -> None:  # computed from the previous weight
        weight: Any = module.weight
        local: Any = weight._local_tensor if is_dtensor(weight) else weight
        if hasattr(local, "_precomputed_scale"):
            local._precomputed_scale = None

    for layer in map(model.get_submodule, names):
        layer.register_state_dict_post_hook(save_plain)
        layer.register_load_state_dict_post_hook(clear_scale)


def tied_layers(model: nn.Module) -> set[str]:
    """Return the names of the layers that share a parameter with another layer."""
    shared = group_tied_names(dict(model.named_parameters(remove_duplicate=False)))
    return {name.rpartition(".")[0] for names, _ in shared if len(names) > 1 for name in names}


def is_divisible(layer: Any, divisor: int = 16) -> bool:
    """Return whether both sizes of a linear layer, of torch or a library, are divisible by a number."""
    return layer.in_features % divisor == 0 and layer.out_features % divisor == 0
