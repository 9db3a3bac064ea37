"""Read a policy file. Strict: the first mistake is a ConfigError ``FILE:LINE: KEYPATH: what is wrong; what to do``.

``parse_policy`` looks at the text only, ``check_paths`` at the directories that a policy names, so that
``tierfs explain`` works on any machine.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, cast

from tierfs.errors import ConfigError
from tierfs.policy.document import TOP
from tierfs.policy.document import At as _At
from tierfs.policy.document import compose as _compose
from tierfs.policy.document import error_at as _error
from tierfs.policy.document import error_of as _error_of
from tierfs.policy.document import listed as _listed
from tierfs.policy.document import nearest as _nearest
from tierfs.policy.document import quote as _quote
from tierfs.policy.match import CATCH_ALL, compile_pattern
from tierfs.policy.model import Keep, Layout, Limits, Mode, Policy, Rule, ScrubConfig, TierConfig, TierKind
from tierfs.units import parse_duration, parse_percent, parse_rate, parse_size

MAX_BYTES = 256 << 10
"""Largest policy file read, in bytes."""

DEFAULT_HIGH, DEFAULT_LOW = 0.85, 0.60
MAX_TRANSFERS = 64
MIN_MEMORY = 1 << 20
"""Bytes of the smallest memory tier: a missing unit makes one that everything passes by."""
MAX_TIMEOUT = 3600.0
MIN_SCRUB = 60.0

_POLICY_KEYS = ("mount", "mode", "allow_other", "state", "tiers", "rules", "limits", "scrub")
_OBJECT_KEYS = ("url", "endpoint", "region")
_TIER_KEYS = ("kind", "path", "size", "max", "numa", "huge", "high", "low", "layout", "codec", *_OBJECT_KEYS)
_RULE_KEYS = ("match", "ack", "close", "fsync", "drain", "keep", "durable_within", "codec")
_LIMIT_KEYS = (
    *("drain", "transfers", "unsynced", "stop", "read_timeout", "tier_timeout"),
    *("encode_threads", "encode_nice"),
)
_MODES = ("auto", "passthrough", "userspace")
_KINDS = ("memory", "dir", "object")
_LAYOUTS = ("tree", "chunks")
_CODECS = ("none", "lz4", "bitshuffle-lz4", "shuffle-zstd")
DEFAULT_CODEC = "bitshuffle-lz4"
_EXTRAS = ("blake3", "imagecodecs", "numpy", "pyfastcdc", "zstandard")
"""What an archive with layout chunks needs beside what every mount does."""
_HUGE = ("never", "within_size", "always", "advise")
_KEEPS = tuple(keep.value for keep in Keep)
_RESERVED = ("ack", "none")
_TIER_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")
_TWO_TIERS = "list at least two tiers: one that acknowledges writes, then the archive, of kind dir or object"
_AN_URL = "write for example s3://bucket/prefix"
_UNSUPPORTED_POLICY = {"policy": "remove it and write rules"}
_TOP = TOP


def load_policy(path: Path, *, mountpoint: Path | None = None) -> Policy:
    """Read and parse the policy file at ``path``; ``mountpoint`` wins over its ``mount``.

    The directories that it names are not looked at: ``check_paths`` does that. Raises ConfigError.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise _error(str(path), 1, _TOP, f"cannot be read ({error.strerror})", "check the path and its mode") from error
    if len(data) > MAX_BYTES:
        raise _error(str(path), 1, _TOP, "is larger than 256KiB", "give the path of a policy file")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _error(str(path), line, _TOP, "is not UTF-8 text", "save the file as UTF-8") from error
    return parse_policy(text, str(path), mountpoint=mountpoint)


def parse_policy(text: str, source: str, *, mountpoint: Path | None = None) -> Policy:
    """The policy that ``text`` says; ``source`` names it in messages; ``mountpoint`` wins over its ``mount``.

    Looks at no file. Raises ConfigError, and nothing else, for every mistake in ``text``.
    """
    root = _compose(text, source)
    fields = root.mapping(_POLICY_KEYS, _UNSUPPORTED_POLICY)
    mount = fields["mount"].directory() if "mount" in fields else None
    if mountpoint is not None:
        mount = Path(os.path.abspath(mountpoint))
    mode = fields["mode"].choice(_MODES) if "mode" in fields else "auto"
    allow_other = fields["allow_other"].boolean() if "allow_other" in fields else False
    if "tiers" not in fields:
        raise root.error("tiers is missing", "list the tiers, fastest first, the archive last", key="tiers")
    tiers = _tiers(fields["tiers"])
    return Policy(
        source=source,
        mount=mount,
        mode=cast(Mode, mode),
        allow_other=allow_other,
        state=fields["state"].directory() if "state" in fields else _default_state(root, tiers),
        tiers=tiers,
        rules=_rules(fields.get("rules"), tiers),
        limits=_limits(fields["limits"]) if "limits" in fields else Limits(),
        scrub=_scrub(fields["scrub"]) if "scrub" in fields else ScrubConfig(),
    )


def check_paths(policy: Policy) -> None:
    """Look at the directories that ``policy`` names: all there, none inside another where that would do harm.

    Lines are found by reading ``policy.source`` again; without it the message says line 1. What is wrong with a
    mountpoint that the command line names, not the file, is said of the key that it collides with. Raises
    ConfigError.
    """
    lines, named = _source_lines(policy.source)
    in_file = policy.mount is None or not lines or named == str(policy.mount)

    def refuse(key: str, problem: str, remedy: str, collides: str = "") -> ConfigError:
        if key == "mount" and not in_file:
            if not collides:
                return ConfigError(f"the mountpoint {problem}; {remedy}")
            key = collides
        return _error(policy.source, lines.get(key, lines.get(key.rpartition(".")[0], 1)), key, problem, remedy)

    archive = policy.tiers[-1]
    if archive.layout == "chunks" and (missing := [name for name in _EXTRAS if importlib.util.find_spec(name) is None]):
        problem = f"layout chunks needs {_listed(missing)}, which this Python does not have"
        raise refuse(f"tiers.{archive.name}.layout", problem, "pip install 'tierfs[chunks]', or use layout: tree")
    if archive.kind == "object" and importlib.util.find_spec("obstore") is None:
        problem = "kind object needs obstore, which this Python does not have"
        raise refuse(f"tiers.{archive.name}.kind", problem, "pip install 'tierfs[object]', or use kind: dir")
    mount = None
    if policy.mount is not None:
        _require_directory(policy.mount, "mount", refuse)
        mount = _real(policy.mount)
    seen: list[tuple[TierConfig, Path]] = []
    for tier in policy.tiers:
        if tier.path is None:
            continue
        key = f"tiers.{tier.name}.path"
        _require_directory(tier.path, key, refuse)
        real = _real(tier.path)
        if mount is not None and real.is_relative_to(mount):
            raise refuse(key, f"{tier.path} is inside the mountpoint {mount}", "move the tier out of the mountpoint")
        if mount is not None and mount.is_relative_to(real):
            problem = f"the mountpoint {mount} is inside tier {tier.name} ({real})"
            raise refuse("mount", problem, "mount outside every tier", key)
        for other, its in seen:
            if real == its:
                raise refuse(
                    key, f"{tier.path} is also the path of tier {other.name}", "give each tier its own directory"
                )
            if real.is_relative_to(its) or its.is_relative_to(real):
                inner, outer = (tier, other) if real.is_relative_to(its) else (other, tier)
                raise refuse(key, f"tier {inner.name} is inside tier {outer.name}", "put the tiers beside each other")
        seen.append((tier, real))
    _check_state(policy, mount, seen, refuse)


def refusal(policy: Policy, key: str, problem: str, remedy: str) -> ConfigError:
    """The error about ``key`` of a policy that was read before, with the line where it stands now."""
    lines, _ = _source_lines(policy.source)
    return _error(policy.source, lines.get(key, 1), key, problem, remedy)


class _Refuse(Protocol):
    def __call__(self, key: str, problem: str, remedy: str, collides: str = ...) -> ConfigError: ...


def _check_state(policy: Policy, mount: Path | None, tiers: list[tuple[TierConfig, Path]], refuse: _Refuse) -> None:
    state = _real(policy.state)
    existing = state
    while not os.path.lexists(existing):
        existing = existing.parent
    _require_directory(existing, "state", refuse)
    if mount is not None and state.is_relative_to(mount):
        raise refuse("state", f"{policy.state} is inside the mountpoint {mount}", "choose a directory outside of it")
    if mount is not None and mount.is_relative_to(state):
        problem = f"the mountpoint {mount} is inside the state directory {state}"
        raise refuse("mount", problem, "mount outside of it", "state")
    for tier, real in tiers:
        if real.is_relative_to(state):
            raise refuse("state", f"{policy.state} holds tier {tier.name} ({real})", "choose a directory of its own")
        if not state.is_relative_to(real):
            continue
        if not tier.persistent:
            raise refuse("state", f"{policy.state} is in memory (tier {tier.name})", "choose a directory on a disk")
        if tier is policy.tiers[-1]:
            own = real / ".tierfs"
            if own not in state.parents or state.is_relative_to(own / "tmp"):
                raise refuse(
                    "state", f"{policy.state} is inside the archive's tree", f"use {own / 'state'} or another directory"
                )
        elif state.is_relative_to(real / "data"):
            raise refuse(
                "state", f"{policy.state} is among the replicas of tier {tier.name}", f"use {real / '.tierfs-state'}"
            )


def _require_directory(path: Path, key: str, refuse: _Refuse) -> None:
    try:
        is_directory = stat.S_ISDIR(os.stat(path).st_mode)
    except FileNotFoundError:
        raise refuse(key, f"{path} does not exist", f"create it (mkdir -p {path}) or correct the path") from None
    except OSError as error:
        remedy = "correct the path or its mode"
        if error.errno == errno.ENOTCONN:
            remedy = f"a dead mount is there, end it (umount {path})"
        raise refuse(key, f"{path} cannot be used ({error.strerror})", remedy) from error
    if not is_directory:
        raise refuse(key, f"{path} is not a directory", "give the path of a directory")


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _source_lines(source: str) -> tuple[dict[str, int], str | None]:
    """Line of every mapping key of a policy file by key path, three levels deep, and its ``mount`` as written; nothing
    when it cannot be read."""
    lines: dict[str, int] = {}
    mount = None
    try:
        level = [_compose(Path(source).read_text(encoding="utf-8-sig"), source)]
        for _ in range(3):
            level = [child for at in level if at.is_mapping() for child in at.mapping().values()]
            lines |= {at.path: at.line for at in level}
            mount = next((str(at.node.value) for at in level if at.path == "mount"), mount)
    except (OSError, ValueError, ConfigError):
        return {}, None  # the file has changed or gone since: the line is a convenience
    return lines, None if mount is None else str(Path(mount))


def _tiers(at: _At) -> tuple[TierConfig, ...]:
    entries = at.mapping()
    if not entries:
        raise at.error("is empty", _TWO_TIERS)
    for name, entry in entries.items():
        if name in _RESERVED:
            raise entry.error(f"{name} is a word of its own in rules", "choose another name for the tier")
        if not _TIER_NAME.fullmatch(name):
            raise entry.error(
                f"{_quote(name)} is not a valid tier name", "use up to 32 letters, digits, '-' and '_', a letter first"
            )
    tiers = tuple(_tier(name, entry) for name, entry in entries.items())
    for index, tier in enumerate(tiers):
        for key in ("layout", "codec"):
            if key in entries[tier.name].mapping() and index < len(tiers) - 1:
                last = tiers[-1].name
                raise entries[tier.name].mapping()[key].error(
                    f"{key} applies only to the archive, the last tier", f"remove it, or write it for {last}"
                )
        if tier.kind == "object" and index < len(tiers) - 1:
            kind = entries[tier.name].mapping()["kind"]
            raise kind.error("only the archive, the last tier, can be of kind object", f"move {tier.name} to the end")
        if tier.kind == "memory":
            kind = entries[tier.name].mapping()["kind"]
            if index == len(tiers) - 1:
                raise kind.error("the last tier is the archive and must be kind dir", "add a tier of kind dir after it")
            if index > 0:
                raise kind.error("a memory tier must be the first tier", f"move {tier.name} to the top of tiers")
    if len(tiers) < 2:
        raise at.error(f"{tiers[0].name} is the only tier; the archive takes no writes itself", _TWO_TIERS)
    return tiers


def _tier(name: str, at: _At) -> TierConfig:
    fields = at.mapping(_TIER_KEYS)
    if "kind" not in fields:
        raise at.error("kind is missing", "write kind: memory, kind: dir or kind: object", key="kind")
    kind = cast(TierKind, fields["kind"].choice(_KINDS))
    path = fields["path"].directory() if "path" in fields else None
    size = None
    if "size" in fields:
        size = fields["size"].unit(parse_size, "size", "64GiB")
        if size == 0:
            raise fields["size"].error("must be more than zero", "write for example 64GiB")
        _memory_fits(fields["size"], kind, size)
    if kind == "dir" and path is None:
        raise at.error("a tier of kind dir needs a path", "write path: and the directory of the tier", key="path")
    if kind == "memory" and path is None and size is None:
        raise at.error(
            "a memory tier without a path needs a size", "write for example size: 64GiB, or give it a path", key="size"
        )
    _check_object(at, fields, kind)
    for key in ("max", "numa", "huge"):
        if key in fields and (kind != "memory" or path is not None):
            raise fields[key].error(
                f"{key} applies only to the tmpfs of a memory tier without a path", f"remove {key}, or remove path"
            )
    most = fields["max"].unit(parse_size, "size", "96GiB") if "max" in fields else None
    if most is not None:
        _memory_fits(fields["max"], kind, most)
    if most is not None and size is not None and most < size:
        raise fields["max"].error("is less than size", "write the size or more; size is what tierfs plans with")
    high = _watermark(fields.get("high"), DEFAULT_HIGH)
    low = _watermark(fields.get("low"), DEFAULT_LOW)
    if low >= high:
        raise fields["low" if "low" in fields else "high"].error(
            f"the low watermark ({low * 100:g}%) is not below the high one ({high * 100:g}%)",
            "set low below high (defaults: low 60%, high 85%)",
        )
    layout = cast(Layout, fields["layout"].choice(_LAYOUTS)) if "layout" in fields else "tree"
    if "codec" in fields and layout != "chunks":
        raise fields["codec"].error("codec applies only to layout chunks", "remove it, or write layout: chunks")
    default = DEFAULT_CODEC if layout == "chunks" else "none"
    return TierConfig(
        name=name,
        kind=kind,
        path=path,
        size=size,
        high=high,
        low=low,
        numa=_numa(fields["numa"]) if "numa" in fields else (),
        huge=fields["huge"].choice(_HUGE) if "huge" in fields else "within_size",
        max=most,
        url=fields["url"].text(_AN_URL) if "url" in fields else None,
        endpoint=fields["endpoint"].text("write for example http://server:8333") if "endpoint" in fields else None,
        region=fields["region"].text("write for example eu-central-1") if "region" in fields else None,
        layout=layout,
        codec=_codec(fields["codec"]) if "codec" in fields else default,
    )


def _check_object(at: _At, fields: Mapping[str, _At], kind: TierKind) -> None:
    if kind != "object":
        for key in _OBJECT_KEYS:
            if key in fields:
                raise fields[key].error(f"{key} applies only to kind object", f"remove {key}, or write kind: object")
        return
    if "url" not in fields:
        raise at.error("a tier of kind object needs a url", _AN_URL, key="url")
    if "path" in fields:
        raise fields["path"].error("path does not apply to kind object", "remove path")
    if "layout" in fields and fields["layout"].is_scalar("str") and fields["layout"].node.value == "chunks":
        raise fields["layout"].error(
            "layout chunks is not supported in an object store in this version", "use layout: tree, or kind: dir"
        )


def _codec(at: _At) -> str:
    if at.is_scalar("str") and at.node.value == "delta":
        raise at.error("codec: delta is not supported in this version", "use shuffle-zstd")
    return at.choice(_CODECS)


def _memory_fits(at: _At, kind: TierKind, size: int) -> None:
    if kind == "memory" and size < MIN_MEMORY:
        raise at.error("is less than 1MiB: no file would fit", "write at least 1MiB, for example 64GiB")


def _watermark(at: _At | None, default: float) -> float:
    if at is None:
        return default
    value = at.unit(parse_percent, "percentage", "85%")
    if value <= 0:
        raise at.error("0% is out of range", "write a percentage above 0% and up to 100%")
    return value


def _numa(at: _At) -> tuple[int, ...]:
    nodes = tuple(item.integer(0, 1023) for item in at.items())
    if not nodes:
        raise at.error("is empty", "list at least one NUMA node, such as [2], or remove numa")
    if len(set(nodes)) < len(nodes):
        raise at.error("names a NUMA node twice", "list each node once")
    return nodes


def _default_state(root: _At, tiers: tuple[TierConfig, ...]) -> Path:
    first = next(tier for tier in tiers if tier.persistent)
    if first.path is None:
        raise root.error(
            "state is missing, and no tier above the archive is on a disk", "name a directory on a disk", key="state"
        )
    return first.path / ".tierfs" / "state" if first is tiers[-1] else first.path / ".tierfs-state"


def _rules(at: _At | None, tiers: tuple[TierConfig, ...]) -> tuple[Rule, ...]:
    rules = [] if at is None else [_rule(item, tiers) for item in at.items()]
    if not any(pattern in CATCH_ALL for rule in rules for pattern in rule.match):
        last = tiers[-1].name
        rules.append(Rule(match=("**",), ack=tiers[0].name, close=None, fsync=None, drain=last, keep={}))
    return tuple(rules)


def _rule(at: _At, tiers: tuple[TierConfig, ...]) -> Rule:
    fields = at.mapping(_RULE_KEYS)
    if "match" not in fields:
        raise at.error("match is missing", 'write a pattern, such as match: "**/*.pt"', key="match")
    order = [tier.name for tier in tiers]
    ack = _ack(fields["ack"], order) if "ack" in fields else order[0]
    drain: str | None = order[-1]
    if "drain" in fields:
        drain = _tier_name(fields["drain"], order, word="none")
        if drain == "none":
            drain = None
        elif order.index(drain) < order.index(ack):
            raise fields["drain"].error(
                f"drain tier {drain} is above the ack tier {ack}", f"drain to {ack} or a tier below it, or write none"
            )
    lowest = ack if drain is None else drain
    return Rule(
        match=_match(fields["match"]),
        ack=ack,
        close=_wait(fields.get("close"), tiers, ack, lowest),
        fsync=_wait(fields.get("fsync"), tiers, ack, lowest),
        drain=drain,
        keep=_keep(fields["keep"], order) if "keep" in fields else {},
        durable_within=_deadline(fields["durable_within"], lowest, order[-1]) if "durable_within" in fields else None,
        codec=_codec_of(fields["codec"], tiers[-1], lowest) if "codec" in fields else None,
    )


def _codec_of(at: _At, archive: TierConfig, lowest: str) -> str:
    if archive.layout != "chunks":
        raise at.error(
            f"codec applies only to an archive with layout chunks, and {archive.name} has layout tree",
            f"remove it, or write layout: chunks for {archive.name}",
        )
    if lowest != archive.name:
        raise at.error(f"the files of this rule end on {lowest}", f"remove it, or drain to {archive.name}")
    return _codec(at)


def _deadline(at: _At, lowest: str, last: str) -> float:
    seconds = at.unit(parse_duration, "duration", "5m")
    if seconds <= 0:
        raise at.error("must be more than 0", "write for example 5m")
    if lowest != last:
        raise at.error(
            f"is a deadline for the last tier, {last}, and the files of this rule end on {lowest}",
            f"remove it, or drain to {last}",
        )
    return seconds


def _match(at: _At) -> tuple[str, ...]:
    remedy = 'write a pattern in quotes, such as "**/*.pt", or a list of them'
    items = at.items() if at.is_sequence() else [at]
    if not items:
        raise at.error("is empty", remedy)
    patterns = []
    for item in items:
        pattern = item.text(remedy)
        try:
            compile_pattern(pattern)
        except ValueError as error:
            raise _error_of(item, error) from None
        patterns.append(pattern)
    return tuple(patterns)


def _tier_name(at: _At, order: list[str], *, word: str | None = None) -> str:
    valid = [*order, word] if word else order
    name = at.text(f"use one of {_listed(valid)}")
    if name not in valid:
        raise at.error(f"there is no tier {_quote(name)}", _nearest(name, valid))
    return name


def _ack(at: _At, order: list[str]) -> str:
    name = _tier_name(at, order)
    if name == order[-1]:
        above = f"use one of {_listed(order[:-1])}"
        raise at.error(
            f"{name} is the archive, which takes no writes itself",
            f"{above}; with close: {name} close() waits until the file is on the archive",
        )
    return name


def _wait(at: _At | None, tiers: tuple[TierConfig, ...], ack: str, lowest: str) -> str | None:
    if at is None:
        return None
    order = [tier.name for tier in tiers]
    name = _tier_name(at, order, word="ack")
    if name == "ack":
        return None
    possible = tiers[order.index(ack) : order.index(lowest) + 1]
    remedy = f"use one of {_listed(['ack', *(tier.name for tier in possible if tier.persistent)])}"
    if not tiers[order.index(name)].persistent:
        raise at.error(f"tier {name} is not persistent, nothing becomes durable there", remedy)
    if name not in {tier.name for tier in possible}:
        where = f"the ack tier {ack} and the drain target {lowest}" if lowest != ack else f"the only tier used, {ack}"
        problem = "is not between" if lowest != ack else "is not"
        raise at.error(f"tier {name} {problem} {where}", remedy)
    return name


def _keep(at: _At, order: list[str]) -> dict[str, Keep]:
    counts = "use watermark, all or none"
    if at.is_scalar("int"):
        raise at.error("integer keep counts are not supported in this version", f"{counts} per tier")
    keep = {}
    for name, entry in at.mapping().items():
        if name not in order:
            raise entry.error(f"there is no tier {_quote(name)}", _nearest(name, order))
        if entry.is_scalar("int"):
            raise entry.error("integer keep counts are not supported in this version", counts)
        keep[name] = Keep(entry.choice(_KEEPS))
        if keep[name] is Keep.NONE and name == order[-1]:
            raise entry.error("the archive always keeps its files, no tier is below it", "write all, or remove it")
    return keep


def _unsynced(at: _At) -> int:
    size = at.unit(parse_size, "size", "200GiB")
    if size == 0:
        raise at.error("must be more than zero", "write for example 200GiB; ack: and a disk keeps files out of memory")
    return size


def _limits(at: _At) -> Limits:
    fields = at.mapping(_LIMIT_KEYS)
    return Limits(
        drain=fields["drain"].unit(parse_rate, "rate", "2GiB/s") if "drain" in fields else None,
        transfers=fields["transfers"].integer(1, MAX_TRANSFERS) if "transfers" in fields else Limits().transfers,
        unsynced=_unsynced(fields["unsynced"]) if "unsynced" in fields else None,
        stop=fields["stop"].unit(parse_duration, "duration", "25s") if "stop" in fields else None,
        read_timeout=_timeout(fields["read_timeout"]) if "read_timeout" in fields else Limits().read_timeout,
        tier_timeout=_timeout(fields["tier_timeout"]) if "tier_timeout" in fields else Limits().tier_timeout,
        encode_threads=fields["encode_threads"].integer(1, 64) if "encode_threads" in fields else 3,
        encode_nice=fields["encode_nice"].integer(0, 19) if "encode_nice" in fields else 0,
    )


def _scrub(at: _At) -> ScrubConfig:
    if at.is_scalar("str") and at.text("") == "none":
        return ScrubConfig(every=None)
    if not at.is_mapping():
        raise at.error(f"must be none or a mapping, not {at.kind()}", "write none, or every: and rate: below it")
    fields = at.mapping(("every", "rate"))
    every, rate = ScrubConfig().every, ScrubConfig().rate
    if "every" in fields:
        every = fields["every"].unit(parse_duration, "duration", "7d")
        if every < MIN_SCRUB:
            raise fields["every"].error(f"{every:g} s is out of range", "write a minute or more, such as 7d")
    if "rate" in fields:
        rate = fields["rate"].unit(parse_rate, "rate", "50MiB/s")
    return ScrubConfig(every, rate)


def _timeout(at: _At) -> float:
    seconds = at.unit(parse_duration, "duration", "30s")
    if not 1 <= seconds <= MAX_TIMEOUT:
        raise at.error(f"{seconds:g} s is out of range", "write a duration from 1s to 1h")
    return seconds
