from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import torch
import yaml

from accel_cli.commands import env
from accel_cli.main import main


def test_the_report_is_text_or_json_of_the_same_facts(capsys):
    assert main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["python"] == sys.version.split()[0]
    assert facts["torch"]["version"] == torch.__version__
    has_megatron = "megatron-core" in facts["libraries"]
    assert (
        facts["experimental"]
        == ["training with Megatron has not yet been run on several GPUs"] * has_megatron
    )
    assert main(["env"]) == 0
    assert capsys.readouterr().out == env.as_text(facts)


def test_the_report_shows_every_value_unchanged():
    facts = {
        "python": "3.11.7",
        "programs": ["g++", "nvidia-smi"],
        "names": [],
        "cpu": {"cores": 2, "memory in GB": None},
        "variables": {"XLA_FLAGS": "--a=*b* --c=__d__", "NCCL_HOST": "<host>"},
    }
    first, *lines, last = env.as_text(facts).splitlines()
    assert (first, last) == ("```yaml", "```")
    assert yaml.safe_load("\n".join(lines)) == facts
    assert "  XLA_FLAGS: --a=*b* --c=__d__" in lines


def test_the_report_has_settings_with_their_source_but_no_other_variable(tmp_path):
    (tmp_path / "run.yaml").write_text("debug: true\n")
    environ = {"ACCELERATE_MIXED_PRECISION": "bf16", "HF_TOKEN": "secret", "HF_HOME": str(tmp_path)}
    facts = env.report(environ, str(tmp_path / "run.yaml"), {})
    assert facts["settings"] == {
        "precision.mixed_precision": "bf16 (variable ACCELERATE_MIXED_PRECISION)",
        "process.debug": f"True (key debug of {tmp_path / 'run.yaml'})",
    }
    assert "secret" not in json.dumps(facts)


def test_a_fact_that_cannot_be_collected_does_not_end_the_report(tmp_path):
    def fail(module):
        raise OSError("libcudart.so.13: cannot open shared object file")

    (tmp_path / "run.yaml").write_text("num_proceses: 2\n")
    environ = {"RANK": "one", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "HF_HOME": "/nowhere"}
    facts = env.report(environ, str(tmp_path / "run.yaml"), {"torch": ("json", fail)})
    assert facts["torch"] == "cannot be queried: OSError: libcudart.so.13: cannot open shared object file"
    assert "key num_proceses" in facts["settings"]
    assert "'one'" in facts["launcher"]
    assert facts["variables"]["RANK"] == "one"


def test_every_device_is_reported_with_its_memory():
    class Module:
        device_count = staticmethod(lambda: 2)
        get_device_properties = staticmethod(lambda index: SimpleNamespace(name="H200", total_memory=150e9))

    kind = SimpleNamespace(module=Module, name="cuda", backend="nccl", least_torch="2.11")
    facts = env.describe_devices(SimpleNamespace(available_kind=lambda: kind))
    assert (facts["count"], facts["names"]) == (2, ["H200, 150.0 GB"] * 2)


def test_the_report_names_the_launcher():
    facts = env.report({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "HF_HOME": "/nowhere"}, None, {})
    assert facts["launcher"] == "torchrun, rank 1 of 4"
