"""What goes wrong with an object store ends in one error with an errno and what to do, in time, without a secret."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from tests.servers import (
    BUCKET,
    KEY,
    SECRET,
    Asked,
    Between,
    Reply,
    Server,
    between,
    free_ports,
    moto,
    program,
    rclone_s3,
    s3_error,
)
from tierfs.errors import ConfigError, NoSuchBlob, TierError
from tierfs.testing.blobs_conformance import PART, mapped
from tierfs.tiers.blobs import Upload
from tierfs.tiers.object_access import profile_credentials
from tierfs.tiers.objects import ObjectBlobs

__all__ = ["mapped"]

PATIENCE, QUICK = 12.0, 1.2
"""Seconds: with a server behind it, which may be slow, and where an answer is made up."""
URL = f"s3://{BUCKET}/errors"
TOKEN = "FwoGZXIvYXdzEsessiontokensessiontoken"
needs_rclone = pytest.mark.skipif(program("rclone") is None, reason="needs rclone")
needs_moto = pytest.mark.skipif(program("moto_server") is None, reason="needs moto_server")


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)


@pytest.fixture
def proxy() -> Iterator[Between]:
    """Answers as told, with no server behind it."""
    with between() as made:
        yield made


@pytest.fixture
def blobs(proxy: Between) -> ObjectBlobs:
    return ObjectBlobs.open("archive", URL, endpoint=proxy.endpoint, patience=PATIENCE)


@pytest.fixture
def quick(proxy: Between) -> ObjectBlobs:
    return ObjectBlobs.open("archive", URL, endpoint=proxy.endpoint, patience=QUICK)


def calls(blobs: ObjectBlobs) -> dict[str, Callable[[], object]]:
    def upload() -> None:
        started = blobs.begin("key", PART)
        try:
            started.part(0, bytes(PART))
            started.part(1, b"x")
            started.complete()
        finally:
            started.abort()

    return {
        "put": lambda: blobs.put("key", b"x"),
        "put_if_absent": lambda: blobs.put_if_absent("key", b"x"),
        "head": lambda: blobs.head("key"),
        "get": lambda: blobs.get("key"),
        "get_range": lambda: blobs.get_range("key", 0, 1),
        "get_ranges": lambda: blobs.get_ranges("key", [(0, 1)]),
        "scan": lambda: list(blobs.scan()),
        "children": lambda: blobs.children(),
        "copy": lambda: blobs.copy("key", "other"),
        "delete": lambda: blobs.delete(["key"]),
        "upload": upload,
        "probe": blobs.probe,
    }


def send(upload: Upload, data: memoryview) -> None:
    """Two parts, and that is all."""
    for number in range(2):
        upload.part(number, data[number * PART : (number + 1) * PART])
    upload.complete()


def secret_free(error: BaseException) -> None:
    told = "".join(traceback.format_exception(error)) + repr(error) + str(error)
    for secret in (SECRET, KEY, TOKEN, "Signature=", "AWS4-HMAC"):
        assert secret not in told


LEAKY = f"<AWSAccessKeyId>{KEY}</AWSAccessKeyId><StringToSign>AWS4-HMAC-SHA256 {TOKEN}</StringToSign>"
ANSWERS = [
    (403, "InvalidAccessKeyId", errno.EACCES, True, "AWS_ACCESS_KEY_ID"),
    (403, "SignatureDoesNotMatch", errno.EACCES, True, "AWS_SECRET_ACCESS_KEY"),
    (400, "ExpiredToken", errno.EACCES, True, "expired"),
    (403, "RequestTimeTooSkewed", errno.EACCES, True, "clock"),
    (403, "AccessDenied", errno.EACCES, True, f"rights to list, read, write and delete in {BUCKET}"),
    (404, "NoSuchBucket", errno.ENOENT, True, f"no bucket {BUCKET}"),
    (400, "AuthorizationHeaderMalformed", errno.EINVAL, False, "AWS_REGION"),
    (507, "InsufficientStorage", errno.ENOSPC, True, "no room"),
    (501, "NotImplemented", errno.EOPNOTSUPP, False, "does not have"),
    (418, "Teapot", errno.EIO, True, "HTTP 418"),
]


@pytest.mark.parametrize(("status", "code", "number", "temporary", "says"), ANSWERS)
def test_what_the_server_refuses(
    proxy: Between, quick: ObjectBlobs, status: int, code: str, number: int, temporary: bool, says: str
) -> None:
    proxy.fault = lambda asked: s3_error(status, code, LEAKY)
    for name, call in (calls(quick) | {"abort_stale": lambda: quick.abort_stale(0)}).items():
        with pytest.raises(TierError) as refused:
            call()
        secret_free(refused.value)
        assert (refused.value.errno, refused.value.temporary) == (number, temporary), (name, str(refused.value))
        assert says in str(refused.value), name
        assert str(refused.value).startswith("tier archive: ")
        assert refused.value.__cause__ is None
        assert refused.value.__context__ is None or isinstance(refused.value.__context__, TierError)


def test_another_region_is_named(proxy: Between, quick: ObjectBlobs) -> None:
    proxy.fault = lambda asked: s3_error(400, "AuthorizationHeaderMalformed", "<Region>eu-central-1</Region>")
    with pytest.raises(TierError, match=r"another region than us-east-1.*eu-central-1"):
        quick.probe()
    proxy.fault = lambda asked: Reply(301)
    with pytest.raises(TierError, match="another region than us-east-1; set the tier's region, or AWS_REGION"):
        quick.probe()


def test_a_missing_blob_is_no_missing_bucket(proxy: Between, quick: ObjectBlobs) -> None:
    proxy.fault = lambda asked: s3_error(404, "NoSuchKey")
    assert quick.head("key") is None
    with pytest.raises(NoSuchBlob):
        quick.get("key")
    proxy.fault = lambda asked: s3_error(404, "NoSuchBucket")
    with pytest.raises(TierError) as missing:
        quick.get("key")
    assert not isinstance(missing.value, NoSuchBlob)


def test_a_storm_of_503_is_an_error_in_time(proxy: Between, quick: ObjectBlobs) -> None:
    proxy.fault = lambda asked: s3_error(503, "SlowDown")
    for name, call in calls(quick).items():
        started, asked = time.monotonic(), len(proxy.asked)
        with pytest.raises(TierError) as busy:
            call()
        assert (busy.value.errno, busy.value.temporary) == (errno.EBUSY, True), name
        assert time.monotonic() - started < 10 * QUICK, name
        assert 1 < len(proxy.asked) - asked <= 20, name


@needs_moto
def test_a_short_storm_is_not_noticed(proxy: Between, blobs: ObjectBlobs, server: Server, mapped: memoryview) -> None:
    proxy.upstream = server
    turn = itertools.count()
    lock = threading.Lock()

    def every_other(asked: Asked) -> Reply | None:
        with lock:
            return s3_error(503, "SlowDown") if next(turn) % 2 == 0 else None

    proxy.fault = every_other
    for call in calls(blobs).values():
        call()
    send(blobs.begin("large", PART), mapped)
    assert blobs.get("large") == mapped[: 2 * PART]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with moto(tmp_path_factory.mktemp("moto") / "server") as server:
        yield server


def test_nothing_listens(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    blobs = ObjectBlobs.open("archive", URL, endpoint=f"http://127.0.0.1:{port}", patience=QUICK)
    for name, call in (calls(blobs) | {"abort_stale": lambda: blobs.abort_stale(0)}).items():
        started = time.monotonic()
        with pytest.raises(TierError, match=f"nothing listens at http://127.0.0.1:{port}") as down:
            call()
        assert (down.value.errno, down.value.temporary) == (errno.ECONNREFUSED, True), name
        assert time.monotonic() - started < 10 * QUICK, name


@pytest.mark.parametrize(
    ("endpoint", "number", "says"),
    [
        ("http://no-such-host.invalid:80", errno.EHOSTUNREACH, "there is no host"),
        ("https://127.0.0.1:{port}", errno.EPROTO, "http:// or https://"),
    ],
)
def test_a_wrong_endpoint(proxy: Between, endpoint: str, number: int, says: str) -> None:
    blobs = ObjectBlobs.open("archive", URL, endpoint=endpoint.format(port=proxy.port), patience=PATIENCE)
    with pytest.raises(TierError, match=says) as wrong:
        blobs.probe()
    assert wrong.value.errno == number


def test_an_endpoint_that_is_no_store(proxy: Between, quick: ObjectBlobs) -> None:
    proxy.fault = lambda asked: Reply(200, b"<html>Welcome to nginx</html>")
    for name in ("probe", "upload"):
        with pytest.raises(TierError):
            calls(quick)[name]()


def test_a_server_that_does_not_answer_holds_nobody_for_ever(proxy: Between, quick: ObjectBlobs) -> None:
    def hang(asked: Asked) -> Reply | None:
        proxy.closing.wait()
        return None

    proxy.fault = hang
    for name, call in calls(quick).items():
        if name in ("probe", "get_ranges", "children", "copy"):
            continue  # the same requests
        started = time.monotonic()
        with pytest.raises(TierError) as silent:
            call()
        assert (silent.value.errno, silent.value.temporary) == (errno.ETIMEDOUT, True), (name, str(silent.value))
        assert time.monotonic() - started < 10 * QUICK, name


@needs_moto
@pytest.mark.parametrize("kept", [0, 1000, 99_999])
def test_a_truncated_body_is_never_taken_for_the_blob(
    proxy: Between, blobs: ObjectBlobs, server: Server, kept: int
) -> None:
    proxy.upstream = server
    data = os.urandom(100_000)
    blobs.put("key", data)
    cut = [True]

    def truncate(asked: Asked, reply: Reply) -> Reply:
        spoilt = asked.method == "GET" and cut[0]
        return Reply(reply.status, reply.body, reply.headers, cut=kept) if spoilt else reply

    proxy.spoil = truncate
    for read in (
        lambda: blobs.get("key"),
        lambda: blobs.get_range("key", 0, len(data)),
        lambda: blobs.get_ranges("key", [(0, len(data))]),
    ):
        found: object = None
        failure: TierError | None = None
        try:  # obstore asks for the rest, which may be all that it gets
            found = read()
        except TierError as broken:
            failure = broken
        if failure is None:
            assert kept > len(data) / 2
            assert bytes(found[0] if isinstance(found, list) else found) == data  # type: ignore[call-overload]
        else:
            assert (failure.errno, failure.temporary) == (errno.ECONNRESET, True), str(failure)
    cut[0] = False
    assert bytes(blobs.get("key")) == data


@needs_moto
def test_a_body_that_is_whole_but_too_short_is_an_error(proxy: Between, blobs: ObjectBlobs, server: Server) -> None:
    proxy.upstream = server
    blobs.put("key", b"0123456789")
    proxy.spoil = lambda asked, reply: (
        Reply(reply.status, reply.body[:4], reply.headers) if asked.method == "GET" else reply
    )
    for read in (
        lambda: blobs.get_range("key", 0, 10),
        lambda: blobs.get_ranges("key", [(0, 10)]),
    ):
        with pytest.raises(TierError) as short:
            read()
        assert short.value.temporary


@needs_rclone
def test_a_server_killed_in_the_middle_of_a_part(proxy: Between, tmp_path: Path, mapped: memoryview) -> None:
    with rclone_s3(tmp_path / "server") as server:
        proxy.upstream = server
        blobs = ObjectBlobs.open("archive", URL, endpoint=proxy.endpoint, patience=PATIENCE)
        blobs.put("key", b"old")

        def kill(asked: Asked) -> Reply | None:
            if asked.is_part and "partNumber=2" in asked.path:
                server.kill()
                raise ConnectionResetError
            return None

        proxy.fault = kill
        upload = blobs.begin("key", PART)
        with pytest.raises(TierError) as killed:
            send(upload, mapped)
        assert killed.value.temporary
        upload.abort()
        proxy.fault = lambda asked: None
        server.start()
        assert bytes(blobs.get("key")) == b"old"
        send(blobs.begin("key", PART), mapped)
        assert blobs.get("key") == mapped[: 2 * PART]


def test_buffers_are_free_after_a_failure_too(proxy: Between, quick: ObjectBlobs) -> None:
    def accept_no_part(asked: Asked) -> Reply | None:
        if asked.method == "POST" and "uploads" in asked.path:
            body = b"<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>"
            return Reply(200, body)
        if asked.is_part or "uploadId" not in asked.path:
            proxy.closing.wait()
        return Reply(204)

    proxy.fault = accept_no_part
    memory = bytearray(2 * PART)
    upload = quick.begin("key", PART)
    with pytest.raises(TierError):
        send(upload, memoryview(memory))
    upload.abort()
    with pytest.raises(TierError):
        quick.put("key", memory)
    memory.append(0)  # BufferError while anybody refers to it


@needs_moto
def test_expired_credentials_are_read_again(
    proxy: Between, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_SESSION_TOKEN")
    profile = tmp_path / ".aws" / "credentials"
    profile.parent.mkdir()
    profile.write_text("[default]\naws_access_key_id = OLDKEY\naws_secret_access_key = old\naws_session_token = t\n")
    monkeypatch.setattr("tierfs.tiers.object_access._REREAD", timedelta(seconds=0.2))
    proxy.upstream = server
    proxy.fault = lambda asked: (
        s3_error(400, "ExpiredToken") if "OLDKEY" in asked.headers.get("authorization", "") else None
    )
    blobs = ObjectBlobs.open("archive", URL, endpoint=proxy.endpoint, patience=PATIENCE)
    with pytest.raises(TierError, match="expired"):
        blobs.put("key", b"x")
    profile.write_text(f"[default]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n")
    until = time.monotonic() + 30
    while True:
        try:
            blobs.put("key", b"x")
            break
        except TierError:
            assert time.monotonic() < until
    assert bytes(blobs.get("key")) == b"x"


def test_no_credentials_at_all(monkeypatch: pytest.MonkeyPatch, proxy: Between) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    (port,) = free_ports(1)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{port}")
    blobs = ObjectBlobs.open("archive", URL, endpoint=proxy.endpoint, patience=PATIENCE)
    with pytest.raises(TierError, match="no credentials were found; set AWS_ACCESS_KEY_ID") as without:
        blobs.probe()
    assert without.value.errno == errno.EACCES


# what is refused before anything is asked


@pytest.mark.parametrize(
    ("url", "says"),
    [
        (f"s3://{KEY}:{SECRET}@bucket/x", "credentials come from"),
        (f"s3://bucket/x?token={SECRET}", "credentials come from"),
        ("ftp://bucket/x", "must begin with"),
        ("bucket/x", "must begin with"),
        ("s3:///x", "no bucket"),
        ("s3://bucket/a//b", "empty segment"),
        ("s3://bucket/../b", "empty segment"),
    ],
)
def test_a_url_that_is_refused(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        ObjectBlobs.open("archive", url)
    secret_free(refused.value)


@pytest.mark.parametrize("endpoint", ["storage.example.com", "ftp://x", "http://", f"http://{KEY}:{SECRET}@x"])
def test_an_endpoint_that_is_no_url(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="the endpoint must be a URL") as refused:
        ObjectBlobs.open("archive", URL, endpoint=endpoint)
    secret_free(refused.value)


def test_no_secret_in_repr_or_log(proxy: Between, quick: ObjectBlobs, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    proxy.fault = lambda asked: s3_error(403, "SignatureDoesNotMatch", LEAKY)
    try:
        quick.probe()
    except TierError:
        logging.exception("failed")
    for secret in (SECRET, KEY, TOKEN):
        assert secret not in repr(quick) + repr(vars(quick)) + caplog.text
    assert "tier archive" in caplog.text


@needs_moto
def test_a_slow_line_gets_fewer_parts_at_once(proxy: Between, server: Server, mapped: memoryview) -> None:
    proxy.upstream = server
    blobs = ObjectBlobs.open("archive", URL, endpoint=proxy.endpoint, patience=PATIENCE)
    slow = ObjectBlobs.open("archive", URL, endpoint=proxy.endpoint, patience=QUICK)
    assert blobs.streams == slow.streams == 8

    def hang(asked: Asked) -> Reply | None:
        if asked.is_part:
            proxy.closing.wait()
        return None

    proxy.fault = hang
    for streams in (4, 2):
        upload = slow.begin("key", PART)
        with pytest.raises(TierError):
            send(upload, mapped)
        upload.abort()
        assert slow.streams == streams
    blobs.streams = 2
    proxy.fault = lambda asked: None
    for streams in (4, 8, 8):
        send(blobs.begin("key", PART), mapped)
        assert blobs.streams == streams


@needs_moto
def test_after_a_fork_calls_are_refused_and_do_not_hang(proxy: Between, server: Server, blobs: ObjectBlobs) -> None:
    proxy.upstream = server
    blobs.put("key", b"x")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: there are threads, and that is the point
        child = os.fork()
    if child == 0:
        said = set()
        for call in calls(ObjectBlobs.open("archive", URL, endpoint=server.endpoint)).values():
            try:
                call()
            except TierError as error:
                said.add(error.errno)
        os._exit(0 if said == {errno.EDEADLK} else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert bytes(blobs.get("key")) == b"x"


# uploads that are left


def test_without_keys_uploads_are_left_to_the_bucket(
    proxy: Between, quick: ObjectBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert quick.abort_stale(0) is None
    assert proxy.asked == []


def test_all_pages_of_uploads_are_looked_at(proxy: Between, quick: ObjectBlobs) -> None:
    def upload(number: int) -> str:
        return (
            f"<Upload><Key>errors/k{number}</Key><UploadId>i{number}</UploadId>"
            f"<Initiated>2020-01-01T00:00:00.000Z</Initiated></Upload>"
        )

    def answer(asked: Asked) -> Reply:
        if asked.method == "DELETE":
            return s3_error(404, "NoSuchUpload") if "uploadId=i1" in asked.path else Reply(204)
        last = "key-marker=errors%2Fk0" in asked.path and "upload-id-marker=i0" in asked.path
        body = upload(1) + upload(2) if last else upload(0) + "<IsTruncated>true</IsTruncated>"
        more = "" if last else "<NextKeyMarker>errors/k0</NextKeyMarker><NextUploadIdMarker>i0</NextUploadIdMarker>"
        namespace = "http://s3.amazonaws.com/doc/2006-03-01/"
        return Reply(200, f"<ListR xmlns='{namespace}'>{body}{more}</ListR>".encode())

    proxy.fault = answer
    assert quick.abort_stale(3600) == 2, "the one that was gone is nobody's merit"
    assert [asked.path.partition("?")[0] for asked in proxy.asked if asked.method == "DELETE"] == [
        f"/{BUCKET}/errors/k{number}" for number in range(3)
    ]
    assert all("prefix=errors%2F" in asked.path for asked in proxy.asked if asked.method == "GET")


# profiles


def test_profiles(tmp_path: Path) -> None:
    aws = tmp_path / ".aws"
    aws.mkdir()
    home = {"HOME": str(tmp_path)}
    assert profile_credentials("t", home) is None
    (aws / "credentials").write_text(
        "[default]\naws_access_key_id=A\naws_secret_access_key=B\n[other]\naws_access_key_id=C\n"
        "aws_secret_access_key=D\naws_session_token=E\n"
    )
    found = profile_credentials("t", home)
    assert found is not None
    assert (found()["access_key_id"], found()["secret_access_key"], found()["token"]) == ("A", "B", None)
    found = profile_credentials("t", {**home, "AWS_PROFILE": "other"})
    assert found is not None
    assert (found()["access_key_id"], found()["token"]) == ("C", "E")
    assert profile_credentials("t", {**home, "AWS_ACCESS_KEY_ID": "X"}) is None
    assert profile_credentials("t", {**home, "AWS_WEB_IDENTITY_TOKEN_FILE": "/x"}) is None
    with pytest.raises(ConfigError, match="AWS_PROFILE is third, of which neither"):
        profile_credentials("t", {**home, "AWS_PROFILE": "third"})
    (aws / "config").write_text("[profile third]\nregion = eu-west-1\n")
    assert profile_credentials("t", {**home, "AWS_PROFILE": "third"}) is None
    (aws / "credentials").write_text("no section\n")
    with pytest.raises(ConfigError, match="cannot be read as an INI file"):
        profile_credentials("t", home)


def test_a_profile_that_needs_boto3_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "config").write_text("[profile sso]\nsso_session = x\n")
    monkeypatch.setitem(sys.modules, "obstore.auth.boto3", None)
    with pytest.raises(ConfigError, match="pip install boto3"):
        profile_credentials("t", {"HOME": str(tmp_path), "AWS_PROFILE": "sso"})
