"""`DeepSpeedPlugin`: options of DeepSpeed, its configuration, and which plugin is active."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from accel_plugins.deepspeed.config import (
    AUTO,
    KEYS,
    HfDeepSpeedConfig,
    check_offload,
    fill,
    leaves,
    open_keys,
    put,
    refuse_mismatches,
)
from accel_plugins.deepspeed.library import ds_module, load_library
from accel_plugins.kwargs import expect_flags, resolve_fields
from accel_state import environ
from accel_state.accelerator_state import AcceleratorState, is_initialized
from accel_state.errors import SettingsError, UnsupportedError
from accel_state.libraries import is_installed
from accel_state.logging import get_logger
from accel_state.settings import from_environ
from accel_state.settings.engines import DeepSpeedSettings
from accel_state.settings.model import BASE_PRECISIONS, Settings

if TYPE_CHECKING:
    from torch import nn

logger = get_logger(__name__)


@dataclass
class DeepSpeedPlugin:
    """Options of DeepSpeed. Arguments take precedence over the launcher's environment, that over defaults.

    Args:
        hf_ds_config: A DeepSpeed configuration: the path of a JSON file, a dictionary, an `HfDeepSpeedConfig`
            or JSON in base64. Its `"auto"` values are filled when a model is prepared; the fields below are
            added if it lacks them.
        gradient_accumulation_steps: Micro-batches per optimizer step; the accelerator's by default.
        gradient_clipping: The norm to which gradients are clipped in every step.
        zero_stage: ZeRO stage: 1 shards optimizer state, 2 also gradients, 3 also parameters, 0 nothing. The
            default is the configuration's, else 2.
        is_train_batch_min: Whether the micro-batch size is the smallest batch size of several loaders, else
            the largest.
        offload_optimizer_device: Device to which optimizer state is offloaded: `"cpu"`, `"nvme"` (stage 3) or
            `"none"`.
        offload_param_device: Device to which parameters are offloaded at stage 3.
        offload_optimizer_nvme_path: The folder for `"nvme"`.
        offload_param_nvme_path: The folder for `"nvme"`.
        zero3_init_flag: Whether transformers shards parameters while it builds or loads a model; by default
            at stage 3.
        zero3_save_16bit_model: Whether the engine's `save_16bit_model` gathers weights at stage 3;
            `Accelerator.get_state_dict` always does.
        transformer_moe_cls_names: Classes of mixture-of-experts layers, separated by commas, whose parameters
            are gathered together at stage 3.
        enable_msamp: Not supported: must be false.
        msamp_opt_level: Not supported: must not be set.

    Raises:
        SettingsError: Values are invalid or contradict the configuration. The message lists all.
        UnsupportedError: MS-AMP is enabled.

    Example:
        >>> plugin = DeepSpeedPlugin(zero_stage=3, offload_param_device="cpu")
        >>> plugin.get_value("zero_optimization.offload_param.device")
        'cpu'
    """

    hf_ds_config: Any = None
    gradient_accumulation_steps: int | None = None
    gradient_clipping: float | None = None
    zero_stage: int | None = None
    is_train_batch_min: bool = True
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None
    transformer_moe_cls_names: str | None = None
    enable_msamp: bool | None = None
    msamp_opt_level: str | None = None

    def __post_init__(self) -> None:
        sources = resolve_fields(self, "deepspeed")
        for name in ("offload_optimizer_nvme_path", "offload_param_nvme_path"):
            if str(getattr(self, name)).lower() == "none":
                setattr(self, name, None)
        if self.enable_msamp or self.msamp_opt_level is not None:
            raise UnsupportedError(
                f"DeepSpeedPlugin(enable_msamp={self.enable_msamp!r}, "
                f"msamp_opt_level={self.msamp_opt_level!r}): MS-AMP is no longer developed, and its engine "
                "cannot be imported together with DeepSpeed 0.19. Use mixed_precision='fp8' with "
                "AORecipeKwargs() (torchao) or TERecipeKwargs() (TransformerEngine), under any ZeRO stage."
            )
        expect_flags(self, "zero3_init_flag", "zero3_save_16bit_model", "enable_msamp")
        keywords = {name: getattr(self, name) for name in KEYS if getattr(self, name) is not None}
        # 1. Add the fields that the configuration lacks, and compare the others.
        is_own = self.hf_ds_config is None
        if not isinstance(self.hf_ds_config, HfDeepSpeedConfig):
            self.hf_ds_config = HfDeepSpeedConfig(_DEFAULT if is_own else self.hf_ds_config)
        config = self.hf_ds_config
        if not isinstance(zero := config.config.setdefault("zero_optimization", {}), dict):
            raise SettingsError(
                f"The DeepSpeed configuration has zero_optimization={zero!r}; it must be an object, such as "
                '{"stage": 2}.'
            )
        for name, value in {**({"zero_stage": 2} if is_own else {}), **keywords}.items():
            node, last = config.find_config_node(KEYS[name])
            if (node is None or last not in node) and str(value).lower() != "none":
                put(config.config, KEYS[name], value)
        known = {KEYS[name]: (value, sources[name]) for name, value in keywords.items()}
        refuse_mismatches(fill(config.config, known))
        config.set_stage_and_offload()
        check_offload(config)
        for section in ("zero_optimization.offload_optimizer", "zero_optimization.offload_param"):
            if config.get_value(f"{section}.device") in {None, "none"}:
                config.del_config_sub_tree(section)
        # 2. Set the fields that the configuration has.
        for name, key in KEYS.items():
            setattr(self, name, None if config.is_auto(key) else config.get_value(key))
        if self.hf_ds_config.is_zero3():
            self.zero3_init_flag = self.zero3_init_flag is not False
        else:
            for name in ("zero3_init_flag", "zero3_save_16bit_model", "transformer_moe_cls_names"):
                if value := getattr(self, name):
                    stage = self.get_value("zero_optimization.stage")
                    logger.warning("%s=%r has no effect with ZeRO stage %s.", name, value, stage)
            self.zero3_init_flag = False
        self._selected = False
        self._link: Any = None

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """The configuration, with the values filled so far."""
        return self.hf_ds_config.config

    @deepspeed_config.setter
    def deepspeed_config(self, config: dict[str, Any]) -> None:
        self.hf_ds_config.config = config
        self.hf_ds_config.set_stage_and_offload()

    @property
    def selected(self) -> bool:
        """Whether this plugin is the active one."""
        return self._selected

    @property
    def mixed_precision(self) -> str:
        """Precision of the engine: `"bf16"`, `"fp16"` or `"no"`."""
        return next((name for name in ("bf16", "fp16") if self.get_value(f"{name}.enabled") is True), "no")

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Activate this plugin; called by `AcceleratorState.select_deepspeed_plugin`.

        Args:
            _from_accelerator_state: True if called by `select_deepspeed_plugin`.

        Raises:
            ValueError: It was called from elsewhere.
        """
        if not _from_accelerator_state:
            raise ValueError(
                "A DeepSpeedPlugin is selected by its name: call "
                "AcceleratorState().select_deepspeed_plugin(name)."
            )
        self._set_selected(value=True)
        self.set_deepspeed_weakref()

    def _unselect(self) -> None:  # Programs call this and the next by Accelerate's names.
        self._set_selected(value=False)
        self._link = None

    def _set_selected(self, value: bool) -> None:
        self._selected = value

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value of a dotted key of the configuration, or a default."""
        return self.hf_ds_config.get_value(ds_key_long, default)

    def is_auto(self, ds_key_long: str) -> bool:
        """Return whether a value of the configuration is `"auto"`."""
        return self.hf_ds_config.is_auto(ds_key_long)

    def fill_match(
        self, ds_key_long: str, mismatches: list[str] | None = None, must_match: bool = True, **kwargs: Any
    ) -> None:
        """Fill one value if it is `"auto"`, else compare it.

        Args:
            ds_key_long: Dotted key; nothing is done if the configuration lacks it.
            mismatches: List to which a contradiction is added; it is raised if `None`.
            must_match: Whether to compare.
            **kwargs: Known values by dotted key.

        Raises:
            SettingsError: No value is known, or it contradicts and `mismatches` is `None`.
        """
        self._fill(lambda key: key == ds_key_long, mismatches, must_match, kwargs)

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: dict[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Fill all `"auto"` values, and compare the others.

        Args:
            prefix: Dotted key with a dot at its end: fill only the values below it.
            mismatches: List to which contradictions are added; all are raised together if `None`.
            config: Fill only values below its keys; below those of the full configuration if `None`.
            must_match: Whether to compare.
            **kwargs: Known values by dotted key.

        Raises:
            SettingsError: A value remains `"auto"`, or contradicts the run. The message lists all such keys.

        Example:
            >>> plugin = DeepSpeedPlugin(hf_ds_config={"train_batch_size": "auto", "zero_optimization": {}})
            >>> plugin.deepspeed_config_process(train_batch_size=8)
            >>> plugin.get_value("train_batch_size")
            8
        """

        def covers(key: str) -> bool:
            name = key.removeprefix(prefix).partition(".")[0]
            return key.startswith(prefix) and (config is None or name in config)

        self._fill(covers, mismatches, must_match, kwargs)

    def _fill(
        self,
        covers: Callable[[str], bool],
        mismatches: list[str] | None,
        must_match: bool,
        values: Mapping[str, Any],
    ) -> None:
        source = "argument" if must_match else ""
        mine = {
            key: (value, source)
            for key, value in values.items()
            if covers(key) and self.get_value(key) is not None
        }
        found = fill(self.deepspeed_config, mine)
        self.hf_ds_config.set_stage_and_offload()
        if unknown := [*filter(covers, open_keys(self.deepspeed_config))]:
            raise SettingsError(
                f"The DeepSpeed configuration has 'auto' for {', '.join(unknown)}, whose value is unknown: "
                "set it, or pass it by its dotted key."
            )
        if mismatches is None:
            refuse_mismatches(found)
        else:
            mismatches += found

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Set the engine's precision, unless the configuration has one.

        Args:
            mixed_precision: `"bf16"`, `"fp16"`, or `"no"`, which keeps the configuration's.

        Raises:
            SettingsError: The configuration enables the other 16-bit precision.
            UnsupportedError: The engine does not support the precision.
        """
        if mixed_precision not in BASE_PRECISIONS:
            raise UnsupportedError(
                f"set_mixed_precision({mixed_precision!r}): DeepSpeed's engine computes in 'bf16', 'fp16' or "
                "'no'; Accelerator(mixed_precision=…) applies a recipe on top of that."
            )
        config, chosen = self.deepspeed_config, mixed_precision
        autocast = self.get_value("torch_autocast.enabled") is True  # torch's autocast is used instead.
        for name, other in (("bf16", "fp16"), ("fp16", "bf16")):
            if chosen == name and self.get_value(f"{other}.enabled") is True:
                refuse_mismatches(fill(config, {f"{other}.enabled": (False, f"mixed_precision={chosen!r}")}))
            value = self.get_value(f"{name}.enabled")
            if value == AUTO or (value is None and chosen == name and not autocast):
                put(config, f"{name}.enabled", chosen == name)

    def set_deepspeed_weakref(self) -> None:
        """Register the configuration with transformers, which then shards models during construction."""
        self._link = None
        if "transformers" not in sys.modules or not is_installed("deepspeed"):
            return
        integration = importlib.import_module("transformers.integrations.deepspeed")
        if self.zero3_init_flag:  # transformers keeps only a weak reference
            known: dict[str, Any] = {}  # models are built without "auto" values, and with a batch size
            for key, value in leaves(self.deepspeed_config):
                if value != AUTO and key not in {"train_batch_size", "gradient_accumulation_steps"}:
                    put(known, key, value)
            self._link = HfDeepSpeedConfig(known | {"train_micro_batch_size_per_gpu": 1})
            integration.set_hf_deepspeed_config(self._link)
        else:
            integration.unset_hf_deepspeed_config()

    def is_zero3_init_enabled(self) -> bool:
        """Return whether transformers shards the parameters of the models that it builds."""
        return bool(self.zero3_init_flag)

    @contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Generator[None]:
        """Enable or disable sharded construction of transformers' models within the block.

        Args:
            enable: Whether transformers shards the parameters of the models that it builds.
        """
        before = self.zero3_init_flag
        self.zero3_init_flag = enable
        self.set_deepspeed_weakref()
        try:
            yield
        finally:
            self.zero3_init_flag = before
            self.set_deepspeed_weakref()

    def set_moe_leaf_modules(self, model: nn.Module) -> None:
        """Mark mixture-of-experts layers, so that stage 3 gathers the parameters of all experts together.

        Args:
            model: A model with layers of the classes in `transformer_moe_cls_names`.

        Raises:
            SettingsError: The model has no layer of a class.
        """
        if self.transformer_moe_cls_names and self.hf_ds_config.is_zero3():
            names = [name.strip() for name in self.transformer_moe_cls_names.split(",")]
            classes = {type(module).__name__: type(module) for module in model.modules()}
            if missing := [name for name in names if name not in classes]:
                raise SettingsError(
                    f"DeepSpeedPlugin(transformer_moe_cls_names={self.transformer_moe_cls_names!r}): "
                    f"{type(model).__name__} has no module of the class {missing[0]!r}; it has "
                    f"{', '.join(sorted(classes))}."
                )
            load_library("transformer_moe_cls_names")
            ds_module("utils").set_z3_leaf_modules(model, [classes[name] for name in names])

    def to_settings(self, settings: Settings) -> Settings:
        """Return the settings with DeepSpeed enabled and the configuration's accumulation steps."""
        steps, training = self.gradient_accumulation_steps, settings.training
        if steps is not None and training.gradient_accumulation_steps == 1:
            training = replace(training, gradient_accumulation_steps=steps)
        return replace(settings, deepspeed=settings.deepspeed or DeepSpeedSettings(), training=training)

    def __deepcopy__(self, memo: dict[int, Any]) -> DeepSpeedPlugin:
        fresh = copy.copy(self)
        fresh.hf_ds_config = HfDeepSpeedConfig(self.deepspeed_config)
        fresh._link = None
        memo[id(self)] = fresh
        return fresh


def get_active_deepspeed_plugin(state: Any) -> DeepSpeedPlugin:
    """Return the active plugin.

    Args:
        state: An `AcceleratorState`, or an `Accelerator`.

    Raises:
        ValueError: DeepSpeed is not used.
    """
    plugin = state.deepspeed_plugin
    if plugin is None:
        raise ValueError(
            "There is no active DeepSpeed plugin, as this run does not use DeepSpeed. Pass a "
            "DeepSpeedPlugin to Accelerator, or start the script with `accel launch --use_deepspeed`."
        )
    return plugin


_DEFAULT = {
    "train_batch_size": AUTO,
    "train_micro_batch_size_per_gpu": AUTO,
    "gradient_accumulation_steps": AUTO,
    "steps_per_print": float("inf"),
    "zero_allow_untested_optimizer": True,
}
"""The configuration of a plugin without one."""


P = ParamSpec("P")
R = TypeVar("R")


def deepspeed_required(func: Callable[P, R]) -> Callable[P, R]:
    """Make a function raise in runs without DeepSpeed.

    Args:
        func: The function.

    Returns:
        The function; it raises `ValueError` in other runs.

    Example:
        >>> @deepspeed_required
        ... def stage():
        ...     return 3
        >>> stage()
        Traceback (most recent call last):
        ...
        ValueError: stage() needs DeepSpeed, which this run does not use.
    """

    @wraps(func)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        is_active = is_initialized() and AcceleratorState().deepspeed_plugin is not None
        if not is_active and from_environ(environ.read()).deepspeed is None:
            raise ValueError(f"{func.__name__}() needs DeepSpeed, which this run does not use.")
        return func(*args, **kwargs)

    return checked
