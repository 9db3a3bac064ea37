"""Patterns against a reference: names by fnmatch, directories by trying every split."""

from __future__ import annotations

from fnmatch import fnmatchcase

from hypothesis import assume, given
from hypothesis import strategies as st

from tierfs.policy.match import RuleMatcher, compile_pattern
from tierfs.policy.model import Rule

ALPHABET = "ab.-é"
NAMES = st.text(ALPHABET, min_size=1, max_size=4).filter(lambda name: name not in (".", ".."))
PATHS = st.lists(NAMES, min_size=1, max_size=4)
PIECES = st.sampled_from(["a", "b", ".", "-", "é", "*", "?", "[ab]", "[!a]", "[a-b]", "[!.-]"])
GLOB_NAMES = (
    st.lists(PIECES, min_size=1, max_size=4)
    .map("".join)
    .filter(lambda name: name not in (".", "..") and "**" not in name)
)
PATTERNS = st.lists(GLOB_NAMES | st.just("**"), min_size=1, max_size=4)


def reference(pattern: list[str], path: list[str]) -> bool:
    """Whether the names of a pattern match the names of a path. ``**`` is any number of names, at the end at least one
    (a pattern matches files, so ``a/**`` is not ``a``)."""
    if not pattern:
        return not path
    if pattern[0] == "**":
        if len(pattern) == 1:
            return bool(path)
        return any(reference(pattern[1:], path[split:]) for split in range(len(path) + 1))
    return bool(path) and fnmatchcase(path[0], pattern[0]) and reference(pattern[1:], path[1:])


def matches(pattern: str, path: list[str]) -> bool:
    return compile_pattern(pattern).fullmatch("/".join(path).encode()) is not None


@given(PATTERNS, PATHS)
def test_patterns_mean_what_the_reference_says(pattern: list[str], path: list[str]) -> None:
    assert matches("/".join(pattern), path) == reference(pattern, path)


@st.composite
def generalised(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A path and a pattern made from it by replacing parts with wildcards that stand for them."""
    path = draw(PATHS)
    names = []
    for name in path:
        cut = draw(st.integers(0, len(name)))
        names.append(draw(st.sampled_from([name, "*", "?" * len(name), name[:cut] + "*", "*" + name[cut:]])))
    keep = draw(st.integers(0, len(names) - 1))
    pattern = draw(st.sampled_from([names, ["**", *names], ["**", *names[keep:]], [*names[:keep], "**"]]))
    assume(not any(name in (".", "..") or "**" in name for name in pattern if name != "**"))
    return "/".join(pattern), path


@given(generalised())
def test_wildcards_match_what_they_replace(case: tuple[str, list[str]]) -> None:
    assert matches(*case)


@given(st.text("ab", min_size=1, max_size=3), st.text("ab/", max_size=4), PATHS)
def test_two_stars_inside_a_name_cross_directories(front: str, back: str, path: list[str]) -> None:
    assume(not back.endswith("/") and "//" not in back)
    whole = "/".join(path)
    expected = len(whole) >= len(front) + len(back) and whole.startswith(front) and whole.endswith(back)
    assert matches(f"{front}**{back}", path) == expected


@given(PATTERNS, st.lists(st.binary(min_size=1, max_size=3).filter(lambda b: b"/" not in b), min_size=1, max_size=3))
def test_names_that_are_not_utf8_never_break_a_pattern(pattern: list[str], path: list[bytes]) -> None:
    raw = b"/".join(path)
    compile_pattern("/".join(pattern)).fullmatch(raw)
    assert compile_pattern("**").fullmatch(raw)
    assert compile_pattern("/".join("*" * len(path))).fullmatch(raw)


@given(st.lists(st.lists(PATTERNS, min_size=1, max_size=3), max_size=4), st.lists(PATHS, min_size=1, max_size=6))
def test_the_first_rule_that_matches_wins(rules: list[list[list[str]]], paths: list[list[str]]) -> None:
    everything = [*rules, [["**"]]]
    matcher = RuleMatcher(
        [Rule(tuple("/".join(p) for p in rule), "memory", None, None, None, {}) for rule in everything]
    )
    for path in paths * 2:  # the second time from the cache
        index, rule = matcher.rule_for("/".join(path).encode())
        assert index == next(i for i, rule in enumerate(everything) if any(reference(p, path) for p in rule))
        assert matcher.pattern_for("/".join(path).encode()) in rule.match
