"""The base of the facets of `Accelerator`: methods over one record of parts."""

from __future__ import annotations

from abc import ABC
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_train.parts import Parts


class Facet(ABC):
    """Methods that belong together; all state is in the parts."""

    __slots__ = ("_parts",)
    _parts: Parts

    if not TYPE_CHECKING:  # type checkers are to report unknown attributes

        def __getattr__(self, name: str) -> Any:
            """Say what to use where an attribute of another library's `Accelerator` is asked for."""
            raise missing_attribute(self, name)


_FLAG = "use set_trigger() and check_trigger()"
_PREPARE = "use prepare()"
_HANDLERS = "keep the object that you gave as one of kwargs_handlers"
_HOOKS = "keep the handles that register_save_state_pre_hook() and register_load_state_pre_hook() return"

INSTEAD = {
    "flag_tensor": _FLAG,
    "init_handler": _HANDLERS,
    "has_fp8_handler": _HANDLERS,
    "fp8_recipe_handler": _HANDLERS,
    "ao_recipe_handler": _HANDLERS,
    "te_recipe_handler": _HANDLERS,
    "msamp_recipe_handler": _HANDLERS,
    "has_lomo_optimizer": "call lomo_backward() where the optimizer is one",
    "delayed_fp8_autocast": "use autocast()",
    "_clip_grad_norm_dtensor_aware": "use clip_grad_norm_(), which takes DTensors",
    "_custom_objects": "keep the objects that you give to register_for_checkpointing()",
    "_do_sync": "use accumulate(), or gradient_state for what it found",
    "_get_devices": "use device",
    "_get_named_parameters": "use named_parameters() of the model",
    "_load_model_state_pre_hook": _HOOKS,
    "_save_model_state_pre_hook": _HOOKS,
    "_prepare_ao": _PREPARE,
    "_prepare_cp": _PREPARE,
    "_prepare_deepspeed": _PREPARE,
    "_prepare_device_mesh": "use torch_device_mesh",
    "_prepare_fsdp2": _PREPARE,
    "_prepare_megatron_lm": _PREPARE,
    "_prepare_msamp": _PREPARE,
    "_prepare_te": _PREPARE,
    "_prepare_tp": _PREPARE,
}
"""Name to advice: what scripts may know from Hugging Face Accelerate, most of it private there."""


def missing_attribute(owner: object, name: str) -> AttributeError:
    """Make the error of an attribute that is not there.

    Example:
        >>> print(missing_attribute(1, "flag_tensor"))
        'int' object has no attribute 'flag_tensor': use set_trigger() and check_trigger()
    """
    advice = f": {INSTEAD[name]}" if name in INSTEAD else ""
    text = f"{type(owner).__name__!r} object has no attribute {name!r}{advice}"
    return AttributeError(text, name=name, obj=owner)
