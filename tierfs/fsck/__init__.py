"""fsck: compare the catalog with the tiers (`check`), mend it (`repair`), make another (`rebuild`)."""

from tierfs.fsck.check import Problem, check_all, check_queued, check_tiers
from tierfs.fsck.rebuild import rebuild_all, restore_clean
from tierfs.fsck.repair import repair_all
from tierfs.fsck.session import Report

__all__ = [
    "Problem",
    "Report",
    "check_all",
    "check_queued",
    "check_tiers",
    "rebuild_all",
    "repair_all",
    "restore_clean",
]
