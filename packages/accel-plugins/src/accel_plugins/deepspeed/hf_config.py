"""A DeepSpeed configuration with access by dotted keys, and its registration with transformers."""

from __future__ import annotations

import base64
import binascii
import copy
import importlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from accel_state.available import is_installed
from accel_state.errors import SettingsError
from accel_state.regular_file import CONFIG_LIMIT, read_regular

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

AUTO = "auto"
"""Value that is replaced by one from the model, the optimizer, the loaders or the arguments."""

_OFFLOADS = frozenset({"cpu", "nvme"})


def read_config(source: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Read a DeepSpeed configuration.

    Args:
        source: A mapping, the path of a JSON file, or the JSON text in URL-safe base64.

    Returns:
        A deep copy, so that filling it does not change the caller's.

    Raises:
        SettingsError: The source is none of these, or not one JSON object without repeated keys.

    Example:
        >>> read_config({"zero_optimization": {"stage": 2}})
        {'zero_optimization': {'stage': 2}}
    """
    if not isinstance(source, (str, Path)) and not hasattr(source, "__fspath__"):
        try:
            return copy.deepcopy(dict(cast("Mapping[str, Any]", source)))
        except (TypeError, ValueError):
            raise SettingsError(
                f"The DeepSpeed configuration {source!r} is not a dictionary, the path of a JSON file, or "
                "JSON in base64."
            ) from None
    path = Path(cast("str", source)).expanduser()
    if _is_file(path):
        where = f"the file {str(path)!r}"
        try:
            return _parse(read_regular(path, limit=CONFIG_LIMIT, error=SettingsError).decode(), where)
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"The DeepSpeed configuration in {where} cannot be read: {error}.") from None
    try:
        text = base64.urlsafe_b64decode(str(source)).decode()
    except (binascii.Error, UnicodeError):
        raise SettingsError(
            f"There is no DeepSpeed configuration file {str(source)!r}, and the text is not base64; pass the "
            "path of a JSON file."
        ) from None
    return _parse(text, "the base64 text")


class HfDeepSpeedConfig:
    """A DeepSpeed configuration, with the queries that transformers makes.

    Args:
        config_file_or_dict: A mapping, the path of a JSON file, or the JSON text in URL-safe base64.

    Raises:
        SettingsError: The configuration cannot be read.

    Example:
        >>> config = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
        >>> config.is_zero3(), config.get_value("zero_optimization.offload_param.device", "none")
        (True, 'none')
    """

    def __init__(self, config_file_or_dict: str | os.PathLike[str] | Mapping[str, Any]) -> None:
        self.config = read_config(config_file_or_dict)
        self._stage: Any = -1
        self._offload = False
        self.set_stage_and_offload()

    def set_stage_and_offload(self) -> None:
        """Update the ZeRO stage and the offload flag after the configuration has changed."""
        self._stage = self.get_value("zero_optimization.stage", -1)
        devices = {
            self.get_value(f"zero_optimization.offload_{what}.device") for what in ("optimizer", "param")
        }
        self._offload = (self.is_zero2() or self.is_zero3()) and bool(_OFFLOADS & devices)

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """Find the dictionary with a dotted key.

        Args:
            ds_key_long: Dotted key.

        Returns:
            The dictionary, or `None`; and the last component of the key.
        """
        node: Any = self.config
        *above, last = ds_key_long.split(".")
        for name in above:
            node = node.get(name) if isinstance(node, dict) else None
        return (cast("dict[str, Any]", node) if isinstance(node, dict) else None), last

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value of a dotted key.

        Args:
            ds_key_long: Dotted key.
            default: Value to return if the key is absent.
        """
        node, last = self.find_config_node(ds_key_long)
        return default if node is None else node.get(last, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Remove a dotted key and its subtree.

        Args:
            ds_key_long: Dotted key.
            must_exist: Whether its absence is an error.

        Raises:
            ValueError: The key is absent and `must_exist` is true.
        """
        node, last = self.find_config_node(ds_key_long)
        if node is not None and last in node:
            del node[last]
        elif must_exist:
            raise ValueError(f"The DeepSpeed configuration has no {ds_key_long!r}: {self.config!r}")

    def is_true(self, ds_key_long: str) -> bool:
        """Return whether a value is present and true.

        Example:
            >>> config = HfDeepSpeedConfig({"bf16": {"enabled": True}})
            >>> config.is_true("bf16.enabled"), config.is_true("fp16.enabled")
            (True, False)
        """
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Return whether a value is present and false."""
        value = self.get_value(ds_key_long)
        return value is not None and not bool(value)

    def is_auto(self, ds_key_long: str) -> bool:
        """Return whether a value is `"auto"`."""
        return self.get_value(ds_key_long) == AUTO

    def is_zero2(self) -> bool:
        """Return whether the ZeRO stage is 2: optimizer state and gradients are sharded."""
        return self._stage == 2

    def is_zero3(self) -> bool:
        """Return whether the ZeRO stage is 3: parameters are sharded, too."""
        return self._stage == 3

    def is_offload(self) -> bool:
        """Return whether parameters or optimizer state are offloaded to the CPU or disk."""
        return self._offload


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # too long for a name: base64
        return False


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text, object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"The DeepSpeed configuration in {where} is not valid JSON: {error}.") from None
    if not isinstance(found, dict):
        raise SettingsError(f"The DeepSpeed configuration in {where} is {found!r}; it must be one object.")
    return cast("dict[str, Any]", found)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"the key(s) {', '.join(map(repr, twice))} are repeated in one object")
    return found


def link(config: Mapping[str, Any], *, asked: bool) -> HfDeepSpeedConfig | None:
    """Register a configuration with transformers, if the program has imported it.

    The returned object stays registered as long as the caller keeps it; `None` if models are built full.
    """
    if "transformers" not in sys.modules or not is_installed("deepspeed"):
        return None
    theirs = importlib.import_module("transformers.integrations.deepspeed")
    if not asked:
        theirs.unset_hf_deepspeed_config()
        return None
    ours = HfDeepSpeedConfig(config_for_models(config))
    theirs.set_hf_deepspeed_config(ours)
    return ours


def config_for_models(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration for building models, with its `"auto"` values removed.

    Example:
        >>> config_for_models({"train_batch_size": "auto", "zero_optimization": {"stage": 3}})
        {'zero_optimization': {'stage': 3}, 'train_micro_batch_size_per_gpu': 1}
    """

    def decided(node: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: decided(value) if isinstance(value, dict) else value
            for name, value in node.items()
            if not (isinstance(value, str) and value == AUTO)
        }

    known = decided(config)
    for name in ("train_batch_size", "gradient_accumulation_steps"):
        known.pop(name, None)
    return known | {"train_micro_batch_size_per_gpu": 1}
