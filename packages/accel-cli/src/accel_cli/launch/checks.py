"""Check settings against each other and the host; each check yields its problems, and all are reported."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from accel_cli.launch.hosts import VISIBLE_DEVICES, HostDevices
from accel_state.errors import AccelError
from accel_state.libraries import Fp8Device, choose_backend
from accel_state.settings import Layer, Merged, Settings, SourcedValue
from accel_state.settings.model import TITLES, value_at
from accel_state.topology import detect

_IN_DEEPSPEED_FILES = [
    "zero_stage", "gradient_clipping", "offload_optimizer_device", "offload_param_device",
    "offload_optimizer_nvme_path", "offload_param_nvme_path", "zero3_save_16bit_model",
]  # fmt: skip
"""What a configuration file of DeepSpeed decides."""
_FP8_FIELDS = {"AO": ("enable_fsdp_float8_all_gather", "pad_inner_dim"), "MSAMP": ("opt_level",)}
"""What backends read; everything else is for TransformerEngine."""
_MEGATRON_SIZES = ("tp_degree", "pp_degree", "context_parallel_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFacts:
    """The inputs of the checks."""

    merged: Merged
    machine: HostDevices
    environ: Mapping[str, str]

    @property
    def settings(self) -> Settings:
        """Return the settings alone."""
        return self.merged.settings

    def source_of(self, path: str) -> SourcedValue:
        """Return the source of a setting."""
        return self.merged.source_of(path)

    def origin(self, path: str) -> str:
        """Return the source of a setting as messages name it."""
        return self.merged.source_of(path).origin

    @property
    def is_local(self) -> bool:
        """Whether processes are started on this machine, with its devices."""
        launch = self.settings.launch
        return launch.compute_environment == "LOCAL_MACHINE" and not launch.on_tpu

    @property
    def is_worker(self) -> bool:
        """Whether a launcher started this very command as one of several processes of a machine."""
        detected = detect(self.environ)
        return detected.world_size > 1 and (detected.launcher != "Slurm" or detected.local_world_size > 1)

    @property
    def machines(self) -> int:
        """Return the number of nodes: those of the hostfile, if DeepSpeed's launcher reaches them."""
        if self.reaches_hosts and self.machine.hosts:
            return len(self.machine.hosts)
        return self.settings.launch.num_machines

    @property
    def reaches_hosts(self) -> bool:
        """Whether DeepSpeed's launcher starts the processes of all machines."""
        hosts = self.settings.hosts
        return (
            self.settings.deepspeed is not None
            and (hosts.launcher or "pdsh") != "standard"
            and bool(hosts.hostfile)
        )


def problems(facts: LaunchFacts) -> list[str]:
    """Return all problems, a sentence for each."""
    found = [problem for check in CHECKS for problem in check(facts)]
    return list(dict.fromkeys(found))


def uses_cpu(merged: Merged) -> bool:
    """Whether to compute on the CPU; of `use_cpu` and `distributed_type` the stronger source decides."""
    switch, kind = merged.source_of("process.use_cpu"), merged.source_of("launch.distributed_type")
    value = merged.settings.process.use_cpu
    if kind.value == "MULTI_CPU":
        return value or kind.layer < switch.layer or switch.value is None
    if value and kind.value in VISIBLE_DEVICES:
        return switch.layer < kind.layer
    return value


def processes_wanted(facts: LaunchFacts) -> int:
    """Return the world size: as asked for, else one process per device."""
    launch, kind = facts.settings.launch, facts.source_of("launch.distributed_type")
    if facts.is_worker:
        return detect(facts.environ).world_size
    if launch.num_processes is not None:
        return launch.num_processes
    if facts.machine.hosts and facts.reaches_hosts:
        return sum(facts.machine.hosts.values())
    return launch.num_machines * _devices(facts) if kind.value != "NO" else 1


def _devices(facts: LaunchFacts) -> int:
    """Return the default number of processes of this machine: one per device, at least one."""
    if uses_cpu(facts.merged):
        return 1
    return len(facts.settings.launch.device_ids) or max(1, facts.machine.gpus)


def _device_contradicts(facts: LaunchFacts) -> Iterator[str]:
    switch, kind = facts.source_of("process.use_cpu"), facts.source_of("launch.distributed_type")
    if facts.settings.process.use_cpu and kind.value in VISIBLE_DEVICES and kind.layer == switch.layer:
        yield f"{switch.origin} asks for the CPU and {kind.origin} for {kind.value}: leave one out."


def _devices_are_missing(facts: LaunchFacts) -> Iterator[str]:
    launch, kind = facts.settings.launch, facts.source_of("launch.distributed_type")
    by_others = facts.is_worker or facts.reaches_hosts or facts.settings.mpi.hostfile is not None
    if uses_cpu(facts.merged) or not facts.is_local or by_others:
        return
    if kind.value in VISIBLE_DEVICES and kind.value != "MULTI_GPU":
        if launch.num_processes is None and not launch.device_ids:
            yield f"{kind.origin} is {kind.value}, whose devices cannot be counted: give --num_processes."
        return
    if (kind.value == "MULTI_GPU" or launch.device_ids) and not facts.machine.installed:
        asking = kind if kind.value == "MULTI_GPU" else facts.source_of("launch.gpu_ids")
        yield (
            f"{asking.origin} asks for GPUs, but this machine shows none: see what `nvidia-smi` and "
            "CUDA_VISIBLE_DEVICES say, or run with --cpu."
        )
        return
    yield from _too_few_devices(facts)


def _too_few_devices(facts: LaunchFacts) -> Iterator[str]:
    launch, machine = facts.settings.launch, facts.machine
    absent = [id_ for id_ in launch.device_ids if id_.isdecimal() and int(id_) >= machine.installed]
    if absent:
        yield (
            f"{facts.origin('launch.gpu_ids')} names GPU {', '.join(absent)}, but this "
            f"machine has {machine.installed}, numbered from 0."
        )
    local = processes_wanted(facts) // facts.machines
    found = min(machine.gpus, machine.installed)
    wants_gpus = found or facts.source_of("launch.distributed_type").value == "MULTI_GPU"
    if wants_gpus and not launch.device_ids and local > found:
        yield (
            f"{facts.origin('launch.num_processes')} asks for {local} processes on this "
            f"machine, which shows {found} GPUs: each needs one of its own; or run with --cpu."
        )


def _number_contradicts(facts: LaunchFacts) -> Iterator[str]:
    number, kind = facts.source_of("launch.num_processes"), facts.source_of("launch.distributed_type")
    asked = facts.settings.launch.num_processes
    if (
        kind.value == "NO"
        and asked is not None
        and asked > 1
        and number.layer >= kind.layer
        and facts.is_local
    ):
        yield (
            f"{number.origin} asks for {asked} processes and {kind.origin} for one ('NO'): change one of the "
            "two."
        )


def _machines_do_not_fit(facts: LaunchFacts) -> Iterator[str]:
    launch, processes, machines = facts.settings.launch, processes_wanted(facts), facts.machines
    if not facts.is_local or facts.is_worker:
        return
    if processes % machines and not facts.reaches_hosts:
        yield (
            f"{processes} processes cannot be divided by {machines} machines: "
            "--num_processes counts those of all machines."
        )
    if launch.machine_rank >= machines:
        yield (
            f"machine rank {launch.machine_rank} is not below the number of machines, {machines}: "
            "ranks start at 0."
        )
    by_launcher = facts.reaches_hosts or facts.settings.mpi.hostfile is not None
    if machines > 1 and not (launch.main_process_ip and launch.main_process_port) and not by_launcher:
        yield (
            f"{machines} machines need to know where to meet: give --main_process_ip and "
            "--main_process_port, the same on each of them."
        )
    ids = launch.device_ids
    if ids and processes // machines > len(ids):
        yield (
            f"{processes // machines} processes on this machine want a device each, but gpu_ids "
            f"is {launch.gpu_ids!r}."
        )


def _elasticity_does_not_fit(facts: LaunchFacts) -> Iterator[str]:
    launch, least = facts.settings.launch, facts.source_of("launch.min_machines")
    if launch.min_machines is None:
        return
    if launch.min_machines > launch.num_machines:
        yield (f"{least.origin} is {launch.min_machines}, more than the {launch.num_machines} machines.")
    if launch.rdzv_backend == "static":
        yield (
            f"{least.origin} lets machines come and go, which a static rendezvous does not: add "
            "--rdzv_backend c10d."
        )


def _engine_is_off(facts: LaunchFacts) -> Iterator[str]:
    for section, title in TITLES.items():
        if value_at(facts.settings, section):
            continue
        names = [
            one.origin
            for path, one in facts.merged.sourced.items()
            if path.startswith(f"{section}.") and one.layer is Layer.ARGUMENT
        ]
        if names:
            is_one = "is" if len(names) == 1 else "are"
            rival = facts.source_of(section)
            why = f" ({rival.origin} is overruled)" if rival.value is False else ""
            switch = {"megatron": "megatron_lm", "parallelism": "parallelism_config"}.get(section, section)
            yield f"{', '.join(names)} {is_one} about {title}, which is not used{why}: add --use_{switch}."


def _megatron_cannot_run(facts: LaunchFacts) -> Iterator[str]:
    section = facts.settings.megatron
    if section is None:
        return
    if facts.is_local and not facts.machine.has_megatron:
        origin = facts.origin("megatron")
        yield f"{origin} asks for Megatron, which is not installed: `pip install 'accel-plugins[megatron]'`."
    number, processes = facts.source_of("launch.num_processes"), processes_wanted(facts)
    names = [name for name in _MEGATRON_SIZES if (getattr(section, name) or 1) > 1]
    one = math.prod(getattr(section, name) for name in names)
    if number.value is not None and processes % one:
        value = ", ".join(f"{name} {getattr(section, name)}" for name in names)
        about = f"the {processes} of {number.origin} cannot be divided"
        yield f"{value} make groups of {one} processes, into which {about}."


def _fp8_cannot_run(facts: LaunchFacts) -> Iterator[str]:
    """Check FP8 as the worker does, for the devices of this machine."""
    if facts.settings.precision.mixed_precision != "fp8" or not facts.is_local:
        return
    if facts.settings.megatron is not None:
        origin = facts.origin("precision.mixed_precision")
        yield f"{origin} asks for FP8, which is not supported with Megatron: use --use_fsdp, or bf16."
    problem = why_no_fp8(facts.merged, facts.machine)
    if problem is not None:
        yield problem
        return
    settings = facts.settings
    sharding = [name for name in ("fsdp", "deepspeed", "parallelism") if value_at(settings, name)]
    if sharding and settings.fp8 is not None and settings.fp8.backend == "MSAMP":
        yield (
            f"{facts.origin('fp8.backend')} asks for MS-AMP, which trains in one process or under DDP, and "
            f"{facts.origin(sharding[0])} for sharded parameters: use --fp8_backend ao."
        )


def why_no_fp8(merged: Merged, machine: HostDevices) -> str | None:
    """Explain why a machine cannot train in the FP8 that settings ask for; `None` if it can."""
    fp8, on_cpu = merged.settings.fp8, uses_cpu(merged) or not machine.gpus
    device = Fp8Device(type="cpu") if on_cpu else Fp8Device(type="cuda", capability=machine.capability())
    try:
        choose_backend(None if fp8 is None else fp8.backend, device, installed=machine.fp8_backends)
    except AccelError as error:
        return f"{merged.source_of('precision.mixed_precision').origin} asks for FP8: {error}"
    return None


def _alias_is_absent(facts: LaunchFacts) -> Iterator[str]:
    if facts.settings.process.as_accelerate and facts.machine.alias is None:
        origin = facts.origin("process.as_accelerate")
        yield f"{origin} asks for accel-compat, which is not installed: `pip install accel-compat`."


def _conflicting_deepspeed_settings(facts: LaunchFacts) -> Iterator[str]:
    section = facts.settings.deepspeed
    if section is None or section.hf_ds_config is None:
        return
    file = facts.source_of("deepspeed.hf_ds_config")
    sources = [
        facts.source_of(f"deepspeed.{name}")
        for name in _IN_DEEPSPEED_FILES
        if getattr(section, name) is not None
    ]
    origins = [one.origin for one in sources if one.layer is file.layer]
    if origins:
        yield (
            f"{file.origin} names the file "
            f"{section.hf_ds_config!r}, which decides about what {', '.join(origins)} sets: set it there."
        )


def _fp8_options_do_nothing(facts: LaunchFacts) -> Iterator[str]:
    asked = {
        path.removeprefix("fp8."): one.origin
        for path, one in facts.merged.sourced.items()
        if path.startswith("fp8.") and one.layer is Layer.ARGUMENT
    }
    backend = facts.settings.fp8 and facts.settings.fp8.backend
    if asked and facts.settings.precision.mixed_precision != "fp8":
        found = facts.source_of("precision.mixed_precision")
        yield (
            f"{', '.join(asked.values())} {'is' if len(asked) == 1 else 'are'} about FP8, but the precision "
            f"is {facts.settings.precision.mixed_precision!r} ({found.origin}): leave out what is about FP8."
        )
    elif backend is not None:
        readers = {name: one for one, names in _FP8_FIELDS.items() for name in names} | {"backend": backend}
        unread = [origin for name, origin in asked.items() if readers.get(name, "TE") != backend]
        if unread:
            origin = facts.origin("fp8.backend")
            yield f"{', '.join(unread)} would not be read: {origin} is {backend!r}, so leave that out."


def _sizes_do_not_fit(facts: LaunchFacts) -> Iterator[str]:
    sizes, launch = facts.settings.parallelism, facts.settings.launch
    if sizes is None or launch.num_processes is None:
        return
    names = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
    product = math.prod(getattr(sizes, name) or 1 for name in names)
    if launch.num_processes % product:
        value = ", ".join(
            f"{name} {getattr(sizes, name)}" for name in names if getattr(sizes, name) is not None
        )
        yield (
            f"{value} make groups of {product} processes, into which the {launch.num_processes} of "
            f"{facts.origin('launch.num_processes')} cannot be divided."
        )


def _filters_contradict(facts: LaunchFacts) -> Iterator[str]:
    hosts, number = facts.settings.hosts, facts.source_of("launch.num_machines")
    if number.value is not None and facts.machines != number.value:
        yield (
            f"{number.origin} is {number.value}, but the hostfile {hosts.hostfile!r} has {facts.machines} "
            "machines that take part: leave one out."
        )
    if hosts.inclusion and hosts.exclusion:
        yield (
            f"{facts.origin('hosts.inclusion')} and {facts.origin('hosts.exclusion')} "
            "cannot be used together: DeepSpeed takes one of the two."
        )


def _cloud_is_incomplete(facts: LaunchFacts) -> Iterator[str]:
    launch, cloud = facts.settings.launch, facts.settings.sagemaker
    if launch.compute_environment != "AMAZON_SAGEMAKER":
        return
    missing = [name for name in ("ec2_instance_type", "iam_role_name") if not getattr(cloud, name)]
    if missing:
        yield f"a job of Amazon SageMaker needs {' and '.join(missing)} in the config file."
    if facts.settings.process.use_cpu and launch.distributed_type not in {None, "NO"}:
        kind, switch = facts.source_of("launch.distributed_type"), facts.source_of("process.use_cpu")
        yield f"{kind.origin} is {kind.value}, which SageMaker has on GPUs only, and {switch.origin} is true."


def _pod_is_incomplete(facts: LaunchFacts) -> Iterator[str]:
    launch, tpu = facts.settings.launch, facts.settings.tpu
    if launch.on_tpu and tpu.use_cluster:
        missing = [f"tpu_{name}" for name in ("name", "zone") if not getattr(tpu, name)]
        if missing:
            yield f"a pod needs {' and '.join(missing)} in the config file."


CHECKS: tuple[Callable[[LaunchFacts], Iterator[str]], ...] = (
    _device_contradicts,
    _devices_are_missing,
    _number_contradicts,
    _machines_do_not_fit,
    _elasticity_does_not_fit,
    _engine_is_off,
    _megatron_cannot_run,
    _fp8_cannot_run,
    _alias_is_absent,
    _conflicting_deepspeed_settings,
    _fp8_options_do_nothing,
    _sizes_do_not_fit,
    _filters_contradict,
    _cloud_is_incomplete,
    _pod_is_incomplete,
)
"""Each yields a sentence for everything that does not fit."""
