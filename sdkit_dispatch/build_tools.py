"""What every build of a run shares."""

from __future__ import annotations

from dataclasses import dataclass

from .cache import EngineStore
from .failures import Failures
from .reference import Reference
from .workers import Workers


@dataclass(frozen=True, kw_only=True)
class BuildTools:
    """The store, the workers and what the user allowed.

    Attributes:
        must_check: False leaves engines unchecked, and their manifests say so.
        is_strict: A failure is an error: no other plan, and no safer precision.
        may_retry: What failed before is tried again.
        parallel_builds: How many engines may be compiled on this host at a time.
        quota_bytes: What the engines may take together; None for no limit.
        must_use_gpu: The plans name GPUs only; when they failed, nothing serves.
    """

    store: EngineStore
    workers: Workers
    reference: Reference
    failures: Failures
    must_check: bool = True
    is_strict: bool = False
    may_retry: bool = False
    parallel_builds: int = 1
    quota_bytes: int | None = None
    must_use_gpu: bool = False
