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
    from collections.abc import Mapping


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


LIBRARIES: Mapping[str, Library] = {
    "aim": _library("aim"),
    "amdsmi": _library("amdsmi"),
    "bnb": _library("bitsandbytes"),
    "boto3": _library("boto3"),
    "clearml": _library("clearml"),
    "comet_ml": _library("comet_ml", distribution="comet-ml"),
    "datasets": _library("datasets"),
    "deepspeed": _library("deepspeed"),
    "dvclive": _library("dvclive"),
    "import_timer": _library("import_timer", distribution="import-timer"),
    "lomo": _library("lomo_optim", distribution="lomo-optim"),
    "matplotlib": _library("matplotlib"),
    "megatron_lm": _library("megatron", distribution="megatron-core"),
    "mlflow": _library("mlflow"),
    "msamp": _library("msamp", distribution="ms-amp"),
    "pandas": _library("pandas"),
    "peft": _library("peft"),
    "plotly": _library("plotly"),
    "pynvml": _library("pynvml", distribution="nvidia-ml-py"),
    "pytest": _library("pytest"),
    "rich": _library("rich"),
    "sagemaker": _library("sagemaker"),
    "schedulefree": _library("schedulefree"),
    "swanlab": _library("swanlab"),
    "tensorboard": _library("tensorboard", "tensorboardX"),
    "timm": _library("timm"),
    "torchao": _library("torchao", minimum="0.6.1"),
    "torchdata": _library("torchdata"),
    "torchdata_stateful_dataloader": _library("torchdata", minimum="0.8.0"),
    "torchvision": _library("torchvision"),
    "trackio": _library("trackio"),
    "transformer_engine": _library("transformer_engine", distribution="transformer-engine"),
    "transformers": _library("transformers"),
    "triton": _library("triton"),
    "wandb": _library("wandb"),
}
"""Every optional library that is asked about, by the name in `is_<name>_available`."""


def is_installed(name: str) -> bool:
    """Return whether a library of the table is installed, in a version that is enough.

    Args:
        name: A key of `LIBRARIES`.

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


def is_aim_available() -> bool:
    """Return whether aim is installed."""
    return is_installed("aim")


def is_amdsmi_available() -> bool:
    """Return whether amdsmi is installed."""
    return is_installed("amdsmi")


def is_boto3_available() -> bool:
    """Return whether boto3 is installed."""
    return is_installed("boto3")


def is_clearml_available() -> bool:
    """Return whether clearml is installed."""
    return is_installed("clearml")


def is_comet_ml_available() -> bool:
    """Return whether comet_ml is installed."""
    return is_installed("comet_ml")


def is_datasets_available() -> bool:
    """Return whether datasets is installed."""
    return is_installed("datasets")


def is_deepspeed_available() -> bool:
    """Return whether deepspeed is installed."""
    return is_installed("deepspeed")


def is_dvclive_available() -> bool:
    """Return whether dvclive is installed."""
    return is_installed("dvclive")


def is_import_timer_available() -> bool:
    """Return whether import_timer is installed."""
    return is_installed("import_timer")


def is_lomo_available() -> bool:
    """Return whether lomo-optim is installed."""
    return is_installed("lomo")


def is_matplotlib_available() -> bool:
    """Return whether matplotlib is installed."""
    return is_installed("matplotlib")


def is_megatron_lm_available() -> bool:
    """Return whether megatron-core is installed."""
    return is_installed("megatron_lm")


def is_mlflow_available() -> bool:
    """Return whether mlflow is installed."""
    return is_installed("mlflow")


def is_msamp_available() -> bool:
    """Return whether MS-AMP is installed."""
    return is_installed("msamp")


def is_pandas_available() -> bool:
    """Return whether pandas is installed."""
    return is_installed("pandas")


def is_peft_available() -> bool:
    """Return whether peft is installed."""
    return is_installed("peft")


def is_plotly_available() -> bool:
    """Return whether plotly is installed."""
    return is_installed("plotly")


def is_pynvml_available() -> bool:
    """Return whether pynvml is installed."""
    return is_installed("pynvml")


def is_pytest_available() -> bool:
    """Return whether pytest is installed."""
    return is_installed("pytest")


def is_rich_available() -> bool:
    """Return whether rich is installed."""
    return is_installed("rich")


def is_sagemaker_available() -> bool:
    """Return whether sagemaker is installed."""
    return is_installed("sagemaker")


def is_schedulefree_available() -> bool:
    """Return whether schedulefree is installed."""
    return is_installed("schedulefree")


def is_swanlab_available() -> bool:
    """Return whether swanlab is installed."""
    return is_installed("swanlab")


def is_tensorboard_available() -> bool:
    """Return whether tensorboard or tensorboardX is installed."""
    return is_installed("tensorboard")


def is_timm_available() -> bool:
    """Return whether timm is installed."""
    return is_installed("timm")


def is_torchao_available() -> bool:
    """Return whether torchao (0.6.1 or newer) is installed."""
    return is_installed("torchao")


def is_torchdata_available() -> bool:
    """Return whether torchdata is installed."""
    return is_installed("torchdata")


def is_torchdata_stateful_dataloader_available() -> bool:
    """Return whether torchdata with its stateful data loader (0.8.0) is installed."""
    return is_installed("torchdata_stateful_dataloader")


def is_torchvision_available() -> bool:
    """Return whether torchvision is installed."""
    return is_installed("torchvision")


def is_trackio_available() -> bool:
    """Return whether trackio is installed."""
    return is_installed("trackio")


def is_transformer_engine_available() -> bool:
    """Return whether transformer_engine is installed."""
    return is_installed("transformer_engine")


def is_transformers_available() -> bool:
    """Return whether transformers is installed."""
    return is_installed("transformers")


def is_triton_available() -> bool:
    """Return whether triton is installed."""
    return is_installed("triton")


def is_wandb_available() -> bool:
    """Return whether wandb is installed."""
    return is_installed("wandb")


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
