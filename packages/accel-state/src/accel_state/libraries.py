"""Find optional libraries, their versions and FP8 support, without importing any of them."""

from __future__ import annotations

import functools
import logging
import operator
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from packaging.version import InvalidVersion, Version

from accel_state.errors import MissingDependencyError, SettingsError, UnsupportedError
from accel_state.frozen import frozen

STR_OPERATION_TO_FUNC: Mapping[str, Callable[[Version, Version], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}
"""The functions of comparison operators."""

MITA_PROFILING_AVAILABLE_PYTORCH_VERSION = "2.1.0"
"""The first version of torch whose profiler records devices other than CUDA."""
XPU_PROFILING_AVAILABLE_PYTORCH_VERSION = "2.4.0"
"""The first version of torch whose profiler records Intel GPUs."""

BETA_TP_AVAILABLE_PYTORCH_VERSION = "2.3.0"
"""The first version of torch whose tensor parallelism works."""
BETA_TP_AVAILABLE_TRANSFORMERS_VERSION = "4.52.0"
"""The first version of transformers whose models have a tensor-parallel plan."""
BETA_CP_AVAILABLE_PYTORCH_VERSION = "2.6.0"
"""The first version of torch whose context parallelism works."""
BETA_SP_AVAILABLE_DEEPSPEED_VERSION = "0.18.2"
"""The first version of DeepSpeed whose sequence parallelism works."""


def compare_versions(library_or_version: str | Version, operation: str, requirement_version: str) -> bool:
    """Compare two versions.

    Args:
        library_or_version: The distribution name of an installed library, or a parsed version.
        operation: One of `>`, `>=`, `==`, `!=`, `<=`, `<`.
        requirement_version: The version on the other side.

    Raises:
        SettingsError: The operation or the version cannot be read.
        MissingDependencyError: The library is not installed.

    Example:
        >>> compare_versions("packaging", ">=", "1.0")
        True
        >>> compare_versions(Version("2.6.0+cu124"), "<", "2.6")
        False
    """
    if operation not in STR_OPERATION_TO_FUNC:
        raise SettingsError(
            f"operation {operation!r} is unknown: use one of {', '.join(STR_OPERATION_TO_FUNC)}"
        )
    known = library_or_version
    if isinstance(known, str):
        known = installed_version(known)
    try:
        required = Version(requirement_version)
    except InvalidVersion:
        raise SettingsError(
            f"{requirement_version!r} is not a version: expected something like '2.9.0'"
        ) from None
    return STR_OPERATION_TO_FUNC[operation](known, required)


def is_torch_version(operation: str, version: str) -> bool:
    """Compare the version of the installed torch with another.

    A pre-release or nightly counts as the release that follows it.

    Example:
        >>> is_torch_version(">=", "2.9")
        True
    """
    return compare_versions(torch_version(), operation, version)


def torch_version() -> Version:
    """Return the version of torch without its local build label, such as `+cpu`."""
    return Version(installed_version("torch").base_version)


@functools.cache
def installed_version(distribution: str) -> Version:
    """Return the version of an installed distribution.

    Raises:
        MissingDependencyError: It is not installed.

    Example:
        >>> installed_version("packaging") > Version("1.0")
        True
    """
    try:
        return Version(version(distribution))
    except PackageNotFoundError:
        raise MissingDependencyError(
            f"the version of {distribution!r} was requested, but no distribution of this name is installed"
        ) from None


@frozen
class Library:
    """An optional library.

    Args:
        modules: Top-level modules; any of them is sufficient.
        distribution: The distribution to install; the module's own name if None.
        minimum: The minimum version.
    """

    modules: tuple[str, ...]
    distribution: str | None = None
    minimum: str | None = None


def _library(*modules: str, distribution: str | None = None, minimum: str | None = None) -> Library:
    return Library(modules=modules, distribution=distribution, minimum=minimum)


_NAMED_ALIKE = (
    "aim", "amdsmi", "boto3", "clearml", "datasets", "deepspeed", "dvclive", "matplotlib", "mlflow",
    "pandas", "peft", "plotly", "pytest", "rich", "sagemaker", "schedulefree", "swanlab", "timm",
    "torchdata", "torchft", "torchvision", "trackio", "transformers", "triton", "wandb",
)  # fmt: skip
"""Libraries whose module and distribution have the same name as their key in `LIBRARIES`."""

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
"""Every optional library, by the name in `is_<name>_available`."""


def hide_import_notices() -> None:
    """Hide torch's log messages about the import of torchao 0.18, meant for the authors of torchao.

    Call it before torchao is imported, as transformers does. It does not import torch.
    """
    logging.getLogger("torch.utils._pytree").addFilter(_is_no_import_notice)


def _is_no_import_notice(record: logging.LogRecord) -> bool:
    return "Calling register_constant() on Enum subclasses is deprecated" not in str(record.msg)


def is_installed(name: str) -> bool:
    """Return whether a library of the table is installed, in its minimum version or newer.

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
        install: The requirement to install, such as an extra of an accel package; the library's distribution
            if None.

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
    try:
        return compare_versions(library.distribution or library.modules[0], ">=", library.minimum)
    except MissingDependencyError:  # the module belongs to no distribution, as a stub does
        return False


def _has_module(name: str) -> bool:
    """Return whether `import name` would find code, rather than a folder that happens to have the name.

    A folder with Python modules deeper down, as of `megatron`, is code; an empty or a data folder is not.
    """
    if sys.modules.get(name) is not None:
        return True
    spec = find_spec(name)  # None for a name that `sys.modules` blocks with None, too
    if spec is None:
        return False
    return spec.origin is not None or name in _NAMESPACES


_NAMESPACES = frozenset({"megatron"})


def _question(name: str) -> Callable[[], bool]:
    """Create the function `is_<name>_available` of a library of the table."""
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
is_torchft_available = _question("torchft")
is_torchvision_available = _question("torchvision")
is_trackio_available = _question("trackio")
is_transformer_engine_available = _question("transformer_engine")
is_transformers_available = _question("transformers")
is_triton_available = _question("triton")
is_wandb_available = _question("wandb")


def is_bnb_available(min_version: str | None = None) -> bool:
    """Return whether bitsandbytes is installed, without importing it.

    Args:
        min_version: The minimum version; None for any.
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
    """Return whether bitsandbytes is installed in a version that supports more than CUDA (0.46.0)."""
    return is_bnb_available(min_version="0.46.0")


def is_fp8_available() -> bool:
    """Return whether any library for FP8 training is installed."""
    return any(map(is_installed, ("msamp", "transformer_engine", "torchao")))


def is_pippy_available() -> bool:
    """Return whether torch has `torch.distributed.pipelining` (2.4)."""
    return is_torch_version(">=", "2.4.0")


def is_weights_only_available() -> bool:
    """Return whether `torch.load(weights_only=True)` accepts a list of safe classes (torch 2.4)."""
    return is_torch_version(">=", "2.4.0")


ADA = (8, 9)
"""The first compute capability with FP8 tensor cores (Ada; Hopper is 9.0)."""

_MI300 = (9, 4)


@frozen
class Fp8Backend:
    """A library for FP8 matrix multiplication.

    Args:
        name: As in `ACCELERATE_FP8_BACKEND`.
        title: The name that the library calls itself.
        library: A key of `accel_state.libraries.LIBRARIES`.
        install: The requirement for `pip install`.
        devices: The device types on which it computes in FP8.
        otherwise: The alternative to suggest where it cannot run.
    """

    name: str
    title: str
    library: str
    install: str
    devices: tuple[str, ...]
    otherwise: str


@frozen
class Fp8Device:
    """The properties of a device that are known before torch is imported.

    Args:
        type: Such as `"cuda"`.
        capability: Its compute capability; `None` if it has none, or it is unknown.
        is_rocm: Whether `"cuda"` means ROCm.
    """

    type: str
    capability: tuple[int, int] | None = None
    is_rocm: bool = False


BACKENDS = (
    Fp8Backend(
        name="AO",
        title="torchao",
        library="torchao",
        install="accel-plugins[torchao]",
        devices=("cuda", "xpu", "cpu"),
        otherwise="use mixed_precision='bf16'",
    ),
    Fp8Backend(
        name="TE",
        title="TransformerEngine",
        library="transformer_engine",
        install="accel-plugins[transformer-engine]",
        devices=("cuda",),
        otherwise="use the FP8 backend 'AO' (torchao, also on a CPU), or mixed_precision='bf16'",
    ),
    Fp8Backend(
        name="MSAMP",
        title="MS-AMP",
        library="msamp",
        install="git+https://github.com/Azure/MS-AMP.git",
        devices=(),
        otherwise="use the FP8 backend 'AO' (torchao: AORecipeKwargs()), or mixed_precision='bf16'",
    ),
)
"""In order of preference when none is requested."""

BY_NAME = {backend.name: backend for backend in BACKENDS}


def why_unusable(backend: Fp8Backend, device: Fp8Device, *, emulate: bool = False) -> str | None:
    """Explain why a backend cannot train on a device, or emulate FP8 there; `None` if it can.

    Example:
        >>> why_unusable(BY_NAME["AO"], Fp8Device(type="cpu"))
        >>> reason = why_unusable(BY_NAME["AO"], Fp8Device(type="cuda", capability=(8, 0)))
        >>> print(reason)
        FP8 needs a GPU of compute capability 8.9 or newer (Ada, Hopper), and this one has 8.0: use 'bf16'.
    """
    if not backend.devices:
        return f"{backend.title} is no longer developed, and not supported: {backend.otherwise}."
    if device.type not in backend.devices:
        supported = " or ".join(map(repr, backend.devices))
        reason = f"{backend.title} trains on devices of type {supported}, not {device.type!r}"
        return f"{reason}: {backend.otherwise}."
    if device.type != "cuda" or device.capability is None or emulate:
        return None
    least, names = (_MI300, "MI300") if device.is_rocm else (ADA, "Ada, Hopper")
    if device.capability >= least:
        return None
    capability = ".".join(map(str, device.capability))
    needed = ".".join(map(str, least))
    return (
        f"FP8 needs a GPU of compute capability {needed} or newer ({names}), and this one has {capability}: "
        "use 'bf16'."
    )


def choose_backend(
    named: str | None, device: Fp8Device, *, emulate: bool = False, installed: Iterable[str] | None = None
) -> Fp8Backend:
    """Return the FP8 backend of a run: the one requested by name, else the first usable installed one.

    Raises:
        MissingDependencyError: The requested backend is not installed, or, without a request, none is.
        UnsupportedError: The device does not support it.

    Example:
        >>> choose_backend(None, Fp8Device(type="cpu"), installed=["TE", "AO"]).title
        'torchao'
    """
    if installed is None:
        installed = [backend.name for backend in BACKENDS if is_installed(backend.library)]
    usable = set(installed)
    candidates = [row for row in BACKENDS if row.name in usable] if named is None else [BY_NAME[named]]
    for backend in candidates:
        if backend.name in usable and why_unusable(backend, device, emulate=emulate) is None:
            return backend
    wanted = (candidates or BACKENDS)[0]
    reason = why_unusable(wanted, device, emulate=emulate)
    if reason is not None:
        raise UnsupportedError(f"mixed_precision='fp8': {reason}")
    raise MissingDependencyError(
        f"mixed_precision='fp8' with the backend {wanted.name!r} needs {wanted.title}, which is not "
        f"installed: run `pip install '{wanted.install}'`."
    )
