"""Tensors that share memory: saved once, each by itself, or refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stio.errors import FormatError, LimitError, SharedTensorsError
from stio.format import json_scanner
from stio.format.shared import TensorSource, overlap_groups, parse_aliases, resolve_shared


def source(name: str, key: object = None, span: tuple[int, int] = (0, 4), **fields: object) -> TensorSource:
    values = {"dtype": "F32", "shape": (1,), "nbytes": span[1] - span[0], "layout": (1,), "data": None, **fields}
    return TensorSource(name=name, storage_key=key, span=span, **values)  # type: ignore[arg-type]


def kept(sources: list[TensorSource], policy: str = "dedupe") -> tuple[list[str], dict[str, str]]:
    left, aliases = resolve_shared(sources, policy)  # type: ignore[arg-type]
    return [one.name for one in left], aliases


def test_equal_tensors_are_saved_once_under_the_name_that_comes_first() -> None:
    sources = [source("c", "s"), source("a", "s"), source("b", "s"), source("x")]
    assert kept(sources) == (["c", "x"], {"a": "c", "b": "c"})
    assert kept(sources[::-1]) == (["x", "b"], {"a": "b", "c": "b"})


@pytest.mark.parametrize(
    "other",
    [
        {"key": "t"},
        {"key": None},
        {"span": (0, 8)},
        {"span": (4, 8)},
        {"dtype": "I32"},
        {"shape": (1, 1)},
        {"layout": (2,)},
    ],
)
def test_what_differs_at_all_has_bytes_of_its_own(other: dict[str, object]) -> None:
    sources = [source("a", key="s"), source("b", **{"key": "s", **other})]  # type: ignore[arg-type]
    assert kept(sources) == (["a", "b"], {})


def test_a_view_and_its_base_are_both_kept() -> None:
    """The hub would keep the base alone."""
    sources = [source("view", "s", (4, 8)), source("base", "s", (0, 16)), source("twin", "s", (4, 8))]
    assert kept(sources) == (["view", "base"], {"twin": "view"})


def test_empty_tensors_are_nobodys_alias() -> None:
    sources = [source("a", "s", (0, 0)), source("b", "s", (0, 0))]
    assert kept(sources) == (["a", "b"], {})
    assert kept(sources, "error") == (["a", "b"], {})


def test_clone_keeps_everything() -> None:
    assert kept([source("b", "s"), source("a", "s")], "clone") == (["b", "a"], {})


def test_error_names_the_groups() -> None:
    sources = [
        source("whole", "s", (0, 100)),
        source("left", "s", (0, 10)),
        source("right", "s", (50, 60)),  # begins after `left` ends, but not after `whole` does
        source("beside", "s", (100, 110)),
        source("alone", "t"),
        source("tied", "u"),
        source("tied too", "u"),
    ]
    with pytest.raises(SharedTensorsError) as caught:
        resolve_shared(sources, "error")
    assert "'left', 'whole', 'right'; 'tied', 'tied too'." in str(caught.value)
    assert "beside" not in str(caught.value) and "alone" not in str(caught.value)


def test_error_passes_disjoint_parts_of_one_storage() -> None:
    sources = [source("right", "s", (4, 8)), source("left", "s", (0, 4)), source("x")]
    assert kept(sources, "error") == (["right", "left", "x"], {})


def test_error_stays_short() -> None:
    sources = [source(f"{k}{'x' * 300}", k // 100) for k in range(1000)]
    with pytest.raises(SharedTensorsError, match="and 99 others.*and 7 more groups") as caught:
        resolve_shared(sources, "error")
    assert len(str(caught.value)) < 4000


def test_overlaps_hang_together() -> None:
    spans = [(50, 60, "right"), (0, 100, "whole"), (0, 10, "left"), (100, 110, "beside"), (105, 120, "last")]
    assert list(overlap_groups(spans)) == [["left", "whole", "right"], ["beside", "last"]]
    assert list(overlap_groups([])) == []
    assert list(overlap_groups([(0, 4, "a"), (4, 8, "b"), (2**63, 2**63 + 1, "c")])) == [["a"], ["b"], ["c"]]


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 8)), max_size=12))
def test_groups_are_those_of_a_plain_search(pairs: list[tuple[int, int]]) -> None:
    spans = [(begin, begin + nbytes, str(k)) for k, (begin, nbytes) in enumerate(pairs)]
    groups = [{name} for *_, name in spans]
    for begin, end, name in spans:
        for other_begin, other_end, other in spans:
            if begin < other_end and other_begin < end:
                joined = {name, other}.union(*(group for group in groups if {name, other} & group))
                groups = [*(group for group in groups if not group & joined), joined]
    assert sorted(map(sorted, overlap_groups(spans))) == sorted(map(sorted, groups))


def test_aliases_as_text() -> None:
    aliases = {"é": "a", "b\n": 'a"'}
    assert parse_aliases(json.dumps(aliases, ensure_ascii=False), path="f", max_aliases=2) == aliases
    assert parse_aliases(" {} ", path="f", max_aliases=0) == {}


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", "5", '"a"', "{}x", '{"a":5}', '{"a":{}}', "{'a':'b'}", '{"a":"b",}'),
        *('{"a":"b","a":"b"}', "[" * 100_000, '{"a":' * 100_000, '{"a":' + "9" * 5000 + "}"),
        *('{"a":"\\ud800"}', '{"a":"\ud800"}', "\ufeff{}"),
    ],
    ids=range(18),
)
def test_malformed_text_of_aliases(text: str) -> None:
    with pytest.raises(FormatError, match="aliases") as caught:
        parse_aliases(text, path="f", max_aliases=10)
    assert type(caught.value) is FormatError
    assert caught.value.path == "f"
    assert caught.value.offset is None
    assert len(str(caught.value)) < 500


def test_many_aliases_are_counted() -> None:
    text = json.dumps({f"x{k}": "a" for k in range(30_000)})
    assert len(parse_aliases(text, path="f", max_aliases=30_000)) == 30_000
    with pytest.raises(LimitError, match="aliases"):
        parse_aliases(text, path="f", max_aliases=29_999)


@pytest.mark.slow
def test_no_call_decodes_much_more_than_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of a decoder holds the interpreter's lock, and an author can write any number of aliases."""
    sizes = []
    decode = json_scanner._decode_strings

    def counted(raw: bytes) -> dict[str, str]:
        sizes.append(len(raw))
        return decode(raw)

    monkeypatch.setattr(json_scanner, "_decode_strings", counted)
    text = json.dumps({f"x{k}": "a" for k in range(100_000)})
    assert len(parse_aliases(text, path="f", max_aliases=100_000)) == 100_000
    assert len(sizes) > 2
    assert max(sizes) < 2 * json_scanner.WINDOW_BYTES
