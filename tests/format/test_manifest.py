"""Manifests: what is read, what is refused, what a save puts there before and after its commit."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys

import pytest

from stio.errors import FormatError, LimitError
from stio.format.files.manifest import ALGORITHMS, FileState, Manifest, manifest_change, new_hasher
from stio.runtime.memory import allocate

A, B, C = ("a" * 64, "b" * 64, "c" * 64)
NAME = "model.safetensors.manifest.json"


def entry(digest=A, nbytes=8):
    return {"nbytes": nbytes, "digest": digest}


def document(**parts):
    return {"version": 1, "algorithm": "sha256", "files": {"m.safetensors": [entry()]}, **parts}


def parsed(content):
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    return Manifest.parse(raw, path="dir/m.manifest.json")


def manifest(**files):
    return Manifest(
        "sha256", {name: tuple(FileState(8, digest) for digest in digests) for name, digests in files.items()}
    )


# The file.


def test_written_and_read_again():
    content = manifest(b=[A, B], a=[C], **{"né\n": [A]})
    raw = content.encode()
    assert parsed(raw) == content
    assert json.loads(raw) == {
        "version": 1,
        "algorithm": "sha256",
        "files": {"a": [entry(C)], "b": [entry(A), entry(B)], "né\n": [entry(A)]},
    }
    assert raw.startswith(b'{\n  "version": 1,\n  "algorithm": "sha256",\n  "files": {\n    "a": [\n      {\n')


def test_equal_content_is_equal_bytes():
    assert manifest(a=[A], b=[B]).encode() == manifest(b=[B], a=[A]).encode()


def test_no_files():
    assert parsed(document(files={})) == Manifest("sha256", {})
    assert parsed(manifest().encode()) == manifest()


def test_any_order_and_spacing():
    text = f' {{ "files" : {{ "x" : [ {{ "digest" : "{A}" , "nbytes" : 3 }} ] }} , "algorithm":"sha256","version":1}}\n'
    assert parsed(text.encode()) == Manifest("sha256", {"x": (FileState(3, A),)})


def test_names_are_opaque_keys():
    names = ["../../etc/passwd", "/dev/zero", "", "\x1b[2J", "a\0b", "C:x"]
    assert list(parsed(document(files={name: [entry()] for name in names})).files) == names


def test_a_name_without_utf8_cannot_be_written():
    with pytest.raises(ValueError, match="not UTF-8"):
        manifest(**{"\udcff.safetensors": [A]}).encode()


VALID = json.dumps(document())

MALFORMED = {
    "empty": b"",
    "spaces": b"   ",
    "null": b"null",
    "array": b"[]",
    "string": b'"x"',
    "empty object": b"{}",
    "BOM": b"\xef\xbb\xbf" + VALID.encode(),
    "UTF-16": VALID.encode("utf-16"),
    "cut": VALID[:-1].encode(),
    "text after the end": VALID.encode() + b"{}",
    "NUL after the end": VALID.encode() + b"\0",
    "trailing comma": VALID[:-1].encode() + b",}",
    "single quotes": VALID.replace('"', "'").encode(),
    "no version": {k: v for k, v in document().items() if k != "version"},
    "no algorithm": {k: v for k, v in document().items() if k != "algorithm"},
    "no files": {k: v for k, v in document().items() if k != "files"},
    "unknown key": document(more=1),
    "version twice": VALID.replace('"version": 1', '"version": 1, "version": 1').encode(),
    "algorithm twice": VALID.replace('"algorithm"', '"algorithm": "sha256", "algorithm"').encode(),
    "files twice": VALID[:-1].encode() + b', "files": {}}',
    "version 0": document(version=0),
    "version 2": document(version=2),
    "version 1.0": document(version=1.0),
    "version true": document(version=True),
    "version text": document(version="1"),
    "version -1": document(version=-1),
    "version null": document(version=None),
    "md5": document(algorithm="md5"),
    "SHA256": document(algorithm="SHA256"),
    "algorithm null": document(algorithm=None),
    "algorithm number": document(algorithm=256),
    "files array": document(files=[]),
    "files null": document(files=None),
    "a name twice": VALID.replace('"m.safetensors"', f'"x": [{json.dumps(entry())}], "x"').encode(),
    "a name twice by an escape": VALID.replace('"m.safetensors"', f'"x": [{json.dumps(entry())}], "\\u0078"').encode(),
    "half a surrogate pair": VALID.replace("m.safetensors", "\\ud800").encode(),
    "invalid UTF-8": VALID.replace("m.safetensors", "X").encode().replace(b"X", b"\xff"),
    "no states": document(files={"x": []}),
    "state no list": document(files={"x": entry()}),
    "states null": document(files={"x": None}),
    "state null": document(files={"x": [None]}),
    "state empty": document(files={"x": [{}]}),
    "state text": document(files={"x": [A]}),
    "state with more": document(files={"x": [{**entry(), "mtime": 1}]}),
    "comma after the last state": VALID.replace("}]", "},]").encode(),
    "no comma between states": VALID.replace("}]", "} {}]").encode(),
    "no size": document(files={"x": [{"digest": A}]}),
    "no digest": document(files={"x": [{"nbytes": 8}]}),
    "size twice": VALID.replace('"nbytes": 8', '"nbytes": 8, "nbytes": 8').encode(),
    "size negative": document(files={"x": [entry(nbytes=-8)]}),
    "size minus zero": VALID.replace('"nbytes": 8', '"nbytes": -0').encode(),
    "size a float": document(files={"x": [entry(nbytes=8.0)]}),
    "size a text": document(files={"x": [entry(nbytes="8")]}),
    "size of 65 bits": document(files={"x": [entry(nbytes=2**64)]}),
    "size of 5000 digits": VALID.replace('"nbytes": 8', '"nbytes": ' + "9" * 5000).encode(),
    "digest short": document(files={"x": [entry(A[:-1])]}),
    "digest long": document(files={"x": [entry(A + "a")]}),
    "digest in capitals": document(files={"x": [entry("A" * 64)]}),
    "digest no hexadecimal": document(files={"x": [entry("g" * 64)]}),
    "digest with a newline": document(files={"x": [entry("a" * 63 + "\n")]}),
    "digest in other digits": document(files={"x": [entry("٣" * 64)]}),
    "digest empty": document(files={"x": [entry("")]}),
    "digest null": document(files={"x": [entry(None)]}),
    "digest number": document(files={"x": [entry(1)]}),
    "digest of the other algorithm": document(algorithm="xxh3"),
    "deep": b'{"version": ' + b"[" * 100_000,
}


@pytest.mark.matrix
@pytest.mark.parametrize("case", MALFORMED)
def test_malformed(case):
    with pytest.raises(FormatError) as caught:
        parsed(MALFORMED[case])
    assert caught.value.path == "dir/m.manifest.json"
    assert type(caught.value) is FormatError
    assert str(caught.value).isprintable()


def test_too_long(monkeypatch):
    raw = manifest(a=[A]).encode()
    monkeypatch.setattr(Manifest, "MAX_BYTES", len(raw))
    assert parsed(raw)
    monkeypatch.setattr(Manifest, "MAX_BYTES", len(raw) - 1)
    with pytest.raises(LimitError, match="too long"):
        parsed(raw)


def test_any_cut_is_refused():
    raw = manifest(a=[A, B], b=[C]).encode().rstrip()
    for stop in range(len(raw)):
        with pytest.raises(FormatError):
            parsed(raw[:stop])


def test_any_changed_byte_is_refused_or_read():
    raw = manifest(a=[A, B], b=[C]).encode()
    random.seed(5)
    for _ in range(3000):
        changed = bytearray(raw)
        changed[random.randrange(len(raw))] = random.randrange(256)
        try:
            parsed(bytes(changed))
        except FormatError:
            pass


@pytest.mark.slow
def test_a_large_one():
    files = {f"model-{k:05}.safetensors": [f"{k:064x}"] for k in range(20_000)}
    assert parsed(manifest(**files).encode()) == manifest(**files)


# Hashes.


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("nbytes", [0, 1, 2047, 2048, 300_001])
def test_hashes_of_memory(algorithm, nbytes):
    if algorithm == "xxh3":
        xxhash = pytest.importorskip("xxhash")
    data = random.Random(nbytes).randbytes(nbytes)
    region = allocate(nbytes + 7)
    region.write(7, data)
    hasher = new_hasher(algorithm)
    hasher.update(region.sub(7, nbytes // 2).view())
    hasher.update(region.sub(7 + nbytes // 2, nbytes - nbytes // 2).view())
    expected = hashlib.sha256(data) if algorithm == "sha256" else xxhash.xxh3_128(data)
    assert hasher.hexdigest() == expected.hexdigest()
    assert len(hasher.hexdigest()) == ALGORITHMS[algorithm]


@pytest.mark.parametrize("algorithm", ["md5", "", "SHA256", None, True])
def test_unknown_algorithms(algorithm):
    with pytest.raises(ValueError, match="hash= takes one of 'sha256', 'xxh3', not"):
        new_hasher(algorithm)


def test_a_missing_package_is_named():
    code = (
        "import sys; sys.modules['xxhash'] = None\n"
        "from stio.format.files.manifest import new_hasher\n"
        "new_hasher('sha256')\n"
        "try: new_hasher('xxh3')\n"
        "except ImportError as error: print(error)"
    )
    # A real interpreter without torch: what it imports. So is the next one.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "the hash xxh3 comes from the package xxhash: pip install 'stio-torch[hash]'\n"


@pytest.mark.slow
def test_no_torch():
    code = (
        "import sys, stio.storage.checkpoint.integrity; print(sorted({'torch', 'numpy', 'xxhash'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# What a save changes.

NEW = {"m": FileState(8, B), "n": FileState(8, C)}
AFTER = manifest(m=[B], n=[C]).encode()


def test_a_hashed_save_names_old_and_new_before_and_new_after():
    old = manifest(m=[A], k=[A]).encode()
    before, after = manifest_change(old, "sha256", NEW, path=NAME)
    assert after == AFTER
    assert parsed(before) == manifest(k=[A], m=[A, B], n=[C])


def test_the_same_file_again_is_one_state():
    assert manifest_change(AFTER, "sha256", NEW, path=NAME) == (AFTER, AFTER)


def test_what_an_interrupted_save_left_is_kept_until_the_next_commit():
    left = manifest(m=[A, C]).encode()
    before, after = manifest_change(left, "sha256", NEW, path=NAME)
    assert parsed(before).files["m"] == (FileState(8, A), FileState(8, C), FileState(8, B))
    assert after == AFTER


@pytest.mark.parametrize(
    "old",
    [None, b"", b"{}", b"\xff", json.dumps(document(algorithm="xxh3", files={"m": [entry("a" * 32)]})).encode()],
    ids=["none", "empty", "malformed", "binary", "another algorithm"],
)
def test_a_crash_leaves_no_manifest_that_calls_the_old_files_wrong(old):
    assert manifest_change(old, "sha256", NEW, path=NAME) == (None, AFTER)


@pytest.mark.parametrize("old", [b"", AFTER])
def test_a_save_without_hash_takes_the_manifest_away(old):
    assert manifest_change(old, None, {}, path=NAME) == (None, None)


def test_a_save_without_hash_where_there_is_no_manifest():
    assert manifest_change(None, None, {}, path=NAME) is None
