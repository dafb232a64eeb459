from __future__ import annotations

import json

import pytest

from accel_cli.commands import env
from accel_cli.output import REDACTED, redact

HUB = "hf_" + "a1B2" * 8
AMAZON = "AKIA" + "ABCD1234" * 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_TOKEN", "plain"),
        ("wandb.api-key", "plain"),
        ("AWS_SECRET_ACCESS_KEY", "plain"),
        ("launch.aws_access_key_id", "plain"),
        ("note", HUB),
        ("note", f"export X={AMAZON}; run"),
        ("tpu_env", ["A=1", "HF_TOKEN=plain"]),
        ("nested", {"inner": {"password": "plain"}}),
        ("proxy", "https://ada:plain@host:1/path"),
        ("command", "curl --token: plain"),
    ],
)
def test_a_secret_is_not_shown_whether_its_name_or_its_form_tells(name, value):
    shown = json.dumps(redact(name, value))
    assert REDACTED in shown
    assert [secret for secret in ("plain", HUB, AMAZON) if secret in shown] == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZERS_PARALLELISM", "false"),
        ("MASTER_ADDR", "10.0.0.1"),
        ("HF_HOME", "/data/hf"),
        ("fsdp.transformer_layer_cls_to_wrap", "KeyedLayer"),
        ("number", 3),
        ("empty_token", ""),
        ("NCCL_DEBUG", "INFO"),
    ],
)
def test_what_is_no_secret_is_shown_as_it_is(name, value):
    assert redact(name, value) == value


def test_the_report_shows_the_variables_that_matter_without_their_secrets(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("debug: true\n")
    environ = {
        "HF_TOKEN": "plain", "ACCELERATE_LOG_LEVEL": HUB, "NCCL_DEBUG": "INFO", "HF_HOME": str(tmp_path),
        "WANDB_API_KEY": "plain", "PATH": "", "HOME": "/home/ada",
    }  # fmt: skip
    facts = env.report(environ, str(config), {})
    assert facts["variables"] == {
        "ACCELERATE_LOG_LEVEL": REDACTED, "HF_HOME": str(tmp_path), "HF_TOKEN": REDACTED,
        "NCCL_DEBUG": "INFO",
    }  # fmt: skip
    for text in (json.dumps(facts), env.as_text(facts)):
        assert [secret for secret in ("plain", HUB) if secret in text] == []
