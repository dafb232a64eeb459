"""AdamW with its state on the host, and a step that overlaps the backward pass."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

from accel_ops.tree import is_dtensor, local_part
from accel_plugins import sharding
from accel_plugins.optimizers.muon import gradient_of
from accel_state.accelerator_state import GradientState
from accel_state.streams import device_streams, pinned_if_possible
from accel_state.torch_private import active_fake_mode

Params: TypeAlias = "Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]"

_LATE = ". The step started in the backward pass and cannot be undone. Pass HostAdamW(overlap=False)."


@dataclass(slots=True)
class _Step:
    """A started step of one parameter: its options, the version of its gradient, and its future."""

    options: Mapping[str, Any]
    version: int
    done: Future[Any]


class HostAdamW(torch.optim.Optimizer):
    """AdamW with float32 master weights and moments on the host, for parameters of any dtype on any device.

    The device has only parameters and gradients, 4 bytes per element in bfloat16; the host has 12. The
    updates are those of `torch.optim.AdamW` on the master weights. Parameters may be DTensors: the state is
    sharded like them, and saved and loaded like any optimizer's.

    With `overlap` a parameter's step begins in the backward pass, as soon as its gradient is final: the
    gradient is copied to the host, a thread updates the state, and the new value is copied back, while the
    backward pass continues with earlier layers. `step` waits for pending updates. Steps cannot begin early if
    gradients change after the backward pass: clipping needs the norm of all gradients, loss scaling unscales
    them. The first step therefore begins in `step` and detects such changes; if there were any, or more than
    one backward pass, all later steps begin there, too. So do steps of replicated parameters in a run of
    several processes, whose gradients are reduced later. In `Accelerator`, the backward pass of the last
    micro-batch of an accumulation window counts.

    Args:
        params: Parameters, or groups.
        lr: Learning rate.
        betas: Decay of the two moments.
        eps: Added to the denominator.
        weight_decay: Decoupled weight decay.
        overlap: Whether steps may begin in the backward pass. Use False if only some steps clip, or some
            steps are skipped.

    Raises:
        ValueError: torch rejects an option.

    Example:
        >>> model = torch.nn.Linear(4, 2, dtype=torch.bfloat16)
        >>> optimizer = HostAdamW(model.parameters(), lr=0.1)
        >>> model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> sorted(optimizer.state[model.weight]), optimizer.state[model.weight]["master"].dtype
        (['exp_avg', 'exp_avg_sq', 'master', 'step'], torch.float32)
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        overlap: bool = True,
    ) -> None:
        options: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        torch.optim.AdamW([torch.empty(1)], **options)  # checks them
        self.overlap = overlap
        self._reset()
        super().__init__(cast("Any", params), options)

    def _reset(self) -> None:
        self._overlaps: bool | None = None  # None: the first step decides
        self._seen: dict[Tensor, tuple[int, Tensor]] = {}  # of gradients in the first backward pass
        self._begun: dict[Tensor, _Step] = {}
        self._options: dict[Tensor, Mapping[str, Any]] = {}
        self._versions: dict[Tensor, int] = {}  # of parameters, after the last step
        self._staging: dict[Tensor, tuple[Tensor, Callable[[Tensor, Tensor], None]]] = {}  # and copy function
        self._copies: dict[torch.device, Any] = {}  # streams for copies
        self._thread, self._process = ThreadPoolExecutor(1, "HostAdamW"), os.getpid()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group and register hooks on its gradients."""
        super().add_param_group(param_group)
        optimizer = weakref.ref(self)

        def notice(parameter: Tensor) -> None:
            owner = optimizer()
            if owner is not None:
                owner._notice(parameter)

        if self.overlap:
            for parameter in self.param_groups[-1]["params"]:
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(notice)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Begin the remaining steps, and wait until all are done.

        Raises:
            RuntimeError: A gradient or an option was changed after a step had begun in the backward pass.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        trained = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for parameter, group in trained:
            begun = self._begun.get(parameter)
            if begun is None:
                self._begun[parameter] = self._begin(parameter, _options_of(group))
            elif begun.version != local_part(parameter.grad)._version:
                raise RuntimeError("A gradient was changed after backward(), as by clipping" + _LATE)
            elif begun.options != _options_of(group):
                raise RuntimeError("A learning rate was changed between backward() and step()" + _LATE)
        for parameter, begun in self._begun.items():
            value, done = local_part(parameter), begun.done.result()
            if (streams := device_streams(value.device)) is not None:
                streams.current_stream().wait_event(done)
            self._versions[parameter] = value._version
        if self._overlaps is None:
            self._overlaps = bool(self._seen) and all(
                parameter.grad is not None
                and local_part(parameter.grad)._version == version
                and torch.equal(_sample(parameter.grad), sample)  # loss scaling divides without a new version
                for parameter, (version, sample) in self._seen.items()
            )
        self._begun.clear()
        self._seen.clear()
        self._options.clear()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; an error if a step has begun in the backward pass."""
        if self._begun:
            raise RuntimeError("zero_grad() was called after backward() without step()" + _LATE)
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state dict; states of parameters have the additional key `"master"`."""
        if self._begun:
            raise RuntimeError("state_dict() was called between backward() and step()" + _LATE)
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state to the host, in float32; for a state of AdamW, the model's weights become masters."""
        # torch's own would cast it to the dtype of the parameters and move it to their device.
        super().load_state_dict({**state_dict, "state": {}})
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(indices, parameters, strict=True):
            if index in state_dict["state"]:
                values = state_dict["state"][index]
                self.state[parameter] = {
                    key: _to_host(values[key], parameter)
                    for key in ("step", "exp_avg", "exp_avg_sq", "master")
                    if key in values
                }
        self._versions.clear()  # master weights may differ from the model's present parameters

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "overlap": self.overlap}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "overlap" in state:  # absent in the state that `load_state_dict` sets
            self._reset()
        super().__setstate__(state)

    def _notice(self, parameter: Tensor) -> None:
        """Begin the step of a parameter whose gradient is final, in the backward pass."""
        if self._overlaps is False or not GradientState().sync_gradients:
            return
        gradient, sharded = cast("Any", parameter.grad), cast("Any", parameter)
        if is_dtensor(parameter):
            is_final = gradient.placements == sharded.placements
        else:
            is_final = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
        if not is_final:
            return
        version = local_part(gradient)._version
        if self._overlaps is None:
            seen = -1 if parameter in self._seen else version
            self._seen[parameter] = (seen, _sample(gradient))
            return
        if parameter in self._begun:
            raise RuntimeError("backward() was called twice before step()" + _LATE)
        if not self._options:
            for group in self.param_groups:
                self._options |= dict.fromkeys(group["params"], _options_of(group))
        if parameter in self._options:
            with torch.no_grad():
                self._begun[parameter] = self._begin(parameter, self._options[parameter])

    def _begin(self, parameter: Tensor, options: Mapping[str, Any]) -> _Step:
        """Copy the gradient to the host, and submit the update to the thread."""
        value, gradient = local_part(parameter.detach()), local_part(gradient_of(parameter))
        version = local_part(cast("Tensor", parameter.grad))._version
        streams = device_streams(value.device)
        if self._versions.get(parameter) != local_part(parameter)._version:
            self._update_master(parameter, value.cpu())
        state = {key: local_part(tensor) for key, tensor in self.state[parameter].items()}
        if streams is None:
            return _Step(options, version, self._submit(_update, state, gradient.cpu(), options, value))
        # 1. Copy the gradient, once it is computed, on the copy stream.
        if streams.device not in self._copies:
            self._copies[streams.device] = streams.new_stream()
            self._thread.submit(streams.set_current)
        copies, ready = self._copies[streams.device], streams.new_event()
        if parameter not in self._staging:
            nbytes = max(gradient.nbytes, value.nbytes)
            pinned = pinned_if_possible(streams, nbytes)
            self._staging[parameter] = (
                (torch.empty(nbytes, dtype=torch.uint8, device="cpu"), streams.copy_pageable_)
                if pinned is None
                else (pinned, streams.copy_)
            )
        staging, copy_ = self._staging[parameter]
        host = staging[: gradient.nbytes].view(gradient.dtype).view(gradient.shape)
        result = staging[: value.nbytes].view(value.dtype).view(value.shape)
        gradient = gradient.contiguous()
        copies.wait_stream(streams.current_stream())
        streams.record_stream(gradient, copies)
        with streams.on(copies):
            copy_(host, gradient)
            ready.record(copies)

        # 2. Update the state in the thread, and copy the new value back; the event is that of its end.
        def update() -> Any:
            ready.synchronize()
            _update(state, host, options, result)
            done = streams.new_event()
            with torch.no_grad(), streams.on(copies):
                copy_(value, result)
                done.record(copies)
            return done

        return _Step(options, version, self._thread.submit(update))

    def _submit(self, update: Callable[..., Any], *args: Any) -> Future[Any]:
        """Submit an update to the thread; run it here for fake tensors, whose mode is that of this thread."""
        if self._process != os.getpid():  # a forked child has inherited no thread
            self._thread, self._process = ThreadPoolExecutor(1, "HostAdamW"), os.getpid()
        if active_fake_mode() is None:
            return self._thread.submit(update, *args)
        done: Future[Any] = Future()
        done.set_result(update(*args))
        return done

    def _update_master(self, parameter: Tensor, value: Tensor) -> None:
        """Update master weights where the parameter was written elsewhere; others keep their bits."""
        state = self.state[parameter]
        if "exp_avg" not in state:
            state["step"] = torch.zeros((), device="cpu")
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = _sharded_like(parameter, torch.zeros_like(value, dtype=torch.float32))
        if "master" not in state:
            state["master"] = _sharded_like(parameter, value.to(torch.float32, copy=True))
            return
        master = local_part(state["master"])
        changed = master.to(value.dtype) != value
        master.copy_(torch.where(changed, value.float(), master))


def _sample(gradient: Tensor) -> Tensor:
    return local_part(gradient).detach().reshape(-1)[:8].clone()


def _options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    own = {"eps": group["eps"], "weight_decay": group["weight_decay"]}
    return {"lr": float(group["lr"]), "beta1": group["betas"][0], "beta2": group["betas"][1], **own}


@torch.no_grad()
def _update(state: Mapping[str, Tensor], gradient: Tensor, options: Mapping[str, Any], value: Tensor) -> None:
    """Step the state of a parameter, on the host, and copy the master weights to its value."""
    if not gradient.numel():
        state["step"].add_(1)
        return
    moments = [state["exp_avg"]], [state["exp_avg_sq"]], []
    fixed: dict[str, Any] = {"foreach": False, "fused": True, "amsgrad": False, "maximize": False}
    adamw([state["master"]], [gradient.float()], *moments, [state["step"]], **fixed, **options)
    value.copy_(state["master"])


def _sharded_like(parameter: Tensor, local: Tensor) -> Tensor:
    return sharding.shards.with_local(parameter, local) if is_dtensor(parameter) else local


def _to_host(value: Any, parameter: Tensor) -> Tensor:
    """Return a loaded value in float32 on the host, sharded like its parameter."""
    local = local_part(torch.as_tensor(value)).detach().to("cpu", torch.float32)
    return _sharded_like(parameter, local) if local.dim() else local
