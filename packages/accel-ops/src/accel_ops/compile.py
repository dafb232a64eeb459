"""Regional compilation: the repeated blocks of a model are compiled once and share the code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator

Module = TypeVar("Module", bound=nn.Module)

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def compile_regions(module: Module, **compile_kwargs: Any) -> Module:
    """Compile the repeated blocks of a model, and the parts between them, instead of the model as one.

    Blocks of one class are compiled for the first of them; the others run the same code. Regions are compiled
    in place, so that names of parameters, classes and references between modules stay what they are. A model
    without repeated blocks is one region.

    Example:
        >>> blocks = [nn.TransformerEncoderLayer(8, 2, batch_first=True) for _ in range(3)]
        >>> model = compile_regions(nn.Sequential(nn.Linear(4, 8), *blocks), backend="eager")
        >>> [name for name, _ in model.named_parameters()][:2]
        ['0.weight', '0.bias']
    """
    for region in regions(module):
        region.compile(**compile_kwargs)
    return module


def compile_regions_deepspeed(module: nn.Module, **compile_kwargs: Any) -> None:
    """Compile the regions of a model that DeepSpeed's engine holds; the same as `compile_regions`."""
    compile_regions(module, **compile_kwargs)


def compile_regions_fsdp2(module: nn.Module, **compile_kwargs: Any) -> None:
    """Compile the regions of a model that `fully_shard` shards; the same as `compile_regions`."""
    compile_regions(module, **compile_kwargs)


def regions(module: nn.Module) -> list[nn.Module]:
    """Find the regions to compile, in the order of `module.modules()`.

    Those are the outermost modules that are repeated, that is, of whose class a container holds several; and
    of what is around these, the largest parts without repeated blocks. Single layers of `torch.nn` are left
    out: alone they gain nothing, and use up the compiler's limit of variants.

    Example:
        >>> class Block(nn.Module): ...
        >>> model = nn.ModuleDict({"embed": nn.Embedding(3, 2), "blocks": nn.ModuleList([Block(), Block()])})
        >>> [type(region).__name__ for region in regions(model)]
        ['Block', 'Block']
    """
    blocks = {id(block) for container in module.modules() for block in _repeated(container)}
    if not blocks:
        return [module]
    around = {id(one) for one in module.modules() if any(id(part) in blocks for part in one.modules())}
    return [*_walk(module, around - blocks)]


def _walk(module: nn.Module, around: set[int]) -> Iterator[nn.Module]:
    if id(module) in around:
        for child in dict.fromkeys(module.children()):
            yield from _walk(child, around)
    elif not _is_single_layer(module) and type(module) not in _CONTAINERS[:2]:
        yield module


def _repeated(container: nn.Module) -> list[nn.Module]:
    if not isinstance(container, _CONTAINERS):
        return []
    candidates = [child for child in container.children() if not _is_single_layer(child)]
    kinds = [type(child) for child in candidates]
    return [child for child in candidates if kinds.count(type(child)) > 1]


def _is_single_layer(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.") and not any(True for _ in module.children())
