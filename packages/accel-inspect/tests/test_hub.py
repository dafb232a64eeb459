"""Models of the hub: in its cache, behind its doors, with code of their own. Without a network."""

from __future__ import annotations

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from accel_inspect.estimate.meta_model import meta_model, sizes_of
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator

constants = pytest.importorskip("huggingface_hub.constants")
pytest.importorskip("transformers")

COMMIT = "0" * 39 + "1"
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 64,
    "tie_word_embeddings": False,
}
LLAMA_ELEMENTS = 2 * 64 * 16 + 3 * (4 * 16 * 16 + 3 * 16 * 32 + 2 * 16) + 16
OWN_CONFIG = """
from transformers import PretrainedConfig

class TinyConfig(PretrainedConfig):
    model_type = "tiny-of-its-own"

    def __init__(self, width=8, **more):
        super().__init__(**more)
        self.width = width
"""
OWN_MODEL = """
import torch
from transformers import PreTrainedModel
from .configuration_tiny import TinyConfig

class TinyModel(PreTrainedModel):
    config_class = TinyConfig

    def __init__(self, config):
        super().__init__(config)
        self.layer = torch.nn.Linear(config.width, config.width)
        self.post_init()
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, and no way to it."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    # transformers 4 reads it when it is imported
    monkeypatch.setattr("transformers.utils.hub.TRANSFORMERS_CACHE", str(tmp_path / "hub"), raising=False)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return tmp_path / "hub"


def put(cache: Path, name: str, files: dict[str, str]) -> None:
    """What `huggingface_hub` leaves behind after it has got files of a model."""
    model = cache / f"models--{name.replace('/', '--')}"
    (model / "refs").mkdir(parents=True)
    (model / "refs/main").write_text(COMMIT)
    write(model / "snapshots" / COMMIT, files)


def write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def own_code() -> dict[str, str]:
    """A model that comes with its own code."""
    auto_map = {"AutoConfig": "configuration_tiny.TinyConfig", "AutoModel": "modeling_tiny.TinyModel"}
    config = {"auto_map": auto_map, "model_type": "tiny-of-its-own", "width": 12}
    return {
        "config.json": json.dumps(config),
        "configuration_tiny.py": OWN_CONFIG,
        "modeling_tiny.py": OWN_MODEL,
    }


def test_a_model_in_the_cache_needs_no_hub(cache: Path) -> None:
    put(cache, "someone/tiny-llama", {"config.json": json.dumps(LLAMA)})
    model = meta_model("someone/tiny-llama")
    assert type(model).__name__ == "LlamaForCausalLM"
    assert sizes_of(model).parameters == LLAMA_ELEMENTS
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.usefixtures("cache")
def test_a_model_that_is_nowhere_is_reported() -> None:
    with pytest.raises(
        SettingsError, match=r"'someone/absent' is not a local file and not in the hub's cache"
    ) as caught:
        meta_model("someone/absent")
    assert isinstance(caught.value, OSError), "programs that handle the hub's errors handle it"


@pytest.mark.parametrize("place", ["folder", "cache"])
def test_code_of_a_model_runs_only_when_it_is_trusted(cache: Path, tmp_path: Path, place: str) -> None:
    name = f"someone/own-{place}"
    if place == "folder":
        name = str(tmp_path / "own-folder")
        write(Path(name), own_code())
    else:
        put(cache, name, own_code())
    with pytest.raises(SettingsError, match=r"custom code: add --trust_remote_code"):
        meta_model(name)
    assert not (tmp_path / "modules").exists()
    model = meta_model(name, trust_remote_code=True)
    assert type(model).__name__ == "TinyModel"
    assert sizes_of(model).parameters == 12 * 12 + 12


def test_a_configuration_of_timm_says_more_than_the_architecture(cache: Path, tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    content = {
        "architecture": "vit_tiny_patch16_224",
        "num_classes": 7,
        "model_args": {"img_size": 64},
        "pretrained_cfg": {},
    }
    put(cache, "someone/vit", {"config.json": json.dumps(content)})
    expected = timm.create_model("vit_tiny_patch16_224", num_classes=7, img_size=64)
    elements = sizes_of(meta_model("someone/vit")).parameters
    assert elements == sum(parameter.numel() for parameter in expected.parameters())
    write(tmp_path / "odd", {"config.json": json.dumps(content | {"architecture": "vit_of_nobody"})})
    with pytest.raises(SettingsError, match="timm does not recognise it"):
        meta_model(str(tmp_path / "odd"))
    for number, odd in enumerate(
        ({"architecture": 5}, {"model_args": "x"}, {"model_args": {"img_size": 0}}, {})
    ):
        write(tmp_path / f"odd{number}", {"config.json": json.dumps({"pretrained_cfg": None, **odd})})
        with pytest.raises(SettingsError, match="timm does not recognise it"):
            meta_model(str(tmp_path / f"odd{number}"))


class Gate(BaseHTTPRequestHandler):
    """A hub that gives no file of a model before somebody has agreed to its terms."""

    def do_HEAD(self) -> None:
        """Answer as the hub does."""
        self.send_response(403)
        self.send_header("X-Error-Code", "GatedRepo")
        self.send_header("X-Error-Message", "Access to this model is restricted.")
        self.end_headers()

    do_GET = do_HEAD  # noqa: N815 - the documented name

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the documented name
        """Say nothing."""


@pytest.fixture
def gate() -> Iterator[str]:
    """The address of such a hub on this machine."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Gate) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.usefixtures("cache")
def test_a_model_behind_a_gate_is_reported(gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", gate)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", gate + "/{repo_id}/resolve/{revision}/{filename}"
    )
    with pytest.raises(SettingsError, match=r"'someone/gated'.*(403|[Gg]ated|restricted)"):
        meta_model("someone/gated")


@pytest.mark.usefixtures("cache")
def test_a_hub_that_cannot_be_reached_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as closed:  # bound, and not listening
        closed.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        )
        with pytest.raises(
            SettingsError, match=r"'someone/far' is not .* \(\[Errno \d+\] Connection refused\)"
        ):
            meta_model("someone/far")
    assert not caplog.records  # of retries
