from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierfs.errors import ConfigError
from tierfs.policy.describe import explain
from tierfs.policy.load import MAX_BYTES, check_paths, load_policy, parse_policy
from tierfs.policy.model import Keep, Limits, Policy, Rule, ScrubConfig, TierConfig

FULL = """\
mount: /mnt/ckpt
mode: userspace
allow_other: true
state: /var/lib/tierfs
tiers:
  memory:
    kind: memory
    size: 64GiB
    numa: [2, 3]
    huge: always
    high: 80%
    low: 50%
  nvme:
    kind: dir
    path: /nvme/data
    size: 2TB
  archive: {kind: dir, path: /archive}
rules:
  - match: "**/*.log"
    ack: nvme
    drain: none
  - match:
      - "**/*.pt"
      - "**/*.distcp"
    ack: memory
    close: ack
    fsync: nvme
    drain: archive
    keep: {memory: none, nvme: watermark, archive: all}
limits:
  drain: 2GiB/s
  transfers: 8
"""
SMALL = "tiers:\n  memory: {kind: memory, size: 1GiB}\n  archive: {kind: dir, path: /archive}\n"


def test_every_key() -> None:
    assert parse_policy(FULL, "p.yaml") == Policy(
        source="p.yaml",
        mount=Path("/mnt/ckpt"),
        mode="userspace",
        allow_other=True,
        state=Path("/var/lib/tierfs"),
        tiers=(
            TierConfig("memory", "memory", None, 64 << 30, 0.8, 0.5, (2, 3), "always"),
            TierConfig("nvme", "dir", Path("/nvme/data"), 2 * 10**12, 0.85, 0.6),
            TierConfig("archive", "dir", Path("/archive"), None, 0.85, 0.6),
        ),
        rules=(
            Rule(("**/*.log",), "nvme", None, None, None, {}),
            Rule(
                ("**/*.pt", "**/*.distcp"),
                "memory",
                None,
                "nvme",
                "archive",
                {"memory": Keep.NONE, "nvme": Keep.WATERMARK, "archive": Keep.ALL},
            ),
            Rule(("**",), "memory", None, None, "archive", {}),
        ),
        limits=Limits(2 << 30, 8),
    )


def test_defaults() -> None:
    policy = parse_policy(SMALL, "p.yaml")
    assert (policy.mount, policy.mode, policy.allow_other) == (None, "auto", False)
    assert policy.state == Path("/archive/.tierfs/state")
    assert policy.rules == (Rule(("**",), "memory", None, None, "archive", {}),)
    assert policy.limits == Limits(None, 4)


def test_the_memory_tier_may_grow_to_twice_its_size_or_as_the_policy_says() -> None:
    assert parse_policy(SMALL, "p.yaml").tiers[0].hard_limit == 2 << 30
    text = SMALL.replace("size: 1GiB", "size: 1GiB, max: 1GiB")
    assert parse_policy(text, "p.yaml").tiers[0].hard_limit == 1 << 30


@pytest.mark.parametrize("size", ["1048576", "1MiB", "1.1MB"])
def test_the_smallest_memory_tier(size: str) -> None:
    text = SMALL.replace("size: 1GiB", f"size: {size}, max: {size}")
    assert parse_policy(text, "p.yaml").tiers[0].size in range(1 << 20, 1_200_000)
    assert parse_policy("tiers: {a: {kind: dir, path: /a, size: 5}, b: {kind: dir, path: /b}}", "p").tiers[0].size == 5


def test_a_deadline() -> None:
    policy = parse_policy(f'{SMALL}rules: [{{match: "**", durable_within: 90s}}]\n', "p.yaml")
    assert policy.rules[0].durable_within == 90.0


def test_state_is_on_the_first_persistent_tier() -> None:
    text = FULL.replace("state: /var/lib/tierfs\n", "")
    assert parse_policy(text, "p.yaml").state == Path("/nvme/data/.tierfs-state")


def test_the_mountpoint_of_the_command_line_wins() -> None:
    assert parse_policy(FULL, "p.yaml", mountpoint=Path("/other")).mount == Path("/other")


@pytest.mark.parametrize("match", ['"**"', '["*.pt", "**"]', '"**/*"'])
def test_no_second_catch_all(match: str) -> None:
    assert len(parse_policy(f"{SMALL}rules:\n  - match: {match}\n", "p.yaml").rules) == 1


@pytest.mark.parametrize("tier", ["archive", "ack"])
def test_close_may_wait_for_the_archive(tier: str) -> None:
    policy = parse_policy(f'{SMALL}rules: [{{match: "**", close: {tier}}}]\n', "p.yaml")
    assert policy.rules[0].close == (None if tier == "ack" else tier)


# Each case: text of FULL, what replaces it, the line, the key path, and what the message says.
MISTAKES = {
    "unknown key": ("mode: userspace", "moed: auto", 2, "moed", "did you mean 'mode'?"),
    "unknown key far from any": ("mode: userspace", "zzz: 1", 2, "zzz", "use one of mount, mode"),
    "unknown tier key": ("    size: 64GiB", "    sise: 64GiB", 8, "tiers.memory.sise", "did you mean 'size'?"),
    "unknown rule key": ("    ack: nvme", "    akc: nvme", 20, "rules[0].akc", "did you mean 'ack'?"),
    "unknown limit": ("  transfers: 8", "  transfer: 8", 32, "limits.transfer", "did you mean 'transfers'?"),
    "duplicate key": ("mode: userspace", "mount: /x", 2, "mount", "duplicate key, first given on line 1"),
    "duplicate tier": ("  archive:", "  nvme:", 17, "tiers.nvme", "duplicate key, first given on line 13"),
    "duplicate rule key": ("    drain: none", "    ack: nvme", 21, "rules[0].ack", "duplicate key"),
    "key is no name": ("  nvme:\n", "  1:\n", 13, "tiers", "the key '1' is not a name"),
    "merge key": ("mode: userspace", "<<: {}", 2, "(file)", "the key '<<' is not a name"),
    "mount relative": ("mount: /mnt/ckpt", "mount: ckpt", 1, "mount", "not an absolute path"),
    "mount a number": ("mount: /mnt/ckpt", "mount: 3", 1, "mount", "must be text, not a number ('3')"),
    "path with NUL": ("mount: /mnt/ckpt", 'mount: "/a\\0"', 1, "mount", "no path can hold"),
    "mode": ("mode: userspace", "mode: userspce", 2, "mode", "did you mean 'userspace'?"),
    "allow_other": ("allow_other: true", 'allow_other: "true"', 3, "allow_other", "write true or false without quotes"),
    "state empty": ("state: /var/lib/tierfs", "state:", 4, "state", "must be text, not empty"),
    "no kind": ("    kind: dir\n", "", 13, "tiers.nvme.kind", "kind is missing; write kind: memory, kind: dir"),
    "kind": ("    kind: memory", "    kind: memroy", 7, "tiers.memory.kind", "did you mean 'memory'?"),
    "object of no url": ("{kind: dir, path: /archive}", "{kind: object}", 17, "tiers.archive.url", "needs a url"),
    "object with path": (
        "{kind: dir, path: /archive}",
        "{kind: object, url: s3://b, path: /archive}",
        17,
        "tiers.archive.path",
        "path does not apply to kind object; remove path",
    ),
    "object with layout chunks": (
        "{kind: dir, path: /archive}",
        "{kind: object, url: s3://b, layout: chunks}",
        17,
        "tiers.archive.layout",
        "layout chunks is not supported in an object store in this version",
    ),
    "object above the archive": (
        "    kind: dir\n    path: /nvme/data",
        "    kind: object\n    url: s3://b",
        14,
        "tiers.nvme.kind",
        "only the archive, the last tier, can be of kind object",
    ),
    "url of a directory": ("/archive}", "/archive, url: s3://b}", 17, "tiers.archive.url", "only to kind object"),
    "endpoint of a directory": ("    size: 2TB", "    endpoint: x", 16, "tiers.nvme.endpoint", "only to kind object"),
    "numa of an object": (
        "{kind: dir, path: /archive}",
        "{kind: object, url: s3://b, numa: [1]}",
        17,
        "tiers.archive.numa",
        "applies only to the tmpfs",
    ),
    "layout": ("/archive}", "/archive, layout: chunk}", 17, "tiers.archive.layout", "did you mean 'chunks'?"),
    "layout of a local tier": ("    size: 2TB", "    layout: chunks", 16, "tiers.nvme.layout", "only to the archive"),
    "codec": ("/archive}", "/archive, layout: chunks, codec: gzip}", 17, "tiers.archive.codec", "not a valid value"),
    "codec of trees": ("/archive}", "/archive, codec: lz4}", 17, "tiers.archive.codec", "only to layout chunks"),
    "codec delta": (
        "/archive}",
        "/archive, layout: chunks, codec: delta}",
        17,
        "tiers.archive.codec",
        "codec: delta is not supported in this version; use shuffle-zstd",
    ),
    "codec of a rule": ("    drain: archive", "    codec: lz4", 28, "rules[1].codec", "archive has layout tree"),
    "deadline of no unit": (
        "    drain: archive",
        "    durable_within: 5",
        28,
        "rules[1].durable_within",
        "has no unit; write 5s",
    ),
    "deadline of zero": ("    drain: archive", "    durable_within: 0s", 28, "rules[1].durable_within", "more than 0"),
    "stop": ("  transfers: 8", "  stop: soon", 32, "limits.stop", "is not a duration"),
    "deadline without drain": (
        "    drain: none",
        "    drain: none\n    durable_within: 5m",
        22,
        "rules[0].durable_within",
        "is a deadline for the last tier, archive, and the files of this rule end on nvme",
    ),
    "threads that encode": ("  transfers: 8", "  encode_threads: 0", 32, "limits.encode_threads", "from 1 to 64"),
    "nice": ("  transfers: 8", "  encode_nice: 20", 32, "limits.encode_nice", "from 0 to 19"),
    "unsynced of nothing": ("  transfers: 8", "  unsynced: 0", 32, "limits.unsynced", "more than zero"),
    "unsynced of no size": ("  transfers: 8", "  unsynced: 50%", 32, "limits.unsynced", "is not a size"),
    "max below size": ("    huge: always", "    max: 63GiB", 10, "tiers.memory.max", "is less than size"),
    "max on a dir": ("    size: 2TB", "    max: 3TB", 16, "tiers.nvme.max", "applies only to the tmpfs"),
    "policy": ("mode: userspace", "policy: checkpoint", 2, "policy", "policy is not supported in this version"),
    "keep count": (
        "nvme: watermark",
        "nvme: 5",
        29,
        "rules[1].keep.nvme",
        "integer keep counts are not supported in this version; use watermark, all or none",
    ),
    "keep count for all": (
        "{memory: none, nvme: watermark, archive: all}",
        "3",
        29,
        "rules[1].keep",
        "integer keep counts are not supported in this version",
    ),
    "keep word": ("nvme: watermark", "nvme: watermrk", 29, "rules[1].keep.nvme", "did you mean 'watermark'?"),
    "keep boolean": ("nvme: watermark", "nvme: no", 29, "rules[1].keep.nvme", "not a boolean ('no')"),
    "keep tier": ("nvme: watermark", "nvem: all", 29, "rules[1].keep.nvem", "did you mean 'nvme'?"),
    "keep none on archive": ("archive: all", "archive: none", 29, "rules[1].keep.archive", "the archive always keeps"),
    "size unit": ("size: 64GiB", "size: 64GX", 8, "tiers.memory.size", "unknown unit 'GX'"),
    "size ambiguous": ("size: 64GiB", "size: 64G", 8, "tiers.memory.size", "write 64GiB"),
    "size negative": ("size: 64GiB", "size: -64GiB", 8, "tiers.memory.size", "is negative"),
    "size negative number": ("size: 64GiB", "size: -5", 8, "tiers.memory.size", "is negative"),
    "size zero": ("size: 64GiB", "size: 0", 8, "tiers.memory.size", "must be more than zero"),
    "memory in bytes": ("size: 64GiB", "size: 1048575", 8, "tiers.memory.size", "is less than 1MiB: no file would fit"),
    "memory in KiB": ("size: 64GiB", "size: 512KiB", 8, "tiers.memory.size", "write at least 1MiB, for example 64GiB"),
    "memory in MB": ("size: 64GiB", "size: 1MB", 8, "tiers.memory.size", "is less than 1MiB"),
    "memory without its unit": ("size: 64GiB", "size: 64", 8, "tiers.memory.size", "is less than 1MiB"),
    "max in bytes": ("    huge: always", "    max: 96", 10, "tiers.memory.max", "is less than 1MiB"),
    "max in KiB": ("    huge: always", "    max: 96KiB", 10, "tiers.memory.max", "is less than 1MiB"),
    "size list": ("size: 64GiB", "size: [1]", 8, "tiers.memory.size", "must be a size, not a list"),
    "tmpfs without size": ("    size: 64GiB\n", "", 6, "tiers.memory.size", "write for example size: 64GiB"),
    "dir without path": ("    path: /nvme/data\n", "", 13, "tiers.nvme.path", "write path:"),
    "numa number": ("numa: [2, 3]", "numa: 2", 9, "tiers.memory.numa", "write it as [A, B]"),
    "numa negative": ("numa: [2, 3]", "numa: [2, -3]", 9, "tiers.memory.numa[1]", "-3 is out of range"),
    "numa twice": ("numa: [2, 3]", "numa: [2, 2]", 9, "tiers.memory.numa", "twice"),
    "numa empty": ("numa: [2, 3]", "numa: []", 9, "tiers.memory.numa", "is empty"),
    "numa on a dir": ("    size: 2TB", "    numa: [1]", 16, "tiers.nvme.numa", "applies only to the tmpfs"),
    "huge": ("huge: always", "huge: alwys", 10, "tiers.memory.huge", "did you mean 'always'?"),
    "percent over 100": ("high: 80%", "high: 120%", 11, "tiers.memory.high", "out of range"),
    "percent zero": ("low: 50%", "low: 0%", 12, "tiers.memory.low", "out of range"),
    "percent without sign": ("high: 80%", "high: 0.8", 11, "tiers.memory.high", "such as 85%"),
    "low above high": ("low: 50%", "low: 90%", 12, "tiers.memory.low", "(90%) is not below the high one (80%)"),
    "low equals high": ("low: 50%", "low: 80%", 12, "tiers.memory.low", "set low below high"),
    "high below default low": ("    size: 2TB", "    high: 40%", 16, "tiers.nvme.high", "set low below high"),
    "tier name reserved": ("  nvme:\n", "  ack:\n", 13, "tiers.ack", "choose another name"),
    "tier name": ("  nvme:\n", "  nv/me:\n", 13, "tiers.'nv/me'", "letters, digits"),
    "tier not a mapping": (
        "{kind: dir, path: /archive}",
        "/archive",
        17,
        "tiers.archive",
        "must be a mapping, not text",
    ),
    "memory last": (
        "{kind: dir, path: /archive}",
        "{kind: memory, size: 1GiB}",
        17,
        "tiers.archive.kind",
        "the last tier is the archive and must be kind dir",
    ),
    "memory not first": (
        "    kind: dir\n    path: /nvme/data",
        "    kind: memory\n    huge: never",
        14,
        "tiers.nvme.kind",
        "a memory tier must be the first tier; move nvme to the top",
    ),
    "match missing": ('- match: "**/*.log"\n    ack', "- ack", 19, "rules[0].match", "match is missing"),
    "match empty": ('match: "**/*.log"', 'match: ""', 19, "rules[0].match", "is empty"),
    "match empty list": ('match: "**/*.log"', "match: []", 19, "rules[0].match", "is empty"),
    "match null": ('match: "**/*.log"', "match:", 19, "rules[0].match", "must be text, not empty"),
    "match in a list": ('"**/*.distcp"', '"/a"', 24, "rules[1].match[1]", "remove the leading '/'"),
    "match a number": ('"**/*.distcp"', "7", 24, "rules[1].match[1]", "pattern in quotes"),
    "match without quotes": ('"**/*.distcp"', "**/*.distcp", 24, "(file)", "in quotes"),
    "rules a mapping": ('  - match: "**/*.log"', '    match: "**/*.log"', 22, "(file)", "not valid YAML"),
    "ack tier": ("    ack: nvme", "    ack: nvm", 20, "rules[0].ack", "there is no tier 'nvm'; did you mean 'nvme'?"),
    "fsync tier": ("    fsync: nvme", "    fsync: disk", 27, "rules[1].fsync", "use one of memory, nvme, archive, ack"),
    "drain tier": ("    drain: archive", "    drain: archiv", 28, "rules[1].drain", "did you mean 'archive'?"),
    "drain null": ("    drain: archive", "    drain: ~", 28, "rules[1].drain", "must be text, not empty; use one of"),
    "drain above ack": ("    drain: none", "    drain: memory", 21, "rules[0].drain", "is above the ack tier nvme"),
    "fsync in memory": ("    fsync: nvme", "    fsync: memory", 27, "rules[1].fsync", "not persistent"),
    "close below drain": (
        "    close: ack\n    fsync: nvme\n    drain: archive",
        "    close: archive\n    drain: nvme",
        26,
        "rules[1].close",
        "is not between the ack tier memory and the drain target nvme; use one of ack, nvme",
    ),
    "close without drain": (
        "    drain: none",
        "    drain: none\n    close: archive",
        22,
        "rules[0].close",
        "is not the only tier used, nvme; use one of ack, nvme",
    ),
    "ack the archive": (
        "    ack: nvme",
        "    ack: archive",
        20,
        "rules[0].ack",
        "archive is the archive, which takes no writes itself; use one of memory, nvme; with close: archive",
    ),
    "close tier": ("    close: ack", "    close: nvm", 26, "rules[1].close", "did you mean 'nvme'?"),
    "duplicate key of a tier": ("    huge: always", "    size: 1GiB", 10, "tiers.memory.size", "first given on line 8"),
    "duplicate keep": ("archive: all", "nvme: all", 29, "rules[1].keep.nvme", "duplicate key"),
    "duplicate limit": ("  transfers: 8", "  drain: 1GiB/s", 32, "limits.drain", "first given on line 31"),
    "keep not a mapping": (
        "{memory: none, nvme: watermark, archive: all}",
        "all",
        29,
        "rules[1].keep",
        "must be a mapping, not text",
    ),
    "rule not a mapping": (
        '- match: "**/*.log"\n    ack: nvme\n    drain: none',
        "- x",
        19,
        "rules[0]",
        "must be a mapping, not text",
    ),
    "limits not a mapping": (
        "limits:\n  drain: 2GiB/s\n  transfers: 8",
        "limits: 8",
        30,
        "limits",
        "must be a mapping, not a number ('8')",
    ),
    "unclosed bracket": ("numa: [2, 3]", "numa: [2, 3", 10, "(file)", "not valid YAML"),
    "rate": ("drain: 2GiB/s", "drain: 2GiB", 31, "limits.drain", "such as 2GiB/s"),
    "rate zero": ("drain: 2GiB/s", "drain: 0/s", 31, "limits.drain", "at least 1B/s"),
    "transfers zero": ("transfers: 8", "transfers: 0", 32, "limits.transfers", "from 1 to 64"),
    "transfers high": ("transfers: 8", "transfers: 65", 32, "limits.transfers", "65 is out of range"),
    "transfers text": ("transfers: 8", "transfers: many", 32, "limits.transfers", "must be a whole number"),
    "transfers octal": ("transfers: 8", "transfers: 010", 32, "limits.transfers", "must be a whole number"),
    "tab": ("mode: userspace", "\tmode: auto", 2, "(file)", "indent with spaces"),
    "control character": ("mode: userspace", "mode: \x01", 2, "(file)", "character that YAML does not allow"),
    "tag": ("mode: userspace", "mode: !!python/name:os.system x", 2, "mode", "a value with a tag"),
    "two documents": ("mode: userspace", "---\nmode: auto", 2, "(file)", "single document"),
}


@pytest.mark.parametrize(("old", "new", "line", "key", "says"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistake(old: str, new: str, line: int, key: str, says: str) -> None:
    assert FULL.count(old) >= 1
    with pytest.raises(ConfigError) as caught:
        parse_policy(FULL.replace(old, new, 1), "dir/p.yaml")
    message = str(caught.value)
    assert message.startswith(f"dir/p.yaml:{line}: {key}: ")
    assert says in message
    assert "; " in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "key", "says"),
    [
        ("", "(file)", "is empty"),
        ("# nothing\n", "(file)", "is empty"),
        ("[1]", "(file)", "must be a mapping"),
        ("mode: auto", "tiers", "tiers is missing"),
        ("tiers: {}", "tiers", "at least two tiers"),
        ("tiers:", "tiers", "must be a mapping, not empty"),
        ("tiers: {m: {kind: memory, size: 1GiB}}", "tiers.m.kind", "must be kind dir"),
        ("tiers: {a: {kind: dir, path: /a}}", "tiers", "a is the only tier; the archive takes no writes"),
        ("tiers: {m: {kind: memory, path: /m, numa: [1]}}", "tiers.m.numa", "without a path"),
        ("tiers: {m: {kind: memory, path: /m, size: 64}}", "tiers.m.size", "is less than 1MiB"),
        (SMALL + "rules: {match: x}", "rules", "must be a list"),
        ("[" * 5000, "(file)", "nested too deeply"),
        ('a: "\\UFFFFFFFF"', "(file)", "is not valid YAML"),
        ("&a [*a]", "(file)", "must be a mapping"),
        ("tiers: &t {a: *t}", "tiers.a.a", "unknown key"),
    ],
)
def test_whole_file(text: str, key: str, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"^p\.yaml:\d+: {re.escape(key)}: .*{re.escape(says)}"):
        parse_policy(text, "p.yaml")


def test_load_reads_the_file(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text("\ufeff" + FULL)
    assert load_policy(file) == replace(parse_policy(FULL, "x"), source=str(file))


@pytest.mark.parametrize(
    ("data", "line", "says"),
    [
        (None, 1, "cannot be read (No such file"),
        (b"a\n\xff", 2, "not UTF-8"),
        (b"#" * (MAX_BYTES + 1), 1, "larger than"),
    ],
)
def test_file_cannot_be_read(tmp_path: Path, data: bytes | None, line: int, says: str) -> None:
    file = tmp_path / "p.yaml"
    if data is not None:
        file.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        load_policy(file)
    assert str(caught.value).startswith(f"{file}:{line}: (file): ")
    assert says in str(caught.value)


PATHS = """\
mount: {0}/mnt
tiers:
  shm: {{kind: memory, path: {0}/shm}}
  nvme:
    kind: dir
    path: {0}/nvme
  archive: {{kind: dir, path: {0}/archive}}
state: {0}/state
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("mnt/in", "shm/in", "nvme/data", "nvme/in", "archive/in", "archive/.tierfs/state", "state/in"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nvme")
    return tmp_path


@pytest.mark.parametrize(
    "state", ["state", "new/below", "nvme/.tierfs-state", "archive/.tierfs/state", "archive/.tierfs/other"]
)
def test_paths_that_fit(tree: Path, state: str) -> None:
    check_paths(parse_policy(PATHS.format(tree).replace(f"{tree}/state", f"{tree}/{state}"), "p.yaml"))


def test_own_tmpfs_and_no_mount_need_no_directory(tree: Path) -> None:
    text = f"tiers:\n  m: {{kind: memory, size: 1MiB}}\n  a: {{kind: dir, path: {tree}/archive}}\n"
    check_paths(parse_policy(text, "p.yaml"))


@pytest.mark.parametrize(
    ("old", "new", "line", "key", "says"),
    [
        ("/nvme", "/gone", 6, "tiers.nvme.path", "does not exist; create it (mkdir -p"),
        ("/nvme", "/file", 6, "tiers.nvme.path", "is not a directory"),
        ("/nvme", "/file/x", 6, "tiers.nvme.path", "cannot be used (Not a directory)"),
        ("/shm", "/gone", 3, "tiers.shm.path", "does not exist"),
        ("/mnt", "/gone", 1, "mount", "does not exist"),
        ("/archive", "/mnt/in", 7, "tiers.archive.path", "is inside the mountpoint"),
        ("/nvme", "/mnt", 6, "tiers.nvme.path", "is inside the mountpoint"),
        ("/mnt", "/nvme/in", 1, "mount", "is inside tier nvme"),
        ("/archive", "/nvme", 7, "tiers.archive.path", "is also the path of tier nvme"),
        ("/archive", "/link", 7, "tiers.archive.path", "is also the path of tier nvme"),
        ("/archive", "/nvme/in", 7, "tiers.archive.path", "tier archive is inside tier nvme"),
        ("/nvme", "/shm/in", 6, "tiers.nvme.path", "tier nvme is inside tier shm"),
        ("/shm", "/link/in", 6, "tiers.nvme.path", "tier shm is inside tier nvme"),
        ("/state", "/mnt/state", 8, "state", "is inside the mountpoint"),
        ("/state", "/file", 8, "state", "is not a directory"),
        ("/state", "/shm/state", 8, "state", "is in memory"),
        ("/state", "/archive/state", 8, "state", "is inside the archive's tree"),
        ("/state", "/archive/.tierfs", 8, "state", "is inside the archive's tree"),
        ("/state", "/archive/.tierfs/tmp/x", 8, "state", "is inside the archive's tree"),
        ("/state", "/nvme", 8, "state", "holds tier nvme"),
        ("/state", "/nvme/data/x", 8, "state", "is among the replicas of tier nvme"),
        ("/mnt", "/state/in", 1, "mount", "is inside the state directory"),
    ],
)
def test_paths_refused(tree: Path, old: str, new: str, line: int, key: str, says: str) -> None:
    file = tree / "p.yaml"
    file.write_text(PATHS.format(tree).replace(f"{tree}{old}", f"{tree}{new}"))
    with pytest.raises(ConfigError) as caught:
        check_paths(load_policy(file))
    assert str(caught.value).startswith(f"{file}:{line}: {key}: ")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("mountpoint", "line", "key", "says"),
    [
        ("nvme/in", 6, "tiers.nvme.path", "is inside tier nvme"),
        ("state/in", 8, "state", "is inside the state directory"),
        ("", 3, "tiers.shm.path", "is inside the mountpoint"),
    ],
)
@pytest.mark.parametrize("named", [True, False])
def test_a_mountpoint_of_the_command_line_that_collides(
    tree: Path, named: bool, mountpoint: str, line: int, key: str, says: str
) -> None:
    file = tree / "p.yaml"
    file.write_text(PATHS.format(tree) if named else PATHS.format(tree).replace(f"mount: {tree}/mnt", "#"))
    with pytest.raises(ConfigError) as caught:
        check_paths(load_policy(file, mountpoint=tree / mountpoint))
    assert str(caught.value).startswith(f"{file}:{line}: {key}: ")
    assert says in str(caught.value)


def test_a_mountpoint_of_the_command_line_that_is_missing(tree: Path) -> None:
    file = tree / "p.yaml"
    file.write_text(PATHS.format(tree))
    with pytest.raises(ConfigError, match=r"^the mountpoint /.*/gone does not exist; create it"):
        check_paths(load_policy(file, mountpoint=tree / "gone"))


def test_paths_without_the_source(tree: Path) -> None:
    policy = parse_policy(PATHS.format(tree).replace("/nvme", "/gone"), "<text>")
    with pytest.raises(ConfigError, match=r"^<text>:1: tiers\.nvme\.path: "):
        check_paths(policy)


def only_config_error(text: str) -> None:
    try:
        parse_policy(text, "p.yaml")
    except ConfigError as error:
        message = str(error)
    else:
        return
    assert re.fullmatch(r"p\.yaml:[1-9]\d*: \S.*: .+; .+", message)


@settings(max_examples=300, deadline=None)
@given(st.text())
def test_fuzz_any_text(text: str) -> None:
    only_config_error(text)


SNIPPETS = st.sampled_from(
    ["", " ", "\n", "\t", ":", "- ", "[", "]", "{", "}", "&a ", "*a", "!!int ", "!!str ", "!!bool ", "<<: ", "? ",
     "|\n", '"', "'", "\\", '"\\ud800"', '"\\0"', "~", "-1", "1e999", ".nan", "0x10", "1:30", "%", "2001-01-01", "none",
     "---\n"]
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(FULL)), st.integers(0, 12), SNIPPETS | st.text(max_size=4)), max_size=4))
def test_fuzz_a_damaged_policy(edits: list[tuple[int, int, str]]) -> None:
    text = FULL
    for at, removed, inserted in edits:
        text = text[:at] + inserted + text[at + removed :]
    only_config_error(text)


def test_limits_and_scrub() -> None:
    text = f"{SMALL}limits: {{read_timeout: 5s, tier_timeout: 2m}}\nscrub: {{every: 7d, rate: 1MiB/s}}\n"
    policy = parse_policy(text, "p.yaml")
    assert (policy.limits.read_timeout, policy.limits.tier_timeout) == (5.0, 120.0)
    assert policy.scrub == ScrubConfig(7 * 86400.0, 1 << 20)
    assert parse_policy(SMALL, "p.yaml").scrub == ScrubConfig(30 * 86400.0, 50 << 20)
    assert parse_policy(f"{SMALL}scrub: none\n", "p.yaml").scrub.every is None


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("limits: {read_timeout: 0.5s}", "limits.read_timeout: 0.5 s is out of range; write a duration from 1s to 1h"),
        ("limits: {tier_timeout: 2h}", "limits.tier_timeout: 7200 s is out of range"),
        ("limits: {tier_timeout: 5}", "limits.tier_timeout: '5' has no unit; write 5s for seconds"),
        ("scrub: weekly", "scrub: must be none or a mapping, not text"),
        ("scrub: {every: 30s}", "scrub.every: 30 s is out of range; write a minute or more"),
        ("scrub: {rate: 5MiB}", "scrub.rate: '5MiB' is not a rate"),
        ("scrub: {evry: 7d}", "scrub.evry: unknown key; did you mean 'every'?"),
    ],
)
def test_mistakes_of_limits_and_scrub(line: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        parse_policy(f"{SMALL}{line}\n", "p.yaml")


CHUNKED = """
state: /var/lib/tierfs
tiers:
  memory: {kind: memory, size: 64GiB}
  archive: {kind: dir, path: /archive, layout: chunks}
rules:
  - {match: "*.pt", codec: shuffle-zstd}
  - {match: "*.log", codec: none}
"""


def test_an_archive_of_chunks_has_a_codec_and_rules_may_have_others() -> None:
    policy = parse_policy(CHUNKED, "test")
    assert (policy.tiers[-1].layout, policy.tiers[-1].codec) == ("chunks", "bitshuffle-lz4")
    assert [rule.codec for rule in policy.rules] == ["shuffle-zstd", "none", None]
    assert explain(policy, b"a.pt")["codec"] == "shuffle-zstd"
    assert explain(policy, b"a.bin")["codec"] == "bitshuffle-lz4"


def test_a_rule_whose_files_do_not_go_there_has_no_codec() -> None:
    with pytest.raises(ConfigError, match="the files of this rule end on memory"):
        parse_policy(CHUNKED.replace("codec: none", "codec: none, drain: none"), "test")


def test_what_layout_chunks_needs_and_is_missing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "archive").mkdir()
    text = CHUNKED.replace("/archive", f"{tmp_path}/archive").replace("/var/lib/tierfs", f"{tmp_path}/state")
    policy = parse_policy(text, "test")
    check_paths(policy)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "blake3" else found(name))
    with pytest.raises(ConfigError, match=r"needs blake3.*pip install 'tierfs\[chunks\]'"):
        check_paths(policy)


def test_a_mount_without_such_an_archive_imports_none_of_it(tmp_path: Path) -> None:
    """Neither on its way to a mount nor in what serves it."""
    code = (
        "import sys, tierfs.daemon, tierfs.cli.app, tierfs.fsck, tierfs.operations, tierfs.tiers.assembly\n"
        "print(sorted({'blake3', 'imagecodecs', 'numpy', 'pyfastcdc', 'zstandard'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_archive_in_an_object_store() -> None:
    archive_text = "{kind: object, url: s3://b/run, endpoint: http://h:1, size: 1TiB}"
    text = SMALL.replace("{kind: dir, path: /archive}", archive_text)
    with pytest.raises(ConfigError, match="state is missing, and no tier above the archive is on a disk"):
        parse_policy(text, "p.yaml")
    archive = parse_policy("state: /var/lib/tierfs\n" + text, "p.yaml").tiers[-1]
    assert (archive.kind, archive.path, archive.persistent) == ("object", None, True)
    assert (archive.url, archive.endpoint, archive.region, archive.size) == ("s3://b/run", "http://h:1", None, 1 << 40)
