"""Vendors' runtimes built from source, with the toolkit of this machine."""
