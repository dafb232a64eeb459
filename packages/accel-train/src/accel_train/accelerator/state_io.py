"""Facet of `Accelerator`: save and load checkpoints, weights and other objects."""

from __future__ import annotations

import os
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from accel_ops import weights
from accel_ops.weights.layout import DEFAULT_SHARD_SIZE
from accel_plugins.full_parameters import FullParameters
from accel_plugins.sharding.adapters import iter_merged
from accel_plugins.unsharded import with_offloaded_weights
from accel_state.errors import SettingsError
from accel_state.files import any_path
from accel_train import checkpoint
from accel_train.accelerator.results import resume_runs
from accel_train.accelerator.run import Facet, attribute_of
from accel_train.data.prepare import skip_first_batches

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from accel_train.checkpoint.save import Saving
    from accel_train.data.adapter import PreparedLoader

T = TypeVar("T")
DEFAULT_BUCKET_BYTES = 256 << 20


class StateIoFacet(Facet):
    """Checkpoints."""

    __slots__ = ()

    @overload
    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        blocking: Literal[True] = True,
        flush: bool | None = None,
        **save_model_func_kwargs: Any,
    ) -> str: ...
    @overload
    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        blocking: bool,
        flush: bool | None = None,
        **save_model_func_kwargs: Any,
    ) -> str | Saving: ...
    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        blocking: bool = True,
        flush: bool | None = None,
        **save_model_func_kwargs: Any,
    ) -> str | Saving:
        """Save models, optimizers, schedulers, positions of data loaders, random numbers, registered objects.

        The checkpoint is written to a staging folder, and committed when every rank has written its files: it
        is complete or absent. Call it on every rank. If nothing is sharded, rank 0 may save alone, with a
        warning, once the others seem not to participate; one that comes later continues with a warning.

        Args:
            output_dir: The folder, or its fsspec URL, such as `"s3://bucket/run"`. The files of a
                checkpoint in it are replaced, all at once; other files remain. Not used if checkpoints are
                numbered (`ProjectConfiguration(automatic_checkpoint_naming=True)`).
            safe_serialization: Write weights as safetensors; else as `torch.save` does.
            blocking: Return when the checkpoint is committed. Otherwise return as soon as everything is
                copied to host memory, which is kept for the next time, and write in the background. The next
                save, `load_state`, `end_training` and the end of the program wait for it, and raise what went
                wrong.
            flush: Commit the checkpoint only when it is on disk, so that it survives a crash of the machine.
                Otherwise it only survives the death of processes. If `None`, the value of
                `ProjectConfiguration(durable=…)`, which is true by default.
            **save_model_func_kwargs: Unused: no strategy of this version has such options.

        Returns:
            The folder; if not `blocking`, a handle with `wait()`, `done` and `path`.

        Raises:
            SettingsError: No folder is given, or a checkpoint of this number or a larger one exists already.
            CheckpointWriteError: A process could not write, for example because the disk is full. Older
                checkpoints remain.
            DistributedOperationException: It was not called on every process (unless rank 0 may save alone),
                or not with the same arguments.
            TypeError: An unknown argument was given.

        Example:
            >>> import tempfile, torch
            >>> from accel_train import Accelerator
            >>> accelerator = Accelerator(cpu=True)
            >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = accelerator.save_state(f"{folder}/here", flush=False)
            ...     accelerator.load_state(path)
        """
        if save_model_func_kwargs:
            names = ", ".join(sorted(save_model_func_kwargs))
            raise TypeError(
                f"save_state() got {names}, which the strategy {self._parts.strategy.name!r} does not support"
            )
        saving = checkpoint.save.save(
            self._parts.checkpoints,
            output_dir,
            safe=safe_serialization,
            blocking=blocking,
            to_disk=self._parts.project.durable if flush is None else flush,
        )
        return saving.path if blocking else saving

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load a checkpoint of `save_state`, with any number of processes. Call it on every process.

        The runs of trackers are resumed. A warning lists the objects that are not restored. No code in a file
        is executed: of `torch.save` files, only tensors, arrays of numbers and plain containers are read.

        Args:
            input_dir: The folder or its fsspec URL; if `None`, the newest complete numbered checkpoint.
            load_kwargs: More arguments of `torch.load`.
            **load_model_func_kwargs: More arguments of `Module.load_state_dict`, such as `strict=False`; and
                `map_location`, where the states of optimizers are read to first: `"cpu"`, `"on_device"` or a
                device.

        Raises:
            SettingsError: No folder is given, and checkpoints are not numbered.
            TypeError: `map_location` is no device.
            CheckpointError: There is no complete checkpoint, or it does not match the prepared objects.
            DistributedOperationException: It was not called on every process, or not with the same arguments.
        """
        folder = checkpoint.load.load(
            self._parts.checkpoints,
            input_dir,
            options=load_kwargs or {},
            model_options=load_model_func_kwargs,
        )
        resume_runs(self._parts.trackers, folder)

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is a numbered checkpoint for `load_state()` to resume from. Read it on every rank.

        Example:
            >>> from accel_train import Accelerator
            >>> Accelerator(cpu=True).has_checkpoint
            False
        """
        return checkpoint.load.has_checkpoint(self._parts.checkpoints)

    def exit_if_preempted(self) -> None:
        """Save and exit if the job is preempted; otherwise do nothing. Call it on every rank.

        With `ProjectConfiguration(save_on_preemption=True)`. Loops over prepared loaders need no call: their
        step ends when the next batch is asked for after an optimizer step, and with the last batch. Where
        batches come from elsewhere, call it at the end of each step.

        Raises:
            SystemExit: A checkpoint was saved on all ranks; the exit code is 143.

        Example:
            >>> from accel_train import Accelerator
            >>> Accelerator(cpu=True).exit_if_preempted()
        """
        if self._parts.preemption is not None:
            self._parts.preemption.end_step()

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Register further objects for `save_state` and `load_state`.

        Args:
            *objects: Each with `state_dict` and `load_state_dict`. The order counts.

        Raises:
            ValueError: An object lacks one of these methods.

        Example:
            >>> import torch
            >>> from accel_train import Accelerator
            >>> Accelerator(cpu=True).register_for_checkpointing(torch.nn.BatchNorm1d(2))
        """
        unfit = [
            f"\n\t- Item at index {index}, `{type(item).__name__}`"
            for index, item in enumerate(objects)
            if not all(callable(getattr(item, name, None)) for name in ("state_dict", "load_state_dict"))
        ]
        if unfit:
            raise ValueError(
                "All `objects` must include a `state_dict` and `load_state_dict` function to be stored. The "
                "following inputs are invalid:" + "".join(unfit)
            )
        self._parts.checkpoints.custom.extend(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call a function before `save_state` writes.

        Args:
            hook: Called as `hook(models, weights, output_dir)` on every process, with the prepared models
                without their wrappers, their state dicts, and the staging folder in which the checkpoint is
                written. Files that it writes there become part of the checkpoint, unless `save_state` writes
                files of the same names. Weights that it removes from `weights` are not saved.

        Returns:
            A handle whose `remove()` undoes it.
        """
        return _register(self._parts.checkpoints.save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call a function before `load_state` loads.

        Args:
            hook: Called as `hook(models, input_dir)` on every process, with a list of the prepared models
                without their wrappers, and the folder of the checkpoint. Models that it removes from `models`
                are not loaded.

        Returns:
            A handle whose `remove()` undoes it.
        """
        return _register(self._parts.checkpoints.load_hooks, hook)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = DEFAULT_SHARD_SIZE,
        safe_serialization: bool = True,
    ) -> None:
        """Save the weights of a model in the format that other libraries load. Call it on every process.

        Of a sharded model, the process that writes holds no more than one file at a time.
        Offloaded weights are included, even if they are saved into the folder from which they are mapped.

        Args:
            model: Prepared or not.
            save_directory: The folder, created if absent, or its fsspec URL.
            max_shard_size: The largest size of a file, in bytes or as `"5GB"`; a larger model gets several
                files and an index. A tensor larger than that has a file of its own.
            safe_serialization: Write safetensors; else as `torch.save` does.

        Raises:
            TypeError: `model` is not a module.
            SettingsError: `save_directory` is a URL with a scheme that fsspec does not know.
            FileExistsError: `save_directory` is a file; raised on every process.

        Example:
            >>> import os, tempfile, torch
            >>> from accel_train import Accelerator
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     Accelerator(cpu=True).save_model(torch.nn.Linear(2, 1), folder)
            ...     os.listdir(folder)
            ['model.safetensors']
        """
        _expect_model(model, "save_model")
        folder = any_path(save_directory, "save_model(save_directory)")
        if isinstance(folder, Path):
            folder.mkdir(parents=True, exist_ok=True)  # on every rank, so that each can list it at once
        parts = self._parts
        commits = parts.checkpoints.commits
        parts.checkpoints.meet("save_model()")
        tensors = parts.strategy.persister.iter_full_state_dict(model, keep=commits)
        if getattr(self.get_state_dict, "__func__", None) is not StateIoFacet.get_state_dict:
            tensors = iter([self.get_state_dict(model)])  # overridden by the program
        try:
            if commits:
                weights.write.save_state_parts(
                    (with_offloaded_weights(part, model) for part in tensors),
                    folder,
                    max_shard_size=max_shard_size,
                    safe_serialization=safe_serialization,
                )
        finally:
            deque(tensors, maxlen=0)  # each remaining tensor is a collective that the other ranks wait in

    def named_full_parameters(
        self,
        model: nn.Module | None = None,
        *,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        to_main_only: bool = False,
        merge_adapters: bool = False,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and full parameters of a model bucket by bucket, as for an inference engine.

        Call it on every process, and iterate to the end on each: every bucket is a collective, and the order
        is the same everywhere. Tensors are on the device of the run, and bit for bit those of
        `get_state_dict`; tied weights come under all their names. Buffers are not among them. Beyond the
        shards this takes the memory of a bucket, and of a second one while tensors of the bucket before are
        held; a larger parameter is a bucket of its own. Where every process has full parameters, there is no
        collective and no bucket: the parameters themselves are yielded, detached but not copied.
        Megatron gathers one of its weights at a time.

        Args:
            model: Prepared or not; if `None`, the only one that was prepared.
            dtype: To which floating-point parameters are converted before they are gathered, such as
                `torch.bfloat16`; their own if `None`.
            bucket_bytes: Size of a bucket in bytes.
            to_main_only: Yield tensors on the main process alone; on others the iteration yields nothing. It
                halves the traffic.
            merge_adapters: Add LoRA adapters of peft to their weights, and use the names of the base model,
                as `merge_and_unload` does. The model stays as it is. The matrices of all adapters are
                gathered first, and buckets have the dtype of the model.

        Returns:
            An iterator over `(name, tensor)`, with the names of the unwrapped model.

        Raises:
            SettingsError: `model` is `None`, and not exactly one model is prepared; or an argument is not a
                valid size or floating-point dtype.
            TypeError: `model` is not a module.
            UnsupportedError: No adapters can be merged, or the weights of a Megatron model have no names in
                transformers.

        Example:
            >>> import torch
            >>> from accel_train import Accelerator
            >>> accelerator = Accelerator(cpu=True)
            >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
            >>> for name, tensor in accelerator.named_full_parameters(dtype=torch.bfloat16):
            ...     print(name, tuple(tensor.shape), tensor.dtype)
            weight (1, 2) torch.bfloat16
            bias (1,) torch.bfloat16
        """
        prepared = self._parts.checkpoints.prepared.models
        if model is None and len(prepared) != 1:
            raise SettingsError(
                f"named_full_parameters() needs a model, since {len(prepared)} models are prepared: "
                "pass one of them."
            )
        model = prepared[0] if model is None else model
        _expect_model(model, "named_full_parameters")
        if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
            raise SettingsError(f"bucket_bytes={bucket_bytes!r} is not a positive number of bytes.")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise SettingsError(f"dtype={dtype!r} is not a floating-point dtype such as torch.bfloat16.")
        request = FullParameters(
            bucket_bytes=bucket_bytes,
            dtype=dtype,
            keep=not to_main_only or self._parts.process.runtime.topology.is_main,
            is_reduced=to_main_only,
        )
        iterate = partial(self._parts.strategy.persister.iter_full_parameters, model)
        tensors = iter_merged(model, request, iterate) if merge_adapters else iterate(request)
        return checkpoint.single_files.iter_with_offloaded_weights(tensors, model)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Gather the full state dict of a model. Call it on every process.

        The state dict of a sharded model is gathered on the CPU of the main process (with
        `save_on_each_node`, of the first process of every node), and is empty on the others.

        Args:
            model: Prepared or not.
            unwrap: Whether to use the names of the unwrapped model.

        Raises:
            TypeError: `model` is not a module.
        """
        _expect_model(model, "get_state_dict")
        self._parts.checkpoints.meet("get_state_dict()")
        if not unwrap:
            return model.state_dict()
        state = self._parts.strategy.persister.full_state_dict(model, keep=self._parts.checkpoints.commits)
        return with_offloaded_weights(state, model)

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Save an object on the main process; on one of every host with `save_on_each_node`.

        Args:
            obj: Any object for `torch.save`; with `safe_serialization`, a dictionary of tensors.
            f: The file, replaced when the new one is complete.
            safe_serialization: Write safetensors; else as `torch.save` does.
        """
        weights.write.save(obj, f, self._parts.project.save_on_each_node, safe_serialization)

    def skip_first_batches(self, dataloader: DataLoader[T], num_batches: int = 0) -> PreparedLoader[T]:
        """Return a loader that skips batches in its next epoch; later epochs are complete.

        Args:
            dataloader: Prepared or not.
            num_batches: Number of batches of this rank to skip.
        """
        return skip_first_batches(dataloader, num_batches)

    _custom_objects: list[Any] = attribute_of("checkpoints", "custom")
    _save_model_state_pre_hook: OrderedDict[int, Callable[..., None]] = attribute_of(
        "checkpoints", "save_hooks"
    )
    _load_model_state_pre_hook: OrderedDict[int, Callable[..., None]] = attribute_of(
        "checkpoints", "load_hooks"
    )

    @property
    def save_iteration(self) -> int:
        """The number of the next checkpoint."""
        return self._parts.project.iteration


def _register(hooks: Any, hook: Callable[..., None]) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _expect_model(model: object, name: str) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{name}() takes a model, prepared or not, but got an object of type {type(model).__name__!r}: "
            "pass the torch.nn.Module itself."
        )
