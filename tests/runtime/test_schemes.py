"""Schemes of URLs that a package registers."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from fakes import MemoryRoot, checkpoint_files

from stio import schemes, sync
from stio.schemes import reader_of


def test_a_registered_scheme_is_a_url_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    root = MemoryRoot(checkpoint_files({"w": torch.ones(2)}))
    module = SimpleNamespace(open_url=lambda url, *, is_file=None: (root, ""), place_of_url=lambda url: url)
    monkeypatch.setitem(sys.modules, "stores_of_ours", module)
    with pytest.raises(FileNotFoundError, match="stio has no scheme 'ours'"):
        sync.load("ours://a/model/")
    monkeypatch.setitem(schemes.READERS, "ours", "stores_of_ours")
    assert torch.equal(sync.load("ours://a/model/")["w"], torch.ones(2))
    assert reader_of("OURS://a").place_of_url("OURS://a") == "OURS://a"
    with pytest.raises(ValueError, match="saves go to local paths, and to URLs of s3, gs, az; not to ours://a"):
        sync.save({"w": torch.ones(2)}, "ours://a/")
