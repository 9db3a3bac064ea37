"""What the catalog says of a file now, to be kept beside its replicas (tiers.beside)."""

from __future__ import annotations

import stat

from tierfs.catalog import Catalog
from tierfs.tiers.beside import DEPTH, NAMES, Beside, Chain, DirectoryBeside
from tierfs.types import ROOT_INO


def beside(catalog: Catalog, ino: int, version: int) -> Beside | None:
    """None when the file has no name any more, or is none: then nothing of it is to be found again."""
    attributes = catalog.attributes(ino)
    if attributes is None or not stat.S_ISREG(attributes.mode):
        return None
    directories: dict[int, DirectoryBeside] = {}
    chains = [_chain(catalog, parent, name, ino, directories) for parent, name in catalog.names(ino, NAMES)]
    names = tuple(chain for chain in chains if chain)
    if not names:
        return None
    return Beside(
        ino=ino,
        version=version,
        seq=catalog.seq,
        mode=attributes.mode,
        uid=attributes.uid,
        gid=attributes.gid,
        size=attributes.size,
        atime_ns=attributes.atime_ns,
        mtime_ns=attributes.mtime_ns,
        ctime_ns=attributes.ctime_ns,
        digest=None,
        names=names,
        directories=directories,
        xattrs=dict(catalog.xattrs(ino)),
    )


def _chain(catalog: Catalog, parent: int, name: bytes, ino: int, directories: dict[int, DirectoryBeside]) -> Chain:
    """Empty when it does not begin at the root, or is too long to be kept."""
    chain = [(ino, name)]
    while parent != ROOT_INO:
        above = catalog.names(parent, 1)
        attributes = catalog.attributes(parent)
        if not above or attributes is None or len(chain) >= DEPTH:
            return ()
        directories[parent] = DirectoryBeside(attributes.mode, attributes.uid, attributes.gid, attributes.mtime_ns)
        chain.append((parent, above[0][1]))
        parent = above[0][0]
    return tuple(reversed(chain))
