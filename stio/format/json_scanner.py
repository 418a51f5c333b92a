"""A strict JSON scanner over bytes: the slow path behind the fast decoders.

It accepts what RFC 8259 and the format's reference reader accept, and nothing more. Python's `json` is not enough
for untrusted text: it recurses, accepts lone surrogates and NaN, fails on integers of more than 4300 digits with
an error of its own, and decodes a document in one call (`gil_slices.py`). Here the depth is bounded, no C call gets
more than `WINDOW_BYTES` of the text, and every error has the offset of its byte.

The fast path is `decode_members`: msgspec decodes many members in one call. It accepts repeated keys, which
this module refuses; the number of quotes shows them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import msgspec

from stio.errors import FormatError, IndexFormatError
from stio.format.dtypes import U64_MAX
from stio.format.gil_slices import WINDOW_BYTES

MAX_DEPTH = 127
"""Most containers open at once, the root included (serde_json's limit, which the reference reader has)."""

MAX_NUMBER_BYTES = 4096
"""Longest number in a skipped value. Stricter than the reference reader, which takes a longer fraction."""

_SPACE = re.compile(rb"[ \t\n\r]*+")
_SHORT_STRING = re.compile(rb'"([^"\\\x00-\x1f]*+)"')
_STRING_RUN = re.compile(rb'(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+')
_HIGH_SURROGATE_END = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")
_INTEGER = re.compile(rb"0|[1-9][0-9]*+")
_NUMBER = re.compile(rb"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?")
_LITERAL = re.compile(rb"true|false|null")
_NUMBER_BYTES = frozenset(b"+-.0123456789eE")

_QUOTE, _COMMA, _COLON = b'",:'
_OPEN_OBJECT, _CLOSE_OBJECT, _OPEN_ARRAY, _CLOSE_ARRAY = b"{}[]"

_STRING_QUOTES = 4
_decode_strings = msgspec.json.Decoder(dict[str, str]).decode


class Scanner:
    """A position in JSON text, with strict steps over it.

    Args:
        raw: The text.
        path: File to name in errors.
        base: Offset of `raw` in that file, added to positions in errors.
        error: Class of the errors raised.
        what: What the text is, for messages.
    """

    __slots__ = ("_base", "_error", "_what", "end", "path", "pos", "raw")

    def __init__(
        self, raw: bytes, *, path: str, base: int, error: type[FormatError | IndexFormatError], what: str
    ) -> None:
        self.raw = raw
        self.pos = 0
        self.end = len(raw)
        self.path = path
        self._base = base
        self._error = error
        self._what = what

    def fail(self, message: str, *, at: int | None = None, expected: object = None, found: object = None) -> NoReturn:
        """Raise the scanner's error, by default at the current position, with the text there as what was found."""
        at = self.pos if at is None else at
        if found is None:
            found = repr(self.raw[at : at + 20])[1:] if at < self.end else "the end"
        raise self._error(
            f"{self._what}: {message}", path=self.path, offset=self._base + at, expected=expected, found=found
        )

    def trim(self) -> None:
        """Exclude white space at both ends."""
        self.skip_space()
        while self.end > self.pos:
            start = max(self.pos, self.end - WINDOW_BYTES)
            num_left = len(self.raw[start : self.end].rstrip(b" \t\n\r"))
            self.end = start + num_left
            if num_left:
                return

    def skip_space(self) -> None:
        """Go to the next byte that is not white space."""
        raw, pos, end = self.raw, self.pos, self.end
        while pos < end and raw[pos] <= 0x20:
            match = _SPACE.match(raw, pos, min(pos + WINDOW_BYTES, end))
            if match is None or match.end() == pos:
                break  # a control character: the next read refuses it
            pos = match.end()
        self.pos = pos

    def peek(self) -> int:
        """Return the byte at the position, -1 at the end."""
        return self.raw[self.pos] if self.pos < self.end else -1

    def take(self, byte: int) -> None:
        """Step over one expected byte, and the white space around it."""
        self.skip_space()
        if self.peek() != byte:
            self.fail("malformed JSON", expected=repr(chr(byte)))
        self.pos += 1
        self.skip_space()

    def open_object(self) -> bool:
        """Step into an object; return whether it has members. It steps over an empty one."""
        self.take(_OPEN_OBJECT)
        if self.peek() == _CLOSE_OBJECT:
            self.pos += 1
            return False
        return True

    def next_member(self) -> bool:
        """Step over the comma before a further member and return True, or over the object's end and return False."""
        self.skip_space()
        byte = self.peek()
        if byte not in (_COMMA, _CLOSE_OBJECT):
            self.fail("malformed JSON", expected="',' or '}'")
        self.pos += 1
        if byte == _CLOSE_OBJECT:
            return False
        self.skip_space()
        return True

    def members(self) -> Iterator[tuple[int, str]]:
        """Yield the position and the key of each member of an object; the caller reads the value before the next."""
        has_members = self.open_object()
        while has_members:
            start = self.pos
            yield start, self.key()
            has_members = self.next_member()

    def elements(self) -> Iterator[None]:
        """Yield before each element of an array; the caller reads it before the next."""
        self.take(_OPEN_ARRAY)
        has_elements = self.peek() != _CLOSE_ARRAY
        while has_elements:
            yield
            self.skip_space()
            has_elements = self.peek() != _CLOSE_ARRAY
            if has_elements:
                self.take(_COMMA)
        self.pos += 1

    def finish(self) -> None:
        """Require that the text ends here."""
        self.skip_space()
        if self.pos != self.end:
            self.fail("text after the end of the JSON object", expected="nothing but white space")

    def key(self) -> str:
        """Read a member's key and its colon."""
        key = self.string()
        self.take(_COLON)
        return key

    def string(self) -> str:
        """Read a string.

        A short one costs one match. A long one is read window by window and appended in place: CPython grows a string
        with a single reference by `realloc`, so 90 MB are not copied again for each window.
        """
        start = self.pos
        match = _SHORT_STRING.match(self.raw, start, min(start + WINDOW_BYTES, self.end))
        if match is not None:
            self.pos = match.end()
            return self._decode_text(match[1], start + 1, escaped=False)
        if self.peek() != _QUOTE:
            self.fail("malformed JSON", expected="a string")
        self.pos += 1
        text = ""
        while self.peek() != _QUOTE:
            text += self._string_run()
        self.pos += 1
        return text

    def _string_run(self) -> str:
        """Read a part of a string, at most a window; neither a character nor a surrogate pair is split."""
        raw, pos = self.raw, self.pos
        match = _STRING_RUN.match(raw, pos, min(pos + WINDOW_BYTES, self.end))
        stop = match.end() if match is not None else pos
        if stop == pos:
            self.fail("malformed string" if pos < self.end else "a string does not end", at=min(pos, self.end))
        if stop < self.end and raw[stop] != _QUOTE:
            if stop - 6 > pos and _HIGH_SURROGATE_END.match(raw, stop - 6, stop):
                before = raw[pos : stop - 6]
                if (len(before) - len(before.rstrip(b"\\"))) % 2 == 0:  # else that backslash is itself escaped
                    stop -= 6
            for _ in range(3):  # a UTF-8 character has at most three bytes after its first
                if stop - 1 > pos and raw[stop] & 0xC0 == 0x80 and raw[stop - 1] >= 0x80:  # not into an escape
                    stop -= 1
        self.pos = stop
        return self._decode_text(raw[pos:stop], pos, escaped=True)

    def _decode_text(self, text: bytes, at: int, *, escaped: bool) -> str:
        try:
            decoded = text.decode()
            if escaped and "\\" in decoded:
                decoded = json.loads(f'"{decoded}"')
                decoded.encode()  # `json` accepts lone surrogates; encoding them raises
        except UnicodeDecodeError as problem:
            self.fail("a string is not UTF-8", at=at + problem.start)
        except UnicodeEncodeError:
            self.fail("a string holds half of a surrogate pair", at=at)
        return str(decoded)

    def integer(self) -> int:
        """Read an integer of 0 to 2**64 - 1, spelled as the reference reader requires: no sign, point or exponent."""
        match = _INTEGER.match(self.raw, self.pos, min(self.pos + 21, self.end))
        stop = match.end() if match is not None else self.pos
        value = int(match[0]) if match is not None else -1
        if not 0 <= value <= U64_MAX or (stop < self.end and self.raw[stop] in _NUMBER_BYTES):
            self.fail("not a number of the format", expected="an integer from 0 to 2**64 - 1")
        self.pos = stop
        return value

    def integers(self, *, at_most: int) -> list[int]:
        """Read an array of integers.

        Returns:
            The integers; where there are more than `at_most`, the first `at_most + 1` of them, and the position
            stays inside the array. So no list grows beyond what the caller accepts.
        """
        if self.peek() != _OPEN_ARRAY:
            self.fail("malformed JSON", expected="an array of integers")
        values: list[int] = []
        for _ in self.elements():
            values.append(self.integer())
            if len(values) > at_most:
                break
        return values

    def string_map(self, *, shared_values: dict[str, str] | None = None) -> dict[str, str]:
        """Read an object of strings.

        Args:
            shared_values: Where given, equal values become one object, and this dict collects them in order of first
                appearance.
        """
        strings: dict[str, str] = {}
        slow_until = 0
        has_members = self.open_object()
        while has_members:
            start = stop = self.pos
            if start >= slow_until:
                stop = self._end_of_strings()
                slow_until = stop if stop > start else start + WINDOW_BYTES
            if stop <= start or not self._add_strings(strings, stop, shared_values):
                key = self.key()
                if key in strings:
                    self.fail("a key occurs twice", at=start, expected="distinct keys", found=key)
                value = self.string()
                strings[key] = value if shared_values is None else shared_values.setdefault(value, value)
            has_members = self.next_member()
        return strings

    def _end_of_strings(self) -> int:
        """Return where a slice of members may end: before a brace, else after the last string that a comma follows."""
        stop = min(self.pos + WINDOW_BYTES, self.end)
        brace = self.raw.find(b"}", self.pos, stop)
        return brace if brace >= 0 else self.raw.rfind(b'",', self.pos, stop) + 1

    def _add_strings(self, strings: dict[str, str], stop: int, shared_values: dict[str, str] | None) -> bool:
        """Decode the members up to `stop` at once; return whether that was possible, and change nothing if not."""
        members = self.decode_members(_decode_strings, self.raw[self.pos : stop], _STRING_QUOTES)
        if not members or not strings.keys().isdisjoint(members):
            return False
        if shared_values is None:
            strings.update(members)
        else:
            for value in dict.fromkeys(members.values()):
                shared_values.setdefault(value, value)
            strings.update(zip(members, map(shared_values.__getitem__, members.values()), strict=True))
        self.pos = stop
        return True

    @staticmethod
    def decode_members(
        decode: Callable[[bytes], dict[str, Any]], text: bytes, num_quotes: int
    ) -> dict[str, Any] | None:
        """Decode members of an object in one call.

        Args:
            decode: A decoder of msgspec.
            text: The members, without braces around them.
            num_quotes: How many quotes one member has.

        Returns:
            The members; None where msgspec refuses them or the number of quotes is another: then a key is repeated
            or unknown, and the caller reads them one by one.
        """
        try:
            members = decode(b"{" + text + b"}")
        except (msgspec.MsgspecError, ValueError, RecursionError):  # before 0.21 the first was no ValueError
            return None
        if b"\\" in text:
            text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
        return members if text.count(b'"') == num_quotes * len(members) else None

    def null(self) -> bool:
        """Step over a `null`, if there is one at the position."""
        if not self.raw.startswith(b"null", self.pos, self.end):
            return False
        self.pos += 4
        return True

    def skip_value(self, depth: int) -> None:
        """Step over a value of any kind, and check it to the last byte.

        Args:
            depth: Containers that are open around it.
        """
        byte = self.peek()
        if byte == _QUOTE:
            self.string()
        elif byte not in (_OPEN_OBJECT, _OPEN_ARRAY):
            self._skip_scalar()
        elif depth >= MAX_DEPTH:
            self.fail("nested too deeply", expected=f"at most {MAX_DEPTH} levels")
        else:
            for _ in self.members() if byte == _OPEN_OBJECT else self.elements():
                self.skip_value(depth + 1)

    def _skip_scalar(self) -> None:
        limit = min(self.pos + MAX_NUMBER_BYTES, self.end)
        match = _LITERAL.match(self.raw, self.pos, limit) or _NUMBER.match(self.raw, self.pos, limit)
        if match is None:
            self.fail("malformed JSON", expected="a value")
        stop = match.end()
        if stop < self.end and self.raw[stop] in _NUMBER_BYTES:
            self.fail("malformed number")
        # `float` has no limit on digits, as `int` has; the reference reader refuses what overflows it.
        if self.raw[stop - 1] <= 0x39 and float(match[0]) in (float("inf"), float("-inf")):
            self.fail("number out of range")
        self.pos = stop
