"""The documented enumerations, with the labels used in config files and messages.

Torch-free. After construction no code of accel compares a `DistributedType`; it asks the strategy
record, the device kind or the topology instead.
"""

from __future__ import annotations

from enum import Enum, EnumMeta
from typing import Literal, TypeAlias


class EnumWithContains(EnumMeta):
    """Metaclass of enumerations whose `in` accepts values."""

    def __contains__(cls, item: object) -> bool:
        try:
            cls(item)
        except ValueError:
            return False
        return True


class BaseEnum(Enum, metaclass=EnumWithContains):
    """An enumeration with `list()`, `in` for values, and its value as text."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[str]:
        """Return all values, in order of definition."""
        return [str(member) for member in cls]


class ComputeEnvironment(str, Enum):  # noqa: UP042 - prints with the name of its class, as documented
    """Where a job runs."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class CustomDtype(Enum):
    """Dtypes without a `torch.dtype`, for size estimates."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


class DistributedType(str, Enum):  # noqa: UP042 - prints with the name of its class, as documented
    """The label of a run for users, derived from the strategy and the device."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"


class DDPCommunicationHookType(BaseEnum):
    """How `DistributedDataParallel` compresses gradients before it averages them."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


class DynamoBackend(str, BaseEnum):
    """The compiler behind `torch.compile`; see the PyTorch documentation of each."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"


class LoggerType(BaseEnum):
    """The experiment trackers that `log_with` accepts."""

    ALL = "all"
    AIM = "aim"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"


class PrecisionType(str, BaseEnum):
    """The precision of forward and backward passes."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


PrecisionName: TypeAlias = Literal["no", "fp8", "fp16", "bf16"]
"""The names of `PrecisionType`."""


class FP8BackendType(str, BaseEnum):
    """The library for FP8 matrix multiplication."""

    NO = "NO"
    TE = "TE"
    MSAMP = "MSAMP"
    AO = "AO"


class RNGType(BaseEnum):
    """The random number generators that can be synchronised across ranks."""

    TORCH = "torch"
    CUDA = "cuda"
    MLU = "mlu"
    SDAA = "sdaa"
    MUSA = "musa"
    NPU = "npu"
    XLA = "xla"
    XPU = "xpu"
    HPU = "hpu"
    NEURON = "neuron"
    GENERATOR = "generator"


class SageMakerDistributedType(str, Enum):  # noqa: UP042 - prints with the name of its class, as documented
    """The kinds of distributed SageMaker jobs."""

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"


# Strategies with a separate label, the same on every device; other strategies use the device's label.
_STRATEGY_LABELS = {
    "fsdp": DistributedType.FSDP,
    "fsdp1": DistributedType.FSDP,
    "fsdp2": DistributedType.FSDP,
    "deepspeed": DistributedType.DEEPSPEED,
    "megatron": DistributedType.MEGATRON_LM,
}


def distributed_type_of(
    strategy_name: str, device_kind_label: DistributedType | str, world_size: int
) -> DistributedType:
    """Return the distributed type of a run.

    Args:
        strategy_name: The name of the strategy, such as `"single"`, `"ddp"` or a third party's.
        device_kind_label: The label of several processes on this kind of device, for example
            `DistributedType.MULTI_GPU` for CUDA.
        world_size: Number of processes.

    Returns:
        `XLA` on XLA devices; else the strategy's label if it has one; else `NO` for one process, the device's
        label for several.

    Example:
        >>> distributed_type_of("ddp", "MULTI_CPU", 2).value
        'MULTI_CPU'
        >>> distributed_type_of("single", "MULTI_CPU", 1).value
        'NO'
        >>> distributed_type_of("fsdp2", "MULTI_GPU", 1).value
        'FSDP'
        >>> distributed_type_of("single", "XLA", 1).value
        'XLA'
    """
    label = DistributedType(device_kind_label)
    if label is DistributedType.XLA:  # even with one process, which may drive many devices
        return label
    labels = _STRATEGY_LABELS.get(strategy_name)
    if labels is not None:
        return labels
    return DistributedType.NO if world_size == 1 else label


TORCH_DISTRIBUTED_OPERATION_TYPES = [
    "DEEPSPEED", "MULTI_GPU", "FSDP", "MEGATRON_LM", "TP", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA",
    "MULTI_MUSA", "MULTI_XPU", "MULTI_CPU", "MULTI_HPU", "MULTI_NEURON",
]  # fmt: skip
"""The labels of runs that use `torch.distributed`."""


def has_sharded_gradients(distributed_type: DistributedType | str | None) -> bool:
    """Return whether the gradients of such a run are sharded.

    Example:
        >>> has_sharded_gradients(DistributedType.FSDP), has_sharded_gradients("MULTI_GPU")
        (True, False)
    """
    return distributed_type == DistributedType.FSDP
