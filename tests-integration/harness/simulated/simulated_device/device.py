"""The module `torch.<type>` of the simulated device: as `torch.cuda`, and what only tests use."""

from __future__ import annotations

import contextlib
import types
from typing import TYPE_CHECKING, Any

import torch
from simulated_device.registration import NAME, library

if TYPE_CHECKING:
    from collections.abc import Generator

Stream = torch.Stream
Event = torch.Event


def _index(device: Any = None) -> int:
    if device is None:
        return library.current_device()
    if isinstance(device, int):
        return device if device >= 0 else library.current_device()
    device = torch.device(device)
    if device.type != NAME:
        raise ValueError(f"Expected a {NAME} device, but got: {device}")
    return library.current_device() if device.index is None else device.index


def is_available() -> bool:
    """Whether there is a device."""
    return library.device_count() > 0


def device_count() -> int:
    """How many devices this process sees."""
    return library.device_count()


def init() -> None:
    """Initialise; raise in a fork of a process that had."""
    library.initialise()


_lazy_init = init


def is_initialized() -> bool:
    """Whether this process has used a device."""
    return library.is_initialised()


def _is_in_bad_fork() -> bool:  # pyright: ignore[reportUnusedFunction] - torch looks for it
    return library.is_forked()


def current_device() -> int:
    """The index of this thread's current device."""
    return library.current_device()


def set_device(device: Any) -> None:
    """Make a device this thread's current one."""
    library.set_device(_index(device))


class device:  # noqa: N801 - as torch.cuda.device
    """Make a device current within a block."""

    def __init__(self, device: Any) -> None:
        self.idx = None if device is None else _index(device)

    def __enter__(self) -> None:
        if self.idx is not None:
            self.prev_idx = library.current_device()
            library.set_device(self.idx)

    def __exit__(self, *_: object) -> None:
        if self.idx is not None:
            library.set_device(self.prev_idx)


def synchronize(device: Any = None) -> None:
    """Wait for all work of a device."""
    library.synchronize(_index(device))


def current_stream(device: Any = None) -> torch.Stream:
    """The stream on which this thread's operators run."""
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: Any = None) -> torch.Stream:
    """The stream on which operators run unless another is current."""
    current = current_stream(device)
    return torch.Stream(stream_id=0, device_index=current.device_index, device_type=current.device_type)


class StreamContext:
    """Run this thread's operators on a stream. Several threads may enter one, unlike `with stream:`."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.device = library.current_device()
            self.before = torch.accelerator.current_stream(self.stream.device)
            torch.accelerator.set_stream(self.stream)
            library.set_device(self.stream.device.index)

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            torch.accelerator.set_stream(self.before)
            library.set_device(self.device)


def stream(stream: torch.Stream | None) -> StreamContext:
    """Run this thread's operators on a stream within a block."""
    return StreamContext(stream)


def set_stream(stream: torch.Stream) -> None:
    """Run this thread's operators on a stream from now on."""
    torch.accelerator.set_stream(stream)


# --- memory


def memory_allocated(device: Any = None) -> int:
    """Bytes of tensors."""
    return library.statistics(_index(device))["allocated"]


def max_memory_allocated(device: Any = None) -> int:
    """The most bytes of tensors since `reset_peak_memory_stats`."""
    return library.statistics(_index(device))["allocated_peak"]


def memory_reserved(device: Any = None) -> int:
    """Bytes of tensors, and those that the allocator keeps for new ones."""
    return library.statistics(_index(device))["reserved"]


def max_memory_reserved(device: Any = None) -> int:
    """The most bytes reserved since `reset_peak_memory_stats`."""
    return library.statistics(_index(device))["reserved_peak"]


def memory_stats(device: Any = None) -> dict[str, Any]:
    """Statistics, by the names of `torch.cuda.memory_stats`."""
    return torch.accelerator.memory_stats(_index(device))


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """Statistics as text."""
    return str(library.statistics(_index(device)))


def reset_peak_memory_stats(device: Any = None) -> None:
    """Begin to look for the most bytes."""
    library.reset_peak(_index(device))


reset_max_memory_allocated = reset_peak_memory_stats


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Free and all bytes of a device."""
    return library.mem_get_info(_index(device))


def empty_cache() -> None:
    """Give back what the allocator keeps."""
    library.empty_cache()


def get_device_name(device: Any = None) -> str:
    """The name of the product."""
    return "Simulated accelerator"


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """A version of the hardware."""
    return (9, 0)


def get_device_properties(device: Any = None) -> types.SimpleNamespace:
    """Name, version and bytes."""
    total = library.statistics(_index(device))["capacity"]
    return types.SimpleNamespace(name=get_device_name(), total_memory=total, major=9, minor=0)


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Whether it computes in bfloat16."""
    return True


# --- random numbers

default_generators = tuple(library.default_generator(index) for index in range(library.MAX_DEVICES))


def manual_seed(seed: int) -> None:
    """Seed the current device."""
    library.default_generator(library.current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed all devices, without initialising one: `torch.manual_seed` calls it."""
    for generator in default_generators:
        generator.manual_seed(seed)


def seed() -> None:
    """Seed the current device with a random number."""
    library.default_generator(library.current_device()).seed()


def seed_all() -> None:
    """Seed all devices with one random number."""
    manual_seed_all(torch.Generator(NAME).seed())


def initial_seed() -> int:
    """The seed of the current device."""
    return library.default_generator(library.current_device()).initial_seed()


def get_rng_state(device: Any = NAME) -> torch.Tensor:
    """The state of a device's generator: 16 bytes on the CPU."""
    library.initialise()
    return library.default_generator(_index(device)).get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = NAME) -> None:
    """Set the state of a device's generator."""
    library.initialise()
    library.default_generator(_index(device)).set_state(new_state.clone())


def get_rng_state_all() -> list[torch.Tensor]:
    """The states of all devices."""
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: Any) -> None:
    """Set the states of all devices."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


random: Any = types.ModuleType(f"torch.{NAME}.random")
for _function in (
    *(manual_seed, manual_seed_all, seed, seed_all, initial_seed),
    *(get_rng_state, set_rng_state, get_rng_state_all, set_rng_state_all),
):
    setattr(random, _function.__name__, _function)


# --- autocast


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes that `torch.autocast` accepts."""
    return [torch.float16, torch.bfloat16]


class _GradScaler(torch.amp.GradScaler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(NAME, *args, **kwargs)


amp: Any = types.ModuleType(f"torch.{NAME}.amp")
amp.GradScaler = _GradScaler


# --- for tests only


def set_device_count(count: int) -> None:
    """Let this process see so many devices, before it uses one."""
    library.set_device_count(count)


@contextlib.contextmanager
def capacity(*sizes: int) -> Generator[None]:
    """Limit the memory of the devices, in bytes each, within a block; empties the allocator's cache."""
    before = [library.statistics(index)["capacity"] for index in range(device_count())]
    for index, size in enumerate(sizes):
        library.set_capacity(index, size)
    try:
        yield
    finally:
        for index, size in enumerate(before):
            library.set_capacity(index, size)


@contextlib.contextmanager
def pinned_capacity(size: int) -> Generator[None]:
    """Limit the host memory that can be pinned, in bytes, within a block."""
    library.set_pinned_capacity(size)
    try:
        yield
    finally:
        library.set_pinned_capacity(None)


def late_copies() -> int:
    """How many copies, and waits for other streams, have not run because nothing waited for them."""
    return library.late_copies()


def take_races() -> list[str]:
    """Reads and writes that no wait orders, and memory that was freed too early, since the last call."""
    return library.take_races()


def touched() -> list[int]:
    """Devices on which this process has done anything: on a GPU, those with a context."""
    return library.touched()


class Counters:
    """How often this process has done something, by what; empty where it has not.

    Attributes:
        synchronisations: The host waited for a device: "item", "copy" (a blocking one), "stream", "event",
            "device", or the operator whose result's shape depends on values ("aten::nonzero").
        copies: "host_to_device", "device_to_host", "device_to_device".
        collectives: "allreduce", "allgather", "broadcast", "send" …
    """

    def __init__(self) -> None:
        self.synchronisations: dict[str, int] = {}
        self.copies: dict[str, int] = {}
        self.collectives: dict[str, int] = {}


@contextlib.contextmanager
def counting() -> Generator[Counters]:
    """Count what all threads do within a block; the counters are filled when it ends."""
    counters = Counters()
    before = library.counters()
    try:
        yield counters
    finally:
        kinds = {
            "synchronise": counters.synchronisations,
            "copy": counters.copies,
            "collective": counters.collectives,
        }
        for key, number in library.counters().items():
            kind, _, what = key.partition(":")
            if number > before.get(key, 0):
                kinds[kind][what] = number - before.get(key, 0)


_debug_counters: dict[str, int] | None = None


def set_sync_debug_mode(debug_mode: str) -> None:
    """Between the modes "error" and "default", refuse implicit synchronisations, as `torch.cuda` does.

    Raises:
        RuntimeError: An operator or a copy has waited for a device; raised at the end, by "default".
    """
    global _debug_counters
    before, _debug_counters = _debug_counters, library.counters() if debug_mode == "error" else None
    if debug_mode == "default" and before is not None:
        explicit = {"synchronise:event", "synchronise:stream", "synchronise:device"}
        causes = [
            key
            for key, number in library.counters().items()
            if key.startswith("synchronise:") and key not in explicit and number > before.get(key, 0)
        ]
        if causes:
            raise RuntimeError(f"called a synchronizing {NAME.upper()} operation: {causes}")


def _sleep(cycles: int) -> None:  # pyright: ignore[reportUnusedFunction] - as torch.cuda has
    """Do nothing: copies are late anyway."""
