"""Replay what libraries replace in `accelerate`: the replacement runs, its result is used, it can be undone.

    python -m accel_compat patches.py [CASE ...]

Prints one line for each case: its name, and what was seen.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

import accelerate
import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig, TorchDynamoPlugin
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

CASES: dict[str, tuple[int, Callable[[], Any]]] = {}


def case(ranks: int = 1) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a case that needs so many ranks, 0 for any number."""

    def register(function: Callable[[], Any]) -> Callable[[], Any]:
        CASES[function.__name__] = (ranks, function)
        return function

    return register


def reset() -> None:
    """Forget the run before."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def make_model() -> nn.Module:
    """Make a small model, the same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def make_fsdp2(**options: Any) -> Accelerator:
    """Make an accelerator whose models are sharded."""
    return Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2), **options)


def train(accelerator: Accelerator) -> list[Any]:
    """Prepare the four kinds of objects and train a step; return them."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    data = torch.utils.data.TensorDataset(torch.arange(32.0).reshape(8, 4) / 32)
    prepared = accelerator.prepare(
        model, optimizer, scheduler, torch.utils.data.DataLoader(data, batch_size=2)
    )
    model, optimizer, scheduler, loader = prepared
    for (batch,) in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        break
    return [model, optimizer, scheduler, loader]


def weights(model: nn.Module) -> list[float]:
    """Return the first row of the first layer, gathered."""
    weight = next(model.parameters())
    full = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return full[0].tolist()


@case(ranks=2)
def fsdp2_prepare_model() -> Any:
    """axolotl shards models by a function of its own, LLaMA-Factory wraps the original."""
    plain = weights(train(make_fsdp2())[0])
    seen = []

    def own(accelerator: Any, model: nn.Module) -> nn.Module:
        seen.append(type(accelerator).__name__)
        for layer in model:
            fully_shard(layer)
        return fully_shard(model)

    reset()
    with mock.patch("accelerate.accelerator.fsdp2_prepare_model", own):
        model, optimizer, *_ = train(make_fsdp2())
        own_weights = weights(model)
        ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        assert ids == {id(parameter) for parameter in model.parameters()}
    original = accelerate.utils.fsdp_utils.fsdp2_prepare_model

    def wrapping(accelerator: Any, model: nn.Module) -> nn.Module:
        seen.append("wrapping")
        return original(accelerator, model)

    reset()
    accelerate.utils.fsdp_utils.fsdp2_prepare_model = wrapping
    wrapped = weights(train(make_fsdp2())[0])
    accelerate.utils.fsdp_utils.fsdp2_prepare_model = original
    reset()
    undone = weights(train(make_fsdp2())[0])
    assert plain == own_weights == wrapped == undone, (plain, own_weights, wrapped, undone)
    return seen


@case(ranks=2)
def fsdp2_load_full_state_dict() -> Any:
    """SimpleTuner replaces how a sharded model gets its values."""
    plain = weights(train(make_fsdp2())[0])
    original = accelerate.utils.fsdp_utils.fsdp2_load_full_state_dict
    seen = []

    def load(accelerator: Any, model: nn.Module, full_sd: dict[str, Any], cpu_offload: bool = False) -> Any:
        seen.append([sorted(full_sd) if accelerator.is_main_process else None, cpu_offload])
        doubled = {name: 2 * value for name, value in full_sd.items()}
        return original(accelerator, model, doubled, cpu_offload=cpu_offload)

    reset()
    with mock.patch.object(accelerate.utils.fsdp_utils, "fsdp2_load_full_state_dict", load):
        model = make_fsdp2().prepare(make_model())
    reset()
    expected = [2 * value for value in weights(make_fsdp2().prepare(make_model()))]
    assert weights(model) == expected
    reset()
    assert weights(train(make_fsdp2())[0]) == plain
    return seen


@case(ranks=2)
def prepare_fsdp2() -> Any:
    """ms-swift wraps the method that prepares everything under FSDP2."""
    original = Accelerator._prepare_fsdp2
    plain = weights(train(make_fsdp2())[0])
    seen = []

    def wrapper(self: Accelerator, *args: Any) -> Any:
        seen.append([type(arg).__name__ for arg in args])
        result = original(self, *args)
        seen.append([type(prepared).__name__ for prepared in result])
        return result

    reset()
    Accelerator._prepare_fsdp2 = wrapper
    wrapped = weights(train(make_fsdp2())[0])
    Accelerator._prepare_fsdp2 = original
    reset()
    assert weights(train(make_fsdp2())[0]) == wrapped == plain
    return seen


@case(ranks=2)
def prepare_cp() -> Any:
    """axolotl replaces the method that prepares context parallelism; another wraps it."""
    seen = []

    def prepare() -> int:
        reset()
        model = make_fsdp2(parallelism_config=ParallelismConfig(cp_size=2)).prepare(make_model())
        return sum(len(module._forward_pre_hooks_with_kwargs) for module in model.modules())

    plain = prepare()
    original = Accelerator._prepare_cp

    def without(self: Accelerator, *args: Any) -> Any:
        seen.append([type(arg).__name__ for arg in args])
        return args

    with mock.patch.object(Accelerator, "_prepare_cp", without):
        left_out = prepare()
    with mock.patch.object(Accelerator, "_prepare_cp", lambda self, *args: original(self, *args)):
        wrapped = prepare()
    assert plain == wrapped == prepare(), (plain, wrapped)
    assert left_out < plain
    return seen


@case()
def prepare_data_loader() -> Any:
    """axolotl wraps the function that shards a loader, wherever it is visible."""
    seen = []
    original = accelerate.data_loader.prepare_data_loader

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        seen.append([len(args), sorted(kwargs)])
        loader = original(*args, **kwargs)
        loader.seen_by_the_wrapper = True
        return loader

    with mock.patch("accelerate.accelerator.prepare_data_loader", wrapper):
        assert train(Accelerator(cpu=True))[3].seen_by_the_wrapper
    reset()
    assert not hasattr(train(Accelerator(cpu=True))[3], "seen_by_the_wrapper")
    return seen


@case()
def is_bf16_available() -> Any:
    """SimpleTuner says whether there is bfloat16."""
    with mock.patch("accelerate.accelerator.is_bf16_available", return_value=False):
        try:
            Accelerator(cpu=True, mixed_precision="bf16")
        except ValueError as error:
            seen = "bfloat16" in str(error)
    reset()
    assert Accelerator(cpu=True, mixed_precision="bf16").mixed_precision == "bf16"
    return seen


@case()
def is_wandb_available() -> Any:
    """unsloth hides wandb."""
    with mock.patch("accelerate.utils.imports.is_wandb_available", return_value=True):
        with_wandb = [str(name) for name in accelerate.tracking.get_available_trackers()]
    with mock.patch("accelerate.utils.is_wandb_available", return_value=False):
        without = [str(name) for name in accelerate.tracking.get_available_trackers()]
    return ["wandb" in with_wandb, "wandb" in without]


@case()
def to_kwargs() -> Any:
    """unsloth lets nothing be compiled."""
    seen = []

    def own(self: Any) -> dict[str, Any]:
        seen.append(self.backend.value.lower())
        return {"backend": "eager", "disable": True}

    with mock.patch.object(TorchDynamoPlugin, "to_kwargs", own):
        model = Accelerator(cpu=True, dynamo_plugin=TorchDynamoPlugin(backend="eager")).prepare(make_model())
        model(torch.ones(1, 4))
    return seen


@case()
def clear_device_cache() -> Any:
    """GPTQModel replaces what frees memory."""
    seen = []
    with mock.patch("accelerate.utils.modeling.clear_device_cache", lambda **options: seen.append(options)):
        accelerate.utils.release_memory(1)
    accelerate.utils.release_memory(1)
    return seen


@case()
def attach_align_device_hook_on_blocks() -> Any:
    """ms-swift wraps what attaches hooks to the blocks of a device map."""
    seen = []
    original = accelerate.big_modeling.attach_align_device_hook_on_blocks

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        seen.append(type(args[0]).__name__)
        return original(*args, **kwargs)

    with mock.patch("accelerate.big_modeling.attach_align_device_hook_on_blocks", wrapper):
        accelerate.dispatch_model(make_model(), {"": "cpu"}, force_hooks=True)
    accelerate.dispatch_model(make_model(), {"": "cpu"}, force_hooks=True)
    return seen


@case()
def convert_model_to_fp8_ao() -> Any:
    """axolotl converts layers by a filter of its own."""
    seen = []

    def own(model: nn.Module, config: Any = None, module_filter_func: Any = None) -> None:
        seen.append([type(config).__name__, module_filter_func])

    with mock.patch("accelerate.accelerator.convert_model_to_fp8_ao", own):
        accelerator = Accelerator(
            cpu=True, mixed_precision="fp8", kwargs_handlers=[accelerate.utils.AORecipeKwargs()]
        )
        accelerator.prepare(make_model())
    return seen


@case(ranks=0)
def methods_of_accelerator() -> Any:
    """axolotl, ms-swift and unsloth replace methods and properties of the class."""
    with mock.patch.object(Accelerator, "clip_grad_norm_", return_value="clipped"):
        clipped = Accelerator(cpu=True).clip_grad_norm_([], 1.0)
    with mock.patch.object(Accelerator, "get_state_dict", lambda self, model, unwrap=True: {"own": unwrap}):
        state = Accelerator(cpu=True).get_state_dict(make_model())
    with mock.patch.object(Accelerator, "distributed_type", property(lambda self: "none")):
        label = Accelerator(cpu=True).distributed_type
    with mock.patch.object(AcceleratorState, "is_fsdp2", property(lambda self: True)):
        is_fsdp2 = Accelerator(cpu=True).is_fsdp2
    assert Accelerator(cpu=True).is_fsdp2 is False
    assert Accelerator(cpu=True).distributed_type != "none"
    return [clipped, state, label, is_fsdp2]


@case(ranks=2)
def distributed_type() -> Any:
    """unsloth keeps models from being wrapped: it has a function in place of the property."""

    def prepare() -> list[Any]:
        reset()
        model, optimizer, *_ = train(Accelerator(cpu=True))
        return [type(model).__name__, type(optimizer).__name__]

    def function(self: Any) -> Any:
        return accelerate.DistributedType.NO

    with mock.patch.object(Accelerator, "distributed_type", function):
        replaced = prepare()
    same = property(lambda self: self.state.distributed_type)
    with mock.patch.object(Accelerator, "distributed_type", same):
        wrapped = prepare()
    return [replaced, wrapped, prepare()]


@case(ranks=2)
def prepare_backend() -> Any:
    """unsloth keeps a process alone that a launcher has started with others; another wraps the method."""
    original = PartialState._prepare_backend

    def alone(self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: Any = None) -> Any:
        return None, accelerate.DistributedType.NO

    PartialState().wait_for_everyone()
    PartialState().destroy_process_group()
    reset()
    with mock.patch.object(PartialState, "_prepare_backend", alone):
        state = PartialState(cpu=True)
        seen = [state.num_processes, state.distributed_type.value]
    reset()

    def wrapper(self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: Any = None) -> Any:
        backend, label = original(self, cpu, sagemaker_dp, backend)
        seen.extend((backend, label.value))
        return backend, label

    with mock.patch.object(PartialState, "_prepare_backend", wrapper):
        seen.append(PartialState(cpu=True).num_processes)
    reset()
    assert PartialState(cpu=True).num_processes == 2
    return seen


@case(ranks=2)
def parallelism_config() -> Any:
    """axolotl replaces how the sizes of axes are validated, counted and named."""
    seen = []

    def validate(self: Any, accelerator: Any) -> None:
        seen.append([type(accelerator).__name__, accelerator.num_processes, accelerator.is_main_process])
        self._set_size("dp_shard", accelerator.num_processes)

    with mock.patch.object(ParallelismConfig, "_validate_accelerator", validate):
        accelerator = make_fsdp2(parallelism_config=ParallelismConfig())
        seen.append([*accelerator.torch_device_mesh.mesh_dim_names])
    reset()
    get_mesh = ParallelismConfig._get_mesh
    asked = []

    def recording(self: Any) -> Any:
        asked.append(get_mesh(self))
        return asked[-1]

    with mock.patch.object(ParallelismConfig, "_get_mesh", recording):
        make_fsdp2(parallelism_config=ParallelismConfig(dp_shard_size=2))
    return [*seen, asked]


@case(ranks=2)
def properties_of_parallelism_config() -> Any:
    """axolotl adds an axis: the mesh, its flattened axes and the sharding are those that it names."""
    plain = weights(train(make_fsdp2())[0])
    post_init = ParallelismConfig.__post_init__

    def own_post_init(self: Any) -> None:
        self._ep_size = 2
        post_init(self)

    def own(value: Any) -> property:
        return property(lambda self: value)

    reset()
    with (
        mock.patch.object(ParallelismConfig, "__post_init__", own_post_init),
        mock.patch.object(ParallelismConfig, "_get_mesh", return_value=(("dp_shard", "own"), (1, 2))),
        mock.patch.object(ParallelismConfig, "total_size", own(2)),
        mock.patch.object(ParallelismConfig, "dp_dim_names", own(["dp_shard", "own"])),
        mock.patch.object(ParallelismConfig, "dp_shard_cp_dim_names", own(["dp_shard", "own"])),
        mock.patch.object(ParallelismConfig, "non_dp_dim_names", own(["own"])),
        mock.patch.object(ParallelismConfig, "ep_enabled", property(lambda self: self._ep_size > 1)),
    ):
        config = ParallelismConfig()
        accelerator = make_fsdp2(parallelism_config=config)
        mesh = accelerator.torch_device_mesh
        model = accelerator.prepare(make_model())
        seen = [
            config.ep_enabled,
            config.active_mesh_dims,
            [*mesh.mesh_dim_names],
            mesh["dp_shard_cp"].size(),
        ]
        shard = next(model.parameters())
        seen += [shard.device_mesh.size(), [*shard.to_local().shape], config.non_data_parallel_size]
        seen.append(len(accelerator.prepare(torch.utils.data.DataLoader(range(8)))))
    reset()
    with (
        mock.patch.object(ParallelismConfig, "_get_mesh", return_value=(("dp_shard", "own"), (1, 2))),
        mock.patch.object(ParallelismConfig, "total_size", own(2)),
        mock.patch.object(ParallelismConfig, "dp_shard_cp_dim_names", own(["dp_shard", "own"])),
        mock.patch.object(ParallelismConfig, "data_parallel_size", own(2)),
    ):
        accelerator = make_fsdp2(parallelism_config=ParallelismConfig())
        seen.append(len(accelerator.prepare(torch.utils.data.DataLoader(range(8)))))
    reset()
    assert weights(train(make_fsdp2())[0]) == plain
    return seen


@case(ranks=2)
def cp_context() -> Any:
    """A replaced `_prepare_cp` chooses what shards sequences."""
    seen = []

    @contextlib.contextmanager
    def shard(**buffers: Any) -> Any:
        seen.append(sorted(buffers))
        yield

    def own(self: Any, *args: Any) -> Any:
        self._cp_context = shard
        return args

    with mock.patch.object(Accelerator, "_prepare_cp", own):
        accelerator = make_fsdp2(parallelism_config=ParallelismConfig(cp_size=2))
        accelerator.prepare(make_model())
    tokens = torch.zeros(1, 8)
    with accelerator.maybe_context_parallel([tokens], [1], {tokens}):
        assert tokens.shape == (1, 8)
    return seen


@case(ranks=0)
def init_of_accelerator() -> Any:
    """LLaMA-Factory wraps the constructor."""
    original, seen = Accelerator.__init__, []

    def own(self: Any, *args: Any, **kwargs: Any) -> None:
        seen.append(sorted(kwargs))
        original(self, *args, **kwargs)

    with mock.patch.object(Accelerator, "__init__", own):
        assert Accelerator(cpu=True).device.type == "cpu"
    Accelerator(cpu=True)
    return seen


@case()
def save_model_by_get_state_dict() -> Any:
    """axolotl replaces what gathers weights; `save_model` writes what it returns."""
    own = {"0.weight": torch.ones(1)}
    with tempfile.TemporaryDirectory() as folder:
        with mock.patch.object(Accelerator, "get_state_dict", return_value=own):
            Accelerator(cpu=True).save_model(make_model(), folder)
        saved = accelerate.utils.load_state_dict(f"{folder}/model.safetensors")
        Accelerator(cpu=True).save_model(make_model(), folder)
        undone = accelerate.utils.load_state_dict(f"{folder}/model.safetensors")
        return [sorted(saved), len(undone)]


@case(ranks=2)
def distributed_data_parallel() -> Any:
    """ms-swift wraps the construction of torch's own class."""
    ddp = accelerate.accelerator.torch.nn.parallel.DistributedDataParallel
    original, seen = ddp.__init__, []

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        seen.append(type(args[0]).__name__)
        original(self, *args, **kwargs)

    with mock.patch.object(ddp, "__init__", init):
        Accelerator(cpu=True).prepare(make_model())
    return seen


def main() -> int:
    """Run the cases of this number of ranks."""
    ranks = PartialState(cpu=True).num_processes
    for name, (needed, function) in CASES.items():
        if needed in (0, ranks) and (len(sys.argv) < 2 or name in sys.argv[1:]):
            reset()
            seen = function()
            if PartialState(cpu=True).is_main_process:
                print(json.dumps({name: seen}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
