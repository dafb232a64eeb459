"""What variables of the environment, config files and arguments mean."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from cases import cases

VARIABLES = (
    ("ACCELERATE_MIXED_PRECISION", ("no", "bf16", "BF16", "bf17", "")),
    ("ACCELERATE_USE_CPU", ("true", "false", "1", "0", "yes", "maybe")),
    ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", ("2", "0", "many")),
    ("ACCELERATE_DYNAMO_BACKEND", ("no", "NO", "eager", "nothing")),
    ("ACCELERATE_DEBUG_MODE", ("true", "false", "1")),
    ("ACCELERATE_USE_FSDP", ("false",)),
    ("ACCELERATE_USE_DEEPSPEED", ("false",)),
)
PAIRS = tuple((name, value) for name, values in VARIABLES for value in values)


@cases("environment", pair=PAIRS)
def accelerator_under(lib: Any, *, pair: tuple[str, str]) -> Any:
    os.environ[pair[0]] = pair[1]
    accelerator = lib.Accelerator(cpu=True)
    return [
        accelerator.mixed_precision, accelerator.device, accelerator.gradient_accumulation_steps,
        accelerator.state.dynamo_plugin.backend, accelerator.state.debug, accelerator.distributed_type,
    ]  # fmt: skip


@cases("environment", value=("1", "true", "TRUE", "yes", "on", "0", "false", "no", "off", "", "2", "maybe"))
def truth(lib: Any, *, value: str) -> Any:
    os.environ["FLAG"] = value
    found = []
    for read in (
        lambda: lib.utils.str_to_bool(value),
        lambda: lib.utils.parse_flag_from_env("FLAG"),
        lambda: lib.utils.parse_choice_from_env("FLAG", "other"),
        lambda: lib.utils.get_int_from_env(["NOTHING", "FLAG"], 7),
    ):
        try:
            found.append(read())
        except ValueError:
            found.append("ValueError")
    return found


@cases("environment", inside=({"A": 1}, {"a": "x", "b": None}))
def patched(lib: Any, *, inside: dict[str, Any]) -> Any:
    names = {name.upper() for name in inside}
    with lib.utils.patch_environment(**inside):
        during = {name: os.environ.get(name) for name in names}
    os.environ["KEEP"] = "1"
    with lib.utils.clear_environment():
        cleared = len(os.environ)
    return [during, {name: os.environ.get(name) for name in names}, cleared, os.environ["KEEP"]]


@cases("arguments", precision=(None, "no", "bf16", "fp16", "fp8", "bf17"), environment=(None, "bf16"))
def precision(lib: Any, *, precision: str | None, environment: str | None) -> Any:
    if environment is not None:
        os.environ["ACCELERATE_MIXED_PRECISION"] = environment
    return lib.Accelerator(cpu=True, mixed_precision=precision).mixed_precision


DATALOADER = (
    "split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler", "non_blocking",
    "use_stateful_dataloader", "data_seed",
)  # fmt: skip


@cases("arguments", name=DATALOADER, value=(True, False, None))
def dataloader_option(lib: Any, *, name: str, value: Any) -> Any:
    config = lib.DataLoaderConfiguration(**{name: value})
    return [getattr(config, name), getattr(lib.Accelerator(cpu=True, dataloader_config=config), name, "none")]


@cases("arguments", project=(None, "here"), logging=(None, "logs"), naming=(False, True))
def project(lib: Any, *, project: str | None, logging: str | None, naming: bool) -> Any:
    config = lib.utils.ProjectConfiguration(
        project_dir=project, logging_dir=logging, automatic_checkpoint_naming=naming
    )
    accelerator = lib.Accelerator(cpu=True, project_config=config)
    return [accelerator.project_dir, accelerator.logging_dir, config]


HANDLERS: dict[str, dict[str, Any]] = {
    "AutocastKwargs": {"cache_enabled": False}, "DistributedDataParallelKwargs": {"bucket_cap_mb": 5},
    "GradScalerKwargs": {"growth_factor": 3.0}, "InitProcessGroupKwargs": {"backend": "gloo"},
    "ProfileKwargs": {"record_shapes": True}, "GradientAccumulationPlugin": {"num_steps": 2},
    "TorchDynamoPlugin": {"mode": "default"}, "ProjectConfiguration": {"total_limit": 3},
    "DataLoaderConfiguration": {"even_batches": False},
}  # fmt: skip


@cases("arguments", handler=HANDLERS, argument=(False, True))
def handler(lib: Any, *, handler: str, argument: bool) -> Any:
    made = getattr(lib.utils, handler)(**(HANDLERS[handler] if argument else {}))
    return [made, made.to_kwargs() if hasattr(made, "to_kwargs") else None]


@cases("arguments", order=("same twice", "unknown", "twice"))
def handlers(lib: Any, *, order: str) -> Any:
    one = lib.utils.AutocastKwargs()
    argument = {
        "same twice": [one, one],
        "unknown": ["autocast"],
        "twice": [one, lib.utils.AutocastKwargs()],
    }[order]
    return type(lib.Accelerator(cpu=True, kwargs_handlers=argument).autocast_handler).__name__


@cases("states", cpu=(False, True), which=("PartialState", "AcceleratorState"))
def state(lib: Any, *, cpu: bool, which: str) -> Any:
    lib.state.PartialState(cpu=cpu)
    lib.Accelerator(cpu=True)
    made = getattr(lib.state, which)()
    return [made.device, made.num_processes, made.distributed_type, made.initialized, made.is_main_process]


@cases("states", seed=(0, 5), device_specific=(False, True), deterministic=(False,))
def seeded(lib: Any, *, seed: int, device_specific: bool, deterministic: bool) -> Any:
    import random

    import torch

    lib.state.PartialState(cpu=True)
    lib.utils.set_seed(seed, device_specific, deterministic)
    return [random.random(), torch.rand(2)]


@cases("helpers", version=(">=", "<", "=="), number=("1.0", "99"))
def compared(lib: Any, *, version: str, number: str) -> Any:
    return [
        lib.utils.is_torch_version(version, number), lib.utils.compare_versions("torch", version, number),
    ]  # fmt: skip


@cases("helpers", tree=({"a": {"b": 1}}, {}), other=({"a": {"c": 2}}, {"a": 3}))
def merged(lib: Any, *, tree: dict[str, Any], other: dict[str, Any]) -> Any:
    destination = {"a": {"x": 0}}
    return [lib.utils.merge_dicts(tree, destination) if tree else None, destination, other]


@cases("helpers", start=(100, 7), fails=(0, 2))
def batch_size_found(lib: Any, *, start: int, fails: int) -> Any:
    tried: list[int] = []

    @lib.utils.find_executable_batch_size(starting_batch_size=start)
    def train(batch_size: int, factor: int) -> int:
        tried.append(batch_size)
        if len(tried) <= fails:
            raise RuntimeError("CUDA out of memory.")
        return batch_size * factor

    return [train(2), tried]


@cases("config files", text=(
    "compute_environment: LOCAL_MACHINE\\nmixed_precision: bf16\\nnum_processes: 2\\n",
    "distributed_type: MULTI_CPU\\nnum_machines: 1\\nuse_cpu: true\\n",
    "distributed_type: FSDP\\nfsdp_config:\\n  fsdp_version: 2\\n",
    "mixed_precision: bf16\\nnonsense: 1\\n",
    "{}",
))  # fmt: skip
def config_file(lib: Any, *, text: str) -> Any:
    import importlib

    path = Path("config.yaml")
    path.write_text(text.replace("\\n", "\n"))
    config = importlib.import_module(f"{lib.__name__}.commands.config.config_args").load_config_from_file(
        str(path)
    )
    return {
        name: getattr(config, name, None)
        for name in ("compute_environment", "distributed_type", "mixed_precision", "use_cpu",
        "num_processes", "debug")
    }  # fmt: skip
