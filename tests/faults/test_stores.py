"""445. A key that obstore refuses, beside a checkpoint: files are found by their names, and the rest names the key."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save as as_bytes

from stio import sync
from stio.cli.main import main
from stio.errors import StorageError
from stio.remote.pulls import pull

pytest.importorskip("obstore")
sys.path.insert(0, str(Path(__file__).parent.parent / "remote"))
gcs_server: Any = import_module("gcs_server")
new_certificate = import_module("servers").new_certificate

TENSORS = {"w": torch.arange(5.0), "v": torch.ones(2, 3)}
KEYS = {
    "run//log.txt": "run//",
    "run/./x": "run/./",
    "run/../y": "run/../",
    'run/a"\tb': 'run/a"\\tb',
    "run/.": "run/.",
}
"""Keys, and what a message shows of them: obstore reports the common prefix of a key in a "directory"."""
URL = "gs://bucket/run"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, tuple[str, str]]:
    found: tuple[str, tuple[str, str]] = new_certificate(tmp_path_factory.mktemp("certificate"))
    return found


@pytest.fixture
def store(certificate: tuple[str, tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("SSL_CERT_FILE", certificate[0])
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with gcs_server.gcs_server(certificate[1]) as server:
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", server.key)
        yield server


def put(store: Any, key: str, data: bytes = b"") -> None:
    store.objects[key] = gcs_server.Stored(data, store.next_number(), {})


@pytest.mark.parametrize("key", KEYS)
def test_c445_a_load_of_the_directory(store: Any, caplog: pytest.LogCaptureFixture, key: str) -> None:
    put(store, key)
    put(store, "run/model.safetensors", as_bytes(TENSORS))
    with caplog.at_level(logging.WARNING, "stio"):
        found = sync.load(URL)
    assert all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)
    (message,) = caplog.messages
    assert KEYS[key] in message
    assert "model.safetensors" in message


def test_c445_saves_replace_what_they_know(store: Any) -> None:
    put(store, "run//log.txt")
    put(store, "run/model.safetensors", as_bytes(TENSORS))
    sync.save(TENSORS, URL)
    assert "run/model.safetensors" not in store.objects
    first = {key for key in store.objects if "00001-of" in key}
    sync.save({"w": torch.zeros(2)}, URL)
    assert not first & store.objects.keys()
    assert sync.load(URL)["w"].tolist() == [0, 0]
    assert len(store.objects) == 3


def test_c445_a_pull_brings_the_checkpoint(store: Any, tmp_path: Path) -> None:
    put(store, "run//log.txt")
    put(store, "run/config.json", b"{}")
    put(store, "run/model.safetensors", as_bytes(TENSORS))
    assert set(pull(URL, tmp_path / "run", also=["config.json"]).files) == {"model.safetensors", "config.json"}


def test_c445_what_needs_a_listing_names_the_key(store: Any) -> None:
    put(store, "run//log.txt")
    put(store, "run/adapter.safetensors", as_bytes(TENSORS))
    with pytest.raises(StorageError, match=r"delete or rename the object.*'run//'"):
        sync.load(URL)
    assert set(sync.load(f"{URL}/adapter.safetensors")) == set(TENSORS)
    result = CliRunner().invoke(main, ["gc", URL])
    assert result.exit_code
    assert "'run//'" in result.output


def test_c445_rotation_of_steps_goes_on(store: Any) -> None:
    put(store, "run//log.txt")
    put(store, "run/step-1//log.txt")
    with sync.Saver(keep_last=1) as saver:
        for step in range(3):
            saver.save(TENSORS, f"{URL}/step-{step}")
    assert {key.split("/")[1] for key in store.objects if key.endswith(".index.json")} == {"step-2"}
