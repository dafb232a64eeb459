"""Estimate a model by its name in several dtypes, for programs that call these functions."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from torch import nn

from accel_bigmodel.empty import init_empty_weights
from accel_bigmodel.sizes import calculate_maximum_sizes
from accel_cli.output import show
from accel_state.errors import SettingsError, UnsupportedError
from accel_state.libraries import is_timm_available, is_transformers_available, require


def gather_data(args: Namespace) -> list[list[Any]] | None:
    """Create a meta model, and compute its size in each dtype.

    Args:
        args: With `model_name`, `library_name`, `trust_remote_code`, and `dtypes`, names of dtypes.

    Returns:
        For each dtype its name, the bytes of the largest layer, the bytes of all weights and buffers, and the
        result of `estimate_training_usage`.

    Raises:
        SettingsError: The model does not exist, or there is no library for it.
        MissingDependencyError: The library that defines it is not installed.
    """
    model = create_empty_model(args.model_name, args.library_name, args.trust_remote_code)
    total, (largest, _) = calculate_maximum_sizes(model)
    rows: list[list[Any]] = []
    for dtype in args.dtypes:
        size, layer = total, largest
        if dtype in _PARTS:
            size, layer = size / _PARTS[dtype], layer / _PARTS[dtype]
        rows.append([dtype, layer, size, estimate_training_usage(total, dtype)])
    return rows


_PARTS = {"float16": 2, "bfloat16": 2, "int8": 4, "int4": 8}
"""The factor by which a dtype is smaller than float32."""


def create_empty_model(
    model_name: str,
    library_name: str | None,
    trust_remote_code: bool = False,
    access_token: str | None = None,
) -> nn.Module:
    """Create the meta model with the given name, without a task head.

    Args:
        model_name: The id of a model on the hub, or a folder with its configuration.
        library_name: `"transformers"` or `"timm"`; None to ask the hub.
        trust_remote_code: Whether code that comes with the model may run.
        access_token: The token for the hub.

    Raises:
        SettingsError: The hub does not list the model's library, or it is another one.
        MissingDependencyError: The library is not installed.
        OSError: The model does not exist, or it is gated.
    """
    library = library_name or _library_of(model_name, access_token)
    if library not in ("transformers", "timm"):
        raise SettingsError(f"model {model_name!r} is for the library {library!r}, not transformers or timm.")
    require(library, f"the model {model_name!r}", install=library)
    if library == "timm":
        with init_empty_weights():
            return import_module("timm").create_model(add_timm_hub_prefix(model_name), pretrained=False)
    show(f"Loading pretrained config for `{model_name}` from `transformers`...")
    transformers: Any = import_module("transformers")
    config = transformers.AutoConfig.from_pretrained(
        model_name, trust_remote_code=trust_remote_code, token=access_token
    )
    with init_empty_weights():
        return transformers.AutoModel.from_config(config, trust_remote_code=trust_remote_code)


def _library_of(model_name: str, access_token: str | None) -> str:
    """Ask the hub which library a model is for."""
    info = verify_on_hub(model_name, access_token)
    if isinstance(info, str):
        problem = {"gated": "is gated, or the hub cannot be reached", "repo": "is not on the hub"}[info]
        raise OSError(f"model {model_name!r} {problem}: log in with `hf auth login` if you have access.")
    if not info.library_name:
        raise SettingsError(
            f"the hub does not name the library of the model {model_name!r}: pass library_name."
        )
    return info.library_name


def verify_on_hub(repo: str, token: str | None = None) -> Any:
    """Return the hub's information about a model.

    Returns:
        A `huggingface_hub.ModelInfo`; `"repo"` if there is no such model, `"gated"` if it may not be read or
        the hub cannot be reached.
    """
    hub, errors = import_module("huggingface_hub"), import_module("huggingface_hub.errors")
    try:
        return hub.model_info(repo, token=token)
    except errors.RepositoryNotFoundError as error:
        return "gated" if isinstance(error, errors.GatedRepoError) else "repo"
    except OSError:
        return "gated"


def check_has_model(error: Exception) -> str:
    """Return the library that raised an error because it has no such model, or `"unknown"`."""
    text = str(error)
    if is_timm_available() and isinstance(error, RuntimeError) and "Unknown model" in text:
        return "timm"
    missing = "does not appear to have a file named"
    if is_transformers_available() and isinstance(error, OSError) and missing in text:
        return "transformers"
    return "unknown"


def create_ascii_table(headers: Sequence[str], rows: Sequence[Sequence[object]], title: str) -> str:
    """Return a table in a frame; the last column is as wide as the title needs.

    Example:
        >>> print(create_ascii_table(["dtype", "size"], [["int8", "3 MB"]], "Memory"))
        ┌──────────┐
        │  Memory  │
        ├─────┬────┤
        │dtype│size│
        ├─────┼────┤
        │ int8│3 MB│
        └─────┴────┘
    """
    cells = [[str(cell) for cell in row] for row in (headers, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    widths[-1] += max(0, len(title) - sum(widths) - len(widths) + 1)
    bars = ["─" * width for width in widths]

    head, *body = (_centered(row, widths) for row in cells)
    return "\n".join(
        (
            f"┌{'─'.join(bars)}┐",
            _centered([title], [sum(widths) + len(widths) - 1]),
            f"├{'┬'.join(bars)}┤",
            head,
            f"├{'┼'.join(bars)}┤",
            *body,
            f"└{'┴'.join(bars)}┘",
        )
    )


def _centered(row: Sequence[str], widths: Sequence[int]) -> str:
    """Return a line of a table with centred cells; an odd space is larger at the left."""
    padded = (
        cell.rjust(len(cell) + (width - len(cell) + 1) // 2).ljust(width)
        for cell, width in zip(row, widths, strict=True)
    )
    return f"│{'│'.join(padded)}│"


def estimate_training_usage(
    bytes: int,  # noqa: A002 - the name that programs pass
    mixed_precision: str,
    msamp_config: str | None = None,
) -> dict[str, int]:
    """Return the bytes of training with Adam at batch size 1, by step of the loop.

    Args:
        bytes: The size of the weights in float32.
        mixed_precision: `"float32"`, `"float16"` or `"bfloat16"`; for others all values are -1, for unknown.
        msamp_config: Not supported: MS-AMP is not estimated.

    Raises:
        UnsupportedError: `msamp_config` was passed.
    """
    if msamp_config is not None:
        raise UnsupportedError("MS-AMP is not estimated: remove msamp_config.")
    if mixed_precision in {"float16", "bfloat16"}:
        return {"model": bytes, "optimizer": bytes * 2, "gradients": bytes + bytes // 2, "step": bytes * 2}
    if mixed_precision == "float32":
        return {"model": bytes, "optimizer": bytes * 2, "gradients": bytes, "step": bytes * 4}
    return dict.fromkeys(("model", "optimizer", "gradients", "step"), -1)


def add_timm_hub_prefix(model_name: str) -> str:
    """Return the name by which timm finds a model on the Hub; return other names unchanged.

    Example:
        >>> add_timm_hub_prefix("timm/resnet50.a1_in1k"), add_timm_hub_prefix("resnet50")
        ('hf-hub:timm/resnet50.a1_in1k', 'resnet50')
    """
    return f"hf-hub:{model_name}" if "/" in model_name and ":" not in model_name else model_name
