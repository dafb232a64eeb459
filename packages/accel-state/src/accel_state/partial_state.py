"""`PartialState`: the documented face of the runtime, shared by all its instances."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from accel_state import environ, runtime
from accel_state.available import require
from accel_state.devices.affinity import set_numa_affinity
from accel_state.devices.kinds import available_kind
from accel_state.devices.select import default_device, set_current_device
from accel_state.errors import SettingsError
from accel_state.labels import distributed_type_of
from accel_state.rank_methods import RankMethods
from accel_state.settings.environ import from_environ

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from accel_state.labels import DistributedType
    from accel_state.runtime import Runtime
    from accel_state.settings.model import Settings

logger = logging.getLogger(__name__)


class SharedState(RankMethods):
    """What `PartialState` and `AcceleratorState` have in common: attributes that all instances share."""

    _shared_state: ClassVar[dict[str, Any]]

    device: torch.device
    distributed_type: DistributedType
    num_processes: int
    process_index: int
    local_process_index: int
    backend: str | None
    debug: bool
    runtime: Runtime

    def __getattr__(self, name: str) -> Any:
        kind = type(self).__name__
        message = f"{kind!r} object has no attribute {name!r}"  # Python's words, which programs look for
        if not name.startswith("__") and not self._shared_state:
            message += (
                f". This happens if `{kind}._reset_state()` was called and no `{kind}()` or `Accelerator()` "
                "was made since."
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
        cpu: Compute on the CPU, also if there is an accelerator.
        **kwargs: Options of `torch.distributed.init_process_group`: `backend`, `init_method`, `timeout`
            (a `datetime.timedelta`: how long a collective may wait for a rank), `store`, `rank`,
            `world_size` …

    Attributes:
        device (torch.device): Where this process computes.
        distributed_type (DistributedType): What the run is called.
        num_processes (int): Number of processes.
        process_index (int): Index of this process, from 0.
        local_process_index (int): Index of this process on its machine, from 0.
        backend (str | None): The backend that moves tensors between processes; `None` for one process.
        debug (bool): Whether collectives check first that all ranks agree.
        fork_launched (bool): Whether a notebook's launcher forked this process.
        runtime (Runtime): The record behind this face.

    Raises:
        SettingsError: The environment or `kwargs` ask for what cannot be done, or for something else
            than what was started before.

    Example:
        >>> state = PartialState(cpu=True)
        >>> state.is_main_process, state.device
        (True, device(type='cpu'))
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    fork_launched: bool

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
        """Initialise the state, unless it is, from settings that were read already."""
        if not cls._shared_state:
            state = cls.__new__(cls)
            state.__dict__ = cls._shared_state
            state._start(settings, variables, cpu, options)

    def _start(
        self, settings: Settings, variables: Mapping[str, str], cpu: bool, options: dict[str, Any]
    ) -> None:
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
            distributed_type=distributed_type_of(
                "ddp" if topology.world_size > 1 else "single",
                started.kind.distributed_type,
                topology.world_size,
            ),
            num_processes=topology.world_size,
            process_index=topology.rank,
            local_process_index=topology.local_rank,
            fork_launched=started.fork_launched,
        )

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
        """Make `device` the current one of its family."""
        set_current_device(self.device)

    def destroy_process_group(self, group: torch.distributed.ProcessGroup | None = None) -> None:
        """Destroy a process group.

        Args:
            group: Which one; the default one, and all others with it, if `None`. A process that was forked
                by a notebook's launcher leaves that to the launcher.
        """
        if self.fork_launched and group is None:
            return
        runtime.destroy_process_group(group)

    def _agree(self, cpu: bool, options: dict[str, Any]) -> None:
        """Check that a later construction asks for what was initialised."""
        if cpu and not self._cpu:
            raise SettingsError(
                f"cpu=True was asked for, but this process computes on {self.device} already. Pass cpu=True "
                "to the first `Accelerator()` or `PartialState()` of the process."
            )
        changed = {name: value for name, value in options.items() if self._options.get(name) != value}
        timeout = changed.pop("timeout", None)
        if timeout is not None and self.use_distributed:
            runtime.set_collective_timeout(timeout)
            self._options["timeout"] = timeout
        if changed:
            logger.warning(
                "The process group exists already; %s come too late. Pass them to the first `Accelerator()` "
                "or `PartialState()` of the process.",
                ", ".join(f"{name}={value!r}" for name, value in sorted(changed.items())),
            )


def wait_for_everyone() -> None:
    """Wait until every process has come here; makes the `PartialState` if there is none.

    Example:
        >>> wait_for_everyone()
    """
    PartialState().wait_for_everyone()
