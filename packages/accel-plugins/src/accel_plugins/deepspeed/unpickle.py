"""Read the files of DeepSpeed's checkpoints without running what their author may have put into them."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch._utils as torch_utils

from accel_plugins.deepspeed.library import part
from accel_state.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path


def _without_attributes(make: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """Make a tensor that was pickled with attributes, which only an engine gives it."""
    del kind, state
    return make(*arguments)


_TENSORS: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch._utils", "_rebuild_tensor"): torch_utils._rebuild_tensor,  # pyright: ignore[reportPrivateUsage] - how tensors are pickled
    ("torch._utils", "_rebuild_tensor_v2"): torch_utils._rebuild_tensor_v2,  # pyright: ignore[reportPrivateUsage]
    ("torch._utils", "_rebuild_parameter"): torch_utils._rebuild_parameter,  # pyright: ignore[reportPrivateUsage]
    ("torch._tensor", "_rebuild_from_type_v2"): _without_attributes,
    ("torch", "Tensor"): torch.Tensor,
    ("torch.nn.parameter", "Parameter"): torch.nn.Parameter,
    ("builtins", "set"): set,
}


class Opaque:
    """Stands for an object of DeepSpeed's own, of which only the plain contents are kept."""

    def __init__(self, *args: Any) -> None:
        self.args = args


# A stage is a number to us.
_STAND_INS: dict[str, Any] = {"ZeroStageEnum": int}
# What an engine needs to get back as it was; each only keeps what it is given.
_OBJECTS: dict[str, str] = {
    "ZeroStageEnum": "runtime.zero.config",
    "LossScaler": "runtime.fp16.loss_scaler",
    "DynamicLossScaler": "runtime.fp16.loss_scaler",
    "fragment_address": "utils.tensor_fragment",
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Give what tensors consist of, and stand-ins for DeepSpeed's objects."""
        found = _TENSORS.get((module_name, global_name))
        if found is not None:
            return found
        if module_name.partition(".")[0] == "deepspeed":
            return self.of_deepspeed(global_name)
        if module_name == "torch":
            known = getattr(torch, global_name, None)
            if isinstance(known, torch.dtype) or global_name.endswith("Storage"):
                return known
        if (module_name, global_name) == ("torch.storage", "UntypedStorage"):
            return torch.UntypedStorage
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is no part of a checkpoint of tensors")

    def of_deepspeed(self, name: str) -> Any:
        """Give a stand-in."""
        return _STAND_INS.get(name, Opaque)


class _EngineUnpickler(_Unpickler):
    def of_deepspeed(self, name: str) -> Any:
        """Give what an engine needs; other objects must stay out."""
        if name not in _OBJECTS:
            raise pickle.UnpicklingError(f"deepspeed's {name} is no part of a checkpoint of tensors")
        return getattr(part(_OBJECTS[name]), name)


def load_file(path: Path, *, for_engine: bool = False) -> dict[str, Any]:
    """Read one file; tensors are mapped from it, and read when they are needed.

    Args:
        path: The file.
        for_engine: Whether DeepSpeed's own objects are wanted, rather than what stands for them.

    Returns:
        Its contents on the CPU.

    Raises:
        CheckpointError: It is damaged, or holds what is not read without trust.
    """
    kind = _EngineUnpickler if for_engine else _Unpickler
    # What torch.load asks of a module that unpickles.
    module = SimpleNamespace(__name__="pickle", Unpickler=kind, load=_refuse, PickleError=pickle.PickleError)
    try:
        # Restricted to tensors by the unpicklers above; DeepSpeed's own classes keep weights_only from it.
        return torch.load(path, map_location="cpu", mmap=True, weights_only=False, pickle_module=module)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {str(error).splitlines()[0]}.") from error


def _refuse(*args: Any, **kwargs: Any) -> Any:
    del args, kwargs
    raise pickle.UnpicklingError("this is a file of a version of PyTorch before 1.6, which is not read")
