"""The package's tables of names."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

import accel_plugins
from accel_plugins import testing

TABLES = [accel_plugins, testing]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.__name__)
def test_every_name_resolves(table):
    for name in table.__all__:
        assert not isinstance(getattr(table, name), ModuleType), "a submodule would hide it"
    exports = [name for name in dir(table) if not isinstance(getattr(table, name), ModuleType)]
    assert exports == sorted(table.__all__)


def test_importing_the_package_does_not_import_torch():
    program = "import accel_plugins, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
