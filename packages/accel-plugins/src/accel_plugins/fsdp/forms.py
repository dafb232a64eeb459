"""Map the plugin's `state_dict_type` to the form that `save_state` writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch.distributed.fsdp import StateDictType

from accel_plugins.dcp.protocol import StateForm

if TYPE_CHECKING:
    from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin

_FORMS = {
    StateDictType.FULL_STATE_DICT: StateForm.FULL,
    StateDictType.SHARDED_STATE_DICT: StateForm.SHARDED,
    StateDictType.LOCAL_STATE_DICT: StateForm.NATIVE,
}


def form_of(plugin: FullyShardedDataParallelPlugin) -> StateForm:
    """Return the form of the plugin's current `state_dict_type`, which may be changed later."""
    return _FORMS[cast("StateDictType", plugin.state_dict_type)]
