"""A cluster of Slurm with two nodes on this machine, of real daemons of its own."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

START = 60.0  # seconds until both nodes take jobs; it takes less than one on an idle machine
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin"
DAEMONS = ("munged", "slurmctld", "slurmd")
MISSING = [name for name in (*DAEMONS, "srun") if shutil.which(name, path=PATH) is None]
SKIP = f"needs {', '.join(MISSING)}: see tools/install_schedulers.sh" if MISSING else ""

CONF = """\
ClusterName=harness
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
SlurmctldPort={controller}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=10
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=2 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=2 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=10 State=UP
"""


class LocalSlurm:
    """Two nodes, n1 and n2, of two CPUs each; a context manager.

    Attributes:
        environ (dict[str, str]): What programs of Slurm need in their environment to reach it.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm", dir="/tmp"))  # a socket's path has to be short
        self.environ = {"SLURM_CONF": str(self.folder / "slurm.conf"), "MASTER_ADDR": "127.0.0.1"}

    def __enter__(self) -> LocalSlurm:
        self.folder.chmod(0o755)
        (self.folder / "state").mkdir()
        for node in ("n1", "n2"):
            (self.folder / f"spool-{node}").mkdir()
        controller, first, second = _free_ports(3)
        conf = CONF.format(
            host=socket.gethostname().partition(".")[0],
            user=getpass.getuser(),
            folder=self.folder,
            controller=controller,
            first=first,
            second=second,
        )
        (self.folder / "slurm.conf").write_text(conf)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = {"socket": "munge.socket", "pid-file": "munged.pid", "log-file": "munged.log"}
        files |= {"seed-file": "munge.seed", "key-file": key.name}
        self._start("munged", "--force", *(f"--{name}={self.folder / file}" for name, file in files.items()))
        self._start("slurmctld", "-c")
        for node in ("n1", "n2"):
            self._start("slurmd", "-N", node)
        deadline = time.monotonic() + START
        while (states := self.run("sinfo", "-h", "-N", "-o", "%t").split()) != ["idle", "idle"]:
            if time.monotonic() > deadline:
                logs = "".join(path.read_text()[-2000:] for path in self.folder.glob("*.log"))
                self.__exit__()
                raise RuntimeError(f"the nodes of Slurm are {states}:\n{logs}")
            time.sleep(0.1)
        return self

    def run(self, *command: str) -> str:
        """Run a program of Slurm; return its output."""
        environ = {**os.environ, "PATH": PATH, **self.environ}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        return done.stdout

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:
            for file in self.folder.glob("*.pid"):
                stack.callback(_end, file)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, *command: str) -> None:
        """Run a daemon, which returns when it is in the background."""
        environ = {**os.environ, "PATH": PATH, **self.environ}
        subprocess.run(command, env=environ, check=True, capture_output=True)


def _free_ports(count: int) -> Sequence[int]:
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]


def _end(file: Path) -> None:
    """End the daemon of a pid file."""
    with suppress(OSError, ValueError):
        pid = int(file.read_text())
        os.kill(pid, signal.SIGTERM)
        for _ in range(50):
            os.kill(pid, 0)
            time.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
