"""The stressors of stress-ng's class ``filesystem`` that this suite runs, in groups that run at the same time.

The list was made with stress-ng 0.15 (Debian 12) by running every stressor of the class on ext4 exactly as the test
runs it on the mount: what passes there is here, with no exception for the mount. Only those are left out:

- bind-mount, binderfs: Debian's build has no workers for them ("No stress workers invoked"), on any filesystem;
- verity: skips itself on an ext4 without that feature, so it would show nothing.
"""

from __future__ import annotations

NO_RESOURCE = 3
"""stress-ng's exit code (EXIT_NO_RESOURCE) when a stressor could not be run at the moment."""

GROUPS: dict[str, list[str]] = {
    "names": ["dentry", "dir", "dirdeep", "dirmany", "filename", "getdent", "link", "mknod", "rename", "symlink"],
    "attributes": ["access", "chattr", "chmod", "chown", "fstat", "inode-flags", "touch", "utime", "xattr"],
    "data": ["copy-file", "fallocate", "fiemap", "fpunch", "file-ioctl", "fsize", "hdd", "io", "iomix", "sync-file"],
    "locks": ["flock", "lease", "locka", "lockf", "lockofd", "fcntl", "dup", "open", "handle"],
    "watchers": ["chdir", "dnotify", "eventfd", "fanotify", "inotify", "ioprio", "procfs"],
}

SMALLER = {
    "chdir-dirs": "64",
    "copy-file-bytes": "128m",
    "fallocate-bytes": "16m",
    "fiemap-bytes": "16m",
    "hdd-bytes": "16m",
    "iomix-bytes": "16m",
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
