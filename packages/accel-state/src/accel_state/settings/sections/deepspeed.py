"""DeepSpeed, and the machines of its hostfile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel_state.settings.option import Answers, documented, rows_of, setting, spelled, switch
from accel_state.settings.parsing import integer, number, optional
from accel_state.settings.sections.launch import is_local, several_machines

_DEVICES = ("none", "cpu", "nvme")
_LAUNCHERS = ("pdsh", "standard", "openmpi", "mvapich", "mpich", "slurm", "nossh")


def _on(answers: Answers) -> bool:
    return bool(answers("deepspeed"))


def _without_file(answers: Answers) -> bool:
    return _on(answers) and not answers("deepspeed.hf_ds_config")


def _is_zero(answers: Answers) -> bool:
    return _without_file(answers) and answers("deepspeed.zero_stage") in {2, 3}


def _stage_three(answers: Answers) -> bool:
    return _on(answers) and (answers("deepspeed.zero_stage") == 3 or bool(answers("deepspeed.hf_ds_config")))


def _among_machines(answers: Answers) -> bool:
    return _on(answers) and several_machines(answers)


def _row(help: str, *, long: str | None = None, **more: Any) -> Any:  # noqa: A002 - as the field is called
    def derive(field: str) -> dict[str, Any]:
        variable = f"ACCELERATE_{'' if long else 'DEEPSPEED_'}{(long or field).upper()}"
        return spelled(long or field, "deepspeed_config", variable=variable, ask_if=_on)

    return setting(derive, help=help, **more)


def _hosts(help: str, **more: Any) -> Any:  # noqa: A002 - as the field is called
    names = {
        "inclusion": "inclusion_filter",
        "exclusion": "exclusion_filter",
        "launcher": "multinode_launcher",
    }

    def derive(field: str) -> dict[str, Any]:
        name = f"deepspeed_{names.get(field, field)}"
        return {"flags": (f"--{name}",), "key": f"deepspeed_config.{name}"}

    return setting(derive, help=help, **more)


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedSettings:
    """How DeepSpeed trains; the fields of `DeepSpeedPlugin`.

    Accumulation is in `Settings.training`, as for every engine.
    """

    hf_ds_config: str | None = _row(
        "A DeepSpeed configuration in JSON; its values auto are filled in.",
        long="deepspeed_config_file",
        question="The path of a DeepSpeed configuration in JSON? (empty: answer questions)",
    )
    zero_stage: int | None = _row(
        "ZeRO stage: 0 shards nothing, 1 optimizer state, 2 also gradients, 3 also parameters.",
        parse=integer(0, 3),
        choices=("0", "1", "2", "3"),
        question="Which ZeRO stage? (0: none, 1: optimizer state, 2: also gradients, 3: also parameters)",
        ask_if=_without_file,
    )
    offload_optimizer_device: str | None = _row(
        "Device to which optimizer state is offloaded; none: it stays on the GPU.",
        choices=_DEVICES,
        question="To which device is optimizer state offloaded? (none: it stays on the GPU)",
        ask_if=_is_zero,
    )
    offload_param_device: str | None = _row(
        "Device to which parameters are offloaded, with stage 3; none: they stay on the GPU.",
        choices=_DEVICES,
        question="To which device are parameters offloaded? (none: they stay on the GPU)",
        ask_if=lambda answers: _is_zero(answers) and answers("deepspeed.zero_stage") == 3,
    )
    offload_optimizer_nvme_path: str | None = _row(
        "The folder for optimizer state on nvme.",
        parse=optional(str, "none"),
        question="In which folder?",
        ask_if=lambda answers: _is_zero(answers) and answers("deepspeed.offload_optimizer_device") == "nvme",
    )
    offload_param_nvme_path: str | None = _row(
        "The folder for parameters on nvme.",
        parse=optional(str, "none"),
        question="In which folder are offloaded parameters?",
        ask_if=lambda answers: _is_zero(answers) and answers("deepspeed.offload_param_device") == "nvme",
    )
    gradient_clipping: float | None = _row(
        "The norm that gradients are clipped to at every step.",
        long="gradient_clipping",
        parse=optional(number(0), "none", "auto"),
        question="To which norm are gradients clipped? (empty: as the script does)",
        ask_if=_without_file,
    )
    zero3_init_flag: bool | None = _row(
        "Shard models while they are constructed, with stage 3 (deepspeed.zero.Init).",
        variable="ACCELERATE_DEEPSPEED_ZERO3_INIT",
        question="Shard models while they are constructed? (deepspeed.zero.Init)",
        ask_if=_stage_three,
    )
    zero3_save_16bit_model: bool | None = _row(
        "Gather sharded weights into a full state dict when a model is saved, with stage 3.",
        question="Gather sharded weights into a full state dict when a model is saved?",
        ask_if=lambda answers: _without_file(answers) and _stage_three(answers),
    )
    transformer_moe_cls_names: str | None = _row(
        "Classes of mixture-of-experts layers, separated by commas.",
        long="deepspeed_moe_layer_cls_names",
        question="Classes of mixture-of-experts layers, separated by commas? (empty: none)",
        ask_if=lambda answers: _without_file(answers) and _stage_three(answers),
    )


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class HostSettings:
    """Starting processes on the machines of a DeepSpeed hostfile."""

    launcher: str | None = _hosts(
        "Program that starts workers on the other nodes.",
        choices=_LAUNCHERS,
        question="What starts processes on the other machines? (standard: you do, with this command)",
        ask_if=_among_machines,
    )
    hostfile: str | None = _hosts(
        "The file that lists the machines, as worker-1 slots=8.",
        question="The path of the file that lists the machines?",
        ask_if=lambda answers: (
            _among_machines(answers) and answers("hosts.launcher") not in {None, "standard"}
        ),
    )
    inclusion: str | None = _hosts(
        "The machines and slots that take part, as worker-1@worker-2:0,2.",
        question="Which machines and slots take part, as worker-1@worker-2:0,2? (empty: all)",
        ask_if=lambda answers: _among_machines(answers) and bool(answers("hosts.hostfile")),
    )
    exclusion: str | None = _hosts(
        "The machines and slots that do not, as worker-1:0.",
        question="Which do not, as worker-1:0? (empty: none)",
        ask_if=lambda answers: (
            _among_machines(answers) and bool(answers("hosts.hostfile")) and not answers("hosts.inclusion")
        ),
    )


DEEPSPEED = (
    switch(
        "deepspeed",
        "deepspeed",
        help="Train with DeepSpeed.",
        topic="DeepSpeed",
        question="Train with DeepSpeed?",
        ask_if=lambda answers: is_local(answers) and answers("launch.distributed_type") not in {"NO", "XLA"},
    ),
    *rows_of("deepspeed", DeepSpeedSettings, topic="DeepSpeed"),
    *rows_of("hosts", HostSettings, topic="DeepSpeed"),
)
