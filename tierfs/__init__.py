"""tierfs: a checkpoint filesystem that acknowledges in memory and drains to disk and archive."""

__version__ = "0.1.0"
