"""Check the settings of a launch for conflicts, with each other and with this host."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from accel_cli.launch.hosts import VISIBLE_DEVICES
from accel_cli.launch.plan import LaunchPlan, uses_cpu
from accel_state.errors import AccelError
from accel_state.libraries import Fp8Device, choose_backend
from accel_state.settings import Layer
from accel_state.settings.engines import find_axes_conflict
from accel_state.settings.model import TITLES, value_at
from accel_state.topology import detect


def find_launch_problems(plan: LaunchPlan) -> list[str]:
    """Return the problems of all checks, as sentences."""
    return list(dict.fromkeys(problem for check in CHECKS for problem in check(plan)))


def _check_devices(plan: LaunchPlan) -> Iterator[str]:
    launch, machine = plan.settings.launch, plan.machine
    switch, kind = plan.source_of("process.use_cpu"), plan.source_of("launch.distributed_type")
    if plan.settings.process.use_cpu and kind.value in VISIBLE_DEVICES and kind.layer == switch.layer:
        yield (
            f"{switch.origin} requests the CPU, but {kind.origin} requests {kind.value}: remove one of them."
        )
    is_started_by_launcher = plan.is_worker or plan.reaches_hosts or plan.settings.mpi.hostfile is not None
    if uses_cpu(plan.merged) or not plan.is_local or is_started_by_launcher:
        return
    if kind.value in VISIBLE_DEVICES and kind.value not in {"MULTI_GPU", machine.kind}:
        if launch.num_processes is None and not launch.device_ids:
            yield f"{kind.origin} is {kind.value}, whose devices cannot be counted: pass --num_processes."
        return
    if (kind.value == "MULTI_GPU" or launch.device_ids) and not machine.installed:
        asking = kind if kind.value == "MULTI_GPU" else plan.source_of("launch.gpu_ids")
        yield (
            f"{asking.origin} requests GPUs, but none are visible on this machine: check `nvidia-smi` "
            "and CUDA_VISIBLE_DEVICES, or run with --cpu."
        )
        return
    absent = [id_ for id_ in launch.device_ids if id_.isdecimal() and int(id_) >= machine.installed]
    if absent:
        yield (
            f"{plan.origin('launch.gpu_ids')} names GPU {', '.join(absent)}, but this "
            f"machine has {machine.installed}, numbered from 0."
        )
    local = plan.num_processes // plan.num_machines
    visible = min(machine.gpus, machine.installed)
    if (visible or kind.value == "MULTI_GPU") and not launch.device_ids and local > visible:
        yield (
            f"{plan.origin('launch.num_processes')} requests {local} processes on this machine, but "
            f"{visible} GPUs are visible. Start one process per GPU, or run with --cpu."
        )


def _check_process_count(plan: LaunchPlan) -> Iterator[str]:
    number, kind = plan.source_of("launch.num_processes"), plan.source_of("launch.distributed_type")
    asked = plan.settings.launch.num_processes or 1
    launched = detect(plan.environ)
    if plan.is_worker and number.layer is Layer.ARGUMENT and asked != launched.world_size:
        yield (
            f"{number.origin} requests {asked} processes, but {launched.launcher} has started this command "
            f"as one of {launched.world_size}: omit it, or start the command once per node."
        )
    if kind.value == "NO" and asked > 1 and number.layer >= kind.layer and plan.is_local:
        yield (
            f"{number.origin} requests {asked} processes, but {kind.origin} requests one ('NO'): change "
            "one of the two."
        )


def _check_nodes(plan: LaunchPlan) -> Iterator[str]:
    launch, processes, machines = plan.settings.launch, plan.num_processes, plan.num_machines
    # 1. Nodes that may leave.
    least = plan.source_of("launch.min_machines").origin
    if launch.min_machines is not None and launch.min_machines > launch.num_machines:
        yield f"{least} is {launch.min_machines}, but there are only {launch.num_machines} machines."
    if launch.min_machines is not None and launch.rdzv_backend == "static":
        yield (
            f"{least} allows nodes to leave, which a static rendezvous does not support: add "
            "--rdzv_backend c10d."
        )
    # 2. Processes on each node of a cluster.
    number, gpus = plan.origin("launch.num_processes"), plan.settings.cluster.gpus_per_node
    if plan.remote and processes % machines:
        yield f"{number} requests {processes} processes, which cannot be divided by {machines} nodes."
    elif plan.remote and gpus is not None and processes // machines > gpus and not uses_cpu(plan.merged):
        yield (
            f"{number} requests {processes // machines} processes on each node, but "
            f"{plan.origin('cluster.gpus_per_node')} requests {gpus} GPUs: each process needs its own GPU."
        )
    # 3. This machine among those that run the same command.
    if not plan.is_local or plan.is_worker:
        return
    if processes % machines and not plan.reaches_hosts:
        yield (
            f"{processes} processes cannot be divided by {machines} machines: --num_processes is the "
            "total over all machines."
        )
    if launch.machine_rank >= machines:
        yield (
            f"machine rank {launch.machine_rank} is not below the number of machines, {machines}: "
            "ranks start at 0."
        )
    by_launcher = plan.reaches_hosts or plan.settings.mpi.hostfile is not None
    if machines > 1 and not launch.main_process_ip and not by_launcher:
        yield f"{machines} machines need a rendezvous: pass the same --main_process_ip on each of them."
    ids = launch.device_ids
    if ids and processes // machines > len(ids):
        yield (
            f"{processes // machines} processes on this machine need one device each, but gpu_ids is"
            f" {launch.gpu_ids!r}."
        )


def _check_unused(plan: LaunchPlan) -> Iterator[str]:
    """Find arguments about an engine, a precision or a kind of job that is not used."""
    settings, switches = plan.settings, {"megatron": "megatron_lm", "parallelism": "parallelism_config"}
    rows = [
        (section, title, bool(value_at(settings, section)), f"--use_{switches.get(section, section)}")
        for section, title in TITLES.items()
    ]
    rows += [
        ("fp8", "FP8", settings.precision.mixed_precision == "fp8", "--mixed_precision fp8"),
        ("cluster", "jobs of a cluster", plan.remote, "--launcher slurm, ray or kubeflow"),
    ]
    for section, title, is_used, flag in rows:
        names = [
            value.origin
            for path, value in plan.merged.sourced.items()
            if path.startswith(f"{section}.") and value.layer is Layer.ARGUMENT
        ]
        if names and not is_used:
            is_one = "is" if len(names) == 1 else "are"
            rival = plan.source_of(section)
            why = f" ({rival.origin} is overruled)" if rival.value is False else ""
            yield f"{', '.join(names)} {is_one} about {title}, not used here{why}: add {flag}."


def _check_installed(plan: LaunchPlan) -> Iterator[str]:
    if plan.settings.process.as_accelerate and plan.machine.alias is None:
        origin = plan.origin("process.as_accelerate")
        yield f"{origin} requests accel-compat, which is not installed: `pip install accel-compat`."
    if not plan.is_local or plan.reaches_hosts:  # DeepSpeed's launcher may start no process on this machine
        return
    for section in ("deepspeed", "megatron"):
        if value_at(plan.settings, section) and section not in plan.machine.engines:
            yield (
                f"{plan.origin(section)} requests {TITLES[section]}, which is not installed: "
                f"`pip install 'accel-plugins[{section}]'`."
            )


def _check_fp8(plan: LaunchPlan) -> Iterator[str]:
    """Check FP8 as the worker does, for the devices of this machine."""
    if plan.settings.precision.mixed_precision != "fp8" or not plan.is_local:
        return
    fp8, machine, on_cpu = plan.settings.fp8, plan.machine, uses_cpu(plan.merged) or not plan.machine.gpus
    device = Fp8Device(type="cpu") if on_cpu else Fp8Device(type="cuda", capability=machine.capability())
    try:
        choose_backend(None if fp8 is None else fp8.backend, device, installed=machine.fp8_backends)
    except AccelError as error:
        yield f"{plan.origin('precision.mixed_precision')} requests FP8: {error}"


def _check_deepspeed_file(plan: LaunchPlan) -> Iterator[str]:
    section = plan.settings.deepspeed
    if section is None or section.hf_ds_config is None:
        return
    file = plan.source_of("deepspeed.hf_ds_config")
    sources = [
        plan.source_of(f"deepspeed.{name}")
        for name in _IN_DEEPSPEED_FILES
        if getattr(section, name) is not None
    ]
    origins = [source.origin for source in sources if source.layer is file.layer]
    if origins:
        yield (
            f"{file.origin} names the file "
            f"{section.hf_ds_config!r}, which overrides {', '.join(origins)}: set the value in that file."
        )


_IN_DEEPSPEED_FILES = (
    *("zero_stage", "gradient_clipping", "zero3_save_16bit_model", "offload_optimizer_device"),
    *("offload_param_device", "offload_optimizer_nvme_path", "offload_param_nvme_path"),
)
"""The settings that a DeepSpeed configuration file overrides."""


def _check_parallel_sizes(plan: LaunchPlan) -> Iterator[str]:
    sizes, number = plan.settings.parallelism, plan.source_of("launch.num_processes")
    if sizes is None:
        return
    axes = ("dp_replicate", "dp_shard", "tp", "cp", "sp", "pp", "ep")
    by_axis = {axis: getattr(sizes, f"{axis}_size") or 1 for axis in axes}
    if conflict := find_axes_conflict(by_axis):
        *both, reason = conflict
        named = [f"{plan.origin(f'parallelism.{axis}_size')} is {by_axis[axis]}" for axis in both]
        yield f"{', and '.join(named)}: {reason}; set one of the two to 1."
    used = {axis: size for axis, size in by_axis.items() if size > 1 and axis != "ep"}
    if number.value is not None and plan.num_processes % math.prod(used.values()):
        product = " x ".join(f"{axis}_size {size}" for axis, size in used.items())
        yield f"the {plan.num_processes} of {number.origin} cannot be divided by {product}."


def _check_host_filters(plan: LaunchPlan) -> Iterator[str]:
    hosts, number = plan.settings.hosts, plan.source_of("launch.num_machines")
    if number.value is not None and plan.num_machines != number.value:
        yield (
            f"{number.origin} is {number.value}, but the hostfile {hosts.hostfile!r} has {plan.num_machines} "
            "usable machines: remove one of the two settings."
        )
    if hosts.inclusion and hosts.exclusion:
        yield (
            f"{plan.origin('hosts.inclusion')} and {plan.origin('hosts.exclusion')} "
            "cannot be used together: DeepSpeed accepts only one of them."
        )


def _check_cloud(plan: LaunchPlan) -> Iterator[str]:
    """Check jobs on SageMaker, and pods of TPUs."""
    launch, cloud, tpu = plan.settings.launch, plan.settings.sagemaker, plan.settings.tpu
    if launch.on_tpu and tpu.use_cluster:
        missing = [f"tpu_{name}" for name in ("name", "zone") if not getattr(tpu, name)]
        if missing:
            yield f"a pod needs {' and '.join(missing)} in the config file."
    if launch.compute_environment != "AMAZON_SAGEMAKER":
        return
    missing = [name for name in ("ec2_instance_type", "iam_role_name") if not getattr(cloud, name)]
    if missing:
        yield f"an Amazon SageMaker job needs {' and '.join(missing)} in the config file."
    if plan.settings.process.use_cpu and launch.distributed_type not in {None, "NO"}:
        kind, switch = plan.source_of("launch.distributed_type"), plan.source_of("process.use_cpu")
        yield (
            f"{kind.origin} is {kind.value}, which SageMaker supports only on GPUs, but "
            f"{switch.origin} is true."
        )


CHECKS: tuple[Callable[[LaunchPlan], Iterator[str]], ...] = (
    _check_devices,
    _check_process_count,
    _check_nodes,
    _check_unused,
    _check_installed,
    _check_fp8,
    _check_deepspeed_file,
    _check_parallel_sizes,
    _check_host_filters,
    _check_cloud,
)
"""All checks. Each yields its problems as sentences."""
