"""What an object store's error means, whether it may pass, and what to do about it.

The text of such an error quotes requests, headers and the server's answer, in which there may be key ids, signatures
and tokens. So none of it is passed on: only codes and statuses that are known to be words, and nothing refers to the
error it came from, or a traceback in a log would show that.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass

from tierfs.errors import NoSuchBlob, TierError


@dataclass(frozen=True)
class Place:
    """Where requests go, for messages."""

    tier: str
    provider: str
    url: str
    bucket: str
    endpoint: str | None
    region: str | None

    @property
    def server(self) -> str:
        return self.endpoint or {"s3": "AWS", "gcs": "Google Cloud Storage", "azure": "Azure"}[self.provider]


@dataclass(frozen=True)
class _Meaning:
    text: str
    """May name {bucket}, {server}, {region}, {endpoint}."""
    errno: int = errno.EIO
    temporary: bool = True


_CREDENTIALS = "the credentials are not accepted; check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the profile"
_EXPIRED = "the credentials have expired; get new ones (tierfs goes on by itself once it finds them)"
_CLOCK = "this machine's clock is too far from the server's; set it (timedatectl, chronyc tracking)"
_DENIED = "access is denied; the credentials need the rights to list, read, write and delete in {bucket}"
_BUSY = "{server} is overloaded or not available"
_BUCKET = "there is no bucket {bucket} at {server}; create it, or correct the tier's url"
_REGION = "the bucket {bucket} is in another region than {region}; set the tier's region, or AWS_REGION"
_FULL = "{server} has no room, or the quota is used up"

_BY_CODE: dict[str, _Meaning] = {
    "InvalidAccessKeyId": _Meaning(_CREDENTIALS, errno.EACCES),
    "SignatureDoesNotMatch": _Meaning(_CREDENTIALS, errno.EACCES),
    "AuthenticationFailed": _Meaning("the credentials are not accepted", errno.EACCES),
    "InvalidToken": _Meaning(_EXPIRED, errno.EACCES),
    "ExpiredToken": _Meaning(_EXPIRED, errno.EACCES),
    "ExpiredTokenException": _Meaning(_EXPIRED, errno.EACCES),
    "TokenRefreshRequired": _Meaning(_EXPIRED, errno.EACCES),
    "RequestTimeTooSkewed": _Meaning(_CLOCK, errno.EACCES),
    "RequestExpired": _Meaning(_CLOCK, errno.EACCES),
    "AccessDenied": _Meaning(_DENIED, errno.EACCES),
    "AllAccessDisabled": _Meaning(_DENIED, errno.EACCES),
    "AuthorizationPermissionMismatch": _Meaning(_DENIED, errno.EACCES),
    "NoSuchBucket": _Meaning(_BUCKET, errno.ENOENT),
    "ContainerNotFound": _Meaning(_BUCKET, errno.ENOENT),
    "InvalidBucketName": _Meaning("{bucket} is no name for a bucket", errno.EINVAL, False),
    "AuthorizationHeaderMalformed": _Meaning(_REGION, errno.EINVAL, False),
    "IllegalLocationConstraintException": _Meaning(_REGION, errno.EINVAL, False),
    "PermanentRedirect": _Meaning(_REGION, errno.EINVAL, False),
    "SlowDown": _Meaning(_BUSY, errno.EBUSY),
    "ServiceUnavailable": _Meaning(_BUSY, errno.EBUSY),
    "ServerBusy": _Meaning(_BUSY, errno.EBUSY),
    "InternalError": _Meaning("{server} has an internal error"),
    "RequestTimeout": _Meaning("{server} did not get the data in time", errno.ETIMEDOUT),
    "NoSuchUpload": _Meaning("{server} has discarded the parts sent before; they are sent again"),
    "InvalidPart": _Meaning("{server} has lost parts sent before; they are sent again"),
    "EntityTooLarge": _Meaning("{server} takes no object or part as large", errno.EFBIG, False),
    "EntityTooSmall": _Meaning("{server} wants larger parts", errno.EINVAL, False),
    "QuotaExceeded": _Meaning(_FULL, errno.EDQUOT),
    "InsufficientStorage": _Meaning(_FULL, errno.ENOSPC),
    "XMinioStorageFull": _Meaning(_FULL, errno.ENOSPC),
    "NotImplemented": _Meaning("{server} does not have what tierfs needs", errno.EOPNOTSUPP, False),
    "InvalidObjectState": _Meaning("the object is in cold storage; restore it first"),
}
"""By the code in the server's answer, S3's words first."""

_NO_CREDENTIALS = _Meaning(
    "no credentials were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile in ~/.aws, or give the "
    "machine a role",
    errno.EACCES,
)
_BY_TEXT: list[tuple[str, _Meaning]] = [
    (r"169\.254\.169\.254|/latest/(?:api/token|meta-data)|metadata\.google\.internal|no credentials", _NO_CREDENTIALS),
    (
        r"dns error|failed to lookup address",
        _Meaning("there is no host for {server}; check the endpoint", errno.EHOSTUNREACH),
    ),
    (
        r"connection refused",
        _Meaning("nothing listens at {server}; check the endpoint, or wait until it is back", errno.ECONNREFUSED),
    ),
    (r"network is unreachable|no route to host", _Meaning("{server} cannot be reached from here", errno.EHOSTUNREACH)),
    (
        r"certificate|unknownissuer|notvalidforname",
        _Meaning(
            "the certificate of {server} is not trusted; check the endpoint's name and the machine's roots",
            errno.EPROTO,
        ),
    ),
    (
        r"invalidcontenttype|corrupt message|wrong version number|invalid ?message|received http/0|"
        r"invalid http version|parse\(version\)",
        _Meaning("{server} does not speak this protocol; is it http:// or https://?", errno.EPROTO, False),
    ),
    (
        r"builder error|url scheme is not allowed|badscheme|relativeurl|invalid uri|empty host",
        _Meaning("the endpoint is no URL such as https://storage.example.com", errno.EINVAL, False),
    ),
    (
        r"non-partial response|notpartial",
        _Meaning("{server} does not answer requests for a range as S3 does", errno.EPROTO, False),
    ),
    (r"redirect without location|bare ?redirect", _Meaning(_REGION, errno.EINVAL, False)),
    (r"timed ?out|deadline has elapsed|\btimeout\b", _Meaning("{server} did not answer in time", errno.ETIMEDOUT)),
    (
        r"connection (?:reset|closed|aborted)|broken pipe|incomplete ?message|unexpected eof|sendrequest|"
        r"channel closed|end of file before message length|error reading a body|error decoding response body|"
        r"request or response body",
        _Meaning("{server} broke off the connection", errno.ECONNRESET),
    ),
    (
        r"invalid \w+ response|invalid list response|quick_xml|deerror",
        _Meaning("{server} gives answers that are not S3's; check the endpoint", errno.EPROTO, False),
    ),
]
"""By what the client says, in this order; the text is in lower case."""

_BY_STATUS: dict[int, _Meaning] = {
    301: _Meaning(_REGION, errno.EINVAL, False),
    307: _Meaning(_REGION, errno.EINVAL, False),
    400: _Meaning("{server} refuses the request; check endpoint, region and credentials", errno.EINVAL),
    401: _Meaning("the credentials are not accepted", errno.EACCES),
    403: _Meaning(_DENIED, errno.EACCES),
    404: _Meaning("there is no such thing at {server}; check the tier's url and endpoint", errno.ENOENT),
    405: _Meaning("{server} does not allow this; check the endpoint", errno.EOPNOTSUPP),
    408: _Meaning("{server} did not get the data in time", errno.ETIMEDOUT),
    411: _Meaning("{server} does not have what tierfs needs", errno.EOPNOTSUPP, False),
    413: _Meaning("{server} takes no object or part as large", errno.EFBIG, False),
    429: _Meaning(_BUSY, errno.EBUSY),
    500: _Meaning("{server} has an internal error"),
    501: _Meaning("{server} does not have what tierfs needs", errno.EOPNOTSUPP, False),
    502: _Meaning(_BUSY, errno.EBUSY),
    503: _Meaning(_BUSY, errno.EBUSY),
    504: _Meaning(_BUSY, errno.EBUSY),
    507: _Meaning(_FULL, errno.ENOSPC),
}

_CODE = re.compile(r"<Code>\s*(\w{3,60})\s*</Code>|\(code: (\w{3,60})\)")
_STATUS = re.compile(r"(?:status(?: code)?|StatusCode)\W{1,3}(\d{3})\b")
_EXPECTED_REGION = re.compile(r"<Region>([a-z0-9-]{2,30})</Region>")
_MISSING = ("FileNotFoundError", "NotFoundError")
_UNKNOWN = _Meaning("the request failed")


def translate(place: Place, action: str, error: BaseException, key: str | None = None) -> TierError:
    """What an error of obstore means. ``action`` says what was tried, for the message; ``key``: the blob that was asked
    for, where that it is missing is an answer."""
    if isinstance(error, TierError):
        return error
    text = str(error)
    found = _CODE.search(text)
    code = (found[1] or found[2]) if found else None
    status = int(match[1]) if (match := _STATUS.search(text)) else None
    missing = type(error).__name__ in _MISSING or status == 404
    if missing and key is not None and (code is None or code not in _BY_CODE):
        return NoSuchBlob(place.tier, key)
    meaning = _meaning(type(error).__name__, code, status, text.lower())
    region = place.region or "us-east-1"
    if meaning.text is _REGION and (right := _EXPECTED_REGION.search(text)) and right[1] != region:
        meaning = _Meaning(f"{_REGION} (the server says {right[1]})", meaning.errno, meaning.temporary)
    told = meaning.text.format(bucket=place.bucket, server=place.server, region=region, endpoint=place.endpoint)
    detail = code if code in _BY_CODE or code is None else None
    said = ", ".join(part for part in (detail, f"HTTP {status}" if status else None) if part)
    if meaning is _UNKNOWN:
        said = said or type(error).__name__
    message = f"tier {place.tier}: {action}: {told}" + (f" ({said})" if said else "")
    return TierError(message, errno=meaning.errno, temporary=meaning.temporary)


def _meaning(kind: str, code: str | None, status: int | None, text: str) -> _Meaning:
    if code in _BY_CODE:
        return _BY_CODE[code]
    if kind in ("NotSupportedError", "NotImplementedError"):
        return _BY_CODE["NotImplemented"]
    if kind in ("InvalidPathError",):
        return _Meaning("the store holds keys that tierfs does not write", errno.EINVAL, False)
    if status in _BY_STATUS and status is not None:
        return _BY_STATUS[status]
    for pattern, meaning in _BY_TEXT:
        if re.search(pattern, text):
            return meaning
    if kind == "PermissionDeniedError":
        return _BY_STATUS[403]
    if kind == "UnauthenticatedError":
        return _BY_STATUS[401]
    return _UNKNOWN
