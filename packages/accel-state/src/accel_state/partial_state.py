"""PartialState: rank, world size and device of this process, and methods that depend on the rank."""

from __future__ import annotations

import builtins
import functools
import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeVar, overload

import numpy as np
import torch

from accel_state import environ, runtime
from accel_state.device_kinds import available_kind
from accel_state.devices import default_device, set_current_device, set_numa_affinity
from accel_state.errors import SettingsError
from accel_state.labels import DistributedType, distributed_type_of
from accel_state.libraries import require
from accel_state.runtime import Runtime
from accel_state.settings.model import Settings, from_environ

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class RankMethods:
    """Methods of `PartialState`, `AcceleratorState` and `Accelerator` that depend on the rank."""

    __slots__ = ()

    @property
    def _process(self) -> PartialState:
        """The `PartialState` of this process."""
        raise NotImplementedError

    @property
    def use_distributed(self) -> bool:
        """Whether there are several processes."""
        return self._process.num_processes > 1

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first of all processes."""
        return self._process.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its node."""
        return self._process.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last of all processes."""
        return self._process.process_index == self._process.num_processes - 1

    def wait_for_everyone(self) -> None:
        """Wait for all ranks (a barrier).

        Raises:
            DistributedOperationException: In debug mode, another rank calls another collective.
        """
        self._process.runtime.barrier()

    def main_process_first(self) -> AbstractContextManager[None]:
        """Run a block on the main process first, then on the other ranks.

        Example:
            >>> from accel_state import PartialState
            >>> with PartialState(cpu=True).main_process_first():
            ...     _ = "download on one process, find it in the cache on the others"
        """
        return goes_first(self.is_main_process, self.wait_for_everyone)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Run a block on the first process of each node first, then on the other ranks."""
        return goes_first(self.is_local_main_process, self.wait_for_everyone)

    def _goes_first(self, is_main: bool) -> Generator[None]:
        """Run the block on some ranks first, then on the others; Accelerate's name of `goes_first`."""
        with goes_first(is_main, self.wait_for_everyone):
            yield

    @overload
    def on_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]: ...
    @overload
    def on_main_process(self, function: None = None) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...
    def on_main_process(self, function: Any = None) -> Any:
        """Decorate a function so that only the main process runs it; others return `None`.

        Example:
            >>> from accel_state import PartialState
            >>> @PartialState(cpu=True).on_main_process
            ... def answer():
            ...     return 42
            >>> answer()
            42
        """
        return _run_if(self.is_main_process, function)

    @overload
    def on_local_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]: ...
    @overload
    def on_local_main_process(
        self, function: None = None
    ) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...
    def on_local_main_process(self, function: Any = None) -> Any:
        """Decorate a function so that only the first process of each node runs it."""
        return _run_if(self.is_local_main_process, function)

    def on_last_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Decorate a function so that only the last process runs it."""
        return only_if(self.is_last_process, function)

    @overload
    def on_process(
        self, function: Callable[P, R], process_index: int | None = None
    ) -> Callable[P, R | None]: ...
    @overload
    def on_process(
        self, function: None = None, process_index: int | None = None
    ) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...
    def on_process(self, function: Any = None, process_index: int | None = None) -> Any:
        """Decorate a function so that only one process runs it.

        Args:
            function: The function; omit it to decorate with arguments.
            process_index: The rank. With a single process, the function runs for any rank.

        Raises:
            ValueError: `process_index` is missing.

        Example:
            >>> from accel_state import PartialState
            >>> @PartialState(cpu=True).on_process(process_index=0)
            ... def answer():
            ...     return 42
            >>> answer()
            42
        """
        return self._on(function, "process_index", self._process.process_index, process_index)

    @overload
    def on_local_process(
        self, function: Callable[P, R], local_process_index: int | None = None
    ) -> Callable[P, R | None]: ...
    @overload
    def on_local_process(
        self, function: None = None, local_process_index: int | None = None
    ) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...
    def on_local_process(self, function: Any = None, local_process_index: int | None = None) -> Any:
        """Decorate a function so that only one process of each node runs it.

        Args:
            function: The function; omit it to decorate with arguments.
            local_process_index: The local rank. With a single process, the function runs for any local rank.

        Raises:
            ValueError: `local_process_index` is missing.
        """
        return self._on(
            function, "local_process_index", self._process.local_process_index, local_process_index
        )

    @overload
    def split_between_processes(
        self, inputs: tuple[T, ...], apply_padding: bool = ...
    ) -> AbstractContextManager[tuple[T, ...]]: ...
    @overload
    def split_between_processes(self, inputs: T, apply_padding: bool = ...) -> AbstractContextManager[T]: ...
    def split_between_processes(
        self, inputs: Any, apply_padding: bool = False
    ) -> AbstractContextManager[Any]:
        """Yield this rank's shard of some data.

        Args:
            inputs: A list, tuple, tensor, numpy array or `datasets.Dataset`, or a dict of such, equally long.
            apply_padding: Repeat the last item of `inputs` so that all shards are equally long, as a
                following `gather` of tensors may need.

        Raises:
            ValueError: The values of a dict are not equally long.
            TypeError: `inputs` has another type.

        Example:
            >>> from accel_state import PartialState
            >>> with PartialState(cpu=True).split_between_processes(["a", "b"]) as shard:
            ...     shard
            ['a', 'b']
        """
        shard = shard_inputs(
            inputs, self._process.num_processes, self._process.process_index, apply_padding=apply_padding
        )
        return nullcontext(shard)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once per node, as the built-in `print` does."""
        if self.is_local_main_process:
            builtins.print(*args, **kwargs)  # noqa: T201 - it is what was asked for

    def _on(self, function: Any, name: str, own: int, wanted: int | None) -> Any:
        if wanted is None:
            raise ValueError(f"Choose the process that runs the function: {name}=0, for example.")
        return _run_if(own == wanted or not self.use_distributed, function)


def _run_if(condition: bool, function: Any) -> Any:
    run = functools.partial(only_if, condition)
    return run if function is None else run(function)


def only_if(condition: bool, function: Callable[P, R]) -> Callable[P, R | None]:
    """Return the function if the condition holds, else a function of the same name that does nothing.

    Example:
        >>> only_if(False, len)([1, 2]) is None
        True
    """
    if condition:
        return function

    @functools.wraps(function)
    def noop(*args: P.args, **kwargs: P.kwargs) -> None:
        del args, kwargs

    return noop


@contextmanager
def goes_first(first: bool, barrier: Callable[[], None]) -> Generator[None]:
    """Run the block on some ranks first, then on the other ranks.

    Args:
        first: Whether this rank is one of the first.
        barrier: Waits for all ranks. Called exactly once on each, also when the block raises, so that
            an error in the first does not leave the others waiting.
    """
    if not first:
        barrier()
    try:
        yield
    finally:
        if first:
            barrier()


def shard_bounds(length: int, num_shards: int, index: int) -> tuple[int, int]:
    """Return begin and end index of one shard of a sequence; the first shards may be one longer.

    Example:
        >>> [shard_bounds(5, 3, i) for i in range(3)]
        [(0, 2), (2, 4), (4, 5)]
    """
    size, longer = divmod(length, num_shards)
    begin = index * size + min(index, longer)
    return begin, begin + size + (index < longer)


def shard_inputs(inputs: Any, num_shards: int, index: int, *, apply_padding: bool = False) -> Any:
    """Return one rank's shard of some data.

    Raises:
        ValueError: The values of a dict are not equally long.
        TypeError: `inputs` has another type.

    Example:
        >>> shard_inputs({"a": [1, 2, 3], "b": (4, 5, 6)}, 2, 1, apply_padding=True)
        {'a': [3, 3], 'b': (6, 6)}
    """
    if isinstance(inputs, dict):
        lengths = {key: len(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(
                "The values of a dict that is split between processes must be equally long, but have "
                f"the lengths {lengths}."
            )
        return {
            key: shard_inputs(value, num_shards, index, apply_padding=apply_padding)
            for key, value in inputs.items()
        }
    if not isinstance(inputs, (list, tuple, torch.Tensor, np.ndarray)) and not _is_dataset(inputs):
        raise TypeError(
            f"Cannot split a {type(inputs).__name__} between processes: pass a list, a tuple, a tensor, a "
            "numpy array, a datasets.Dataset, or a dict of these."
        )
    length = len(inputs)
    begin, end = shard_bounds(length, num_shards, index)
    missing = -(-length // num_shards) - (end - begin) if apply_padding and length else 0
    return _slice_padded(inputs, begin, end, missing)


def _slice_padded(inputs: Any, begin: int, end: int, missing: int) -> Any:
    """Return items `begin` to `end`, padded with `missing` copies of the last of all items."""
    if _is_dataset(inputs):
        return inputs.select([*range(begin, end), *[len(inputs) - 1] * missing])
    shard, last = inputs[begin:end], inputs[-1:]
    if missing == 0:
        return shard
    if isinstance(inputs, torch.Tensor):
        return torch.cat([shard, *[last] * missing])
    if isinstance(inputs, np.ndarray):
        return np.concatenate([shard, *[last] * missing])
    return shard + last * missing


def _is_dataset(inputs: Any) -> bool:
    """Return whether this is a `datasets.Dataset`, without importing that package."""
    return any(
        base.__name__ == "Dataset" and base.__module__.partition(".")[0] == "datasets"
        for base in type(inputs).__mro__
    )


class SharedState(RankMethods):
    """Base of `PartialState` and `AcceleratorState`: attributes that all instances share."""

    _shared_state: ClassVar[dict[str, Any]]
    _known_attrs: ClassVar[list[str]] = [
        *("_cpu", "_mixed_precision", "_shared_state", "backend", "debug", "device", "distributed_type"),
        *("fork_launched", "local_process_index", "num_processes", "process_index"),
    ]
    """The attributes that all instances share, as Accelerate lists them."""

    device: torch.device
    distributed_type: DistributedType
    num_processes: int
    process_index: int
    local_process_index: int
    backend: str | None
    debug: bool
    runtime: Runtime

    if not TYPE_CHECKING:  # type checkers are to report unknown attributes

        def __getattr__(self, name: str) -> Any:
            kind = type(self).__name__
            message = f"{kind!r} object has no attribute {name!r}"  # Programs match Python's wording.
            is_known = name in SharedState.__annotations__ or name.endswith("_plugin")
            if is_known and not self._shared_state:
                message = (
                    f"`{kind}` object has no attribute `{name}`. This happens if `{kind}._reset_state()` was "
                    "called and an `Accelerator` or `PartialState` was not reinitialized."
                )
            raise AttributeError(message, name=name, obj=self)

    @property
    def initialized(self) -> bool:
        """Whether the state is initialised."""
        return bool(self._shared_state)


class PartialState(SharedState):
    """Rank, world size and device of this process, with collectives. All instances share state.

    The first one joins the process group, if a launcher started several processes; a group that exists
    already is used as it is.

    Args:
        cpu: Compute on the CPU even if there is an accelerator.
        **kwargs: Options of `torch.distributed.init_process_group`: `backend`, `init_method`, `timeout`
            (a `datetime.timedelta`: how long a collective may wait for a rank), `store`, `rank`,
            `world_size` …

    Attributes:
        device (torch.device): Where this process computes.
        distributed_type (DistributedType): The kind of run.
        num_processes (int): Number of processes.
        process_index (int): Index of this process, from 0.
        local_process_index (int): Index of this process on its machine, from 0.
        backend (str | None): The backend that moves tensors between processes; `None` for one process.
        debug (bool): Whether collectives check first that all ranks agree.
        fork_launched (bool): Whether `notebook_launcher` forked this process.
        runtime (Runtime): The record behind this class.

    Raises:
        SettingsError: The environment or `kwargs` request something impossible, or contradict the existing
            state.

    Example:
        >>> state = PartialState(cpu=True)
        >>> state.is_main_process, state.device
        (True, device(type='cpu'))
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    fork_launched: bool
    _cpu: bool
    _options: dict[str, Any]

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        self.__dict__ = self._shared_state
        if self.initialized:
            self._agree(cpu, kwargs)
            return
        variables = environ.read()
        self._start(from_environ(variables), variables, cpu, kwargs)

    @classmethod
    def _from_settings(
        cls, settings: Settings, variables: Mapping[str, str], cpu: bool, options: dict[str, Any]
    ) -> None:
        """Initialise the state from settings that were read already, unless it is initialised."""
        if not cls._shared_state:
            state = cls.__new__(cls)
            state.__dict__ = cls._shared_state
            state._start(settings, variables, cpu, options)

    def _start(
        self, settings: Settings, variables: Mapping[str, str], cpu: bool, options: dict[str, Any]
    ) -> None:
        label: DistributedType | None = None
        if type(self)._prepare_backend is not _prepare_backend:
            backend, label = self._prepare_backend(cpu, False, options.get("backend"))  # noqa: FBT003 - as Accelerate does
            options = {**options, "backend": backend}
            if label == "NO":  # one process, whatever a launcher says
                variables, options = {}, {}
        started = runtime.init(settings, variables, cpu=cpu, **options)
        topology = started.topology
        if settings.process.cpu_affinity:
            set_numa_affinity(topology.local_rank)
        if settings.process.enable_rich:
            require("rich", "ACCELERATE_ENABLE_RICH")
            import_module("rich.traceback").install(show_locals=False)
        self.__dict__.update(
            _cpu=started.device.type == "cpu",
            _options=dict(options),
            runtime=started,
            backend=started.backend,
            device=started.device,
            debug=started.debug,
            distributed_type=label
            or distributed_type_of(
                "ddp" if topology.world_size > 1 else "single",
                started.kind.distributed_type,
                topology.world_size,
            ),
            num_processes=topology.world_size,
            process_index=topology.rank,
            local_process_index=topology.local_rank,
            fork_launched=started.fork_launched,
        )

    def _prepare_backend(
        self, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
    ) -> tuple[str | None, DistributedType]:
        """Return the backend and the distributed type of this run; programs override it, as in Accelerate.

        The values that an override returns at the start select the backend of the process group; with
        `DistributedType.NO` the process runs alone. An override that calls this method then gets the
        values of the launcher's variables.
        """
        del sagemaker_dp
        if self.initialized:
            return self.backend, self.distributed_type
        variables = environ.read()
        topology, kind, _ = runtime.topology_and_device(from_environ(variables), variables, cpu=cpu)
        several = topology.world_size > 1
        label = distributed_type_of(
            "ddp" if several else "single", kind.distributed_type, topology.world_size
        )
        return (backend or kind.group_backend) if several else None, label

    def __repr__(self) -> str:
        if not self._shared_state:
            return "PartialState(reset)"
        backend = f"  Backend: {self.backend}" if self.backend else ""
        return (
            f"Distributed environment: {self.distributed_type}{backend}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )

    @classmethod
    def _reset_state(cls) -> None:
        """Reset the shared state, for tests. The process group stays as it is."""
        cls._shared_state.clear()
        runtime.reset()

    @property
    def _process(self) -> PartialState:
        return self

    @property
    def default_device(self) -> torch.device:
        """The best device of this machine, whether or not this run uses it."""
        topology = self.runtime.topology
        return default_device(available_kind(), topology.local_rank, topology.local_world_size)

    def set_device(self) -> None:
        """Make `device` the current device of its type."""
        set_current_device(self.device)

    def destroy_process_group(self, group: torch.distributed.ProcessGroup | None = None) -> None:
        """Destroy a process group.

        Args:
            group: The group to destroy; the default group and all others if `None`, except in a process that
                `notebook_launcher` forked, which destroys them itself.
        """
        if self.fork_launched and group is None:
            return
        runtime.destroy_process_group(group)

    def _agree(self, cpu: bool, options: dict[str, Any]) -> None:
        """Check that the arguments of a later construction match the initialised state."""
        if cpu and not self._cpu:
            raise SettingsError(
                f"cpu=True was requested, but this process already computes on {self.device}. Pass cpu=True "
                "to the first `Accelerator()` or `PartialState()` of the process."
            )
        changed = {name: value for name, value in options.items() if self._options.get(name) != value}
        timeout = changed.pop("timeout", None)
        if timeout is not None and self.use_distributed:
            runtime.set_collective_timeout(timeout)
            self._options["timeout"] = timeout
        if changed:
            logger.warning(
                "The process group already exists, so %s have no effect. Pass them to the first "
                "`Accelerator()` or `PartialState()` of the process.",
                ", ".join(f"{name}={value!r}" for name, value in sorted(changed.items())),
            )


_prepare_backend = PartialState._prepare_backend


def wait_for_everyone() -> None:
    """Wait until every process has reached this call; create the `PartialState` if absent.

    Example:
        >>> wait_for_everyone()
    """
    PartialState().wait_for_everyone()
