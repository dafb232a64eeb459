"""Models larger than memory: sizes, device maps, hooks, loading, saving."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from cases import cases
from safetensors.torch import save_file
from torch import nn


class Block(nn.Module):
    """Two linear layers around an activation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.norm = nn.BatchNorm1d(2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Compute, and add the inputs."""
        return inputs + self.down(torch.relu(self.norm(self.up(inputs))))


class Stack(nn.Module):
    """An embedding, blocks, and a head that may share its weights."""

    def __init__(self, *, tied: bool = False, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 10, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute the logits."""
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def stack(*, tied: bool = False) -> Stack:
    """The same model every time, for evaluation."""
    torch.manual_seed(0)
    return Stack(tied=tied).eval()


TOKENS = torch.arange(6) % 10
BUDGETS: dict[str, dict[Any, Any]] = {
    "plenty": {0: 10**6, "cpu": 10**6}, "tight": {0: 700, 1: 700, "cpu": 10**6},
    "very tight": {0: 400, 1: 400, 2: 400, "cpu": 800, "disk": 10**6}, "host": {"cpu": 10**6},
    "host and disk": {"cpu": 900, "disk": 10**6}, "text": {0: "1KB", "cpu": "1MB"}, "nothing": {0: 0,
    "cpu": 10**6},
}  # fmt: skip


@cases("device maps", budget=BUDGETS, tied=(False, True), no_split=(None, "Block"))
def inferred(lib: Any, *, budget: str, tied: bool, no_split: str | None) -> Any:
    classes = None if no_split is None else [no_split]
    found = lib.utils.infer_auto_device_map(stack(tied=tied), dict(BUDGETS[budget]), classes)
    return covered(stack(tied=tied), found)


def covered(model: nn.Module, device_map: dict[str, Any]) -> dict[str, Any]:
    """The device of every parameter, however the map says it."""
    found = {}
    for name, _ in model.named_parameters():
        owner = max((one for one in device_map if one == "" or f"{name}.".startswith(f"{one}.")), key=len)
        found[name] = str(device_map[owner])
    return found


@cases("device maps", budget=BUDGETS, low_zero=(False, True))
def balanced(lib: Any, *, budget: str, low_zero: bool) -> Any:
    found = lib.utils.get_balanced_memory(stack(), dict(BUDGETS[budget]), ["Block"], low_zero=low_zero)
    return [str(key) for key in found]


@cases("device maps", budget=BUDGETS)
def maximum(lib: Any, *, budget: str) -> Any:
    argument = dict(BUDGETS[budget])
    return [lib.utils.get_max_memory(argument), argument]


@cases(
    "device maps", argument=({0: "1GB", "cpu": "2GiB"}, {"cpu": 1.5e6}, {"cpu": "5MB", "disk": 3}, {"gpu": 1})
)
def memory_of(lib: Any, *, argument: dict[Any, Any]) -> Any:
    argument = dict(argument)
    return [lib.utils.get_max_memory(argument), argument]


@cases("device maps", dtype=(None, "float16", "int8"))
def sizes(lib: Any, *, dtype: str | None) -> Any:
    kind = None if dtype is None else getattr(torch, dtype)
    return lib.utils.compute_module_sizes(stack(), dtype=kind)


@cases("device maps", size=("1GB", "2.5MiB", "10kb", 7, "lots", "-3GB"))
def bytes_of(lib: Any, *, size: Any) -> Any:
    return lib.utils.convert_file_size_to_int(size)


@cases("device maps", kind=("float32", "float16", "bool", "int64", "float8_e4m3fn"))
def element(lib: Any, *, kind: str) -> Any:
    return lib.utils.dtype_byte_size(getattr(torch, kind))


@cases("device maps", argument=("whole", "parts", "unknown", "missing"))
def checked(lib: Any, *, argument: str) -> Any:
    maps = {
        "whole": {"": "cpu"}, "parts": {"embed": "cpu", "blocks": "cpu", "head": "cpu"},
        "unknown": {"": "cpu", "tail": "cpu"}, "missing": {"embed": "cpu"},
    }  # fmt: skip
    return lib.utils.check_device_map(stack(), maps[argument])


DISPATCHED: dict[str, dict[str, Any]] = {
    "whole": {"": "cpu"}, "disk": {"embed": "cpu", "blocks": "disk", "head": "cpu"}, "all disk": {"": "disk"},
    "one block": {"embed": "cpu", "blocks.0": "disk", "blocks.1": "cpu", "blocks.2": "disk", "head": "cpu"},
}  # fmt: skip


@cases("dispatch", device_map=DISPATCHED, tied=(False, True))
def dispatched(lib: Any, *, device_map: str, tied: bool) -> Any:
    model = lib.dispatch_model(
        stack(tied=tied), DISPATCHED[device_map], main_device="cpu", offload_dir="away"
    )
    return [model(TOKENS), model(TOKENS), model.hf_device_map]


@cases("dispatch", tied=(False, True), buffers=(False, True), kind=("cpu", "disk"))
def offloaded(lib: Any, *, tied: bool, buffers: bool, kind: str) -> Any:
    model = stack(tied=tied)
    if kind == "cpu":
        lib.cpu_offload(model, torch.device("cpu"), offload_buffers=buffers)
    else:
        lib.disk_offload(model, "away", torch.device("cpu"), offload_buffers=buffers)
    first = model(TOKENS)
    lib.hooks.remove_hook_from_submodules(model)
    return [first, model.head.weight.device]


@cases("dispatch", append=(False, True))
def hooked(lib: Any, *, append: bool) -> Any:
    class Adding(lib.hooks.ModelHook):
        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            del module
            return (args[0] + 1,), kwargs

        def post_forward(self, module: Any, output: Any) -> Any:
            del module
            return output * 2

    layer = nn.Identity()
    lib.hooks.add_hook_to_module(layer, Adding())
    lib.hooks.add_hook_to_module(layer, Adding(), append=append)
    found = [layer(torch.ones(1)), type(layer._hf_hook).__name__]
    lib.hooks.remove_hook_from_module(layer)
    return [*found, layer(torch.ones(1)), hasattr(layer, "_hf_hook"), hasattr(layer, "_old_forward")]


@cases("loading", buffers=(False, True))
def empty(lib: Any, *, buffers: bool) -> Any:
    with lib.init_empty_weights(include_buffers=buffers):
        model = Stack()
    return {name: one.device for name, one in [*model.named_parameters(), *model.named_buffers()]}


@cases(
    "loading", form=("file", "sharded", "bin"), device_map=(None, "disk"), dtype=(None,),
    extra=(False, True),
)  # fmt: skip
def loaded(lib: Any, *, form: str, device_map: str | None, dtype: str | None, extra: bool) -> Any:
    where = written(stack(), form, extra={"tail.weight": torch.ones(2)} if extra else {})
    with lib.init_empty_weights():
        model = Stack()
    layout = None if device_map is None else DISPATCHED[{"cpu": "whole", "disk": "disk"}[device_map]]
    kind = None if dtype is None else getattr(torch, dtype)
    if layout is None:
        model = Stack()
        lib.load_checkpoint_in_model(model, str(where), dtype=kind)
        return model.state_dict()
    model = lib.load_checkpoint_and_dispatch(
        model, str(where), device_map=layout, offload_folder="away", dtype=kind
    )
    return [model.eval()(TOKENS), model.embed.weight.dtype]


def written(model: nn.Module, form: str, *, extra: dict[str, torch.Tensor]) -> Path:
    """Write a model's weights in one of the forms of checkpoints."""
    folder = Path("checkpoint")
    folder.mkdir()
    state = {**model.state_dict(), **extra}
    if form == "bin":
        torch.save(state, folder / "pytorch_model.bin")
    elif form == "file":
        save_file(state, str(folder / "model.safetensors"), metadata={"format": "pt"})
    else:
        names = sorted(state)
        parts = {f"part-{number}.safetensors": names[number::2] for number in range(2)}
        for file, part in parts.items():
            save_file({name: state[name] for name in part}, str(folder / file), metadata={"format": "pt"})
        table = {name: file for file, part in parts.items() for name in part}
        index = {"metadata": {}, "weight_map": table} if "old" not in form else table
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@cases("loading", form=("old sharded",))
def loaded_with_an_old_index(lib: Any, *, form: str) -> Any:
    where = written(stack(), form, extra={})
    model = Stack()
    lib.load_checkpoint_in_model(model, str(where / "model.safetensors.index.json"))
    return model.state_dict()


@cases("loading", shape=((4, 4), (10, 4)), strict=(False, True), missing=(False, True))
def loaded_with_mistakes(lib: Any, *, shape: tuple[int, int], strict: bool, missing: bool) -> Any:
    state = {"embed.weight": torch.ones(shape)}
    if not missing:
        state = {**stack().state_dict(), **state}
    save_file(state, "model.safetensors", metadata={"format": "pt"})
    model = Stack()
    lib.load_checkpoint_in_model(model, "model.safetensors", strict=strict)
    return model.embed.weight


@cases("saving", safe=(False, True), size=("10GB", "1KB"), tied=(False, True))
def saved(lib: Any, *, safe: bool, size: str, tied: bool) -> Any:
    accelerator = lib.Accelerator(cpu=True)
    accelerator.save_model(accelerator.prepare(stack(tied=tied)), "out", size, safe)
    return sorted(path.name for path in Path("out").iterdir())


@cases("saving", kind=("plain", "shared"))
def found_tied(lib: Any, *, kind: str) -> Any:
    return [sorted(group) for group in lib.utils.find_tied_parameters(stack(tied=kind == "shared"))]


@cases("saving", value=(None, "tensor", "number"), dtype=(None, "float16"))
def assigned(lib: Any, *, value: str | None, dtype: str | None) -> Any:
    layer = nn.Linear(2, 2)
    values = {"tensor": torch.full((2, 2), 3.0), "number": torch.full((2, 1), 3.0)}
    kind = None if dtype is None else getattr(torch, dtype)
    argument = values.get(value or "")
    lib.utils.set_module_tensor_to_device(layer, "weight", "cpu", value=argument, dtype=kind)
    return [layer.weight if argument is not None else layer.weight.dtype, layer.weight.requires_grad]


@cases("saving", kind=("float32", "bfloat16", "bool", "0-d"))
def offloaded_and_restored(lib: Any, *, kind: str) -> Any:
    weight = torch.ones(()) if kind == "0-d" else torch.ones(2, 3, dtype=getattr(torch, kind))
    index = lib.utils.offload_weight(weight, "w", ".", {})
    return [index, torch.as_tensor(lib.utils.load_offloaded_weight("w.dat", index["w"]))]


@cases("saving", limit=("1KB", "10GB"))
def states_saved(lib: Any, *, limit: str) -> Any:
    accelerator = lib.Accelerator(cpu=True, project_dir=".")
    model = accelerator.prepare(stack())
    accelerator.save_state("here")
    before = model.head.weight.clone()
    with torch.no_grad():
        model.head.weight.zero_()
    accelerator.load_state("here")
    accelerator.save_model(model, "there", limit)
    return [bool(torch.equal(before, model.head.weight)), len([*Path("there").iterdir()]) > 1]
