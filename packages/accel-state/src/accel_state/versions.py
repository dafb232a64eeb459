"""Compare versions of installed libraries, by their metadata; import none of them."""

from __future__ import annotations

import functools
import operator
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from accel_state.errors import MissingDependencyError, SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

STR_OPERATION_TO_FUNC: Mapping[str, Callable[[Version, Version], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}
"""What the texts of comparisons mean."""

MITA_PROFILING_AVAILABLE_PYTORCH_VERSION = "2.1.0"
"""The version of torch since which its profiler records devices that are not CUDA's."""
XPU_PROFILING_AVAILABLE_PYTORCH_VERSION = "2.4.0"
"""The version of torch since which its profiler records Intel GPUs."""

BETA_TP_AVAILABLE_PYTORCH_VERSION = "2.3.0"
"""The version of torch since which tensor parallelism works."""
BETA_TP_AVAILABLE_TRANSFORMERS_VERSION = "4.52.0"
"""The version of transformers since which its models have a plan for tensor parallelism."""
BETA_CP_AVAILABLE_PYTORCH_VERSION = "2.6.0"
"""The version of torch since which context parallelism works."""
BETA_SP_AVAILABLE_DEEPSPEED_VERSION = "0.18.2"
"""The version of DeepSpeed since which sequence parallelism works."""


def compare_versions(library_or_version: str | Version, operation: str, requirement_version: str) -> bool:
    """Compare a version with another.

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
    found = (
        installed_version(library_or_version) if isinstance(library_or_version, str) else library_or_version
    )
    return STR_OPERATION_TO_FUNC[operation](found, _parsed(requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """Compare the version of the installed torch with another.

    A pre-release or nightly counts as the release that it leads to.

    Example:
        >>> is_torch_version(">=", "2.9")
        True
    """
    return compare_versions(Version(installed_version("torch").base_version), operation, version)


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
            f"the version of {distribution!r} was asked for, but no distribution of this name is installed"
        ) from None


def _parsed(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        raise SettingsError(f"{text!r} is not a version: expected something like '2.9.0'") from None
