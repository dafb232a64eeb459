"""Use the store of a process group from another thread, with few requests for many keys."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented

if TYPE_CHECKING:
    from collections.abc import Sequence


def clone_store(store: Any) -> Any:
    """Open a second connection to a store, for another thread; a waiting request blocks the first."""
    if hasattr(store, "clone"):
        return store.clone()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return TCPStore(store.host, store.port, None, False, timedelta(seconds=30))  # noqa: FBT003 - no keywords there
    return store


def absent_keys(store: Any, keys: Sequence[str]) -> list[str]:
    """Return the keys that are not in a store: one request if none is absent, else some log(n) for each.

    Example:
        >>> from torch.distributed import HashStore
        >>> store = HashStore()
        >>> store.set("1", "here")
        >>> absent_keys(store, ["0", "1", "2"])
        ['0', '2']
    """
    if not keys or store.check(list(keys)):
        return []
    if len(keys) == 1:
        return list(keys)
    half = len(keys) // 2
    return absent_keys(store, keys[:half]) + absent_keys(store, keys[half:])


def get_all(store: Any, keys: Sequence[str]) -> list[bytes]:
    """Return the values of keys that are all in a store, in one request where the store can."""
    if not keys:
        return []
    if store.has_extended_api():
        return store.multi_get(list(keys))
    return [store.get(key) for key in keys]
