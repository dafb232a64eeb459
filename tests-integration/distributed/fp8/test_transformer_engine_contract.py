"""What we use of TransformerEngine exists in it: without a GPU its Python sources are read, not imported."""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from packaging.version import Version

from accel_plugins.fp8.recipe import TERecipeKwargs
from accel_plugins.fp8.te import RECIPE_CLASSES, recipe_options
from accel_plugins.fsdp.blocks import FIRST_VERSION

VERSIONS = ("1.13.0", "2.2.0", "2.9.0", "2.20.2")
WITHOUT = {"1.13.0": {"current", "mxfp8", "nvfp4"}, "2.2.0": {"nvfp4"}}
"""Recipes that older versions do not have."""


@functools.cache
def sources(version):
    """The wheel of the Python sources, which has no compiled code; another distribution has that."""
    uv = os.environ.get("UV") or shutil.which("uv")
    if uv is None:
        pytest.skip("uv is not there to fetch TransformerEngine's sources")
    cache = Path(tempfile.gettempdir()) / f"accel-transformer-engine-{os.getuid()}"
    folder = cache / version
    if not folder.is_dir():
        cache.mkdir(mode=0o700, exist_ok=True)
        staging = Path(tempfile.mkdtemp(dir=cache))
        command = [uv, "pip", "install", "--quiet", "--no-deps", "--no-build", "--target", str(staging)]
        command += [f"transformer-engine=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        if done.returncode:
            shutil.rmtree(staging)
            pytest.skip(f"TransformerEngine {version} cannot be fetched: {done.stderr.strip()[:200]}")
        with contextlib.suppress(OSError):  # another process of the tests was faster
            staging.rename(folder)
    return folder / "transformer_engine"


def tree(version, path):
    return ast.parse((sources(version) / path).read_text())


def named(found, name):
    """The class or function of a name at the top of a module."""
    kinds = (ast.ClassDef, ast.FunctionDef)
    return next((one for one in found.body if isinstance(one, kinds) and one.name == name), None)


def parameters(node):
    if isinstance(node, ast.ClassDef):
        node = named(node, "__init__")
    return {one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}


def fields(node):
    return {one.target.id for one in node.body if isinstance(one, ast.AnnAssign)}


def attributes(node):
    """Attributes that methods set on `self`, and parameters that they register by a literal name."""
    found = set()
    for one in ast.walk(node):
        targets = one.targets if isinstance(one, ast.Assign) else [getattr(one, "target", None)]
        found |= {target.attr for target in targets if isinstance(target, ast.Attribute)}
        if isinstance(one, ast.Call) and getattr(one.func, "attr", "") == "register_parameter":
            found |= {part.value for part in one.args if isinstance(part, ast.Constant)}
    return found


def is_call(node, name):
    """Whether a node calls a function or method of a name."""
    function = getattr(node, "func", None) if isinstance(node, ast.Call) else None
    return name in (getattr(function, "attr", None), getattr(function, "id", None))


def exported(version):
    found = set()
    for one in ast.walk(tree(version, "pytorch/__init__.py")):
        if isinstance(one, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in one.names}
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_layers_take_and_have_what_we_use(version):
    assert {"Linear", "LayerNorm", "TransformerLayer"} <= exported(version)
    linear = named(tree(version, "pytorch/module/linear.py"), "Linear")
    assert {"in_features", "out_features", "bias", "params_dtype", "device"} <= parameters(linear)
    assert {"in_features", "out_features", "use_bias"} <= attributes(linear)
    weights = [one for one in ast.walk(linear) if isinstance(one, ast.Constant) and one.value == "weight"]
    assert weights, "the weight of a linear layer is called weight"
    norm = named(tree(version, "pytorch/module/layernorm.py"), "LayerNorm")
    assert {"normalized_shape", "eps", "params_dtype"} <= parameters(norm)
    assert named(norm, "__init__").args.kwarg is not None, "it passes `device` on"
    base = named(tree(version, "pytorch/ops/basic/layer_norm.py"), "LayerNorm")
    assert "device" in parameters(base)
    assert {"eps", "weight", "bias"} <= attributes(base)


@pytest.mark.parametrize("version", VERSIONS)
def test_autocast_takes_what_we_pass(version):
    new = "autocast" in exported(version)
    file = "quantization.py" if new else "fp8.py"
    function = named(tree(version, f"pytorch/{file}"), "autocast" if new else "fp8_autocast")
    group = {"recipe", "amax_reduction_group"} if new else {"fp8_recipe", "fp8_group"}
    assert {"enabled", *group} <= parameters(function)
    assert new or "fp8_autocast" in exported(version)


@pytest.mark.parametrize("version", VERSIONS)
def test_blocks_are_recomputed_by_its_own_function_within_its_autocast(version):
    assert "checkpoint" in exported(version)
    function = named(tree(version, "pytorch/distributed.py"), "checkpoint")
    taken = [one.args[0].value for one in ast.walk(function) if is_call(one, "pop")]
    assert "use_reentrant" in taken
    signature = function.args
    assert [arg.arg for arg in signature.args] == ["function"]
    assert (signature.vararg.arg, signature.kwarg.arg) == ("args", "kwargs")
    again = next(one for one in ast.walk(function) if getattr(one, "name", "") == "recompute_fn")
    enters = any(is_call(one, "autocast") or is_call(one, "fp8_autocast") for one in ast.walk(again))
    assert enters == (Version(version) >= Version(FIRST_VERSION))


@pytest.mark.parametrize("version", VERSIONS)
def test_recipes_take_what_we_pass(version):
    module = tree(version, "common/recipe/__init__.py")
    members = {
        target.id
        for one in named(module, "Format").body
        if isinstance(one, ast.Assign)
        for target in one.targets
    }
    assert {"HYBRID", "E4M3", "E5M2"} <= members
    for name, kind in RECIPE_CLASSES.items():
        node = named(module, kind)
        assert (node is None) == (name in WITHOUT.get(version, ()))
        if node is not None:
            known = fields(node)
            wanted = recipe_options(TERecipeKwargs(recipe=name), dict.fromkeys(known))
            assert set(wanted) <= known
            assert ("amax_history_len" in wanted) == (name == "delayed")


@pytest.mark.parametrize("version", VERSIONS)
def test_scales_of_layers_are_in_their_extra_state_as_a_tensor(version):
    """Checkpoints hold that: `tests-integration/train/test_extra_state.py`."""
    base = named(tree(version, "pytorch/module/base.py"), "TransformerEngineBaseModule")
    assert named(base, "set_extra_state") is not None
    function = named(base, "get_extra_state")
    assert ast.unparse(function.returns) == "torch.Tensor"
