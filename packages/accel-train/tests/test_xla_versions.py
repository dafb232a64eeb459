"""A torch_xla that was built for another torch is refused when an `Accelerator` is made."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from accel_state.errors import MissingDependencyError
from accel_train import Accelerator


@pytest.fixture
def other_torch_xla(tmp_path, monkeypatch):
    (tmp_path / "torch_xla").mkdir()
    (tmp_path / "torch_xla/__init__.py").write_text("raise ImportError('_XLAC.so: undefined symbol')\n")
    (tmp_path / "torch_xla-2.1.0.dist-info").mkdir()
    (tmp_path / "torch_xla-2.1.0.dist-info/METADATA").write_text("Name: torch_xla\nVersion: 2.1.0\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("other_torch_xla")
def test_both_versions_are_named_with_the_right_pair(monkeypatch):
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "xla")  # a GPU of this machine would come first
    with pytest.raises(MissingDependencyError, match=r"'torch==2\.1\.\*' 'torch_xla==2\.1\.\*'") as refused:
        Accelerator()
    assert f"torch {version('torch')} and torch_xla 2.1.0 are installed" in str(refused.value)


@pytest.mark.usefixtures("other_torch_xla")
def test_the_cpu_needs_neither():
    assert Accelerator(cpu=True).device.type == "cpu"
