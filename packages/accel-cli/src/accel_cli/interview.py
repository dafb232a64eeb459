"""The questions of `accel config`: conditions, suggested answers, and terminal prompts."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from accel_cli.launch.hosts import probe_devices
from accel_state.errors import SettingsError
from accel_state.frozen import frozen
from accel_state.settings import OPTIONS, Layer, Option, SourcedValue, merge_layers
from accel_state.settings.model import BY_PATH, Settings, as_text, parse, value_at
from accel_state.settings.option import Answers, boolean, comma_list
from accel_state.settings.run import DEVICE_TYPES, SAGEMAKER_TYPES
from accel_state.topology import first_host

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyPressEvent


def interview(ask: Callable[[Question], str], host: HostInfo) -> Settings:
    """Ask the questions that depend on the answers so far.

    After the user goes back, a question suggests its earlier answer.

    Args:
        ask: Returns a choice, `"true"` or `"false"`, or a valid text, or raises `PreviousQuestion`.
        host: The host for which answers are suggested.
    """
    answers: list[tuple[Option, str]] = []
    earlier: dict[str, str] = {}
    while (question := _next_question(answers, host, earlier)) is not None:
        try:
            text = ask(question)
        except PreviousQuestion:
            if answers:
                option, text = answers.pop()
                earlier[option.path] = text
            continue
        answers.append((BY_PATH[question.path], text))
    settings = _merge_answers(answers)
    if settings.launch.compute_environment == "LOCAL_MACHINE" and settings.launch.distributed_type == "NO":
        settings = replace(settings, launch=replace(settings.launch, num_processes=1))
    return settings


class PreviousQuestion(Exception):  # noqa: N818 - not an error
    """Raised to return to the previous question."""


@frozen
class Question:
    """A question about a setting.

    Args:
        choices: The choices, each with its title.
        default: The suggested answer; for yes or no `"true"` or `"false"`.
        find_problem: Returns the problem of a text answer; None if it is valid.
    """

    path: str
    message: str
    kind: Literal["choice", "yes or no", "text"]
    choices: tuple[tuple[str, str], ...]
    default: str
    find_problem: Callable[[str], str | None]


def _next_question(
    answers: Sequence[tuple[Option, str]], host: HostInfo, earlier: Mapping[str, str]
) -> Question | None:
    """Return the next question that applies after the last answer; None if there is none."""
    answer_to = partial(value_at, _merge_answers(answers))
    for option in OPTIONS[OPTIONS.index(answers[-1][0]) + 1 :] if answers else OPTIONS:
        if option.question is not None and (option.ask_if is None or option.ask_if(answer_to)):
            question = make_question(option, host, answer_to)
            default = earlier.get(option.path, question.default)
            is_a_choice = not question.choices or default in dict(question.choices)
            return replace(question, default=default) if is_a_choice else question
    return None


def _merge_answers(answers: Sequence[tuple[Option, str]]) -> Settings:
    read = {option.path: read_answer(option, text) for option, text in answers}
    return merge_layers({path: value for path, value in read.items() if value is not None}).settings


def make_question(option: Option, host: HostInfo, answers: Callable[[str], object]) -> Question:
    """Return the question about a setting."""
    choices = list_choices(option, answers)
    titles = CHOICE_TITLES.get(option.path, {})
    return Question(
        path=option.path,
        message=option.question or "",
        kind="choice" if choices else "yes or no" if option.parse is boolean else "text",
        choices=tuple((choice, titles.get(choice, choice)) for choice in choices),
        default=suggest_answer(option, host, answers) or ("false" if option.parse is boolean else ""),
        find_problem=lambda text: _find_problem(option, text),
    )


def list_choices(option: Option, answers: Answers) -> tuple[str, ...]:
    """Return the choices of a question."""
    if option.path == "launch.distributed_type":
        if answers("launch.compute_environment") == "AMAZON_SAGEMAKER":
            return ("NO", *SAGEMAKER_TYPES)
        return tuple(kind for kind in CHOICE_TITLES[option.path] if kind in {*DEVICE_TYPES, "XLA"})
    if option.path == "fsdp.fsdp_version":
        return ("2", "1")
    if option.path == "fsdp.state_dict_type" and answers("fsdp.fsdp_version") == 2:
        return tuple(kind for kind in option.choices if kind != "LOCAL_STATE_DICT")
    return option.choices


CHOICE_TITLES: Mapping[str, Mapping[str, str]] = {
    "launch.compute_environment": {
        "LOCAL_MACHINE": "this machine or a cluster",
        "AMAZON_SAGEMAKER": "Amazon SageMaker",
    },
    "launch.distributed_type": {
        "NO": "one device: CPU or a single GPU (one process)",
        "MULTI_GPU": "multi-GPU (NVIDIA or AMD)",
        "MULTI_CPU": "multi-CPU",
        "XLA": "TPU",
        "MULTI_XPU": "multi-XPU (Intel)",
        "MULTI_HPU": "multi-HPU (Intel Gaudi)",
        "MULTI_NPU": "multi-NPU (Huawei Ascend)",
        "MULTI_MLU": "multi-MLU (Cambricon)",
        "MULTI_SDAA": "multi-SDAA (Teco)",
        "MULTI_MUSA": "multi-MUSA (Moore Threads)",
        "MULTI_NEURON": "multi-Neuron (AWS)",
        "DATA_PARALLEL": "multi-GPU with SageMaker's data parallelism",
        "MODEL_PARALLEL": "multi-GPU with SageMaker's model parallelism",
    },
}
"""Titles of choices by the setting's path, where the names need an explanation."""


def suggest_answer(option: Option, host: HostInfo, answers: Answers) -> str:
    """Return the suggested answer to the question about a setting; empty for none."""
    suggestion = _SUGGESTIONS.get(option.path)
    if suggestion is not None:
        return suggestion if isinstance(suggestion, str) else suggestion(host, answers)
    value = option.launch_default or value_at(Settings(), option.path)
    return next(iter(option.choices), "") if value is None else as_text(value)


def _suggest_device_type(host: HostInfo, answers: Answers) -> str:
    is_local = answers("launch.compute_environment") == "LOCAL_MACHINE"
    return host.kind if is_local and (host.gpus > 1 or host.nodes > 1) else "NO"


def _suggest_num_processes(host: HostInfo, answers: Answers) -> str:
    nodes = answers("launch.num_machines")
    if answers("launch.distributed_type") == "MULTI_CPU":
        return str(max(2, nodes))
    return str(nodes * max(1, host.gpus))


def _suggest_precision(host: HostInfo, answers: Answers) -> str:
    if answers("process.use_cpu") or answers("launch.distributed_type") == "MULTI_CPU" or not host.gpus:
        return "bf16" if answers("launch.distributed_type") == "XLA" else "no"
    return "bf16" if host.bf16 else "fp16"


_SUGGEST_ONE = (
    *("fp8.interval", "megatron.tp_degree", "megatron.pp_degree", "megatron.num_micro_batches"),
    *(f"parallelism.{axis}_size" for axis in ("dp_replicate", "tp", "cp", "sp", "ep", "pp")),
)
_SUGGEST_TRUE = (
    *("fsdp.reshard_after_forward", "deepspeed.zero3_init_flag", "deepspeed.zero3_save_16bit_model"),
    *("parallelism.sp_seq_length_is_variable", "megatron.sequence_parallelism"),
    *("megatron.recompute_activations", "megatron.use_distributed_optimizer"),
    *("fp8.enable_fsdp_float8_all_gather", "fp8.pad_inner_dim"),
)

_SUGGESTIONS: Mapping[str, str | Callable[[HostInfo, Answers], str]] = {
    "launch.distributed_type": _suggest_device_type,
    "launch.num_machines": lambda host, _: str(host.nodes),
    "launch.num_processes": _suggest_num_processes,
    "launch.main_process_ip": lambda host, _: host.first_node or host.address or "",
    **dict.fromkeys(_SUGGEST_ONE, "1"),
    **dict.fromkeys(_SUGGEST_TRUE, "true"),
    "launch.main_process_port": "29500",
    "launch.gpu_ids": "all",
    "precision.mixed_precision": _suggest_precision,
    "fsdp.fsdp_version": "2",
    "fsdp.state_dict_type": "SHARDED_STATE_DICT",
    "deepspeed.zero_stage": "2",
    "parallelism.dp_shard_size": lambda _, answers: str(
        max(1, (answers("launch.num_processes") or 1) // (answers("parallelism.dp_replicate_size") or 1))
    ),
    "parallelism.pp_schedule": "1F1B",
    "megatron.gradient_clipping": "1.0",
    "fp8.margin": "0",
    "fp8.amax_history_len": "1024",
    "fp8.amax_compute_algo": "most_recent",
    "fp8.override_linear_precision": "false,false,false",
    "fp8.opt_level": "O2",
    "sagemaker.ec2_instance_type": "ml.g5.2xlarge",  # PyTorch 2.8 does not support the V100 of p3.
    "sagemaker.iam_role_name": "accelerate_sagemaker_execution_role",
    # The versions of SageMaker's newest container; the defaults of the settings are Accelerate's.
    "sagemaker.transformers_version": "4.56.2",
    "sagemaker.pytorch_version": "2.8.0",
    "sagemaker.py_version": "py312",
}


def read_answer(option: Option, text: str) -> SourcedValue | None:
    """Parse an answer; None if it is empty."""
    if option.kind == "list":
        values = comma_list(text)
        return SourcedValue(value=values, layer=Layer.ARGUMENT, origin="answer") if values else None
    return parse(option, text.strip(), Layer.ARGUMENT, "answer")


def _find_problem(option: Option, text: str) -> str | None:
    if not text.strip():
        return "This answer is required." if option.path in _REQUIRED else None
    try:
        read_answer(option, text)
    except SettingsError as error:
        return str(error).rpartition(": ")[2]
    return None


_REQUIRED = (
    *("launch.num_processes", "launch.main_process_ip", "launch.main_process_port", "hosts.hostfile"),
    *("sagemaker.ec2_instance_type", "sagemaker.iam_role_name", "tpu.name", "tpu.zone"),
)


@frozen
class HostInfo:
    """This host, and the nodes of its Slurm job.

    Args:
        address: Network address; None if the host has none.
        nodes: Number of nodes of the Slurm job; 1 outside of one.
        first_node: Name of the job's first node; None outside of one.
        kind: The distributed type of its devices.
    """

    gpus: int = 0
    cores: int = 1
    bf16: bool = False
    address: str | None = None
    nodes: int = 1
    first_node: str | None = None
    kind: str = "MULTI_GPU"


def probe_host(environ: Mapping[str, str]) -> HostInfo:
    """Probe this host without torch."""
    devices = probe_devices(environ)
    address = None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        # No packet is sent; this address is reserved for documentation: RFC 5737.
        probe.connect(("192.0.2.1", 9))
        address = str(probe.getsockname()[0])
    nodes = environ.get("SLURM_JOB_NUM_NODES", "")
    return HostInfo(
        gpus=devices.gpus,
        cores=devices.cores,
        # NVIDIA GPUs compute in bfloat16 from compute capability 8 (Ampere); AMD GPUs are assumed to.
        bf16=devices.gpus > 0
        and (shutil.which("nvidia-smi") is None or (devices.capability() or (0, 0)) >= (8, 0)),
        address=address,
        nodes=int(nodes) if nodes.isdecimal() and int(nodes) > 0 else 1,
        first_node=first_host(environ.get("SLURM_JOB_NODELIST", "")),
        kind=devices.kind,
    )


def ask(question: Question) -> str:
    """Ask on the terminal until the answer is valid."""
    import questionary
    from prompt_toolkit.key_binding import KeyBindings, merge_key_bindings

    keys = KeyBindings()

    @keys.add("escape", eager=True)
    def go_back(event: KeyPressEvent) -> None:  # pyright: ignore[reportUnusedFunction] - the key calls it
        event.app.exit(exception=PreviousQuestion)

    if question.kind == "yes or no":
        prompt = questionary.confirm(question.message, default=question.default == "true")
    elif question.kind == "text":
        prompt = questionary.text(
            question.message,
            default=question.default,
            validate=lambda text: question.find_problem(text) or True,
        )
    else:
        choices = [questionary.Choice(title, value=value) for value, title in question.choices]
        default = next((choice for choice in choices if choice.value == question.default), None)
        prompt = questionary.select(question.message, choices, default=default)
    application = prompt.application
    application.key_bindings = merge_key_bindings([application.key_bindings or KeyBindings(), keys])
    answer: object = prompt.unsafe_ask()
    return str(answer).lower() if question.kind == "yes or no" else str(answer)


def confirm(message: str, *, default: bool) -> bool:
    """Ask a yes-or-no question."""
    import questionary

    return bool(questionary.confirm(message, default=default).unsafe_ask())
