"""The export tables of `accel`: every entry resolves, is documented and typed, and waits until asked for."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import subprocess
import sys
from importlib.metadata import version
from types import ModuleType

import pytest

import accel

MODULES = ["accel", *(found.name for found in pkgutil.walk_packages(accel.__path__, "accel."))]
SCRIPTS = "accel.test_utils.scripts."
NO_TABLES = ("accel.commands", "accel._internal", *(name for name in MODULES if name.startswith(SCRIPTS)))
TABLES = [name for name in MODULES if name not in NO_TABLES and not name.endswith(".__main__")]


@pytest.mark.parametrize("table", TABLES)
def test_every_entry_of_a_table_resolves(table: str) -> None:
    module = importlib.import_module(table)
    assert "_EXPORTS" in vars(module), f"{table} has no names"
    for name in [*module.__all__, *dir(module)]:
        assert getattr(module, name) is not None, name


@pytest.mark.parametrize("table", TABLES)
def test_star_import_brings_the_names_and_no_submodule(table: str) -> None:
    brought: dict[str, object] = {}
    exec(f"from {table} import *", brought)
    del brought["__builtins__"]
    assert sorted(brought) == sorted(importlib.import_module(table).__all__)
    modules = [name for name, value in brought.items() if isinstance(value, ModuleType)]
    assert not [name for name in modules if not callable(brought[name])]


@pytest.mark.parametrize("table", TABLES)
def test_every_exported_class_and_function_is_documented_and_typed(table: str) -> None:
    module = importlib.import_module(table)
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value):
            assert value.__doc__, name
        elif inspect.isroutine(value):
            function = inspect.unwrap(value)
            assert function.__doc__, name
            signature = inspect.signature(function)
            assert signature.return_annotation is not signature.empty, name
            untyped = [p.name for p in signature.parameters.values() if p.annotation is p.empty]
            assert not untyped, name


def test_a_module_that_has_the_name_of_a_function_can_be_called_like_it() -> None:
    program = (
        "import accel.utils.tqdm\n"
        "from accel.utils import tqdm\n"
        "from accel.utils.tqdm import tqdm as function\n"
        "assert list(tqdm(range(3), disable=True)) == list(function(range(3), disable=True)) == [0, 1, 2]\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_an_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="module 'accel' has no attribute 'Accellerator'"):
        _ = accel.Accellerator  # pyright: ignore[reportAttributeAccessIssue]


def test_importing_accel_and_its_tables_does_not_import_torch() -> None:
    program = (
        f"import sys, {', '.join(TABLES)}; print(sorted({{'torch', 'numpy', 'yaml'}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_submodules_are_attributes_without_being_imported() -> None:
    program = "import accel; print(accel.utils.DistributedType.NO is accel.DistributedType.NO)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_the_version_is_that_of_the_distribution() -> None:
    assert accel.__accel_version__ == version("accel-suite")
