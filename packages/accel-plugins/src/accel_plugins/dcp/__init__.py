"""Sharded states of models and optimizers, by name, and PyTorch Distributed Checkpoint (DCP) folders."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_plugins.dcp.index import Entry as Entry
    from accel_plugins.dcp.index import entries as entries
    from accel_plugins.dcp.index import read_index as read_index
    from accel_plugins.dcp.index import write_index as write_index
    from accel_plugins.dcp.read import read_all as read_all
    from accel_plugins.dcp.read import read_into as read_into
    from accel_plugins.dcp.write import ShardWriter as ShardWriter

__all__ = ["Entry", "ShardWriter", "entries", "read_all", "read_index", "read_into", "write_index"]

_EXPORTS = {
    **dict.fromkeys(("Entry", "entries", "read_index", "write_index"), "accel_plugins.dcp.index"),
    **dict.fromkeys(("read_all", "read_into"), "accel_plugins.dcp.read"),
    "ShardWriter": "accel_plugins.dcp.write",
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
