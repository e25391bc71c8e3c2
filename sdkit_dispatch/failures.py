"""What failed here before, so that it is not tried again until something changes.

A failure is remembered for the engine that was asked for (its key holds graph, weights, runtime
version, precision, shapes and options), the device and its driver. It is forgotten when one of
those changes, or on `--retry`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from .contract import BuildRequest, Device, Plan, record_from_json, record_to_json
from .errors import ERROR_KINDS, DispatchError
from .whole_file import read_note, write_note


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One remembered failure.

    Attributes:
        runtime: Of the vendor, when it failed.
        kind: Name of the error class.
        at: UTC, ISO 8601.
        graph_digest: Of the component's graph.
        key: Of the engine that was asked for.
    """

    vendor: str
    component: str
    device: str
    driver: str
    runtime: str
    precision: str
    kind: str
    message: str
    at: str
    graph_digest: str = ""
    key: str = ""

    def as_error(self) -> DispatchError:
        """Returns the error to raise instead of trying again."""
        return ERROR_KINDS.get(self.kind, DispatchError)(
            f"{self.message} (remembered from {self.at[:16]} UTC, not tried again)",
            "add --retry to try it again",
        )


class Failures:
    """The memory of failures below one home folder."""

    def __init__(self, home: Path) -> None:
        self._folder = home / "failures"

    def remember(self, request: BuildRequest, device: Device, error: DispatchError) -> None:
        """Remembers that building or running the engine of `request` on `device` failed."""
        failure = Failure(
            vendor=request.vendor,
            component=request.component,
            device=device.id,
            driver=device.driver,
            runtime=request.runtime,
            precision=request.precision,
            kind=type(error).__name__,
            message=error.message,
            at=datetime.now(UTC).isoformat(timespec="seconds"),
            graph_digest=request.graph_digest,
            key=request.key,
        )
        with suppress(OSError):  # no loss: it will fail again
            write_note(self._file(request, device), record_to_json(failure))

    def recall(self, request: BuildRequest, device: Device) -> Failure | None:
        """Returns the remembered failure of `request` on `device`, if there is one."""
        return _read(self._file(request, device))

    def forget(self, request: BuildRequest, device: Device) -> None:
        """Forgets it: it may be tried again."""
        with suppress(OSError):
            self._file(request, device).unlink(missing_ok=True)

    def all(self) -> Iterator[Failure]:
        """Yields every remembered failure."""
        for path in sorted(self._folder.glob("*.json")):
            failure = _read(path)
            if failure is not None:
                yield failure

    def _file(self, request: BuildRequest, device: Device) -> Path:
        text = json.dumps([request.key, device.id, device.driver])
        return self._folder / f"{hashlib.sha256(text.encode()).hexdigest()}.json"


def standing(
    failures: Iterable[Failure], devices: Sequence[Device], plans: Sequence[Plan]
) -> tuple[Failure, ...]:
    """Returns the failures that still count: device, driver and runtime are what they were."""
    drivers = {device.id: device.driver for device in devices}
    runtimes = {(plan.vendor, plan.device.id): plan.runtime for plan in plans if plan.runtime}
    return tuple(
        failure
        for failure in failures
        if drivers.get(failure.device) == failure.driver
        and runtimes.get((failure.vendor, failure.device), failure.runtime) == failure.runtime
    )


def _read(path: Path) -> Failure | None:
    try:
        return record_from_json(Failure, read_note(path))
    except ValueError:
        return None
