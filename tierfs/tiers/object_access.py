"""From a URL to an obstore store: where it is, who asks, how long a request may take. Nothing is asked of the server.

Credentials come from where the provider's own tools look, and only from there. obstore knows the environment, web
identity, containers and machines; for AWS this module adds the profiles of ``~/.aws``: static keys itself, the other
kinds through boto3 if that is installed. A URL or policy file with a secret in it is refused.

obstore is imported here and only when an object tier is opened.
"""

from __future__ import annotations

import configparser
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tierfs.errors import ConfigError

Provider = Callable[[], dict[str, Any]]
"""Gives credentials as obstore takes them."""

SCHEMES = {"s3": "s3", "s3a": "s3", "gs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure", "adl": "azure"}
"""URL schemes, and whose they are."""

PATIENCE = 45.0
"""Seconds after which a call has come back, with an error or without: less than the policy's ``tier_timeout``."""
_REREAD = timedelta(minutes=5)
"""After which static keys are looked up again: they may have been exchanged."""


@dataclass(frozen=True)
class Access:
    """A store, and what messages say of it: never a secret."""

    store: Any
    """obstore's S3Store, GCSStore or AzureStore."""
    provider: str
    url: str
    bucket: str
    prefix: str
    endpoint: str | None
    """None: the provider's own."""
    region: str | None
    profile: Provider | None = None
    """Gives the credentials, when it is not obstore itself that finds them."""

    def __repr__(self) -> str:
        return f"Access({self.url!r}, endpoint={self.endpoint!r})"


def connect(
    tier: str,
    url: str,
    *,
    endpoint: str | None = None,
    region: str | None = None,
    patience: float = PATIENCE,
    environ: Mapping[str, str] = os.environ,
) -> Access:
    """Open the store at ``url``. Where no endpoint or region is given, the environment's count. Raises ConfigError."""
    provider, bucket, prefix = _parse(tier, url)
    try:
        from obstore import store as stores
    except ImportError:
        raise ConfigError(f"tier {tier}: object stores need obstore: pip install 'tierfs[object]'") from None
    if provider == "gcs" and (endpoint or region):
        raise ConfigError(f"tier {tier}: endpoint and region are for s3:// and az:// URLs")
    client, retry = _timing(patience)
    common: dict[str, Any] = {"client_options": client, "retry_config": retry}
    if prefix:
        common["prefix"] = prefix
    config: dict[str, Any] = {}
    profile: Provider | None = None
    kinds: Any = stores
    try:
        if provider == "s3":
            endpoint = endpoint or environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL")
            region = region or environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
            # The bytes are checked by digests of tierfs's own; hashing them for the signature, too, costs as much CPU
            # as all the rest.
            config["unsigned_payload"] = True
            profile = common["credential_provider"] = profile_credentials(tier, environ)
            if region:
                config["region"] = region
            _set_endpoint(tier, endpoint, config, client)
            made = kinds.S3Store(bucket, config=config, **common)
        elif provider == "gcs":
            made = kinds.GCSStore(bucket, **common)
        else:
            _set_endpoint(tier, endpoint, config, client)
            made = kinds.AzureStore(bucket, config=config, **common)
    except ConfigError:
        raise
    except Exception as error:  # its message may quote what it was given
        kind = type(error).__name__
        hint = (
            "is AZURE_STORAGE_ACCOUNT_NAME set?" if provider == "azure" else "check the environment's settings for it"
        )
        refused = ConfigError(f"tier {tier}: {url} is refused ({kind}): {hint}")
    else:
        return Access(made, provider, url, bucket, prefix, endpoint, region, profile)
    raise refused


def _set_endpoint(tier: str, endpoint: str | None, config: dict[str, Any], client: dict[str, Any]) -> None:
    if endpoint is None:
        return
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or parts.query:
        raise ConfigError(f"tier {tier}: the endpoint must be a URL such as https://storage.example.com, and no more")
    config["endpoint"] = endpoint
    client["allow_http"] = parts.scheme == "http"


def _parse(tier: str, url: str) -> tuple[str, str, str]:
    """(provider, bucket, prefix). Raises ConfigError, which does not quote what may be a secret."""
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigError(
            f"tier {tier}: url may have no credentials, query or fragment; credentials come from the environment, "
            f"~/.aws, or the machine"
        )
    provider = SCHEMES.get(parts.scheme)
    if provider is None:
        raise ConfigError(f"tier {tier}: url {url!r} must begin with one of s3://, gs://, az://")
    if not parts.netloc:
        raise ConfigError(f"tier {tier}: url {url!r} has no bucket; write {parts.scheme}://BUCKET/PREFIX")
    prefix = parts.path.strip("/")
    if any(segment in ("", ".", "..") for segment in prefix.split("/")) and prefix:
        raise ConfigError(f"tier {tier}: url {url!r} has an empty segment or one that is . or ..")
    return provider, parts.netloc, prefix


def _timing(patience: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options for client and retries: a last try begins within a third of the patience, and none takes more than the
    rest. Longer outages are the migrator's, which knows what else there is to do."""
    client: dict[str, Any] = {
        "timeout": timedelta(seconds=patience * 2 / 3),
        "connect_timeout": timedelta(seconds=min(5.0, patience / 4)),
        "pool_idle_timeout": timedelta(seconds=30),
        "user_agent": "tierfs",
    }
    retry: dict[str, Any] = {
        "max_retries": 5,
        "retry_timeout": timedelta(seconds=patience / 3),
        "backoff": {
            "init_backoff": timedelta(milliseconds=100),
            "max_backoff": timedelta(seconds=min(3.0, patience / 10)),
            "base": 2,
        },
    }
    return client, retry


# AWS profiles


def profile_credentials(tier: str, environ: Mapping[str, str] = os.environ) -> Provider | None:
    """What gives the credentials of the AWS profile; None when the environment or the machine does, which obstore asks
    itself. Raises ConfigError."""
    if environ.get("AWS_ACCESS_KEY_ID") or environ.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
        return None
    if environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true", "yes", "on"):
        return None
    home = Path(environ.get("HOME") or "~").expanduser()
    named = environ.get("AWS_PROFILE")
    profile = named or "default"
    credentials = Path(environ.get("AWS_SHARED_CREDENTIALS_FILE") or home / ".aws" / "credentials")
    config = Path(environ.get("AWS_CONFIG_FILE") or home / ".aws" / "config")

    def static() -> dict[str, Any] | None:
        found = _section(tier, credentials, profile) or {}
        if not found.get("aws_access_key_id") or not found.get("aws_secret_access_key"):
            return None
        return {
            "access_key_id": found["aws_access_key_id"],
            "secret_access_key": found["aws_secret_access_key"],
            "token": found.get("aws_session_token"),
            "expires_at": datetime.now(UTC) + _REREAD,
        }

    def again() -> dict[str, Any]:
        keys = static()
        if keys is None:
            raise ConfigError(f"the profile {profile} is no longer in {credentials}")
        return keys

    if static() is not None:
        return again
    section = "default" if profile == "default" else f"profile {profile}"
    settings = _section(tier, config, section)
    sources = ("sso_session", "sso_start_url", "role_arn", "credential_process", "aws_access_key_id", "login_session")
    if settings is None or not any(source in settings for source in sources):
        if named and settings is None and _section(tier, credentials, profile) is None:
            raise ConfigError(f"tier {tier}: AWS_PROFILE is {named}, of which neither {credentials} nor {config} knows")
        return None
    try:
        from obstore.auth import boto3

        chain: Any = boto3
        provider: Provider = chain.Boto3CredentialProvider()
    except ImportError:
        raise ConfigError(f"tier {tier}: the AWS profile {profile} needs boto3: pip install boto3") from None
    except Exception as error:
        refused = ConfigError(f"tier {tier}: the AWS profile {profile} gives no credentials ({type(error).__name__})")
    else:
        return provider
    raise refused


def _section(tier: str, path: Path, name: str) -> dict[str, str] | None:
    parser = configparser.RawConfigParser()
    try:
        parser.read_string(path.read_text(encoding="utf-8"))
    except OSError:
        return None
    except (configparser.Error, ValueError):
        raise ConfigError(f"tier {tier}: {path} cannot be read as an INI file") from None
    return dict(parser.items(name)) if parser.has_section(name) else None
