"""Which rule a path falls under. Pure: patterns become regular expressions over bytes, the first match wins.

``*`` any run of characters within one name, ``?`` one character, ``[ab]`` ``[a-z]`` ``[!a]`` one character of a set,
``**`` any run of characters across directories; ``**/`` also stands for no directory at all. A pattern covers the whole
path, relative to the mount root. Names that are not UTF-8 match ``*``, ``**`` and ``?`` (byte by byte) like any other.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

from tierfs.policy.model import Rule

CACHED_PATHS = 4096
"""Paths whose rule one matcher remembers."""

CATCH_ALL = ("**", "**/*")
"""Patterns that match every path."""

# One UTF-8 character, or one byte where the name is not UTF-8; atomic, so that no character counts as two.
_CHARACTER = (
    rb"(?>[\x00-\x2e\x30-\x7f]|[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}|[\x80-\xff])"
)
_TOKEN = re.compile(
    rb"(?P<dirs>(?:(?:(?<=/)|^)\*\*+/)+)|(?P<deep>\*\*+)|(?P<star>\*)|(?P<one>\?)|(?P<set>\[)|(?P<text>.)", re.S
)


def compile_pattern(pattern: str) -> re.Pattern[bytes]:
    """The regular expression of one glob pattern, for ``fullmatch`` on a path as bytes.

    Raises ValueError, saying what to write instead, for a pattern that is malformed or could never match.
    """
    if not pattern:
        raise ValueError('the pattern is empty; write "**" to match every file')
    if pattern.startswith("/"):
        raise ValueError("patterns are relative to the mount; remove the leading '/'")
    if pattern.endswith("/"):
        raise ValueError(f"a trailing '/' matches no file; write \"{pattern.rstrip('/')}/**\" for what is below")
    if any(name in ("", ".", "..") for name in pattern.split("/")):
        raise ValueError("the names '', '.' and '..' never occur in a path; remove them from the pattern")
    try:
        glob = pattern.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise ValueError("the pattern holds a character that UTF-8 cannot carry; replace it by '?'") from None
    if b"\0" in glob:
        raise ValueError("no path holds a NUL character; remove it from the pattern")
    parts: list[bytes] = []
    at = 0
    while at < len(glob):
        token = _TOKEN.match(glob, at)
        assert token is not None  # the last alternative takes any byte
        at = token.end()
        match token.lastgroup:
            case "dirs":
                parts.append(rb"(?:.*/)?")
            case "deep":
                parts.append(rb".*")
            case "star":
                parts.append(rb"[^/]*")
            case "one":
                parts.append(_CHARACTER)
            case "set":
                expression, at = _compile_set(glob, at)
                parts.append(expression)
            case _:
                parts.append(re.escape(token.group()))
    return re.compile(b"".join(parts), re.S)


def _compile_set(glob: bytes, at: int) -> tuple[bytes, int]:
    """The expression for a set whose ``[`` ends at ``at``, and where the pattern goes on."""
    negated = glob[at : at + 1] in (b"!", b"^")
    start = at + negated
    end = glob.find(b"]", start + 1)  # a ']' in first place is a member
    if end < 0:
        raise ValueError("a '[' has no matching ']'; close the set, or write [[] for the character itself")
    body = glob[start:end]
    if b"/" in body:
        raise ValueError("a [..] set never matches '/'; remove it from the set")
    if not body.isascii():
        raise ValueError("a [..] set holds ASCII characters only; use ? or several patterns instead")
    members: list[bytes] = []
    i = 0
    while i < len(body):
        if body[i + 1 : i + 2] == b"-" and i + 2 < len(body):
            first, last = body[i : i + 1], body[i + 2 : i + 3]
            if first > last:
                raise ValueError(f"the range {body[i : i + 3].decode()} is reversed; write the smaller character first")
            members.append(re.escape(first) + b"-" + re.escape(last))
            i += 3
        else:
            members.append(_member(body[i : i + 1]))
            i += 1
    choice = b"[" + b"".join(members) + b"]"
    return (b"(?!" + choice + b")" + _CHARACTER if negated else b"(?!/)" + choice), end + 1


def _member(byte: bytes) -> bytes:
    return b"\\" + byte if byte in b"^-]\\[&~|" else re.escape(byte)


class RuleMatcher:
    """First-match lookup in a list of rules, remembering the last ``CACHED_PATHS`` paths. Safe to share by threads."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        """Compile every pattern. Raises ValueError for a malformed one (the loader rules that out)."""
        self._patterns = [
            (index, rule, pattern, compile_pattern(pattern))
            for index, rule in enumerate(rules)
            for pattern in rule.match
        ]
        self._cached = functools.lru_cache(maxsize=CACHED_PATHS)(self._find)

    def rule_for(self, path: bytes) -> tuple[int, Rule]:
        """Index and rule for ``path``, relative to the mount root, names separated by ``/``, any bytes.

        Raises LookupError when no rule matches, which the catch-all of a loaded policy rules out.
        """
        index, rule, _ = self._cached(path)
        return index, rule

    def pattern_for(self, path: bytes) -> str:
        """The pattern by which ``rule_for`` chose. Raises LookupError as it does."""
        return self._cached(path)[2]

    def _find(self, path: bytes) -> tuple[int, Rule, str]:
        for index, rule, pattern, expression in self._patterns:
            if expression.fullmatch(path):
                return index, rule, pattern
        raise LookupError(f"no rule matches {path!r}")
