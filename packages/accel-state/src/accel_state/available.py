"""Which optional libraries are installed, found out without importing any of them."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from packaging.version import Version

from accel_state.errors import MissingDependencyError
from accel_state.versions import compare_versions, installed_version, is_torch_version

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """An optional library.

    Args:
        modules: Top-level modules, any of which is enough.
        distribution: What to install; the module's own name if None.
        minimum: The first version that is enough.
    """

    modules: tuple[str, ...]
    distribution: str | None = None
    minimum: str | None = None


def _library(*modules: str, distribution: str | None = None, minimum: str | None = None) -> Library:
    return Library(modules=modules, distribution=distribution, minimum=minimum)


_NAMED_ALIKE = (
    "aim", "amdsmi", "boto3", "clearml", "datasets", "deepspeed", "dvclive", "matplotlib", "mlflow",
    "pandas", "peft", "plotly", "pytest", "rich", "sagemaker", "schedulefree", "swanlab", "timm",
    "torchdata", "torchvision", "trackio", "transformers", "triton", "wandb",
)  # fmt: skip
"""Libraries whose module and distribution have the name by which we know them."""

LIBRARIES: Mapping[str, Library] = {
    **{name: _library(name) for name in _NAMED_ALIKE},
    "bnb": _library("bitsandbytes"),
    "comet_ml": _library("comet_ml", distribution="comet-ml"),
    "import_timer": _library("import_timer", distribution="import-timer"),
    "lomo": _library("lomo_optim", distribution="lomo-optim"),
    "megatron_lm": _library("megatron", distribution="megatron-core"),
    "msamp": _library("msamp", distribution="ms-amp"),
    "pynvml": _library("pynvml", distribution="nvidia-ml-py"),
    "tensorboard": _library("tensorboard", "tensorboardX"),
    "torchao": _library("torchao", minimum="0.6.1"),
    "torchdata_stateful_dataloader": _library("torchdata", minimum="0.8.0"),
    "transformer_engine": _library("transformer_engine", distribution="transformer-engine"),
}
"""Every optional library that is asked about, by the name in `is_<name>_available`."""


def is_installed(name: str) -> bool:
    """Return whether a library of the table is installed, in a version that is enough.

    Example:
        >>> is_installed("import_timer")
        False
    """
    return _is_installed(LIBRARIES[name])


def require(name: str, what: str, *, install: str | None = None) -> None:
    """Raise if an optional library is absent.

    Args:
        name: A key of `LIBRARIES`.
        what: The feature that needs it, as the subject of a sentence.
        install: What to install, such as an extra of one of our packages; its own distribution if None.

    Raises:
        MissingDependencyError: It is not installed, or too old.
    """
    library = LIBRARIES[name]
    if _is_installed(library):
        return
    distribution = library.distribution or library.modules[0]
    wanted = f"{distribution}>={library.minimum}" if library.minimum else distribution
    raise MissingDependencyError(
        f"{what} needs {library.modules[0]}, which is not installed"
        f"{f' in version {library.minimum} or newer' if library.minimum else ''}: "
        f"run `pip install '{install or wanted}'`"
    )


@functools.cache
def _is_installed(library: Library) -> bool:
    if not any(map(_has_module, library.modules)):
        return False
    if library.minimum is None:
        return True
    return compare_versions(_version_of(library), ">=", library.minimum)


def _has_module(name: str) -> bool:
    """Whether `import name` would find code, rather than a folder that happens to have the name.

    A folder with Python modules deeper down, as of `megatron`, is code; an empty or a data folder is not.
    """
    if sys.modules.get(name) is not None:
        return True
    spec = find_spec(name)  # None for a name that `sys.modules` blocks with None, too
    if spec is None:
        return False
    return spec.origin is not None or name in _NAMESPACES


_NAMESPACES = frozenset({"megatron"})


def _version_of(library: Library) -> Version:
    """The installed version; 0 for a module that no distribution brought, such as a stub."""
    try:
        return installed_version(library.distribution or library.modules[0])
    except MissingDependencyError:
        return Version("0")


def _question(name: str) -> Callable[[], bool]:
    """Make `is_<name>_available` of a library of the table."""
    library = LIBRARIES[name]

    def is_available() -> bool:
        return is_installed(name)

    since = f" ({library.minimum} or newer)" if library.minimum else ""
    is_available.__name__ = is_available.__qualname__ = f"is_{name}_available"
    is_available.__doc__ = f"Return whether {' or '.join(library.modules)}{since} is installed."
    return is_available


is_aim_available = _question("aim")
is_amdsmi_available = _question("amdsmi")
is_boto3_available = _question("boto3")
is_clearml_available = _question("clearml")
is_comet_ml_available = _question("comet_ml")
is_datasets_available = _question("datasets")
is_deepspeed_available = _question("deepspeed")
is_dvclive_available = _question("dvclive")
is_import_timer_available = _question("import_timer")
is_lomo_available = _question("lomo")
is_matplotlib_available = _question("matplotlib")
is_megatron_lm_available = _question("megatron_lm")
is_mlflow_available = _question("mlflow")
is_msamp_available = _question("msamp")
is_pandas_available = _question("pandas")
is_peft_available = _question("peft")
is_plotly_available = _question("plotly")
is_pynvml_available = _question("pynvml")
is_pytest_available = _question("pytest")
is_rich_available = _question("rich")
is_sagemaker_available = _question("sagemaker")
is_schedulefree_available = _question("schedulefree")
is_swanlab_available = _question("swanlab")
is_tensorboard_available = _question("tensorboard")
is_timm_available = _question("timm")
is_torchao_available = _question("torchao")
is_torchdata_available = _question("torchdata")
is_torchdata_stateful_dataloader_available = _question("torchdata_stateful_dataloader")
is_torchvision_available = _question("torchvision")
is_trackio_available = _question("trackio")
is_transformer_engine_available = _question("transformer_engine")
is_transformers_available = _question("transformers")
is_triton_available = _question("triton")
is_wandb_available = _question("wandb")


def is_bnb_available(min_version: str | None = None) -> bool:
    """Return whether bitsandbytes is installed, without importing it.

    Args:
        min_version: The first version that is enough; None for any.
    """
    return is_installed("bnb") and (
        min_version is None or compare_versions("bitsandbytes", ">=", min_version)
    )


def is_8bit_bnb_available() -> bool:
    """Return whether bitsandbytes is installed in a version with 8-bit layers (0.37.2)."""
    return is_bnb_available(min_version="0.37.2")


def is_4bit_bnb_available() -> bool:
    """Return whether bitsandbytes is installed in a version with 4-bit layers (0.39.0)."""
    return is_bnb_available(min_version="0.39.0")


def is_bitsandbytes_multi_backend_available() -> bool:
    """Return whether bitsandbytes is installed in a version for more than CUDA (0.46.0)."""
    return is_bnb_available(min_version="0.46.0")


def is_fp8_available() -> bool:
    """Return whether any library for FP8 training is installed."""
    return any(map(is_installed, ("msamp", "transformer_engine", "torchao")))


def is_pippy_available() -> bool:
    """Return whether torch brings `torch.distributed.pipelining` (2.4)."""
    return is_torch_version(">=", "2.4.0")


def is_weights_only_available() -> bool:
    """Return whether `torch.load(weights_only=True)` accepts a list of safe classes (torch 2.4)."""
    return is_torch_version(">=", "2.4.0")
