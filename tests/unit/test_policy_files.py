from __future__ import annotations

from pathlib import Path

import pytest

from tierfs.policy.load import load_policy
from tierfs.policy.match import RuleMatcher

POLICIES = Path(__file__).parents[2] / "policies"
FILES = sorted(POLICIES.glob("*.yaml"))


def test_the_shipped_policies_are_there() -> None:
    assert {"default.yaml", "checkpoint.yaml", "single-disk.yaml"} <= {path.name for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_policy_file(path: Path) -> None:
    policy = load_policy(path)
    assert policy.mount == Path("/mnt/ckpt")
    assert policy.source == str(path)
    assert RuleMatcher(policy.rules).rule_for(b"any/\xff")[1] is policy.rules[-1]
    assert path.read_text().startswith("# ")
