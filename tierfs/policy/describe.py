"""A policy told back as JSON-able values, for ``tierfs explain`` and ``tierfs check``. Pure."""

from __future__ import annotations

import dataclasses
import os

from tierfs.policy.match import CATCH_ALL, RuleMatcher
from tierfs.policy.model import Keep, Policy, Rule


def explain(policy: Policy, path: bytes) -> dict[str, object]:
    """How the policy treats ``path`` (relative to the mount root): which rule, by which pattern, and what it says.

    ``path`` comes back as str with surrogateescape. Raises LookupError when no rule matches, which a loaded policy
    rules out.
    """
    matcher = RuleMatcher(policy.rules)
    index, rule = matcher.rule_for(path)
    where = {"path": os.fsdecode(path), "rule": index, "pattern": matcher.pattern_for(path)}
    memory = {"memory_tiers": [tier.name for tier in policy.tiers if not tier.persistent]}
    return where | _treatment(policy, rule) | memory


def check_summary(policy: Policy) -> dict[str, object]:
    """The whole policy with its defaults filled in. Sizes in bytes, rates in bytes per second, marks as fractions.

    ``unreachable_rules`` lists the indexes of rules behind a catch-all. Raises nothing.
    """
    first_catch_all = next(
        (i for i, rule in enumerate(policy.rules) if any(p in CATCH_ALL for p in rule.match)), len(policy.rules)
    )
    return {
        "source": policy.source,
        "mount": None if policy.mount is None else str(policy.mount),
        "mode": policy.mode,
        "allow_other": policy.allow_other,
        "state": str(policy.state),
        "tiers": [
            {
                "name": tier.name,
                "kind": tier.kind,
                "path": None if tier.path is None else str(tier.path),
                "url": tier.url,
                "endpoint": tier.endpoint,
                "size": tier.size,
                "max": tier.hard_limit if tier.kind == "memory" and tier.path is None else None,
                "high": tier.high,
                "low": tier.low,
                "numa": list(tier.numa),
                "huge": tier.huge if tier.kind == "memory" else None,
                "persistent": tier.persistent,
                "archive": tier is policy.tiers[-1],
                "layout": tier.layout if tier is policy.tiers[-1] else None,
                "codec": tier.codec if tier.layout == "chunks" else None,
            }
            for tier in policy.tiers
        ],
        "rules": [{"match": list(rule.match)} | _treatment(policy, rule) for rule in policy.rules],
        "unreachable_rules": list(range(first_catch_all + 1, len(policy.rules))),
        "limits": dataclasses.asdict(policy.limits),
        "scrub": dataclasses.asdict(policy.scrub),
    }


def remarks(policy: Policy) -> list[str]:
    """What a valid policy may still say by oversight, a sentence each."""
    memory = {tier.name for tier in policy.tiers if not tier.persistent}
    found = []
    if policy.limits.unsynced is not None:
        if not memory:
            found.append("limits.unsynced limits nothing: there is no memory tier")
        elif len(policy.tiers) == 2:
            found.append("limits.unsynced can only make files wait: no tier is between memory and archive")
    catch_all = False
    for index, rule in enumerate(policy.rules):
        if catch_all:
            found.append(f"rule {index} is never used: a rule before it matches every file")
            continue
        catch_all = any(pattern in CATCH_ALL for pattern in rule.match)
        if rule.ack in memory and rule.close is None and rule.fsync is None:
            way = "its files are only in memory" if rule.drain is None else "only draining makes its files durable"
            found.append(f"rule {index} ({', '.join(rule.match)}): fsync() makes nothing durable, {way}")
    return found


def _treatment(policy: Policy, rule: Rule) -> dict[str, object]:
    archive = policy.tiers[-1]
    return {
        "ack": rule.ack,
        "close": rule.close or "ack",
        "fsync": rule.fsync or "ack",
        "drain": rule.drain or "none",
        "durable_within": rule.durable_within,
        "codec": (rule.codec or archive.codec) if archive.layout == "chunks" and rule.lowest == archive.name else None,
        "keep": {
            tier.name: rule.keep.get(tier.name, Keep.WATERMARK).value if tier is not archive else Keep.ALL.value
            for tier in policy.tiers
        },
    }
