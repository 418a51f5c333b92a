"""The names of a checkpoint's files are the hub's, and files of other programs do not match."""

from __future__ import annotations

import pytest

from stio.format.files.names import FilePattern, check_shard_name

PATTERN = "model{suffix}.safetensors"
SAVE_ID = "0123456789ab"


def test_names() -> None:
    assert FilePattern(PATTERN).shard(0, 1) == "model.safetensors"
    assert FilePattern(PATTERN).shard(0, 3) == "model-00001-of-00003.safetensors"
    assert FilePattern(PATTERN).shard(2, 3) == "model-00003-of-00003.safetensors"
    assert FilePattern(PATTERN).shard(0, 1, save_id=SAVE_ID) == f"model-{SAVE_ID}-00001-of-00001.safetensors"
    assert FilePattern(PATTERN).shard(1, 2, save_id=SAVE_ID) == f"model-{SAVE_ID}-00002-of-00002.safetensors"
    assert FilePattern(PATTERN).index == "model.safetensors.index.json"
    assert FilePattern(PATTERN).manifest == "model.safetensors.manifest.json"


@pytest.mark.parametrize(
    "pattern", [PATTERN, "x{suffix}.v1.safetensors", "diffusion_pytorch_model{suffix}.fp16.safetensors", "é{suffix}.safetensors"]
)  # fmt: skip
def test_patterns(pattern: str) -> None:
    FilePattern(pattern).require_safe()
    for k, n, save_id in [(0, 1, None), (1, 3, None), (0, 1, SAVE_ID), (4, 100_000, SAVE_ID)]:
        name = FilePattern(pattern).shard(k, n, save_id=save_id)
        check_shard_name(name, path="x")
        assert FilePattern(pattern).matches(name)
    assert FilePattern(pattern).matches(FilePattern(pattern).index)


@pytest.mark.parametrize(
    "pattern",
    [
        "model.safetensors", "", "model{suffix}.bin", "model.safetensors{suffix}", "{suffix}", "{suffix}.safetensors",
        "model{suffix}{suffix}.safetensors", "model{suffix}{rank}.safetensors", "model{}{suffix}.safetensors",
        "model{suffix:>20}.safetensors", "model{suffix!r}.safetensors", "model{suffix.safetensors", "model{{suffix}}.safetensors", "{{a}}{suffix}.x.safetensors",
        "a/model{suffix}.safetensors", "..\\model{suffix}.safetensors", "/model{suffix}.safetensors", "m\0{suffix}.safetensors",
        "C:model{suffix}.safetensors", "m\n{suffix}.safetensors", "m%2e{suffix}.safetensors", "m\ud800{suffix}.safetensors",
    ],
)  # fmt: skip
def test_bad_patterns(pattern: str) -> None:
    with pytest.raises(ValueError, match="filename pattern"):
        FilePattern(pattern).require_safe()


def test_a_pattern_is_text() -> None:
    with pytest.raises(TypeError):
        FilePattern(b"model{suffix}.safetensors")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "belongs"),
    [
        ("model.safetensors", True),
        ("model-00001-of-00002.safetensors", True),
        ("model-100000-of-100000.safetensors", True),
        ("model.safetensors.index.json", True),
        ("model-00001-of-00002.safetensors.index.json", True),
        (f"model-{SAVE_ID}-00001-of-00002.safetensors", True),
        ("model-finetuned-00001-of-00002.safetensors", False),
        (f"model-{SAVE_ID}.safetensors", False),
        ("model.safetensors.backup", False),
        ("model.safetensors.manifest.json", False),
        ("model-1-of-2.safetensors", False),
        ("model-\u0660\u0660\u0660\u0660\u0661-of-00002.safetensors", False),
        ("model-00001-of-00002.safetensors\n", False),
        ("modelXsafetensors", False),
        ("old-model.safetensors", False),
        ("config.json", False),
    ],
)
def test_what_belongs_to_a_checkpoint(name: str, belongs: bool) -> None:
    assert FilePattern(PATTERN).matches(name) is belongs
