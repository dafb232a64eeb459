"""The jobs that a page shows are those that the command prints."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from accel_cli.main import main

PAGE = Path(__file__).parents[2] / "packages/accel-suite/docs/guides/laptop-to-cluster.md"
BLOCKS = re.findall(
    r"```text\n\$ accel (launch [^\n]*--dry_run[^\n]*)\n(.*?)```", PAGE.read_text(), re.DOTALL
)


def test_each_launcher_of_a_cluster_has_a_dry_run():
    assert {re.search(r"--launcher (\w+)", line)[1] for line, _ in BLOCKS} == {"slurm", "ray", "kubeflow"}


@pytest.mark.parametrize(("line", "shown"), BLOCKS)
def test_a_dry_run_prints_what_the_page_shows(line, shown, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(line)) == 0
    assert capsys.readouterr().out.replace(sys.executable, "python").strip() == shown.strip()
