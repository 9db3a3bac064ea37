"""Regions of what is made of zip archives: `torch.save`, the `.distcp` files of `torch.distributed.checkpoint` (one
archive for each item, one behind the other), `numpy.savez`."""

from __future__ import annotations

from tierfs.chunks.formats import npy, pickled, zips
from tierfs.chunks.span import Item, Region

_PICKLES = ((b"data.pkl", b"data/"), (b"constants.pkl", b"constants/"))
"""Pickles, and where the storages lie that they refer to: weights, and the constants of TorchScript."""


def regions(source: memoryview) -> list[Region] | None:
    """The tensors and other records of all archives; None when the file does not end as an archive does."""
    found = [part for archive in zips.archives(source) for part in reversed(_regions(source, archive))]
    return found[::-1] or None


def _regions(source: memoryview, archive: zips.Archive) -> list[Region]:
    storages = _storages(source, archive)
    found = []
    for entry in archive.entries:
        if entry.length == 0:
            continue
        if entry.name in storages:
            item, name = storages[entry.name]
            found.append(Region(entry.offset, entry.length, item, name, entry.crc))
        else:
            found += _other(source, entry)
    return found


def _storages(source: memoryview, archive: zips.Archive) -> dict[bytes, tuple[Item, str]]:
    """Element type and tensor by the names of records."""
    found = {}
    for entry in archive.entries:
        for pickle, directory in _PICKLES:
            if entry.method == zips.STORED and entry.name.endswith(b"/" + pickle) and entry.name.count(b"/") == 1:
                prefix = entry.name.removesuffix(pickle) + directory
                raw = source[entry.offset : entry.offset + entry.length]
                for key, (item, name) in pickled.storages(raw).items():
                    found[prefix + key.encode(errors="replace")] = item, name
    return found


def _other(source: memoryview, entry: zips.Entry) -> list[Region]:
    """A record that is no storage: an array of numpy, or anything else."""
    whole = Region(entry.offset, entry.length, None)
    if entry.method != zips.STORED or not entry.name.endswith(b".npy"):
        return [whole]
    array = npy.elements(source[entry.offset : entry.offset + entry.length])
    if array is None or array.offset >= entry.length:
        return [whole]
    name = entry.name.decode(errors="replace")
    return [Region(entry.offset + array.offset, entry.length - array.offset, array.item, name, entry.crc)]
