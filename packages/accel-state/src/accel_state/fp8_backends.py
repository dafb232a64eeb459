"""The libraries that train in FP8: which one a run uses, and on which devices they can."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from accel_state.available import is_installed
from accel_state.errors import MissingDependencyError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable

ADA = (8, 9)
"""The first compute capability with FP8 tensor cores (Ada; Hopper is 9.0)."""

_MI300 = (9, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Backend:
    """A library that multiplies matrices in 8 bits.

    Args:
        name: As in `ACCELERATE_FP8_BACKEND`.
        title: Its own name.
        library: A key of `accel_state.available.LIBRARIES`.
        install: What `pip install` takes.
        devices: The types of devices on which it runs, of those where FP8 is computed.
        otherwise: What to use where it cannot run.
    """

    name: str
    title: str
    library: str
    install: str
    devices: tuple[str, ...]
    otherwise: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Device:
    """What is known of a device before torch is imported.

    Args:
        type: Such as `"cuda"`.
        capability: Its compute capability; `None` if it has none, or nobody knows it.
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
        devices=("cuda",),
        otherwise="use the FP8 backend 'AO' (torchao: AORecipeKwargs()), or mixed_precision='bf16'",
    ),
)
"""In the order in which they are used when none is named."""

BY_NAME = {backend.name: backend for backend in BACKENDS}


def why_unusable(backend: Fp8Backend, device: Fp8Device, *, emulate: bool = False) -> str | None:
    """Explain why a backend cannot train on a device, or emulate FP8 there; `None` if it can.

    Example:
        >>> why_unusable(BY_NAME["AO"], Fp8Device(type="cpu"))
        >>> reason = why_unusable(BY_NAME["AO"], Fp8Device(type="cuda", capability=(8, 0)))
        >>> print(reason)
        FP8 needs a GPU of compute capability 8.9 or newer (Ada, Hopper), and this one has 8.0: use 'bf16'.
    """
    if device.type not in backend.devices:
        supported = " or ".join(map(repr, backend.devices))
        found = f"{backend.title} trains on devices of type {supported}, not {device.type!r}"
        return f"{found}: {backend.otherwise}."
    if device.type != "cuda" or device.capability is None or emulate:
        return None
    least, names = (_MI300, "MI300") if device.is_rocm else (ADA, "Ada, Hopper")
    if device.capability >= least:
        return None
    found = ".".join(map(str, device.capability))
    needed = ".".join(map(str, least))
    return (
        f"FP8 needs a GPU of compute capability {needed} or newer ({names}), and this one has {found}: "
        "use 'bf16'."
    )


def choose_backend(
    named: str | None, device: Fp8Device, *, emulate: bool = False, installed: Iterable[str] | None = None
) -> Fp8Backend:
    """Return the backend of a run: the one that was named, else the first that is installed and can run.

    Raises:
        MissingDependencyError: The one that was named, or all of them, are not installed.
        UnsupportedError: The device cannot do it.

    Example:
        >>> choose_backend(None, Fp8Device(type="cpu"), installed=["TE", "AO"]).title
        'torchao'
    """
    current = (
        [one.name for one in BACKENDS if is_installed(one.library)] if installed is None else [*installed]
    )
    candidates = [one for one in BACKENDS if one.name in current] if named is None else [BY_NAME[named]]
    for backend in candidates:
        if backend.name in current and why_unusable(backend, device, emulate=emulate) is None:
            return backend
    wanted = (candidates or BACKENDS)[0]
    reason = why_unusable(wanted, device, emulate=emulate)
    if reason is not None:
        raise UnsupportedError(f"mixed_precision='fp8': {reason}")
    remedy = f"run `pip install '{wanted.install}'`"
    if wanted.name == "MSAMP":
        remedy = f"it is no longer developed; {wanted.otherwise}"
    raise MissingDependencyError(
        f"mixed_precision='fp8' with the backend {wanted.name!r} needs {wanted.title}, which is not "
        f"installed: {remedy}."
    )
