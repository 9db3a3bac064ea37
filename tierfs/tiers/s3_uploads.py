"""The uploads in parts that an S3 bucket still has: list and abort them. obstore has no calls for either, so these two
requests, and only these, are signed here (AWS Signature Version 4). They carry no data.

Of credentials only those that this process can see are used: the environment's and the profiles'. Those of a machine's
role are obstore's, and then a rule of the bucket has to see to it.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from urllib.parse import quote, urlsplit
from xml.etree import ElementTree

from tierfs.errors import TierError
from tierfs.tiers.object_access import Access
from tierfs.tiers.object_errors import Place, translate

TIMEOUT = 15.0
"""Seconds for one of these requests."""
PAGE = 1000
_NOTHING = hashlib.sha256(b"").hexdigest()
_LARGEST_ANSWER = 8 << 20
_GONE = "NoSuchUpload"


@dataclass(frozen=True, slots=True)
class Begun:
    """An upload that was neither completed nor aborted. ``key`` includes the store's prefix."""

    key: str
    id: str
    at: datetime


@dataclass(frozen=True)
class _Credentials:
    key: str
    secret: str
    token: str | None

    def __repr__(self) -> str:
        return "_Credentials()"


class _Refused(Exception):
    """What the server answered, for `translate` alone."""


class S3Uploads:
    """Of one store. Its methods raise TierError."""

    def __init__(self, access: Access, place: Place, environ: Mapping[str, str] = os.environ) -> None:
        self._access = access
        self._place = place
        self._environ = environ
        self._region = access.region or "us-east-1"
        self._endpoint = urlsplit(access.endpoint or f"https://s3.{self._region}.amazonaws.com")

    def abort_stale(self, older_than: float, live: Collection[str]) -> int | None:
        """Abort those begun over ``older_than`` seconds ago by the server's clock, but for the keys ``live``: how many;
        None when there are no credentials for it."""
        if self._credentials() is None:
            return None
        aborted = 0
        for begun, now in list(self._begun()):
            if begun.key in live or (now - begun.at).total_seconds() <= older_than:
                continue
            status, body, _ = self._ask("DELETE", begun.key, {"uploadId": begun.id})
            if status < 300:
                aborted += 1
            elif _GONE not in body:  # somebody completed or aborted it meanwhile
                raise self._refusal("remove the parts of an upload", status, body)
        return aborted

    def _begun(self) -> Iterator[tuple[Begun, datetime]]:
        """Uploads below the store's prefix, and the server's time."""
        after: dict[str, str] = {}
        while True:
            query = {"uploads": "", "max-uploads": str(PAGE), **after}
            if self._access.prefix:
                query["prefix"] = f"{self._access.prefix}/"
            status, body, now = self._ask("GET", None, query)
            if status != 200:
                raise self._refusal("list uploads", status, body)
            try:
                root = ElementTree.fromstring(body)
                for upload in root.iterfind("{*}Upload"):
                    key, identity, at = (upload.findtext(f"{{*}}{tag}", "") for tag in ("Key", "UploadId", "Initiated"))
                    yield Begun(key, identity, datetime.fromisoformat(at)), now
                if root.findtext("{*}IsTruncated", "").strip() != "true":
                    return
                after = {
                    "key-marker": root.findtext("{*}NextKeyMarker", ""),
                    "upload-id-marker": root.findtext("{*}NextUploadIdMarker", ""),
                }
            except (ElementTree.ParseError, ValueError, TypeError):
                raise self._refusal("list uploads", 200, "invalid list response") from None

    def _refusal(self, action: str, status: int, body: str) -> TierError:
        return translate(self._place, action, _Refused(f"status code: {status} {body}"))

    def _credentials(self) -> _Credentials | None:
        if self._access.profile is not None:
            found = self._access.profile()
            return _Credentials(found["access_key_id"], found["secret_access_key"], found.get("token"))
        key, secret = (self._environ.get(f"AWS_{name}") for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"))
        if not key or not secret:
            return None
        return _Credentials(key, secret, self._environ.get("AWS_SESSION_TOKEN") or None)

    def _ask(self, method: str, key: str | None, query: dict[str, str]) -> tuple[int, str, datetime]:
        """Status, body and the server's time."""
        try:
            return self._request(method, key, query)
        except (OSError, http.client.HTTPException) as error:
            failure = translate(self._place, "ask for uploads", error)
        raise failure

    def _request(self, method: str, key: str | None, query: dict[str, str]) -> tuple[int, str, datetime]:
        path = f"{self._endpoint.path.rstrip('/')}/{self._access.bucket}"
        if key is not None:
            path += "/" + quote(key, safe="/-_.~")
        asked = "&".join(
            f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}" for name, value in sorted(query.items())
        )
        kind = http.client.HTTPSConnection if self._endpoint.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._endpoint.netloc, timeout=TIMEOUT)
        try:
            connection.request(method, f"{path}?{asked}", headers=self._signed(method, path, asked))
            reply = connection.getresponse()
            body = reply.read(_LARGEST_ANSWER).decode(errors="replace")
            date = reply.getheader("Date")
            return reply.status, body, parsedate_to_datetime(date) if date else datetime.now(UTC)
        finally:
            connection.close()

    def _signed(self, method: str, path: str, query: str) -> dict[str, str]:
        credentials = self._credentials()
        if credentials is None:
            return {}
        now = datetime.now(UTC)
        stamp, day = now.strftime("%Y%m%dT%H%M%SZ"), now.strftime("%Y%m%d")
        headers = {"host": self._endpoint.netloc, "x-amz-content-sha256": _NOTHING, "x-amz-date": stamp}
        if credentials.token:
            headers["x-amz-security-token"] = credentials.token
        names = ";".join(sorted(headers))
        canonical = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
        request = "\n".join((method, path, query, canonical, names, _NOTHING))
        scope = f"{day}/{self._region}/s3/aws4_request"
        to_sign = "\n".join(("AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(request.encode()).hexdigest()))
        key = b"AWS4" + credentials.secret.encode()
        for part in scope.split("/"):
            key = hmac.digest(key, part.encode(), "sha256")
        signature = hmac.digest(key, to_sign.encode(), "sha256").hex()
        headers["authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={credentials.key}/{scope}, SignedHeaders={names}, Signature={signature}"
        )
        return headers
