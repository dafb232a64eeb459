"""What a run was asked to do: frozen records, and nothing that knows where a value came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from accel_state.settings.engines import (
    DeepSpeedSettings,
    Fp8Settings,
    FsdpSettings,
    MegatronSettings,
    ParallelismSettings,
)
from accel_state.settings.remote import HostSettings, MpiSettings, SageMakerSettings, TpuSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

Precision: TypeAlias = Literal["no", "fp16", "bf16", "fp8"]

BASE_PRECISIONS = frozenset({"no", "fp16", "bf16"})
"""Those that need no recipe."""


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
        as_accelerate: Let `import accelerate` in what is launched be accel.
    """

    use_cpu: bool = False
    debug: bool = False
    torch_device: str | None = None
    cpu_affinity: bool = False
    log_level: str | None = None
    enable_rich: bool = False
    as_accelerate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionSettings:
    """In which precision the forward and backward passes compute.

    Args:
        mixed_precision: A `Precision`, of which `"no"` leaves the model as it is, or the name of an installed
            recipe.
    """

    mixed_precision: str = "no"


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
        strategy: The name of the strategy that trains; None for the first that applies.
    """

    gradient_accumulation_steps: int = 1
    strategy: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """How the command starts processes. Workers do not see this: their launcher tells them who they are.

    Args:
        compute_environment: `"LOCAL_MACHINE"`, or `"AMAZON_SAGEMAKER"` for a job there.
        launcher: The name of what starts the processes; None for the first that applies.
        num_processes: Processes on all machines together; None for one per device of each machine.
        num_machines: How many machines take part.
        min_machines: Go on with as few machines as this; None for all.
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

    compute_environment: str = "LOCAL_MACHINE"
    launcher: str | None = None
    num_processes: int | None = None
    num_machines: int = 1
    min_machines: int | None = None
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

    @property
    def on_tpu(self) -> bool:
        """Whether processes run on TPUs, which have launchers of their own."""
        return self.distributed_type == "XLA"

    @property
    def device_ids(self) -> tuple[str, ...]:
        """The devices of this machine that were chosen; empty for all.

        Example:
            >>> LaunchSettings(gpu_ids="0, 2").device_ids, LaunchSettings(gpu_ids="all").device_ids
            (('0', '2'), ())
        """
        text = self.gpu_ids or "all"
        return () if text.strip().lower() == "all" else tuple(one.strip() for one in text.split(","))


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that can be set from outside a script, decided once and passed down in parts.

    Args:
        process: How one process runs.
        precision: In which precision the model computes.
        dynamo: How the model is compiled.
        training: How the loop steps.
        launch: How the command starts processes.
        fsdp: How FSDP shards models; None if it does not, as with all that follow.
        deepspeed: How DeepSpeed trains.
        megatron: How Megatron-LM trains.
        parallelism: The sizes of the axes of parallelism.
        fp8: How matrices are multiplied in eight bits; None if nothing was said about it.
        mpi: How `mpirun` starts processes. The command only reads this and what follows.
        hosts: How the machines of a hostfile are reached.
        tpu: Where TPUs are, and what they run.
        sagemaker: How a job of Amazon SageMaker runs.

    Example:
        >>> Settings().precision.mixed_precision
        'no'
    """

    process: ProcessSettings = field(default_factory=ProcessSettings)
    precision: PrecisionSettings = field(default_factory=PrecisionSettings)
    dynamo: DynamoSettings = field(default_factory=DynamoSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    launch: LaunchSettings = field(default_factory=LaunchSettings)
    fsdp: FsdpSettings | None = None
    deepspeed: DeepSpeedSettings | None = None
    megatron: MegatronSettings | None = None
    parallelism: ParallelismSettings | None = None
    fp8: Fp8Settings | None = None
    mpi: MpiSettings = field(default_factory=MpiSettings)
    hosts: HostSettings = field(default_factory=HostSettings)
    tpu: TpuSettings = field(default_factory=TpuSettings)
    sagemaker: SageMakerSettings = field(default_factory=SageMakerSettings)


OPTIONAL_SECTIONS: Mapping[
    str, type[FsdpSettings | DeepSpeedSettings | MegatronSettings | ParallelismSettings]
] = {
    "fsdp": FsdpSettings,
    "deepspeed": DeepSpeedSettings,
    "megatron": MegatronSettings,
    "parallelism": ParallelismSettings,
}
"""The sections that a switch of the same name turns on."""

ENGINES = ("deepspeed", "megatron", "fsdp")
"""The sections of which there can be one only."""

IMPLICIT_SECTIONS: Mapping[str, type[Fp8Settings]] = {"fp8": Fp8Settings}
"""The sections that exist if any of their settings has a source."""


def value_at(settings: Settings, path: str) -> object:
    """The value of a path; of a section alone whether it is there; None in a section that is not.

    Args:
        settings: Where to look.
        path: The path of an `Option`.

    Example:
        >>> value_at(Settings(fsdp=FsdpSettings(fsdp_version=2)), "fsdp.fsdp_version")
        2
        >>> value_at(Settings(), "fsdp"), value_at(Settings(), "fsdp.fsdp_version")
        (False, None)
    """
    section, _, name = path.partition(".")
    found = getattr(settings, section)
    if not name:
        return found is not None
    return None if found is None else getattr(found, name)
