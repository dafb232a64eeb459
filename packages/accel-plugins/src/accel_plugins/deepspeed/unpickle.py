"""Read the files of DeepSpeed's checkpoints with an unpickler that allows only known classes."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch._utils as torch_utils

from accel_plugins.deepspeed.library import ds_module
from accel_state.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path


def _without_attributes(make: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """Rebuild a tensor without the attributes that an engine has pickled with it."""
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
    """Placeholder for an object of DeepSpeed's, with its plain contents only."""

    def __init__(self, *args: Any) -> None:
        self.args = args


_PLACEHOLDERS: dict[str, Any] = {"ZeroStageEnum": int}
# The classes that an engine needs; each only stores its arguments.
_OBJECTS: dict[str, str] = {
    "ZeroStageEnum": "runtime.zero.config",
    "LossScaler": "runtime.fp16.loss_scaler",
    "DynamicLossScaler": "runtime.fp16.loss_scaler",
    "fragment_address": "utils.tensor_fragment",
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Return one of the allowed classes, or a placeholder for DeepSpeed's."""
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
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is not allowed in a checkpoint of tensors")

    def of_deepspeed(self, name: str) -> Any:
        """Return a placeholder."""
        return _PLACEHOLDERS.get(name, Opaque)


class _EngineUnpickler(_Unpickler):
    def of_deepspeed(self, name: str) -> Any:
        """Return one of the classes that an engine needs."""
        if name not in _OBJECTS:
            raise pickle.UnpicklingError(f"deepspeed's {name} is not allowed in a checkpoint of tensors")
        return getattr(ds_module(_OBJECTS[name]), name)


def load_file(path: Path, *, for_engine: bool = False) -> dict[str, Any]:
    """Read one file; tensors are memory-mapped on the CPU.

    Raises:
        CheckpointError: The file is damaged, or has objects of classes that are not allowed.
    """
    kind = _EngineUnpickler if for_engine else _Unpickler
    # The attributes of a pickle module that torch.load uses.
    module = SimpleNamespace(__name__="pickle", Unpickler=kind, load=_refuse, PickleError=pickle.PickleError)
    try:
        # Restricted to tensors by the unpicklers above; DeepSpeed's own classes keep weights_only from it.
        return torch.load(path, map_location="cpu", mmap=True, weights_only=False, pickle_module=module)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {str(error).splitlines()[0]}.") from error


def _refuse(*args: Any, **kwargs: Any) -> Any:
    del args, kwargs
    raise pickle.UnpicklingError("the file is of a version of PyTorch before 1.6, which is not supported")
