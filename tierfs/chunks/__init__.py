"""The archive's layout `chunks`, without I/O: where a file is cut, how parts are named and what a manifest says."""
