"""Launch several processes from within Python: from a notebook, or on the CPU for a test."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

from accel_state import environ
from accel_state.devices.info import peer_variables
from accel_state.devices.kinds import CPU, available_kind
from accel_state.errors import SettingsError
from accel_state.labels import DistributedType
from accel_state.partial_state import PartialState
from accel_state.settings import from_environ
from accel_state.settings.model import Precision
from accel_state.topology import DEFAULT_PORT
from accel_train.forking import launch, launch_config, listening, refuse_initialised_devices, run_forked

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION = "2.2.0"
"""The first version of torch that knows `log_line_prefix_template`."""


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> dict[int, Any]:
    """Run a training function on several devices from a notebook or any Python process.

    The function runs in forked processes, so that it may be defined in a notebook cell; one process on one
    machine is not forked but runs here. Make the `Accelerator`, and touch accelerators, in the function only.

    Args:
        function: What to run. Its result has to be picklable.
        args: What it is called with.
        num_processes: How many processes on this machine; one for every accelerator, or one, if `None`. On
            TPUs one process drives all chips if 1, as sharding by the compiler (SPMD) needs it, else there is
            one for every chip, and the arguments of the rendezvous are not used.
        mixed_precision: For `Accelerator`s that do not say themselves: `"fp16"` or `"bf16"`; `"no"` leaves it
            to the environment.
        use_port: Where rank 0 listens; 0 for any free port. If the usual one is taken on a single machine,
            another one is used.
        master_addr: The address of the first machine.
        node_rank: Which machine this is.
        num_nodes: On how many machines this function is called.
        rdzv_backend: How machines find each other: `"static"` or `"c10d"`.
        rdzv_endpoint: Where they do; `<master_addr>:<use_port>` if empty.
        rdzv_conf: Further options of the rendezvous.
        rdzv_id: The id of this job, the same on all its nodes.
        max_restarts: How often all processes are started again when one has failed.
        monitor_interval: Seconds between two checks of the processes.
        log_line_prefix_template: If given, the processes' output passes through this one, every line with
            this in front; `${rank}`, `${local_rank}` and `${role_name}` are replaced.

    Returns:
        The results of this machine's processes by rank.

    Raises:
        SettingsError: An argument cannot be used, or a device was initialised already, with which no forked
            process could work any more.
        WorkerFailedError: The function failed in a forked process.
        UnsupportedError: This system cannot fork.

    Example:
        >>> notebook_launcher(lambda text: text.upper(), ("trained",), num_processes=1)
        {0: 'TRAINED'}
    """
    variables = _precision_variables(mixed_precision)
    kind = CPU if from_environ(environ.read()).process.use_cpu else available_kind()
    count = device_count(kind.module) if num_processes is None else num_processes
    _check_numbers(count, num_nodes, node_rank, max_restarts)
    if kind.own_runtime is not None and num_processes != 1:
        refuse_initialised_devices()
        with environ.patch_environment(**variables):
            return kind.own_runtime.run_on_each_device(function, args, num_processes)
    listener = nullcontext(0) if rdzv_endpoint else _rendezvous(use_port, num_nodes, node_rank)
    plain = rdzv_backend == "static" and not (rdzv_endpoint or max_restarts or log_line_prefix_template)
    if plain and count == num_nodes == 1:
        with environ.patch_environment(**variables):
            return {0: function(*args)}
    if kind.type != "cpu":
        refuse_initialised_devices()
    if kind.name == "cuda":
        variables |= peer_variables(environ.read())
    shown = log_line_prefix_template is not None
    with listener as port, environ.patch_environment(**variables):
        config = launch_config(
            count,
            num_nodes=num_nodes,
            node_rank=node_rank,
            rdzv_endpoint=rdzv_endpoint or f"{master_addr}:{port}",
            rdzv_backend=rdzv_backend,
            rdzv_conf=rdzv_conf,
            run_id=rdzv_id,
            max_restarts=max_restarts,
            monitor_interval=monitor_interval,
            log_line_prefix_template=log_line_prefix_template,
            logs_specs=DefaultLogsSpecs(tee=Std.ALL if shown else Std.NONE),
        )
        return launch(function, args, config)


def debug_launcher(
    function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2
) -> dict[int, Any]:
    """Run a training function in several processes on the CPU, to try it out or test it.

    Args:
        function: What to run. Its result has to be picklable.
        args: What it is called with.
        num_processes: How many processes.

    Returns:
        The results by rank.

    Raises:
        SettingsError: `num_processes` is no number of processes, or this is one of several already.
        WorkerFailedError: The function failed.
        UnsupportedError: This system cannot fork.

    Example:
        >>> from accel_train import Accelerator
        >>> debug_launcher(lambda: Accelerator().process_index, num_processes=2)
        {0: 0, 1: 1}
    """
    _check_numbers(num_processes, 1, 0, 0)
    with listening(0, "debug_launcher: port") as port, environ.patch_environment(accelerate_use_cpu="yes"):
        return launch(function, args, launch_config(num_processes, rdzv_endpoint=f"127.0.0.1:{port}"))


class PrepareForLaunch:
    """A function for `torch.multiprocessing` to start, which passes the index of a process first.

    The caller sets `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`.

    Args:
        launcher: What to run.
        distributed_type: How the processes work together; `"NO"` if they do not.
        debug: Use the file in `ACCELERATE_DEBUG_RDV_FILE` for the rendezvous, and gloo.

    Example:
        >>> from accel_state import patch_environment
        >>> with patch_environment(FORK_LAUNCHED=1):  # which every process it starts gets
        ...     PrepareForLaunch(lambda a, b: a + b)(0, 1, 2)
        3
    """

    def __init__(
        self,
        launcher: Callable[..., Any],
        distributed_type: DistributedType | str = "NO",
        debug: bool = False,
    ) -> None:
        self.launcher = launcher
        self.distributed_type = DistributedType(distributed_type)
        self.debug = debug

    def __call__(self, index: int, *args: Any) -> Any:
        """Run the function as the process of an index.

        Args:
            index: Local rank of the process.
            *args: What the function is called with.

        Raises:
            SettingsError: The environment lacks the variables of the rendezvous.
        """
        variables = environ.read()
        if self.debug:
            _meet_in_file(index, variables)
        elif self.distributed_type.value != "NO":
            local = int(variables.get("NPROC") or variables.get("WORLD_SIZE") or 1)
            node = int(variables.get("NODE_RANK") or 0)
            environ.publish({"LOCAL_RANK": str(index), "RANK": str(local * node + index)})
        return run_forked(self.launcher, *args)


def test_launch() -> None:
    """Make a `PartialState`, to check the rendezvous."""
    PartialState()


def _meet_in_file(index: int, variables: Mapping[str, str]) -> None:
    missing = [name for name in ("ACCELERATE_DEBUG_RDV_FILE", "WORLD_SIZE") if not variables.get(name)]
    if missing:
        raise SettingsError(
            f"PrepareForLaunch(debug=True) needs {' and '.join(missing)} in the environment: a file that "
            "does not exist yet, and the number of processes. debug_launcher() takes care of all."
        )
    world_size = int(variables["WORLD_SIZE"])
    store = torch.distributed.FileStore(  # pyright: ignore[reportPrivateImportUsage]
        variables["ACCELERATE_DEBUG_RDV_FILE"], world_size
    )
    torch.distributed.init_process_group("gloo", rank=index, store=store, world_size=world_size)
    environ.publish({"LOCAL_RANK": str(index), "RANK": str(index), "ACCELERATE_USE_CPU": "yes"})


def _precision_variables(mixed_precision: str) -> dict[str, str]:
    if mixed_precision.lower() not in get_args(Precision):
        raise SettingsError(
            f"notebook_launcher: mixed_precision={mixed_precision!r} not in {get_args(Precision)}."
        )
    return {} if mixed_precision.lower() == "no" else {"accelerate_mixed_precision": mixed_precision}


def _check_numbers(num_processes: int, num_nodes: int, node_rank: int, max_restarts: int) -> None:
    counts = {"num_processes": num_processes, "num_nodes": num_nodes, "max_restarts": max_restarts}
    for name, value in counts.items():
        least = 0 if name == "max_restarts" else 1
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise SettingsError(f"{name}={value!r}: expected a whole number of at least {least}.")
    if not 0 <= node_rank < num_nodes:
        raise SettingsError(f"node_rank={node_rank!r} is not one of num_nodes={num_nodes!r}, counted from 0.")


def _rendezvous(asked: str | int, num_nodes: int, node_rank: int) -> AbstractContextManager[int]:
    """Yield the port on which rank 0 listens; see `use_port`."""
    if not str(asked).isdigit():
        raise SettingsError(f"notebook_launcher(use_port={asked!r}): expected the number of a port.")
    port = int(asked)
    if num_nodes > 1 and port == 0:
        raise SettingsError("notebook_launcher(use_port=0): several machines need to know the port.")
    if node_rank > 0:
        return nullcontext(port)
    usual = num_nodes == 1 and port == DEFAULT_PORT
    return listening(port, "notebook_launcher: use_port", or_any=usual)


def device_count(module: Any) -> int:
    """Return the number of accelerators, without initialising one."""
    return max(1, module.device_count()) if hasattr(module, "device_count") else 1
