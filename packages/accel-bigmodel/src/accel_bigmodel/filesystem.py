"""What kind of file system a path is on."""

from __future__ import annotations

import functools
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_NETWORK = frozenset(
    {
        "9p", "afs", "beegfs", "ceph", "cifs", "fuse.glusterfs", "fuse.juicefs", "fuse.s3fs", "fuse.sshfs",
        "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "smb3", "smbfs", "wekafs",
    }
)  # fmt: skip


def is_network(path: Path) -> bool:
    """Return whether a path is known to be on a network, where many small mapped reads are slow."""
    real = path.resolve()
    mounts = _mounts()
    for parent in (real, *real.parents):
        kind = mounts.get(str(parent))
        if kind is not None:
            return kind in _NETWORK
    return False


@functools.cache
def _mounts() -> dict[str, str]:
    """Read mount point to type; see proc(5) for the format: the type follows a lone dash."""
    if not _MOUNTS.is_file():
        return {}
    table: dict[str, str] = {}
    for line in _MOUNTS.read_text(encoding="utf-8").splitlines():
        left, _, right = line.partition(" - ")
        table[left.split(" ")[4].replace("\\040", " ")] = right.split(" ")[0]
    return table
