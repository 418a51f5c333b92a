"""Strict JSON over bytes in windows: msgspec decodes many members at once, Python's decoder what msgspec refuses.

Both get at most a window of text in one call (`gil_slices.py`), unless a single member is longer. Where a window ends
is a guess, and the number of quotes shows whether it was right: msgspec accepts repeated keys, which stio refuses, and
skips unknown ones. If the guess was wrong, `Scanner` finds the end of one member and decodes it alone.

Python's `json` decides about a member that msgspec refuses, and makes the errors. It is made strict here: it accepts
NaN, repeated keys and lone surrogates, recurses, and fails on integers of more than 4300 digits.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import msgspec

from stio.errors import FormatError, IndexFormatError, printable
from stio.format.gil_slices import WINDOW_BYTES

MAX_DEPTH = 127
"""Most containers open at once, the root included (serde_json's limit, which the reference reader has)."""

MAX_MEMBER_BYTES = 10 << 20
"""Longest member that Python's decoder gets: one with a key that the format does not define, or an error."""

MAX_PARTS = 1 << 17
"""Most strings, brackets and commas in a member that is read alone."""

MAX_NUMBER_BYTES = 4096
"""Longest number. Stricter than the reference reader, which takes a longer fraction."""

_WHITE = b" \t\n\r"
_SPACE = re.compile(rb"[ \t\n\r]*+")
_SHORT_STRING = re.compile(rb'"(?:[^"\\]|\\.){0,100}+"', re.DOTALL)
_IN_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_OUTSIDE_STRINGS = re.compile(rb'[^"{}\[\],]*+')
_QUOTE, _COMMA = b'",'
_OPEN, _CLOSE = b"{[", b"}]"

_STRING_QUOTES = 4
_decode_strings = msgspec.json.Decoder(dict[str, str]).decode


class Scanner:
    """A position in a JSON object, and strict steps over its members.

    Args:
        raw: The text; white space at both ends is ignored.
        path: File to name in errors.
        base: Offset of `raw` in that file, added to positions in errors.
        error: Class of the errors raised.
        what: What the text is, for messages.
    """

    __slots__ = ("_base", "_error", "_slow_until", "_what", "end", "path", "pos", "raw")

    def __init__(
        self, raw: bytes, *, path: str, base: int, error: type[FormatError | IndexFormatError], what: str
    ) -> None:
        self.raw, self.path = raw, path
        self._base, self._error, self._what = base, error, what
        self._slow_until = 0
        self.pos, self.end = 0, len(raw)
        self.skip_space()
        while self.end > self.pos and raw[self.end - 1] in _WHITE:
            start = max(self.pos, self.end - WINDOW_BYTES)
            self.end = start + len(raw[start : self.end].rstrip(_WHITE))

    def fail(self, message: str, *, at: int | None = None, expected: object = None, found: object = None) -> NoReturn:
        """Raise the scanner's error, by default at the current position, with the text there as what was found."""
        at = self.pos if at is None else at
        if found is None:
            found = repr(self.raw[at : at + 20])[1:] if at < self.end else "the end"
        raise self._error(
            f"{self._what}: {message}", path=self.path, offset=self._base + at, expected=expected, found=found
        )

    # Single steps.

    def skip_space(self) -> None:
        """Go to the next byte that is not white space."""
        raw, pos, end = self.raw, self.pos, self.end
        while pos < end and raw[pos] in _WHITE:
            pos = _SPACE.match(raw, pos, min(pos + WINDOW_BYTES, end)).end()  # type: ignore[union-attr]
        self.pos = pos

    def accept(self, text: bytes) -> bool:
        """Step over a text, and white space behind it, if it is at the position."""
        if not self.raw.startswith(text, self.pos, self.end):
            return False
        self.pos += len(text)
        if self.pos < self.end and self.raw[self.pos] in _WHITE:
            self.skip_space()
        return True

    def expect(self, text: bytes) -> None:
        """Step over a text, and white space behind it.

        Raises:
            FormatError: It is not at the position.
        """
        if not self.accept(text):
            self.fail("malformed JSON", expected=repr(text.decode()))

    def accept_key(self, key: str) -> bool:
        """Step over a key and its colon, if the key is this one, with or without escapes."""
        if self.raw[self.pos + 1 : self.pos + 2] not in (key[:1].encode(), b"\\"):
            return False
        match = _SHORT_STRING.match(self.raw, self.pos, self.end)
        if match is None:
            return False
        try:
            name = json.loads(match[0].decode()) if b"\\" in match[0] else match[0][1:-1].decode()
        except ValueError:
            return False
        if name != key:
            return False
        self.pos = match.end()
        self.skip_space()
        self.expect(b":")
        return True

    def members(self) -> Iterator[int]:
        """Yield the position of each member of an object; before the next, the caller steps over one or more."""
        self.expect(b"{")
        has_members = not self.accept(b"}")
        while has_members:
            yield self.pos
            if self.pos < self.end and self.raw[self.pos] in _WHITE:
                self.skip_space()
            has_members = not self.accept(b"}")
            if has_members:
                self.expect(b",")

    def finish(self) -> None:
        """Require that the text ends here."""
        if self.pos != self.end:
            self.fail("text after the end of the JSON object", expected="nothing but white space")

    # Members.

    def batch(self, decode: Callable[[bytes], dict[str, Any]], stop: int, num_quotes: int) -> dict[str, Any] | None:
        """Decode members by msgspec, and step over them: those before `stop`, or the next one alone.

        Args:
            decode: A decoder of msgspec.
            stop: A guess where members end.
            num_quotes: How many quotes a member has.

        Returns:
            The members; None, at the same position, if the next one is no such member.
        """
        start, members = self.pos, None
        if start >= self._slow_until:
            text = b"{" + self.raw[start:stop] + b"}"
            members = self.decode_members(decode, text, num_quotes) if stop > start else None
            if not members:
                self._slow_until = start + WINDOW_BYTES  # or each member in it would cost one more guess
        if not members:
            text, stop = self._next_member()
            members = self.decode_members(decode, text, num_quotes)
        if not members:
            return None
        self.pos = stop
        return members

    def member(self) -> tuple[str, Any]:
        """Decode the next member by Python's decoder, and step over it."""
        text, stop = self._next_member()
        if len(text) > MAX_MEMBER_BYTES:
            self.fail("a member is too long", expected=f"at most {MAX_MEMBER_BYTES} bytes")
        members = self.decode(text, at=self.pos - 1)
        if not members:
            self.fail("malformed JSON", expected="a member")
        self.pos = stop
        ((key, value),) = members.items()
        return key, value

    def string_map(self) -> dict[str, str]:
        """Read an object of strings, and step over it."""
        strings: dict[str, str] = {}
        slow_until = self._slow_until
        for start in self.members():
            members = self.batch(_decode_strings, self._end_of_strings(), _STRING_QUOTES)
            if members is None:
                key, value = self.member()
                if not isinstance(value, str):
                    self.fail(f"the value of {printable(key)!r} is no text", at=start, found=value)
                members = {key: value}
            if not strings.keys().isdisjoint(members):
                twice = next(filter(strings.__contains__, members))
                self.fail("a key occurs twice", at=start, expected="distinct keys", found=twice)
            strings.update(members)
        self._slow_until = slow_until  # a brace in a text, such as the tree of a state, says nothing of what follows
        return strings

    def _end_of_strings(self) -> int:
        """Return where members may end: before a brace, else after the last string that a comma follows."""
        stop = min(self.pos + WINDOW_BYTES, self.end)
        brace = self.raw.find(b"}", self.pos, stop)
        return brace if brace >= 0 else self.raw.rfind(b'",', self.pos, stop) + 1

    @staticmethod
    def decode_members(
        decode: Callable[[bytes], dict[str, Any]], text: bytes, num_quotes: int
    ) -> dict[str, Any] | None:
        """Decode an object of members, in one call of msgspec.

        Returns:
            The members; None where msgspec refuses them, or the number of quotes shows that a key is repeated or
            unknown.
        """
        try:
            members = decode(text)
        except (msgspec.MsgspecError, ValueError, RecursionError):  # before 0.21 the first was no ValueError
            return None
        if b"\\" in text:
            text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
        return members if text.count(b'"') == num_quotes * len(members) else None

    def _next_member(self) -> tuple[bytes, int]:
        """Return the next member in braces, and where it ends, by its strings and brackets alone.

        Long white space is left out. The text is one copy, made by a call: before and behind it other threads may run.

        Raises:
            FormatError: The text ends before; or the member is nested too deeply, or has too many values.
        """
        raw, start, pos, end = self.raw, self.pos, self.pos, self.end
        pieces: list[bytes | memoryview] = [b"{"]
        depth = num_parts = 0
        in_string = False
        while pos < end:
            before, run = pos, _IN_STRING if in_string else _OUTSIDE_STRINGS
            pos = run.match(raw, pos, min(pos + WINDOW_BYTES, end)).end()  # type: ignore[union-attr]
            byte = raw[pos] if pos < end else 0
            if byte == _QUOTE:
                in_string = not in_string
            elif in_string or byte not in b"{}[],":  # the window ended
                if pos == before:
                    break  # at a backslash before the end
                if not in_string and not raw[before:pos].strip(_WHITE):
                    pieces += memoryview(raw)[start:before], b" "
                    start = pos
                continue
            elif depth == 0 and (byte == _COMMA or byte in _CLOSE):
                pieces += memoryview(raw)[start:pos], b"}"
                return b"".join(pieces), pos
            else:
                depth += (byte in _OPEN) - (byte in _CLOSE)
            pos += 1
            num_parts += 1
            if depth >= MAX_DEPTH or num_parts > MAX_PARTS:
                what = "nested too deeply" if depth >= MAX_DEPTH else "a member has too many values"
                self.fail(what, at=pos - 1, expected=f"at most {MAX_DEPTH} levels and {MAX_PARTS} values")
        return self.fail("the text ends inside a member", at=end)

    def decode(self, text: bytes, *, at: int = 0) -> Any:
        """Decode text by Python's decoder, made strict.

        Args:
            text: The text.
            at: Its position, for errors.
        """
        document = ""
        try:
            document = text.decode()
            value = _strict.decode(document)
            if b"\\u" in text:
                json.dumps(value, ensure_ascii=False).encode()  # refuses lone surrogates
            return value
        except UnicodeDecodeError as error:
            at, problem = at + error.start, "a string is not UTF-8"
        except UnicodeEncodeError:
            problem = "a string holds half of a surrogate pair"
        except json.JSONDecodeError as error:
            at, problem = at + len(document[: error.pos].encode()), f"malformed JSON: {error.msg}"
        except RecursionError:
            problem = "nested too deeply"
        except ValueError as error:
            problem = str(error)
        return self.fail(problem, at=max(0, at))


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {printable(twice)!r} occurs twice")
    return values


def _number(digits: str) -> float:
    if len(digits) > MAX_NUMBER_BYTES or math.isinf(value := float(digits)):
        raise ValueError("a number is out of range")
    return value


def _integer(digits: str) -> int | float:
    value = _number(digits)
    return value if digits == "-0" else int(digits)  # as in the reference reader, -0 is no integer


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_strict = json.JSONDecoder(object_pairs_hook=_distinct, parse_int=_integer, parse_float=_number, parse_constant=_refuse)
