"""Replica groups: the quorum of each step, and the transfer of state to a returning group.

This is the only importer of torchft in the library. A group is the job that its launcher starts, with
separate ranks and collectives; torchft's managers find the other groups through a lighthouse.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Generator, Iterable, Mapping
from datetime import timedelta
from importlib import import_module
from itertools import chain
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accel_ops.tree import local_part
from accel_plugins.kwargs import ReplicaSyncKwargs
from accel_plugins.sharding.shards import with_local
from accel_state.errors import SettingsError, UnsupportedError
from accel_state.libraries import require

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_plugins.strategy import StateDict, Strategy

logger = logging.getLogger(__name__)

START_S = 300.0
"""Seconds that the groups of a new job wait for each other before their first step."""

_QUORUM_S = 600
"""Seconds that a group waits for a quorum, as for `min_groups`."""


class ReplicaGroups:
    """This replica group, and its agreement with the others on every optimizer step.

    If `is_sharded`, its ranks have shards of the models. Groups that train `apart` agree in some steps only.
    """

    def __init__(self, strategy: Strategy, *, is_sharded: bool = False) -> None:
        settings = strategy.settings.replicas
        require("torchft", "strategy='torchft'", install="accel-plugins[torchft]")
        if settings.lighthouse is None:
            raise SettingsError(
                "strategy='torchft' needs a lighthouse: start the script with `accel launch --replica_groups "
                "N`, or pass its address with --lighthouse (TORCHFT_LIGHTHOUSE)."
            )
        if not 0 <= settings.group < settings.groups:
            raise SettingsError(
                f"REPLICA_GROUP_ID={settings.group} is not one of the NUM_REPLICA_GROUPS={settings.groups} "
                "groups, which are counted from 0."
            )
        self.settings = settings
        self.covers = f"replica group {settings.group} of {settings.groups}"  # for messages
        self.models: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.manager: Any = None
        self._runtime = strategy.runtime
        self._is_sharded = is_sharded
        self._tensors: list[dict[str, Tensor]] = []  # of the models
        self._has_begun = False
        self.apart: ReplicaSyncKwargs | None = strategy.handlers.get(ReplicaSyncKwargs)
        self._unit = "step" if self.apart is None else "sync"  # in which the manager counts, for messages
        self._sync: Any = None
        self._store: Any = None
        self._read: Callable[[], StateDict] = dict
        self._restore: Callable[[StateDict, bool], Mapping[Any, StateDict]] = lambda *_: {}
        self._load_last: Callable[[], str | None] = lambda: None
        self._saved: StateDict = {}
        self._is_open = False
        self._commits, self._agreed = True, 0
        self._is_resumed = False
        self._jumps: dict[int, StateDict] = {}
        self._participants = settings.groups
        self._alone_since = 0

    # What checkpoints and loaders ask.

    @property
    def is_saver(self) -> bool:
        """Whether this group writes the checkpoints: the first group of the quorum does."""
        if self.manager is None:
            return self.settings.group == 0
        return self.manager.participating_rank() == 0

    def share(
        self,
        read: Callable[[], StateDict],
        restore: Callable[[StateDict, bool], Mapping[Any, StateDict]],
        load_last: Callable[[], str | None],
    ) -> None:
        """Register how a group gets state other than models and optimizers from another; called once.

        `read`, also called in another thread, returns it. `restore` restores it, given whether the optimizers
        are about to step, having counted that, and returns the positions of loaders, which follow their
        current batch. `load_last` loads the last checkpoint and returns its folder, if there is one.
        """
        self._read, self._restore, self._load_last = read, restore, load_last

    def watched(self, loader: Any, begin: Callable[[], Generator[Any]]) -> Generator[Any]:
        """Yield the batches of an epoch; after this group was healed, continue at the others' position."""
        self._load_checkpoint_once()
        batches = begin()
        try:
            while True:
                for batch in batches:
                    yield batch
                    if id(loader) in self._jumps:
                        break
                else:
                    return
                batches.close()
                loader.load_state_dict(self._jumps.pop(id(loader)))
                batches = begin()
        finally:
            batches.close()

    # The methods of `Generators`: a checkpoint has the number of steps, by which groups compare themselves.

    def state_dict(self) -> StateDict:
        """Return the number of steps that the groups have agreed on."""
        return dict(self._saved if self.manager is None else self.manager.state_dict())

    def load_state_dict(self, state: StateDict) -> str | None:
        """Resume the number of steps."""
        if not state:
            return "the steps of replica groups are absent"
        self._saved, self._is_resumed = dict(state), True
        if self.manager is not None:
            self.manager.load_state_dict(self._saved)
        return None

    # Steps.

    def open(self) -> None:
        """Begin an optimizer step: request a quorum in the background, once per accumulation window."""
        if self._is_open or self._sync is not None:
            return
        self._is_open = True
        for model in self.models[len(self._tensors) :]:
            state = model.state_dict(keep_vars=True)  # FSDP2 reshards a model when this is built
            self._tensors.append({name: one for name, one in state.items() if isinstance(one, Tensor)})
        if self.manager is None:
            self._begin()
        else:
            self.manager.start_quorum()

    def equalize(self, models: Iterable[nn.Module]) -> None:
        """Broadcast the parameters and buffers of rank 0 of this group."""
        for model in models:
            for tensor in (*model.parameters(), *model.buffers()):
                self._runtime.collectives.broadcast(tensor.data, 0)

    def average(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Average a bucket of gradients over the ranks of this group, then over the groups."""
        buffer: Tensor = bucket.buffer()
        if self._runtime.topology.world_size > 1:
            dist.all_reduce(buffer)
            buffer.div_(self._runtime.topology.world_size)
        if self.apart is None:
            self.average_shard(buffer)
        devices: Any = None if buffer.device.type == "cpu" else [buffer.device]
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        future.set_result(buffer)
        return future

    def average_shard(self, gradients: Tensor) -> None:
        """Average gradients, in place, over the ranks of the same index in all groups."""
        self.manager.allreduce(gradients).wait()  # On an error, the manager commits nothing.

    def commits(self) -> bool:
        """Whether the optimizers step: all groups of the quorum have the gradients. Heals this group."""
        self._agreed = self.manager.current_step() if self.manager else 0
        if self._is_open and self.apart is None:
            self._is_open = False
            self._commits = bool(self.manager.should_commit())
            if self._commits and not self._agreed and not self._is_sharded:
                self.equalize(self.models)  # where torchft has healed each rank from another group
            self._report(commits=self._commits)
        return self._commits

    def after_step(self) -> None:
        """Report the sync of groups that train independently, if the step ended with one."""
        self._is_open = False
        if self._sync is not None and self._sync._local_step == 0:
            self._report(commits=self.manager.current_step() > self._agreed)

    def release(self) -> None:
        """Shut down the manager, and release models and optimizers."""
        manager, self.manager = self.manager, None
        if self._sync is not None:
            self._sync.__exit__(None, None, None)
            self._sync = None
        self.models.clear()
        self.optimizers.clear()
        self._tensors.clear()
        if manager is not None:
            manager.shutdown(wait=False)

    def _begin(self) -> None:
        """Start the manager; at the start of a job wait until all groups are present."""
        self._load_checkpoint_once()
        self.manager = manager = self._make_manager()
        manager.load_state_dict({"step": 0, "batches_committed": 0} | self._saved)
        if self.apart is not None and self.settings.restarts:
            self._has_begun = True
            self._sync = self._make_sync(self.apart)
            self._sync._local_step = (
                self.apart.sync_every - 1
            )  # its first step ends with the others' next sync
            return
        deadline = monotonic() + START_S
        manager.start_quorum()
        while (
            not self.settings.restarts
            and manager.num_participants() < self.settings.groups
            and manager.current_step() == self._saved.get("step", 0)
            and monotonic() < deadline
        ):
            sleep(0.1)
            manager.start_quorum()
        # Later quorums form during the forward pass. The first was awaited, so that all groups begin with the
        # same weights, and with a batch that counts.
        manager._use_async_quorum = self.apart is None
        self._has_begun = True
        if not self.settings.restarts and not manager.current_step():
            self._take_first_weights()
        if self.apart is not None:
            manager.should_commit()  # in step 0 torchft would replace weights in the first sync, too
            self._sync = self._make_sync(self.apart)
        if self.settings.restarts and manager.is_participating() and not manager.current_step():
            self._warn(
                "Replica group %d was restarted, found no checkpoint, and no group is further: it "
                "begins at step 0. Use ProjectConfiguration(automatic_checkpoint_naming=True) and "
                "save_state() to write checkpoints.",
                self.settings.group,
            )

    def _make_sync(self, apart: ReplicaSyncKwargs) -> Any:
        """Return torchft's LocalSGD or DiLoCo, which hooks the steps of the optimizer."""
        if len(self.models) != 1 or len(self.optimizers) != 1:
            raise UnsupportedError(
                f"ReplicaSyncKwargs: groups that train apart have one model and one optimizer, and prepare() "
                f"got {len(self.models)} and {len(self.optimizers)}."
            )
        (model,), (optimizer,), local_sgd = self.models, self.optimizers, import_module("torchft.local_sgd")
        if apart.outer_optimizer is None:
            sync = local_sgd.LocalSGD(self.manager, model, optimizer, apart.sync_every)
        else:
            outer = apart.outer_optimizer(model.parameters())
            sync = local_sgd.DiLoCo(self.manager, [model], optimizer, outer, apart.sync_every)
        return sync.__enter__()

    def _take_first_weights(self) -> None:
        """Begin with the weights of the first group: torchft could take each rank's from another group."""
        first = self.manager.participating_rank() == 0
        for tensors in self._tensors:
            for tensor in tensors.values():
                local = local_part(tensor.detach())
                if not local.numel():
                    continue
                raw = local.reshape(-1).view(torch.uint8)  # of any dtype
                sent = raw.clone() if first else torch.zeros_like(raw)
                self.manager.allreduce(sent, reduce_op=dist.ReduceOp.SUM).wait()
                if self.manager.errored():
                    return  # a group has failed: in the next quorum torchft heals all from the others
                local.copy_(sent.view(local.dtype).view_as(local))

    def _load_checkpoint_once(self) -> None:
        """Load the last checkpoint once, if this group was restarted and has loaded none."""
        if self._is_resumed or not self.settings.restarts:
            return
        self._is_resumed = True
        if folder := self._load_last():
            self._warn(
                "Replica group %d was restarted and loaded the last checkpoint in %s. A group that is "
                "further heals it.",
                self.settings.group,
                folder,
            )

    def _make_manager(self) -> Any:
        torchft: Any = import_module("torchft")
        runtime, host = self._runtime, self._own_address()
        timeout = timedelta(seconds=max(10, 2 * self.settings.timeout))
        endpoint: list[Any] = [None]
        if runtime.topology.rank == 0:
            self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
            endpoint = [(host, self._store.port)]
        runtime.collectives.broadcast_object_list(endpoint, 0)
        kind = torchft.ProcessGroupNCCL if runtime.device.type == "cuda" else torchft.ProcessGroupGloo
        return torchft.Manager(
            pg=kind(timeout=timeout),
            min_replica_size=self.settings.min_groups,
            state_dict=self._state,
            load_state_dict=self._load,
            replica_id=f"group_{self.settings.group}",
            rank=runtime.topology.rank,
            world_size=runtime.topology.world_size,
            store_addr=endpoint[0][0],
            store_port=endpoint[0][1],
            lighthouse_addr=self.settings.lighthouse,
            hostname=host,
            timeout=timeout,
            quorum_timeout=timedelta(seconds=_QUORUM_S),
            use_async_quorum=bool(self.settings.restarts) and self.apart is None,
        )

    def _own_address(self) -> str:
        """Return the address at which the lighthouse's host, and so the other groups, can reach this host."""
        url = urlsplit(self.settings.lighthouse or "")
        family, kind, protocol, _, target = socket.getaddrinfo(
            url.hostname, url.port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # This sends no packet: it only chooses the route.
            return str(probe.getsockname()[0])

    def _state(self) -> StateDict:
        """Return the state that heals another group; called in the quorum's thread."""
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        return {
            "models": _as_shards(self._tensors),
            "optimizers": _as_shards(optimizers),
            "shared": self._read(),
        }

    def _load(self, state: StateDict) -> None:
        """Heal this group, in the main thread, right before the optimizers step."""
        step = self.manager.current_step()
        if step or self._has_begun:  # else the weights of the first group are awaited
            for tensors, own in zip(self._tensors, state["models"], strict=True):
                for name, tensor in tensors.items():
                    local_part(tensor.detach()).copy_(own[name])
        for optimizer, own in zip(self.optimizers, state["optimizers"], strict=True):
            _load_optimizer(optimizer, own)
        # A group that trains independently sends its state after it has counted the step.
        positions = self._restore(state["shared"], self.apart is None and not self._is_open)
        if step:
            self._jumps = {id(loader): position for loader, position in positions.items()}
            self._warn(
                "Replica group %d is healed in %s %d: its own batch of this step is given up, and its "
                "loaders go on where the others are.",
                self.settings.group,
                self._unit,
                step + 1,
            )

    def _warn(self, message: str, *arguments: Any) -> None:
        """Log a warning, once for the ranks of this group."""
        if self._runtime.topology.rank == 0:
            logger.warning(message, *arguments)

    def _report(self, *, commits: bool) -> None:
        """Log abandoned steps, once per change of the groups that are present."""
        groups, present = self.settings.groups, self.manager.num_participants()
        if not commits:
            reason = self.manager.errored() or f"{present} of {groups} groups are present"
            self._warn("%s %d is given up: %s.", self._unit.capitalize(), self._agreed + 1, reason)
        if present == self._participants:
            return
        step, self._participants = self.manager.current_step(), present
        since, self._alone_since = self._alone_since, step if present < groups else 0
        if self.manager.participating_rank() != 0:
            return  # another group reports
        if since:
            self._warn(
                "The batches that the missing groups have in %ss %d to %d are given up.",
                self._unit,
                since,
                step - 1,
            )
        self._warn("From %s %d on %d of %d replica groups train.", self._unit, step, present, groups)


def _as_shards(state: Any) -> Any:
    """Replace the `DTensor`s in nested dictionaries and lists by this rank's local tensors."""
    if isinstance(state, DTensor):
        return local_part(state.detach())
    if isinstance(state, Mapping):
        return {key: _as_shards(value) for key, value in state.items()}
    return [_as_shards(value) for value in state] if isinstance(state, list) else state


def _load_optimizer(optimizer: Optimizer, state: StateDict) -> None:
    """Load another rank's state, a result of `_as_shards`, into an optimizer of sharded parameters."""
    saved = chain.from_iterable(group["params"] for group in state["param_groups"])
    current = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    parameters = dict(zip(saved, current, strict=True))
    values = {
        index: {key: _sharded_like(parameters[index], value) for key, value in own.items()}
        for index, own in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": values})


def _sharded_like(parameter: Any, value: Any) -> Any:
    """Return a value in the shape of a parameter's shard as a `DTensor` like the parameter."""
    is_shard = isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.dim() > 0
    if not is_shard or value.shape != local_part(parameter).shape:
        return value
    return with_local(parameter, value.to(parameter.device))
