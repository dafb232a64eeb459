"""What the plugin's type of state dict means for `save_state`."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch.distributed.fsdp import StateDictType

from accel_plugins.dcp.protocol import StateForm

if TYPE_CHECKING:
    from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin

_FORMS = {
    StateDictType.FULL_STATE_DICT: StateForm.WHOLE,
    StateDictType.SHARDED_STATE_DICT: StateForm.SHARDED,
    StateDictType.LOCAL_STATE_DICT: StateForm.OWN,
}


def form_of(plugin: FullyShardedDataParallelPlugin) -> StateForm:
    """The form that the plugin asks for now; it may ask for another one later."""
    return _FORMS[cast("StateDictType", plugin.state_dict_type)]
