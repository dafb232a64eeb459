"""What a run was asked to do: frozen records, and nothing that knows where a value came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Precision: TypeAlias = Literal["no", "fp16", "bf16", "fp8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """How one process runs.

    Args:
        use_cpu: Compute on the CPU, whatever else there is.
        debug: Check before every collective that all ranks make the same call on data that fits together.
        torch_device: The device to use, such as `"cuda:1"`; None for the one that the local rank gets.
        cpu_affinity: Pin the process to the CPU cores that are near its device.
        log_level: The level that `get_logger` sets when it is not given one.
        enable_rich: Show tracebacks with rich.
    """

    use_cpu: bool = False
    debug: bool = False
    torch_device: str | None = None
    cpu_affinity: bool = False
    log_level: str | None = None
    enable_rich: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionSettings:
    """In which precision the forward and backward passes compute.

    Args:
        mixed_precision: `"no"` leaves the model as it is.
    """

    mixed_precision: Precision = "no"


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamoSettings:
    """How `torch.compile` compiles the model.

    Args:
        backend: A value of `DynamoBackend`; `"NO"` does not compile.
        mode: The `mode` of `torch.compile`.
        use_fullgraph: Fail rather than break the model into several graphs.
        use_dynamic: Trace with dynamic shapes.
        use_regional_compilation: Compile each repeated block once instead of the whole model.
    """

    backend: str = "NO"
    mode: str = "default"
    use_fullgraph: bool = False
    use_dynamic: bool = False
    use_regional_compilation: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """How the training loop steps.

    Args:
        gradient_accumulation_steps: Micro-batches per optimizer step.
    """

    gradient_accumulation_steps: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """How the command starts processes. Workers do not see this: their launcher tells them who they are.

    Args:
        num_processes: Processes on all machines together; None for one per device of each machine.
        num_machines: How many machines take part.
        machine_rank: Index of this machine among them, from 0.
        distributed_type: The label of the device family to use, as in a config file; None to find out.
        gpu_ids: The devices of this machine to use, as `"0,1"`; None or `"all"` for all.
        main_process_ip: Host name or address of the machine of rank 0.
        main_process_port: TCP port there; 0 for a free one, None for the usual one or else a free one.
        same_network: Whether the machines reach each other directly. Documentation of the config file:
            nothing depends on it.
        num_cpu_threads_per_process: Threads per process (`OMP_NUM_THREADS`); None to share the cores.
        rdzv_backend: How machines meet: `"static"`, or a rendezvous backend of `torch.distributed.run`.
        rdzv_conf: Further configuration of the rendezvous, as `"key=value,…"`.
        max_restarts: How often a failed group of workers is started again.
        monitor_interval: Seconds between looks at the workers.
        tee: Which streams go to the console and to a file, as `torch.distributed.run --tee` takes it.
        log_dir: Folder of the log files of the workers.
        role: What the workers are called in logs.
        module: The script is the name of a module, as for `python -m`.
        no_python: The script is a program of its own.
        quiet: Leave out the launcher's own summary when a worker fails.
    """

    num_processes: int | None = None
    num_machines: int = 1
    machine_rank: int = 0
    distributed_type: str | None = None
    gpu_ids: str | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None
    same_network: bool = False
    num_cpu_threads_per_process: int | None = None
    rdzv_backend: str = "static"
    rdzv_conf: str | None = None
    max_restarts: int = 0
    monitor_interval: float = 0.1
    tee: str = "0"
    log_dir: str | None = None
    role: str = "default"
    module: bool = False
    no_python: bool = False
    quiet: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that can be set from outside a script, decided once and passed down in parts.

    Args:
        process: How one process runs.
        precision: In which precision the model computes.
        dynamo: How the model is compiled.
        training: How the loop steps.
        launch: How the command starts processes.

    Example:
        >>> Settings().precision.mixed_precision
        'no'
    """

    process: ProcessSettings = field(default_factory=ProcessSettings)
    precision: PrecisionSettings = field(default_factory=PrecisionSettings)
    dynamo: DynamoSettings = field(default_factory=DynamoSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    launch: LaunchSettings = field(default_factory=LaunchSettings)
