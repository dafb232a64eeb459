"""Private methods of Accelerate's `Accelerator` that programs call, wrap or replace.

`prepare` checks once per call for replacements: `SEAMS` lists the stage that each one replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Any

from accel_ops.modules import extract_model_from_parallel
from accel_ops.tree import local_part
from accel_state.errors import UnsupportedError
from accel_state.frozen import frozen
from accel_state.lazy import replaced_absent_names
from accel_state.logging import get_logger
from accel_train.accelerator.run import Facet, ProcessFacet

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from accel_train.accelerator.build import Parts

logger = get_logger(__name__)


@frozen
class Seam:
    """A method of Accelerate's `Accelerator` that corresponds to a stage of `prepare`.

    Args:
        method: Its name. It takes the arguments of `prepare`, and returns them partly prepared.
        stage: The stage that is skipped if the method is replaced; the other stages get what the
            replacement returns.
        applies: Whether Accelerate would call it in a run.
    """

    method: str
    stage: str
    applies: Callable[[Parts], bool]


SEAMS: tuple[Seam, ...] = (
    Seam(method="_prepare_ao", stage="recipe", applies=lambda parts: parts.fp8_backend == "AO"),
    Seam(method="_prepare_te", stage="recipe", applies=lambda parts: parts.fp8_backend == "TE"),
    Seam(
        method="_prepare_cp",
        stage="sequences",
        applies=lambda parts: parts.strategy.split_sequences is not None,
    ),
    Seam(method="_prepare_fsdp2", stage="wrap", applies=lambda parts: parts.state.is_fsdp2),
    Seam(method="_prepare_deepspeed", stage="wrap", applies=lambda parts: parts.strategy.name == "deepspeed"),
    Seam(
        method="_prepare_megatron_lm", stage="wrap", applies=lambda parts: parts.strategy.name == "megatron"
    ),
)
"""In the order in which `prepare` calls those that a program has replaced."""

UNCALLED = (
    "_clip_grad_norm_dtensor_aware",
    "_do_sync",
    "_get_devices",
    "_get_named_parameters",
    "_prepare_device_mesh",
    "_prepare_msamp",
    "_prepare_tp",
)
"""Methods that programs may call and nothing here does, so that a replacement has no effect."""


class SeamFacet(Facet):
    """The private methods of Accelerate's `Accelerator`."""

    __slots__ = ()

    def _run_stages(self, args: Sequence[Any], *, leave_out: Container[str] = ()) -> list[Any]:
        """Run the stages of `prepare`."""
        raise NotImplementedError

    def _run_single_stage(self, stage: str, args: Sequence[Any]) -> tuple[Any, ...]:
        """Run one stage of `prepare`."""
        raise NotImplementedError

    def _prepare_one(self, obj: Any, first_pass: bool = False, device_placement: bool | None = None) -> Any:
        """Prepare one object: a scheduler in the second pass, anything else in the first."""
        raise NotImplementedError

    def _prepare_ao(self, *args: Any) -> tuple[Any, ...]:
        """Convert models to torchao's FP8 layers."""
        return self._run_single_stage("recipe", args)

    def _prepare_te(self, *args: Any) -> tuple[Any, ...]:
        """Convert models to layers of TransformerEngine."""
        return self._run_single_stage("recipe", args)

    def _prepare_msamp(self, *args: Any, device_placement: Any) -> tuple[Any, ...]:
        """Refuse: MS-AMP is no recipe of this version."""
        del args, device_placement
        raise UnsupportedError(
            "MS-AMP is not supported. mixed_precision='fp8' uses torchao or TransformerEngine."
        )

    def _prepare_cp(self, *args: Any) -> tuple[Any, ...]:
        """Set up models for context parallelism."""
        return self._run_single_stage("sequences", args)

    def _prepare_tp(self, *args: Any) -> tuple[Any, ...]:
        """Return the arguments: layers are sharded where models are wrapped."""
        return args

    def _prepare_fsdp2(self, *args: Any) -> list[Any]:
        """Prepare all arguments, models sharded by `fully_shard`."""
        return self._run_remaining_stages(args)

    def _prepare_deepspeed(self, *args: Any) -> list[Any]:
        """Prepare all arguments, models and optimizers in DeepSpeed's engine."""
        return self._run_remaining_stages(args)

    def _prepare_megatron_lm(self, *args: Any) -> list[Any]:
        """Prepare all arguments, models in Megatron's stages."""
        return self._run_remaining_stages(args)

    def _run_remaining_stages(self, args: Sequence[Any]) -> list[Any]:
        return self._run_stages(args, leave_out=replaced_stages(self).keys() - {"wrap"})

    def _prepare_device_mesh(self) -> DeviceMesh | None:
        """Return the device mesh of the run."""
        return self._parts.strategy.mesh

    def _get_devices(self, *args: Any) -> tuple[torch.device | None, torch.device | None]:
        """Return the devices of the first model and of the first optimizer parameter."""
        models = (next(arg.parameters(), None) for arg in args if hasattr(arg, "parameters"))
        optimizers = (arg.param_groups[0]["params"][0] for arg in args if hasattr(arg, "param_groups"))
        model, optimizer = next(models, None), next(optimizers, None)
        return None if model is None else model.device, None if optimizer is None else optimizer.device

    def _get_named_parameters(
        self, *args: Any, drop_refs: bool = False
    ) -> dict[str, Tensor] | dict[str, int]:
        """Return the parameters of all models by name; with `drop_refs` their addresses."""
        parameters: dict[str, Tensor] = {}
        for model in (arg for arg in args if hasattr(arg, "named_parameters")):
            parameters |= extract_model_from_parallel(model).named_parameters()
        if drop_refs:
            return {name: local_part(tensor).data_ptr() for name, tensor in parameters.items()}
        return parameters

    def _do_sync(self) -> None:
        """Count one micro-batch, and set `sync_gradients`."""
        self._parts.synchronizer.advance()

    def _clip_grad_norm_dtensor_aware(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip gradients, which may include DTensors, without unscaling them."""
        return self._parts.strategy.stepper.clip_grad_norm(parameters, max_norm, norm_type)


def replaced_stages(accelerator: SeamFacet) -> dict[str, str]:
    """Return the stages whose method a program has replaced, as `{stage: method}`."""
    return {
        seam.stage: seam.method
        for seam in SEAMS
        if _is_replaced(accelerator, seam.method) and seam.applies(accelerator._parts)  # pyright: ignore[reportPrivateUsage] - ours
    }


def warn_of_uncalled(accelerator: SeamFacet) -> None:
    """Warn once about methods that a program has replaced but that are never called."""
    names = [f"Accelerator.{method}" for method in UNCALLED if _is_replaced(accelerator, method)]
    names += replaced_absent_names()
    if names:
        logger.warning_once(
            "The program replaces %s, which accel never calls: the replacement has no effect.",
            ", ".join(names),
        )


def says_another_type(accelerator: Any) -> bool:
    """Return whether a program overrides `Accelerator.distributed_type` by a type other than the run's.

    Accelerate chooses the wrapper of a model by it; unsloth overrides it to keep models unwrapped.
    """
    if type(accelerator).distributed_type is ProcessFacet.distributed_type:
        return False
    return accelerator.distributed_type != accelerator._parts.state.distributed_type  # pyright: ignore[reportPrivateUsage] - ours


def _is_replaced(accelerator: SeamFacet, method: str) -> bool:
    own, kind = vars(accelerator), type(accelerator)
    return method in own or getattr(kind, method) is not getattr(SeamFacet, method)
