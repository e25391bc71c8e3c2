"""Measures vendors, their bare runtimes and peers, side by side in one run."""

from sdkit_dispatch.benchmark.quick import QuickRow, quick_benchmark

__all__ = ["QuickRow", "quick_benchmark"]
