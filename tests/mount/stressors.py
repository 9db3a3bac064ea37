"""The stressors of stress-ng's class ``filesystem`` that this suite runs, in groups that run at the same time.

The list was made with stress-ng 0.15 (Debian 12) by running every stressor of the class on ext4 exactly as the test
runs it on the mount: what passes there is here, with no exception for the mount. Only those are left out:

- io: opens and syncs every filesystem of the machine, so that how long it takes and whether it fails is up to the
  others (and they are "in use" meanwhile); through FUSE its sync(2) does not even come to the daemon;
- iomix: drops the page cache of the whole machine over and over, which takes as long as there is something in it (72 s
  on a loaded machine) and slows down what else runs; what it does to its one file fio does, and checks every byte;
- fsize: needs fallocate(2), which pyfuse3 does not have. stress-ng writes instead, gives up in the middle when its time
  is over, and fsize then takes that for a file beyond its limit. test_posix has a test of RLIMIT_FSIZE;
- bind-mount, binderfs: Debian's build has no workers for them ("No stress workers invoked"), on any filesystem;
- verity: skips itself on an ext4 without that feature, so it would show nothing.
"""

from __future__ import annotations

AGAIN = {3: "no resources for a stressor", 7: "a stressor was interrupted while it counted"}
"""Exit codes of stress-ng (EXIT_NO_RESOURCE, EXIT_METRICS_UNTRUSTWORTHY) that a busy machine causes."""

GROUPS: dict[str, list[str]] = {
    "names": ["dentry", "dir", "dirdeep", "dirmany", "filename", "getdent", "link", "mknod", "rename", "symlink"],
    "attributes": ["access", "chattr", "chmod", "chown", "fstat", "inode-flags", "touch", "utime", "xattr"],
    "data": ["copy-file", "fallocate", "fiemap", "fpunch", "file-ioctl", "hdd", "sync-file"],
    "locks": ["flock", "lease", "locka", "lockf", "lockofd", "fcntl", "dup", "open", "handle"],
    "watchers": ["chdir", "dnotify", "eventfd", "fanotify", "inotify", "ioprio", "procfs"],
}

SMALLER = {
    "chdir-dirs": "64",
    "copy-file-bytes": "128m",
    "fallocate-bytes": "16m",
    "fiemap-bytes": "16m",
    "hdd-bytes": "16m",
    "sync-file-bytes": "16m",
}
"""Options that keep one operation small."""

OPERATIONS, SECONDS = 500, 4
"""Each stressor ends after so many of its operations or after so long, whichever is first."""


def command(group: list[str], directory: object) -> list[str]:
    """The command line that runs the stressors of ``group`` on ``directory``."""
    words = ["stress-ng", "--temp-path", str(directory), "--timeout", str(SECONDS), "--verify", "--metrics-brief"]
    for stressor in group:
        words += [f"--{stressor}", "1", f"--{stressor}-ops", str(OPERATIONS)]
    for option, value in SMALLER.items():
        words += [f"--{option}", value]
    return words


def complaints(output: str) -> str:
    """What stress-ng said, without the figures and remarks that would hide it."""
    return "\n".join(line for line in output.splitlines() if " info: " not in line and " metrc: " not in line)
