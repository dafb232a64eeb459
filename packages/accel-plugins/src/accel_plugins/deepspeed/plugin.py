"""`DeepSpeedPlugin`: how DeepSpeed trains, as an argument of `Accelerator`."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from accel_plugins.deepspeed.fill import Known, Mismatch, fill, leaves, put, refuse_mismatches
from accel_plugins.deepspeed.hf_config import AUTO, HfDeepSpeedConfig
from accel_plugins.deepspeed.leaf_modules import mark_leaf_modules
from accel_plugins.deepspeed.rules import KEYS, check_fields, without_none
from accel_plugins.deepspeed.transformers_link import link
from accel_plugins.kwargs.base import expect_flags
from accel_state import environ
from accel_state.errors import SettingsError, UnsupportedError
from accel_state.logging import get_logger
from accel_state.settings import combine, parse_environ
from accel_state.settings.engines import DeepSpeedSettings

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import nn

    from accel_state.settings.model import Settings

logger = get_logger(__name__)

_DEFAULT_STAGE = 2
_OF_STAGE_3 = ("zero3_init_flag", "zero3_save_16bit_model", "transformer_moe_cls_names")


@dataclass
class DeepSpeedPlugin:
    """How DeepSpeed trains. What is left out comes from the environment of a launcher, or the default.

    Args:
        hf_ds_config: A DeepSpeed configuration: the path of a JSON file, a dictionary, an `HfDeepSpeedConfig`
            or the JSON text in base64. Its values `"auto"` are filled in from what is known elsewhere; fields
            below that it does not have are added to it.
        gradient_accumulation_steps: Micro-batches per optimizer step; the accelerator's if left out.
        gradient_clipping: The norm that gradients are clipped to at every step.
        zero_stage: What ZeRO divides among the ranks: 1 optimizer state, 2 also gradients, 3 also parameters,
            0 nothing. 2 if neither the configuration nor anything else says it.
        is_train_batch_min: Whether the smallest batch size of the loaders is that of training, else the
            largest.
        offload_optimizer_device: `"cpu"` or, with stage 3, `"nvme"`: where optimizer state lives; `"none"`.
        offload_param_device: The same for parameters, with stage 3.
        offload_optimizer_nvme_path: The folder for `"nvme"`.
        offload_param_nvme_path: The folder for `"nvme"`.
        zero3_init_flag: Whether transformers divides parameters while it makes or loads a model; by default
            with stage 3.
        zero3_save_16bit_model: Whether the engine's own `save_16bit_model` brings weights together in stage
            3; `Accelerator.get_state_dict` always does.
        transformer_moe_cls_names: Classes of mixture-of-experts layers, with commas between, whose parameters
            are gathered together in stage 3.
        enable_msamp: Not available: refused if true.
        msamp_opt_level: Of it.

    Raises:
        SettingsError: A field cannot be used, or the configuration contradicts some; all of them are named.
        UnsupportedError: MS-AMP is asked for.

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
        sources = self._read_environment()
        expect_flags(self, "is_train_batch_min")
        expect_flags(self, "zero3_init_flag", "zero3_save_16bit_model", optional=True)
        if self.enable_msamp or self.msamp_opt_level is not None:
            raise UnsupportedError(
                f"DeepSpeedPlugin(enable_msamp={self.enable_msamp!r}, "
                f"msamp_opt_level={self.msamp_opt_level!r}): MS-AMP is not developed further and works "
                "with no present version of PyTorch; use mixed_precision='bf16', or 'fp8' without DeepSpeed."
            )
        keywords = {name: getattr(self, name) for name in KEYS if getattr(self, name) is not None}
        self.hf_ds_config = _configuration(self.hf_ds_config, keywords)
        known = {KEYS[name]: Known(value=value, source=sources[name]) for name, value in keywords.items()}
        filled = fill(self.deepspeed_config, known)
        refuse_mismatches(filled.mismatches)
        self.deepspeed_config = filled.config
        check_fields(self.hf_ds_config)
        self.deepspeed_config = without_none(filled.config)
        for name, key in KEYS.items():
            value = self.get_value(key)
            setattr(self, name, None if value == AUTO else value)
        self._resolve_init_flag()
        self._selected = False
        self._link: Any = None

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """The configuration, as far as it is filled in."""
        return self.hf_ds_config.config

    @deepspeed_config.setter
    def deepspeed_config(self, config: dict[str, Any]) -> None:
        self.hf_ds_config.config = config
        self.hf_ds_config.set_stage_and_offload()

    @property
    def selected(self) -> bool:
        """Whether this is the active one of several plugins."""
        return self._selected

    @property
    def mixed_precision(self) -> str:
        """In what the engine trains: `"bf16"`, `"fp16"` or `"no"`."""
        return next((name for name in ("bf16", "fp16") if self.get_value(f"{name}.enabled") is True), "no")

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Become the active one of several plugins; called by `AcceleratorState.select_deepspeed_plugin`.

        Args:
            _from_accelerator_state: Whether that is who calls.

        Raises:
            ValueError: It is not.
        """
        if not _from_accelerator_state:
            raise ValueError(
                "A DeepSpeedPlugin is selected by its name: call "
                "AcceleratorState().select_deepspeed_plugin(name)."
            )
        self._selected = True
        self.set_deepspeed_weakref()

    def unselect(self) -> None:
        """Be the active one no more."""
        self._selected = False
        self._link = None

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """The value of a key of the configuration, with dots between; a default where it is absent."""
        return self.hf_ds_config.get_value(ds_key_long, default)

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether a value of the configuration is to be filled in."""
        return self.hf_ds_config.is_auto(ds_key_long)

    def fill_match(
        self,
        ds_key_long: str,
        mismatches: list[str] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Fill in one value if it is `"auto"`, else compare it.

        Args:
            ds_key_long: The key, with dots between. Nothing is done if the configuration does not have it.
            mismatches: Where a contradiction is noted; it is raised if `None`.
            must_match: Whether to compare.
            **kwargs: Values by key with dots.

        Raises:
            SettingsError: There is no value to fill in, or it contradicts and `mismatches` is `None`.
        """
        node, last = self.hf_ds_config.find_config_node(ds_key_long)
        if node is None or last not in node:
            return
        if node[last] == AUTO:
            if ds_key_long not in kwargs:
                raise SettingsError(
                    f"The DeepSpeed configuration has {ds_key_long}='auto', and there is nothing to fill "
                    f"it with; give it a value, or pass {ds_key_long!r} here."
                )
            node[last] = kwargs[ds_key_long]
            self.hf_ds_config.set_stage_and_offload()
            return
        if must_match and node[last] is not None and node[last] != kwargs.get(ds_key_long, node[last]):
            known = Known(value=kwargs[ds_key_long], source="argument")
            mismatch = Mismatch(key=ds_key_long, found=node[last], known=known)
            if mismatches is None:
                refuse_mismatches([mismatch])
            else:
                mismatches.append(str(mismatch))

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: dict[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Fill in all values that are `"auto"`, and compare the others.

        Args:
            prefix: Only what is below this key, with a dot at its end.
            mismatches: Where contradictions are noted; all are raised together if `None`.
            config: The part of the configuration below `prefix`; the whole if `None`.
            must_match: Whether to compare.
            **kwargs: Values by key with dots.

        Raises:
            SettingsError: Something stays `"auto"`, or contradicts; all such keys are named.

        Example:
            >>> plugin = DeepSpeedPlugin(hf_ds_config={"train_batch_size": "auto", "zero_optimization": {}})
            >>> plugin.deepspeed_config_process(train_batch_size=8)
            >>> plugin.get_value("train_batch_size")
            8
        """
        noted: list[str] = [] if mismatches is None else mismatches
        for key, _ in [*leaves(self.deepspeed_config if config is None else config, prefix)]:
            self.fill_match(key, noted, must_match, **kwargs)
        if mismatches is None and noted:
            raise SettingsError(
                "The DeepSpeed configuration contradicts what was said elsewhere: "
                + "; ".join(noted)
                + ". Say each in one place only, or set it to 'auto' in the configuration."
            )

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Let the engine train in a precision, unless its configuration says another.

        Args:
            mixed_precision: `"bf16"`, `"fp16"`, or `"no"`, by which the configuration decides.

        Raises:
            SettingsError: The configuration has the other 16-bit format switched on.
            UnsupportedError: The engine has no such precision.
        """
        if mixed_precision not in {"no", "bf16", "fp16"}:
            raise UnsupportedError(
                f"mixed_precision={mixed_precision!r} does not go together with DeepSpeed; use 'bf16'."
            )
        config, chosen = self.deepspeed_config, mixed_precision
        autocast = self.get_value("torch_autocast.enabled") is True  # the configuration's own way
        for name, other in (("bf16", "fp16"), ("fp16", "bf16")):
            if chosen == name and self.get_value(f"{other}.enabled") is True:
                source = f"mixed_precision={chosen!r}"
                known = Known(value=False, source=source)
                refuse_mismatches([Mismatch(key=f"{other}.enabled", found=True, known=known)])
            found = self.get_value(f"{name}.enabled")
            if found == AUTO or (found is None and chosen == name and not autocast):
                put(config, f"{name}.enabled", chosen == name)

    def set_deepspeed_weakref(self) -> None:
        """Tell transformers to divide parameters while it makes or loads models, if stage 3 asks for that."""
        self._link = link(self.deepspeed_config, asked=bool(self.zero3_init_flag))

    def is_zero3_init_enabled(self) -> bool:
        """Whether models of transformers are made with their parameters divided."""
        return bool(self.zero3_init_flag)

    @contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Generator[None]:
        """A block in which models of transformers are made with their parameters divided, or are not.

        Args:
            enable: Which.
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
        """Let layers of experts gather all their parameters at once in stage 3, whichever of them are used.

        Args:
            model: It has layers of the classes in `transformer_moe_cls_names`.

        Raises:
            SettingsError: It has none of some class.
        """
        if self.transformer_moe_cls_names and self.hf_ds_config.is_zero3():
            mark_leaf_modules(model, self.transformer_moe_cls_names)

    def to_settings(self, settings: Settings) -> Settings:
        """Settings that say that DeepSpeed is used, and the micro-batches of a step by its configuration."""
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

    def _read_environment(self) -> dict[str, str]:
        """Take what was not given from the settings; return where every field comes from."""
        merged = combine(parse_environ(environ.read()))
        section = merged.settings.deepspeed
        sources: dict[str, str] = {}
        present = set() if section is None else {one.name for one in fields(section)}
        for one in fields(self):
            value = getattr(self, one.name)
            sources[one.name] = f"DeepSpeedPlugin({one.name}={value!r})"
            if value is None and one.name in present:
                setattr(self, one.name, getattr(section, one.name))
                sources[one.name] = merged.source_of(f"deepspeed.{one.name}").origin
        for name in ("offload_optimizer_nvme_path", "offload_param_nvme_path"):
            if str(getattr(self, name)).lower() == "none":
                setattr(self, name, None)
        return sources

    def _resolve_init_flag(self) -> None:
        if self.hf_ds_config.is_zero3():
            if self.zero3_init_flag is None:
                self.zero3_init_flag = True
            return
        stage = self.get_value("zero_optimization.stage")
        for name in _OF_STAGE_3:
            if getattr(self, name):
                logger.warning("%s=%r has no effect with ZeRO stage %s.", name, getattr(self, name), stage)
        self.zero3_init_flag = False


def get_active_deepspeed_plugin(state: Any) -> DeepSpeedPlugin:
    """The plugin that is used now.

    Args:
        state: An `AcceleratorState`, or an `Accelerator`.

    Raises:
        ValueError: DeepSpeed is not used.
    """
    plugin = state.deepspeed_plugin
    if plugin is None:
        raise ValueError(
            "There is no active DeepSpeed plugin: DeepSpeed is not used in this run. Pass a "
            "DeepSpeedPlugin to Accelerator, or start the script with `accel launch --use_deepspeed`."
        )
    return plugin


def _configuration(given: Any, keywords: dict[str, Any]) -> HfDeepSpeedConfig:
    """The configuration that was given, or the usual one, with every field that it does not have."""
    if given is None:
        config = HfDeepSpeedConfig(
            {
                "train_batch_size": AUTO,
                "train_micro_batch_size_per_gpu": AUTO,
                "gradient_accumulation_steps": AUTO,
                "steps_per_print": float("inf"),
                "zero_allow_untested_optimizer": True,
            }
        )
    else:
        config = given if isinstance(given, HfDeepSpeedConfig) else HfDeepSpeedConfig(given)
    if not isinstance(config.config.get("zero_optimization", {}), dict):
        raise SettingsError(
            f"The DeepSpeed configuration has zero_optimization={config.config['zero_optimization']!r}; it "
            "must be "
            'an object, such as {"stage": 2}.'
        )
    if given is None and "zero_stage" not in keywords:
        put(config.config, KEYS["zero_stage"], _DEFAULT_STAGE)
    for name, value in keywords.items():
        node, last = config.find_config_node(KEYS[name])
        if (node is None or last not in node) and str(value).lower() != "none":
            put(config.config, KEYS[name], value)
    config.set_stage_and_offload()
    return config
