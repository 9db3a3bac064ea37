"""A SeaweedFS of a module's own, for mounts whose archive is in it."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator

import pytest

from tests.servers import BUCKET, KEY, SECRET, Server, program, seaweedfs
from tierfs.errors import NoSuchBlob
from tierfs.tiers.objects import ObjectBlobs


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if program("weed") is None:
        pytest.skip("needs weed")
    with seaweedfs(tmp_path_factory.mktemp("seaweedfs") / "server") as running:
        yield running


@pytest.fixture(scope="module")
def credentials() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        patch.setenv("AWS_ACCESS_KEY_ID", KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        yield


def fresh_url() -> str:
    return f"s3://{BUCKET}/run {secrets.token_hex(4)}"


def objects(bucket: ObjectBlobs) -> dict[str, bytes]:
    """Key → bytes, as any other program sees them: one after the other."""
    found = {}
    for blob in bucket.scan():
        with contextlib.suppress(NoSuchBlob):  # moved since
            found[blob.key] = bytes(bucket.get(blob.key))
    return found
