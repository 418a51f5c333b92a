"""Differential fuzzing of the header parser against the reference reader, `safetensors.deserialize`.

    python tests/fuzz_header.py --seconds 60 --min-cases 100000 [--seed 1]

Mutates a corpus of small files in memory. A file must be accepted by stio exactly if the reference reader accepts it
and none of the cases holds in which stio is stricter on purpose (`stricter_because`, read off the JSON by Python's
own `json`, independent of both parsers). Accepted files must yield the same tensors, byte for byte. Each file is parsed
by the fast path, by the plain path, and by both with windows so small that every cut is exercised; all must agree.

Prints the number of cases and what they were; exits with 1 and a reproducer on the first disagreement.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import safetensors

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from stio.errors import FormatError
from stio.format import header as header_module
from stio.format import json_scanner
from stio.format.header import Header, header_nbytes, parse_header
from stio.limits import Limits

LIMITS = Limits()
MAX_DATA_BYTES = 64

Case = tuple[bytes, int]
"""JSON of a header, and the number of data bytes behind it."""


def entry(name: str, dtype: str, shape: str, offsets: str, extra: str = "") -> str:
    return f'"{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}{extra}}}'


def corpus() -> list[Case]:
    """Return files that the reference reader accepts, each with something of its own."""
    a, b, c = (
        entry("a", "F32", "[2]", "[0,8]"),
        entry("b", "BF16", "[2,2]", "[8,16]"),
        entry("c", "U8", "[3]", "[16,19]"),
    )
    a2, b2 = a.replace(":", " : ").replace(",", ",\n  "), b.replace(",", ", ")
    texts: list[tuple[str, int]] = [
        ("{" + a + "}", 8),
        ("{}", 0),
        ("{" + f"{a},{b},{c}" + "}", 19),
        ("{" + f"{c},{a},{b}" + "}   ", 19),
        ('{"__metadata__":{"format":"pt"},' + a + "}", 8),
        ('{"__metadata__":{"format":"pt","k":"v","n":""},' + f"{a},{b}" + "}", 16),
        ("{" + a + ',"__metadata__":{"k":"}\\"{"}}', 8),
        ('{"__metadata__":null,' + a + "}", 8),
        ('{"__metadata__":{},' + f"{a},{b},{c}" + "}", 19),
        (" \n\t{ " + a2 + ",\n" + b2 + " }\r\n ", 16),
        ("{" + entry('\\u0061\\n\\"', "I8", "[]", "[0,1]") + "," + entry("é\u4e2d😀", "BOOL", "[1]", "[1,2]") + "}", 2),
        ("{" + entry("\\ud83d\\ude00", "F16", "[4]", "[0,8]") + "}", 8),
        ("{" + entry("x", "F4", "[4]", "[0,2]") + "," + entry("y", "F6_E2M3", "[4]", "[2,5]") + "}", 5),
        ("{" + entry("z", "F32", "[0,7]", "[0,0]") + "," + a + "," + entry("w", "I64", "[3,0]", "[8,8]") + "}", 8),
        ("{" + entry("a", "F32", "[2]", "[0,8]", ',"x":{"y":[1,-0,2.5e3,"s",null,true]}') + "," + b + "}", 16),
        ('{"":{"data_offsets":[0,1],"shape":[1],"dtype":"F8_E4M3"}}', 1),
        ("{" + entry("layer-0.w", "C64", "[1,2]", "[0,16]") + "," + entry(",-1", "U16", "[1]", "[16,18]") + "}", 18),
        ("{" + ",".join(entry(f"m.{i}.weight", "I16", "[1,2]", f"[{4 * i},{4 * i + 4}]") for i in range(12)) + "}", 48),
    ]
    return [(text.encode(), size) for text, size in texts]


TOKENS = [
    *(t.encode() for t in ("{", "}", "[", "]", ",", ":", '"', "\\", "-", "0", "1", ".", "e", " ", "\n", "\t", "},", '",', "},{")),
    *(b"null,true,false,NaN,Infinity,-0,-1,01,1.0,2e0,1e999,1e-400,0e99999,-,+1,0x1,1_0".split(b",")),
    *(str(n).encode() for n in (2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30, 10**310)),
    b'"dtype":"F32",', b'"dtype":', b'"shape":[2],', b'"shape":', b'"data_offsets":[0,8],', b'"data_offsets":',
    b'"__metadata__":{},', b'"__metadata__":null,', b'"__metadata__":{"a":"b","a":"c"},', b'"__metadata__":',
    b'{"F32":null}', b'["F32",[2],[0,8]]', b'{"F32":{}}', b"[0,9223372036854775807,9223372036854775807]",
    b"[4294967296,4294967296,0]", b"[0,4294967296,4294967296]", b"[" + b"1," * 64 + b"1]", b"[" + b"1," * 63 + b"1]",
    b"[" * 130, b"[" * 126 + b"]" * 126, b"[" * 125 + b"]" * 125, b'{"a":' * 60 + b"1" + b"}" * 60,
    b"\\u0061", b"\\ud800", b"\\udc00", b"\\ud83d\\ude00", b"\\n", b"\\x", b"\\u00", b"\\\\", b'\\"', b"\\/",
    b"\xff", b"\xed\xa0\x80", b"\xc3\xa9", b"\xc0\x80", b"\xf4\x90\x80\x80", b"\x00", b"\x01", b"\x1f", b"\x7f", b"\xef\xbb\xbf",
    b"F64", b"F16", b"BF16", b"U8", b"F4", b"F6_E3M2", b"F8_E8M0", b"BOOL", b"f32", b"F33", b"C64", b'"x":1,', b',"x":[]',
]  # fmt: skip

SWAPS = [
    (b'"F32"', b'{"F32":null}'),
    (
        b'"dtype":"F32","shape":[2],"data_offsets":[0,8]',
        b'"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]',
    ),
    (b'{"dtype":"F32","shape":[2],"data_offsets":[0,8]}', b'["F32",[2],[0,8]]'),
    (b"[2]", b"[2" + b",1" * 64 + b"]"),
    (b"[2]", b"[2" + b",1" * 63 + b"]"),
    (b"[0,7]", b"[0,9223372036854775808]"),
    (b"[0,7]", b"[0,9223372036854775807]"),
    (b"[0,7]", b"[4294967295,4294967296,0]"),
    (b"[0,7]", b"[0,18446744073709551616]"),
    (b"[0,7]", b"[0,4294967296,4294967296]"),
    (b'"format":"pt"', b'"form\\u0061t":"pt","format":"tf"'),
    (b'"a"', b'"\\u0061"'),
    (b'"b"', b'"a"'),
    (b'"dtype"', b'"dtyp\\u0065"'),
    (b",", b" , "),
    (b":", b":\t"),
    (b"}", b',"x":[{}]}'),
    (b'"shape"', b'"u":"\\"","shape"'),
    (b"0", b"-0"),
    (b'"b"', b'"__metadata__"'),
    (b'"shape"', b'"u":' + b"[" * 125 + b"]" * 125 + b',"shape"'),
    (b'"shape"', b'"u":' + b"[" * 126 + b"]" * 126 + b',"shape"'),
    (b"],", b'],"x":-0,'),
]
"""What stands somewhere in the corpus, and what it may be instead: changes that leave most of a file whole."""

NUMBERS = [b"0", b"1", b"2", b"3", b"4", b"7", b"8", b"16", b"18446744073709551615", b"9223372036854775808", b"-0"]


def mutate(rng: random.Random, cases: list[Case]) -> Case:
    """Return a file of the corpus with a few changes; one in twenty stays as it is but for the data's size."""
    raw, size = rng.choice(cases)
    text = bytearray(raw)
    for _ in range(rng.choice((0, 1, 1, 1, 1, 2, 2, 3, 5))):
        _change(rng, text, cases)
    if rng.random() < 0.05:
        size = max(0, size + rng.choice((-8, -1, 1, 8)))
    return bytes(text), size


def _change(rng: random.Random, text: bytearray, cases: list[Case]) -> None:
    at = rng.randrange(len(text) + 1)
    kind = rng.randrange(11)
    if kind == 0 and text:  # one byte is another
        text[min(at, len(text) - 1)] = rng.randrange(256) if rng.random() < 0.3 else rng.choice(b'{}[]",:\\-0129 aef')
    elif kind == 1:  # some bytes are gone
        del text[at : at + rng.choice((1, 1, 2, 5, 20))]
    elif kind in (2, 3):  # a token comes in, or replaces something
        text[at : at + rng.choice((0, 0, 1, 3))] = rng.choice(TOKENS)
    elif kind == 4:  # a number is another
        digits = [k for k, byte in enumerate(text) if 0x30 <= byte <= 0x39]
        if digits:
            start = stop = rng.choice(digits)
            while stop < len(text) and 0x30 <= text[stop] <= 0x39:
                stop += 1
            text[start:stop] = rng.choice(NUMBERS)
    elif kind == 5:  # a token stands at a place where JSON may go on
        marks = [k + 1 for k, byte in enumerate(text) if byte in b"{[,:"]
        if marks:
            at = rng.choice(marks)
            text[at:at] = rng.choice(TOKENS)
    elif kind == 6:  # a part comes twice
        part = text[at : at + rng.choice((1, 5, 60))]
        text[at:at] = part
    elif kind >= 8:  # one thing is spelled otherwise
        old, new = rng.choice(SWAPS)
        at = text.find(old, at) if rng.random() < 0.5 else text.find(old)
        if at >= 0:
            text[at : at + len(old)] = new
    else:  # members of another file come in, or a value is another one's
        other = rng.choice(cases)[0].strip()[1:-1]
        if other and text[:1] == b"{":
            text[1:1] = other + b","


def official(file: bytes) -> list[tuple[str, str, tuple[int, ...], bytes]] | None:
    """Return the reference reader's tensors, None where it refuses."""
    try:
        tensors = safetensors.deserialize(file)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError:
        return None
    return sorted((name, info["dtype"], tuple(info["shape"]), bytes(info["data"])) for name, info in tensors)


def stio_header(file: bytes) -> Header | None:
    """Return stio's header, None where it refuses. Any other error is a finding."""
    try:
        nbytes = header_nbytes(file[:8], file_bytes=len(file), limits=LIMITS, path="fuzz")
        return parse_header(file[8 : 8 + nbytes], file_bytes=len(file), path="fuzz", shard="fuzz", limits=LIMITS)
    except FormatError as error:
        str(error)  # a message that cannot be shown is a finding too
        return None


def columns(header: Header | None) -> tuple[Any, ...] | None:
    if header is None:
        return None
    return header.names, header.dtypes, header.shapes, header.begins, header.ends, header.metadata


class Pairs(list[tuple[str, Any]]):
    """A JSON object with all its members, also those that come twice."""


def stricter_because(raw: bytes) -> str | None:
    """Return the case in which stio is stricter that holds for a header the reference reader accepts.

    Independent of stio: Python's `json` reads the text, which is known to be good JSON.
    """
    root = json.loads(raw, object_pairs_hook=Pairs)
    names = [key for key, _ in root]
    if len(set(names)) != len(names):
        return "A26-A28 a name twice"
    for key, value in root:
        if key == "__metadata__":
            keys = [k for k, _ in value] if value is not None else []
            if len(set(keys)) != len(keys):
                return "A32 a metadata key twice"
            continue
        if not isinstance(value, Pairs):
            return "A36 an entry as a list"
        fields = dict(value)
        if _has_a_key_twice(value):
            return "A39 an unknown key twice"
        if isinstance(fields["dtype"], Pairs):
            return "A37 a dtype as an object"
        strided = 1
        for dimension in fields["shape"]:
            strided *= dimension or 1
        if strided > 2**63 - 1:
            return "A50-A51 too many elements to stride"
        if len(fields["shape"]) > LIMITS.max_rank:
            return "A52 a rank above the limit"
    return None


def _has_a_key_twice(value: object) -> bool:
    if isinstance(value, Pairs):
        keys = [key for key, _ in value]
        return len(set(keys)) != len(keys) or any(_has_a_key_twice(inner) for _, inner in value)
    return isinstance(value, list) and any(map(_has_a_key_twice, value))


@contextmanager
def variant(*, fast: bool, window: int | None) -> Iterator[None]:
    """Parse without the fast path, or with another window."""
    with ExitStack() as stack:
        if not fast:
            stack.enter_context(mock.patch.object(json_scanner.Scanner, "decode_members", lambda *_: None))
        if window is not None:
            stack.enter_context(mock.patch.object(header_module, "WINDOW_BYTES", window))
            stack.enter_context(mock.patch.object(json_scanner, "WINDOW_BYTES", window))
        yield


def check(case: Case, header: Header | None) -> tuple[str, str | None]:
    """Return what kind of case this is, and what is wrong with what stio made of it (None if nothing is)."""
    raw, _ = case
    file = file_of(case)
    reference = official(file)
    reason = stricter_because(raw) if reference is not None else None
    expected = reference is not None and reason is None
    kind = reason or ("accepted" if expected else "refused")
    if (header is not None) != expected:
        return kind, f"stio {'accepts' if header is not None else 'refuses'}, expected was: {kind}"
    if header is not None and reference is not None:
        data = file[header.data_start :]
        rows = zip(header.names, header.dtypes, header.shapes, header.begins, header.ends, strict=True)
        ours = sorted((name, dtype, shape, data[begin:end]) for name, dtype, shape, begin, end in rows)
        if ours != reference:
            return kind, f"tensors differ: {ours} != {reference}"
        if header.metadata != (json.loads(raw).get("__metadata__") or {}):
            return kind, f"metadata differ: {header.metadata}"
    return kind, None


def run(*, seconds: float, min_cases: int, seed: int, report: Callable[[str], None] = print) -> int:
    """Fuzz for a time and a number of cases, whichever takes longer; return the number of disagreements (0 or 1)."""
    cases = corpus()
    counts: Counter[str] = Counter()
    start = time.perf_counter()
    done = 0
    batch_cases = 500
    while done < min_cases or time.perf_counter() - start < seconds:
        rng = random.Random(f"{seed}/{done}")
        batch = [mutate(rng, cases) for _ in range(batch_cases)] if done else cases
        results = []
        for case in batch:
            try:
                header = stio_header(file_of(case))
                results.append(columns(header))
                kind, problem = check(case, header)
            except Exception as error:  # noqa: BLE001 - anything but a FormatError is a finding
                kind, problem = "crash", repr(error)
            counts[kind] += 1
            if problem:
                return _found(report, case, seed, problem)
        for fast, window in ((False, None), (True, 24), (False, 24)):
            with variant(fast=fast, window=window):
                for case, result in zip(batch, results, strict=True):
                    other = columns(stio_header(file_of(case)))
                    if other != result:
                        return _found(report, case, seed, f"fast={fast} window={window}: {other} != {result}")
        done += len(batch)
    elapsed = time.perf_counter() - start
    report(f"{done} headers in {elapsed:.1f} s ({done / elapsed:.0f} a second), seed {seed}, no disagreement")
    for kind, number in counts.most_common():
        report(f"  {number:8d}  {kind}")
    return 0


def file_of(case: Case) -> bytes:
    raw, size = case
    return len(raw).to_bytes(8, "little") + raw + bytes(range(1, size + 1))


def _found(report: Callable[[str], None], case: Case, seed: int, problem: str) -> int:
    raw, size = case
    report(f"DISAGREEMENT (seed {seed}): {problem}\n  header: {raw!r}\n  hex: {raw.hex()}\n  data bytes: {size}")
    return 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="fuzz at least this long")
    parser.add_argument("--min-cases", type=int, default=100_000, help="fuzz at least so many headers")
    parser.add_argument("--seed", type=int, default=1, help="same seed, same headers")
    options = parser.parse_args()
    return run(seconds=options.seconds, min_cases=options.min_cases, seed=options.seed)


if __name__ == "__main__":
    sys.exit(main())
