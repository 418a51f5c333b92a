"""What `keep_last` deletes, and what it never deletes: the newest ones, wherever they stand and however they are named."""

from __future__ import annotations

import os

import pytest
import torch

import stio
import stio.sync


def generation(number):
    return {"a": torch.full((5,), float(number)), "b": torch.full((7,), float(number))}


def saved(directory, *destinations, keep_last=1, **keywords):
    """Save generations 0, 1, ... one after the other; return what stands there then."""
    with stio.sync.Saver(keep_last=keep_last) as saver:
        for number, destination in enumerate(destinations):
            of_its_own = {} if isinstance(destination, str | os.PathLike) else destination[1]
            where = destination if isinstance(destination, str | os.PathLike) else destination[0]
            saver.save(generation(number), where, **(keywords | of_its_own))
    return sorted(os.path.relpath(path, directory) for path in directory.rglob("*") if path.is_file())


def require_generation(path, number):
    tensors = stio.sync.load(path)
    assert tensors.keys() == generation(0).keys()
    assert all(bool((tensor == number).all()) for tensor in tensors.values())


def test_a_slash_at_the_end_changes_nothing(tmp_path):
    left = saved(tmp_path, *(f"{tmp_path}/step-{step}/" for step in range(4)), keep_last=2)
    assert left == ["step-2/model.safetensors", "step-3/model.safetensors"]
    assert sorted(os.listdir(tmp_path)) == ["step-2", "step-3"]


@pytest.mark.matrix
@pytest.mark.parametrize("spelling", ["{}/x/", "{}/./x", "{}/y/../x", "{}/link", "{}/link/"])
@pytest.mark.parametrize("keywords", [{}, {"max_shard_size": 20, "hash": "sha256"}], ids=["one", "several"])
def test_one_place_in_two_spellings_is_one_checkpoint(tmp_path, spelling, keywords):
    (tmp_path / "link").symlink_to("x")
    saved(tmp_path, tmp_path / "x", spelling.format(tmp_path), **keywords)
    require_generation(tmp_path / "x", 1)


def test_a_link_to_a_file(tmp_path):
    (tmp_path / "link.safetensors").symlink_to("blob-0")
    left = saved(tmp_path, tmp_path / "link.safetensors", tmp_path / "y-1.safetensors", hash="sha256")
    assert left == ["y-1.safetensors", "y-1.safetensors.manifest.json"]


@pytest.mark.parametrize("places", [["7", "7/step-1"], ["7", "7/x/step-1"], ["7/step-1", "7"], ["7", "7/step-1", "7"]])
def test_one_inside_another(tmp_path, places):
    left = saved(tmp_path, *(tmp_path / place for place in places))
    assert left == [f"{places[-1]}/model.safetensors"]
    require_generation(tmp_path / places[-1], len(places) - 1)


@pytest.mark.parametrize("places", [["run", "run/model.safetensors"], ["run/model.safetensors", "run"]])
def test_a_file_and_its_directory(tmp_path, places):
    left = saved(tmp_path, *(tmp_path / place for place in places), hash="sha256")
    assert left == ["run/model.safetensors", "run/model.safetensors.manifest.json"]
    require_generation(tmp_path / places[-1], 1)
    assert stio.sync.load(tmp_path / places[-1], verify=True)


def test_two_families_of_names_in_one_directory(tmp_path):
    families = [
        {"filename_pattern": name, "max_shard_size": 20} for name in ("a{suffix}.safetensors", "b{suffix}.safetensors")
    ]
    left = saved(tmp_path, *((tmp_path / "run", family) for family in families))  # names no step: both stay
    names = ("-00001-of-00002.safetensors", "-00002-of-00002.safetensors", ".safetensors.index.json")
    assert left == [f"run/{family}{name}" for family in "ab" for name in names]


def test_a_directory_whose_name_ends_like_a_file(tmp_path):
    (tmp_path / "x-0.safetensors").mkdir()
    (tmp_path / "x-0.safetensors" / "mine").touch()
    left = saved(tmp_path, f"{tmp_path}/x-0.safetensors/", tmp_path / "y-1")
    assert left == ["x-0.safetensors/mine", "y-1/model.safetensors"]


def test_the_working_directory_changes(tmp_path, monkeypatch):
    for name in ("one", "two/step-0"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "two" / "step-0" / "model.safetensors").write_bytes(b"not the saver's")
    with stio.sync.Saver(keep_last=1) as saver:
        monkeypatch.chdir(tmp_path / "one")
        result = saver.save(generation(0), "step-0").result()
        monkeypatch.chdir(tmp_path / "two")
        saver.save(generation(1), "step-1")
    assert result.path == str(tmp_path / "one" / "step-0")
    assert os.listdir(tmp_path / "one") == []
    assert (tmp_path / "two" / "step-0" / "model.safetensors").read_bytes() == b"not the saver's"
