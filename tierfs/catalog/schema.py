"""Catalog format 5 and what was added to it since. The comment at each column is the authority on its meaning and
sentinels."""

from __future__ import annotations

FORMAT = 5

SCHEMA = """
CREATE TABLE meta (
    key   TEXT PRIMARY KEY,             -- 'format', 'uuid', 'generation' (SQLite commits so far),
                                        -- 'next_ino', 'next_seq' (first ids never given to anything),
                                        -- 'clean' (1: closed by whoever had it open, 0: in use or crashed)
                                        -- 'boot' (the kernel's boot id when it was last opened)
                                        -- 'archived' (last seq of the oplog that the archive has followed)
                                        -- 'logged' ("number bytes": the archive's log of batches is so far at least)
                                        -- 'drains' (rules and tiers that every file's queued copies follow)
    value NOT NULL
) WITHOUT ROWID;

CREATE TABLE inodes (
    ino      INTEGER PRIMARY KEY,       -- 1 is the root; never reused
    mode     INTEGER NOT NULL,          -- type and permission bits
    uid      INTEGER NOT NULL,
    gid      INTEGER NOT NULL,
    nlink    INTEGER NOT NULL,          -- 0: unlinked, row kept until the kernel forgets it
    rdev     INTEGER NOT NULL,
    size     INTEGER NOT NULL,          -- bytes at the last close; stale while open for writing
    atime_ns INTEGER NOT NULL,
    mtime_ns INTEGER NOT NULL,          -- at the last close; stale while open for writing
    ctime_ns INTEGER NOT NULL,
    version  INTEGER NOT NULL,          -- current version; 0 unless a regular file
    blocks   INTEGER NOT NULL,          -- 512-byte blocks at the last close
    target   BLOB                       -- symlinks only
);
CREATE INDEX inodes_orphans ON inodes(ino) WHERE nlink = 0;

CREATE TABLE dentries (
    parent INTEGER NOT NULL,
    name   BLOB NOT NULL,
    ino    INTEGER NOT NULL,
    cookie INTEGER NOT NULL,            -- a seq: resumes a listing after this entry
    PRIMARY KEY (parent, name)
) WITHOUT ROWID;
CREATE UNIQUE INDEX dentries_by_cookie ON dentries(parent, cookie);
CREATE INDEX dentries_by_ino ON dentries(ino);

CREATE TABLE xattrs (
    ino   INTEGER NOT NULL,
    name  BLOB NOT NULL,                -- with its 'user.' prefix
    value BLOB NOT NULL,
    PRIMARY KEY (ino, name)
) WITHOUT ROWID;

CREATE TABLE replicas (
    ino      INTEGER NOT NULL,
    version  INTEGER NOT NULL,
    tier     TEXT NOT NULL,
    state    INTEGER NOT NULL,          -- types.ReplicaState
    key      TEXT NOT NULL,             -- file within the tier; '' on the archive, which has names
    size     INTEGER NOT NULL,          -- bytes; stale while state is OPEN
    digest   BLOB,                      -- NULL until computed
    PRIMARY KEY (ino, version, tier)
) WITHOUT ROWID;
CREATE INDEX replicas_by_tier ON replicas(tier);

CREATE TABLE sums (
    tier  TEXT NOT NULL,
    state INTEGER NOT NULL,             -- types.ReplicaState
    bytes INTEGER NOT NULL,             -- of the tier's replicas in this state; kept by the triggers below, which
                                        -- spare empty files
    PRIMARY KEY (tier, state)
) WITHOUT ROWID;
CREATE TRIGGER replica_added AFTER INSERT ON replicas WHEN new.size > 0 BEGIN
    INSERT INTO sums VALUES (new.tier, new.state, new.size) ON CONFLICT DO UPDATE SET bytes = bytes + new.size;
END;
CREATE TRIGGER replica_removed AFTER DELETE ON replicas WHEN old.size > 0 BEGIN
    UPDATE sums SET bytes = bytes - old.size WHERE tier = old.tier AND state = old.state;
END;
CREATE TRIGGER replica_left AFTER UPDATE OF state, size ON replicas WHEN old.size > 0 BEGIN
    UPDATE sums SET bytes = bytes - old.size WHERE tier = old.tier AND state = old.state;
END;
CREATE TRIGGER replica_came AFTER UPDATE OF state, size ON replicas WHEN new.size > 0 BEGIN
    INSERT INTO sums VALUES (new.tier, new.state, new.size) ON CONFLICT DO UPDATE SET bytes = bytes + new.size;
END;

CREATE TABLE chunks (
    ino     INTEGER PRIMARY KEY,        -- large files only, and only what was last copied to the archive
    version INTEGER NOT NULL,
    digests BLOB NOT NULL               -- xxh3-128 of each chunk of 4 MiB, whose digest is the replica's
);

CREATE TABLE drains (
    seq     INTEGER PRIMARY KEY,        -- order of close
    ino     INTEGER NOT NULL,
    version INTEGER NOT NULL,           -- below the inode's: overtaken, nothing to copy, but deletes wait for it until
                                        -- a later version is durable; one such row per file and tier, the first
    tier    TEXT NOT NULL               -- destination; never the archive, whose queue is the oplog
);
CREATE INDEX drains_by_ino ON drains(ino);

CREATE TABLE oplog (
    seq    INTEGER PRIMARY KEY,         -- the order in which the archive replays
    kind   INTEGER NOT NULL,            -- types.OpKind
    ino    INTEGER NOT NULL,            -- subject; EXCHANGE: what was at (parent, name)
    parent INTEGER NOT NULL,            -- 0 for CONTENT and ATTRIBUTES
    name   BLOB NOT NULL,               -- b'' for CONTENT and ATTRIBUTES
    arg    INTEGER NOT NULL,            -- LINK, UNLINK: mode; CONTENT: version; RENAME, EXCHANGE: new parent
    name2  BLOB,                        -- RENAME, EXCHANGE: new name
    at_ns  INTEGER NOT NULL             -- wall clock, for settling and ages
);
CREATE INDEX oplog_content ON oplog(kind) WHERE kind = 5;

CREATE TABLE published (
    parent   INTEGER NOT NULL,          -- the namespace as the archive has it, behind the mount's; 0: not a name,
                                        -- but an object set aside (migrator.archive)
    name     BLOB NOT NULL,
    ino      INTEGER NOT NULL,
    occupant INTEGER NOT NULL,          -- inode whose object stands at this name; 0: nothing yet;
                                        -- another than ino: replaced, kept until ino's content comes;
                                        -- -ino: ino's, but older than what ino was at this point of the replay
    PRIMARY KEY (parent, name)
) WITHOUT ROWID;
CREATE INDEX published_by_ino ON published(ino);

CREATE TABLE intents (
    id    INTEGER PRIMARY KEY,          -- always 1: the archive's replay works on one batch at a time
    steps TEXT NOT NULL                 -- migrator.steps.Batch.encode, stored before the first step is taken
);
"""

ADDED = """
CREATE TABLE IF NOT EXISTS deadlines (
    ino     INTEGER PRIMARY KEY,        -- only files whose rule has a deadline; the row goes once the archive has it
    version INTEGER NOT NULL,           -- another than the inode's current one: superseded, the row means nothing
    seq     INTEGER NOT NULL,           -- of the CONTENT in the oplog: what lies before it must be published first
    due_ns  INTEGER NOT NULL            -- wall clock
);
CREATE INDEX IF NOT EXISTS deadlines_by_due ON deadlines(due_ns);

CREATE TABLE IF NOT EXISTS held (
    seq       INTEGER PRIMARY KEY,      -- version 0: the operation that took a name from ino (its oplog.seq); else the
                                        -- close (its drains.seq) that replaced this version. The row goes once
                                        -- everything closed before seq is durable
    ino       INTEGER NOT NULL,         -- whose inode, xattrs and durable replicas stay until then
    version   INTEGER NOT NULL,         -- 0: a name was taken
    since     INTEGER NOT NULL,         -- the close of ino, if it was durable nowhere when its last name went; else 0
    parent    INTEGER NOT NULL,         -- the name that it lost; 0 and b'' with a version
    name      BLOB NOT NULL,
    forgotten INTEGER NOT NULL          -- 1: no name, no handle, unknown to the kernel: nothing but this row keeps it
);
CREATE INDEX IF NOT EXISTS held_by_ino ON held(ino);

CREATE TABLE IF NOT EXISTS versions (
    ino      INTEGER NOT NULL,          -- a file as it was when this version, durable somewhere, was replaced
    version  INTEGER NOT NULL,
    size     INTEGER NOT NULL,
    blocks   INTEGER NOT NULL,
    mtime_ns INTEGER NOT NULL,
    mode     INTEGER NOT NULL,
    uid      INTEGER NOT NULL,
    gid      INTEGER NOT NULL,
    PRIMARY KEY (ino, version)
) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS version_xattrs (
    ino     INTEGER NOT NULL,
    version INTEGER NOT NULL,
    name    BLOB NOT NULL,
    value   BLOB NOT NULL,
    PRIMARY KEY (ino, version, name)
) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS vouched (
    ino     INTEGER PRIMARY KEY,        -- a file of which somebody was told that this version is durable, while
    version INTEGER NOT NULL,           -- something closed before it may not have been
    seq     INTEGER NOT NULL            -- when
);

CREATE TABLE IF NOT EXISTS damage (
    ino      INTEGER NOT NULL,          -- a replica that does not have the bytes written to it
    version  INTEGER NOT NULL,
    tier     TEXT NOT NULL,
    key      TEXT NOT NULL,             -- another than the replica's: it was replaced, the row means nothing
    what     TEXT NOT NULL,             -- for a person
    since_ns INTEGER NOT NULL,          -- wall clock
    PRIMARY KEY (ino, version, tier)
) WITHOUT ROWID;

CREATE INDEX IF NOT EXISTS oplog_content_by_ino ON oplog(ino) WHERE kind = 5;

CREATE INDEX IF NOT EXISTS published_odd ON published(parent) WHERE occupant<>ino AND occupant<>0;

CREATE TABLE IF NOT EXISTS scrubs (
    tier        TEXT PRIMARY KEY,
    ino         INTEGER NOT NULL,       -- the last replica read by the pass under way; 0: none yet
    version     INTEGER NOT NULL,
    began_ns    INTEGER NOT NULL,       -- wall clock; above finished_ns: the pass is not over
    finished_ns INTEGER NOT NULL        -- of the last pass that came to its end, or of the first mount
) WITHOUT ROWID;
"""
"""Tables that a catalog of an earlier build of this format lacks: made when it is opened."""
