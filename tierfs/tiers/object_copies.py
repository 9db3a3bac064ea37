"""Copies of the catalog in a store of blobs, and the log of batches after each: as `tierfs.tiers.copies`, whose names
and records these are. A blob cannot grow, so a log is a row of blobs, ``log-<n>/<number>``, with one record each.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import xxhash

from tierfs.errors import NoSuchBlob, TierError
from tierfs.points import At, reach
from tierfs.tiers.blobs import PART
from tierfs.tiers.copies import FORMAT, KEPT, Manifest, parse_manifest, record, records
from tierfs.tiers.object_names import CATALOG
from tierfs.tiers.object_root import ObjectRoot
from tierfs.tiers.reached import Position, number_of

_COPY = re.compile(r"copy-(\d{1,18})\.json")
_LOG = re.compile(r"log-(\d{1,18})/(\d{10})")
_CLEAN = CATALOG + "clean"


class ObjectCopies:
    """See `CatalogCopies`. Thread-safe. Methods block and raise TierError, except `advance`."""

    def __init__(self, tree: ObjectRoot) -> None:
        self._tree = tree
        self._lock = threading.Lock()
        self._number: int | None = None
        self._records = 0
        """Of the current log."""
        self.log_bytes = 0
        self.reached: Position | None = None

    def _names(self) -> list[str]:
        return [blob.key[len(CATALOG) :] for blob in self._tree.blobs.scan(CATALOG)]

    # writing

    def begin(self) -> None:
        self._begin()

    def _begin(self) -> int:
        highest = 0
        if self._number is None:
            highest = max((_number(name) for name in self._names()), default=0)
        with self._lock:
            if self._number is None:
                self._number = highest + 1
            return self._number

    def advance(self) -> int:
        with self._lock:
            assert self._number is not None
            self._number += 1
            self._records = 0
            self.log_bytes = 0
            return self._number

    def append(self, payload: bytes) -> None:
        """Log a batch. When this fails, the next one takes its place, should it be there after all."""
        self._tree.attach()
        number = self._begin()
        packed = record(payload)
        self._tree.blobs.put(f"{CATALOG}log-{number}/{self._records:010d}", packed)
        with self._lock:
            if number == self._number:
                self._records += 1
                self.log_bytes += len(packed)
                self.reached = number, self.log_bytes

    def put(
        self,
        source: Path,
        number: int,
        uuid: str,
        seq: int,
        at_ns: int,
        alive: Callable[[int], object] = lambda size: None,
    ) -> Manifest:
        self._tree.attach()
        hasher, size = xxhash.xxh3_128(), 0
        key = f"{CATALOG}copy-{number}"
        with source.open("rb") as file:
            data = file.read(PART)
            if len(data) < PART:
                hasher.update(data)
                size = len(data)
                alive(size)
                self._tree.blobs.put(key, data)
            else:
                upload = self._tree.blobs.begin(key, PART)
                try:
                    part = 0
                    while data:
                        hasher.update(data)
                        size += len(data)
                        alive(len(data))
                        upload.part(part, data)
                        part += 1
                        data = file.read(PART)
                    upload.complete()
                finally:
                    upload.abort()
        manifest = Manifest(number, size, hasher.hexdigest(), uuid, seq, at_ns)
        reach(At.COPY_NAMED)
        self._tree.blobs.put(key + ".json", json.dumps({"format": FORMAT, **asdict(manifest)}).encode() + b"\n")
        self._rotate()
        return manifest

    def _rotate(self) -> None:
        kept = sorted((manifest.number for manifest in self.manifests()), reverse=True)[:KEPT]
        self._tree.blobs.delete([CATALOG + name for name in self._names() if 0 < _number(name) < min(kept)])

    # clean

    def declare_clean(self, manifest: Manifest) -> None:
        self._tree.blobs.put(_CLEAN, b"%d\n" % manifest.number)

    def forget_clean(self) -> None:
        self._tree.blobs.delete([_CLEAN])

    def clean(self) -> Manifest | None:
        raw = self._tree.read(_CLEAN)
        if raw is None:
            return None
        return next((found for found in self.manifests() if raw.strip() == b"%d" % found.number), None)

    # reading

    def manifests(self) -> list[Manifest]:
        found = []
        for name in self._names():
            match = _COPY.fullmatch(name)
            raw = self._tree.read(CATALOG + name) if match and _number(name) else None
            manifest = parse_manifest(raw, int(match[1])) if match and raw is not None else None
            if manifest is not None:
                found.append(manifest)
        return sorted(found, key=lambda manifest: manifest.number, reverse=True)

    def fetch(self, manifest: Manifest, target: Path) -> bool:
        hasher, done = xxhash.xxh3_128(), 0
        key = f"{CATALOG}copy-{manifest.number}"
        try:
            blob = self._tree.blobs.head(key)
            if blob is None or blob.size != manifest.bytes:
                return False
            with target.open("wb") as file:
                while done < blob.size:
                    data = self._tree.blobs.get_range(key, done, min(PART, blob.size - done))
                    hasher.update(data)
                    done += len(data)
                    file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except NoSuchBlob:
            target.unlink(missing_ok=True)
            return False
        except OSError as error:
            raise TierError.of(self._tree.name, "fetch the copy of the catalog", error) from error
        if hasher.hexdigest() != manifest.digest:
            target.unlink()
            return False
        return True

    def logged(self, first: int) -> Iterator[bytes]:
        """What was logged after copy ``first``, in order. A log ends where a record is missing or damaged."""
        names = [match for name in self._names() if (match := _LOG.fullmatch(name)) and _number(name)]
        found = sorted((int(match[1]), int(match[2])) for match in names)
        following: dict[int, int] = {}
        for number, index in found:
            if number < first or index != following.get(number, 0):
                continue
            raw = self._tree.read(f"{CATALOG}log-{number}/{index:010d}")
            payloads = [] if raw is None else list(records(raw))
            if len(payloads) == 1:
                following[number] = index + 1
                yield payloads[0]


def _number(name: str) -> int:
    """Of the copy or log that a name belongs to; 0: none."""
    return number_of(name.split("/")[0]) or 0
