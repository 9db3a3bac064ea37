from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierfs.policy.describe import check_summary, explain, remarks
from tierfs.policy.load import parse_policy
from tierfs.policy.match import CACHED_PATHS, RuleMatcher, compile_pattern
from tierfs.policy.model import Rule

POLICY = """
tiers:
  memory: {kind: memory, size: 1GiB}
  nvme: {kind: dir, path: /n}
  archive: {kind: dir, path: /a}
rules:
  - match: "**/*.log"
    ack: nvme
    drain: none
  - {match: ["**/*.pt", "latest"], fsync: nvme, keep: {memory: none}}
limits: {drain: 1MiB/s}
"""


def rule(*match: str) -> Rule:
    return Rule(match=match, ack="a", close=None, fsync=None, drain=None, keep={})


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("**", [b"", b"x", b"a/b/c", b"\xff/\n"], []),
        ("**/*", [b"x", b"a/b"], []),
        ("**/x", [b"x", b"a/x", b"a/b/x"], [b"ax", b"x/a", b"a/bx"]),
        ("**/**/x", [b"x", b"a/b/x"], [b"ax"]),
        ("a/**", [b"a/b", b"a/b/c"], [b"a", b"ab"]),
        ("a/**/b", [b"a/b", b"a/x/b", b"a/x/y/b"], [b"ab", b"a/xb"]),
        ("**.pt", [b"a.pt", b"d/a.pt"], [b"a.pth"]),
        ("*.pt", [b"a.pt", b".pt", b"\xff\xfe.pt", b"a\nb.pt"], [b"d/a.pt", b"a.pt\n"]),
        ("a?c", [b"abc", b"a\xffc", "aäc".encode(), "a\U0001f600c".encode()], [b"a/c", b"ac", b"abbc"]),
        ("??", [b"ab", "äö".encode()], ["ä".encode(), b"a"]),
        ("[abc]", [b"a", b"c"], [b"d", b"", b"ab"]),
        ("[a-c]x", [b"bx"], [b"dx"]),
        ("[!a-c]", [b"d", b"\xff", "ä".encode()], [b"a", b"/", b""]),
        ("[^a]", [b"b"], [b"a", b"/"]),
        ("[]]", [b"]"], [b"a"]),
        ("[a-]", [b"a", b"-"], [b"b"]),
        ("[a^]", [b"^"], [b"b"]),
        ("a[+-9]b", [b"a5b", b"a-b"], [b"a/b"]),
        ("a.b+(c)", [b"a.b+(c)"], [b"axb+(c)"]),
        ("ä*", ["äb".encode()], [b"b"]),
        ("\udcff*", [b"\xffx"], [b"x"]),
    ],
)
def test_pattern(pattern: str, yes: list[bytes], no: list[bytes]) -> None:
    expression = compile_pattern(pattern)
    assert [path for path in yes if not expression.fullmatch(path)] == []
    assert [path for path in no if expression.fullmatch(path)] == []


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("", "empty"),
        ("/a", "leading '/'"),
        ("a/", '"a/\\*\\*"'),
        ("a//b", "never occur"),
        ("../a", "never occur"),
        ("[ab", "no matching"),
        ("[z-a]", "reversed"),
        ("[a/b]", "never matches '/'"),
        ("[ä]", "ASCII"),
        ("a\0", "NUL"),
        ("\ud800", "UTF-8"),
    ],
)
def test_bad_pattern(pattern: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        compile_pattern(pattern)


@given(st.text(alphabet="ab*?[]!^-/.&|~\\ä{}()", max_size=12), st.binary(max_size=12))
def test_any_pattern_compiles_or_is_refused(pattern: str, path: bytes) -> None:
    try:
        compile_pattern(pattern).fullmatch(path)
    except ValueError as error:
        message = str(error)
    else:
        return
    assert "; " in message


@given(st.binary(max_size=40).filter(lambda path: b"/" not in path))
def test_star_matches_any_name(name: bytes) -> None:
    assert compile_pattern("*").fullmatch(name)
    assert compile_pattern("**/*").fullmatch(b"d/" + name)


def test_first_match_wins() -> None:
    rules = [rule("a/*", "b"), rule("**/x"), rule("**")]
    matcher = RuleMatcher(rules)
    assert matcher.rule_for(b"a/x") == (0, rules[0])
    assert matcher.rule_for(b"b") == (0, rules[0])
    assert matcher.rule_for(b"c/x") == (1, rules[1])
    assert matcher.rule_for(b"c/y") == (2, rules[2])
    assert matcher.pattern_for(b"b") == "b"


def test_no_rule() -> None:
    with pytest.raises(LookupError, match="no rule"):
        RuleMatcher([rule("a")]).rule_for(b"b")


def test_cache_is_bounded() -> None:
    matcher = RuleMatcher([rule("**")])
    for i in range(CACHED_PATHS + 10):
        matcher.rule_for(b"%d" % i)
    assert matcher._cached.cache_info().currsize == CACHED_PATHS


def test_explain() -> None:
    policy = parse_policy(POLICY, "p.yaml")
    assert explain(policy, b"d/m.pt") == {
        "path": "d/m.pt",
        "rule": 1,
        "pattern": "**/*.pt",
        "ack": "memory",
        "close": "ack",
        "fsync": "nvme",
        "drain": "archive",
        "codec": None,
        "durable_within": None,
        "keep": {"memory": "none", "nvme": "watermark", "archive": "all"},
        "memory_tiers": ["memory"],
    }
    assert explain(policy, b"x.log")["drain"] == "none"
    assert json.loads(json.dumps(explain(policy, b"\xff")))["path"] == "\udcff"


def test_check_summary() -> None:
    summary = json.loads(json.dumps(check_summary(parse_policy(POLICY, "p.yaml"))))
    assert summary["state"] == "/n/.tierfs-state"
    assert [tier["archive"] for tier in summary["tiers"]] == [False, False, True]
    assert summary["limits"] == {
        "drain": 1 << 20,
        "transfers": 4,
        "unsynced": None,
        "stop": None,
        "read_timeout": 30.0,
        "tier_timeout": 60.0,
        "encode_threads": 3,
        "encode_nice": 0,
    }
    assert summary["rules"][-1]["match"] == ["**"]
    assert summary["unreachable_rules"] == []


def test_check_summary_shows_unreachable_rules() -> None:
    text = POLICY.replace('"**/*.log"', '"**"')
    assert check_summary(parse_policy(text, "p.yaml"))["unreachable_rules"] == [1]


def test_remarks_on_what_was_hardly_meant() -> None:
    text = POLICY.replace("fsync: nvme, ", "").replace(
        "limits:", '  - {match: "scratch/**", drain: none}\n  - {match: "**"}\n  - {match: "x"}\nlimits:'
    )
    assert remarks(parse_policy(text, "p.yaml")) == [
        "rule 1 (**/*.pt, latest): fsync() makes nothing durable, only draining makes its files durable",
        "rule 2 (scratch/**): fsync() makes nothing durable, its files are only in memory",
        "rule 3 (**): fsync() makes nothing durable, only draining makes its files durable",
        "rule 4 is never used: a rule before it matches every file",
    ]


def test_a_limit_of_unsynced_bytes_that_cannot_spill_is_remarked() -> None:
    two = "tiers:\n  m: {kind: memory, size: 1GiB}\n  a: {kind: dir, path: /a}\nlimits: {unsynced: 1GiB}\n"
    assert "can only make files wait" in remarks(parse_policy(two, "p.yaml"))[0]
    disks = two.replace("kind: memory, size: 1GiB", "kind: dir, path: /m")
    assert "limits nothing" in remarks(parse_policy(disks, "p.yaml"))[0]
