"""The workers of one run: which environment serves a vendor, and what its probe said."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from .config import Config
from .contract import (
    Device,
    Plan,
    Precision,
    Rejection,
    VendorSpec,
    record_from_json,
    record_to_json,
)
from .detect.graphics import graphics_state
from .detect.processor import processor_features
from .env import Environment, resolve
from .errors import VendorEnvError, WorkerError
from .native.builds import built_variables
from .whole_file import read_note, write_note
from .worker_client import WorkerClient
from .worker_process import WorkerSettings


class Workers:
    """Starts workers on demand and keeps one for each vendor. Use it as a context manager."""

    def __init__(self, *, home: Path, config: Config, specs: Mapping[str, VendorSpec]) -> None:
        self.specs = specs
        self._home = home
        self._config = config
        self._clients: dict[str, WorkerClient] = {}
        self._resolved: dict[str, Environment | Rejection] = {}
        self._limit_s: float | None = None

    @contextmanager
    def limited(self, limit_s: float) -> Iterator[None]:
        """Bounds every request of workers that start within, whatever the config says."""
        self.close()
        self._limit_s = limit_s
        try:
            yield
        finally:
            self._limit_s = None
            self.close()

    def environment(self, spec: VendorSpec) -> Environment | Rejection:
        """Returns the environment that serves a vendor, or why there is none."""
        if spec.name not in self._resolved:
            self._resolved[spec.name] = resolve(spec, choice=self._config.env, home=self._home)
        return self._resolved[spec.name]

    def forget(self, spec: VendorSpec) -> None:
        """Looks for the environment again at the next call: after an installation."""
        self._resolved.pop(spec.name, None)
        self.stop(spec)

    def client(self, spec: VendorSpec) -> WorkerClient:
        """Returns the running worker of a vendor; starts it if there is none, or it died."""
        running = self._clients.get(spec.name)
        if running is not None and running.is_alive:
            return running
        self.stop(spec)
        self._clients[spec.name] = self.fresh(spec)
        return self._clients[spec.name]

    def fresh(
        self,
        spec: VendorSpec,
        *,
        limit_s: float | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> WorkerClient:
        """Starts a worker that the caller closes.

        Args:
            spec: The vendor.
            limit_s: No request may take longer, whatever the config says.
            variables: Environment variables of its own; by default those that tell it of the right
                build of its runtime.

        Raises:
            VendorEnvError: No environment serves the vendor.
            WorkerError: The process cannot be started.
        """
        environment = self.environment(spec)
        if isinstance(environment, Rejection):
            raise VendorEnvError(
                f"the vendor '{spec.name}' is not ready: {environment.reason}", environment.hint
            )
        return WorkerClient(
            spec,
            python=environment.python,
            is_isolated=environment.is_isolated,
            settings=replace(
                worker_settings(
                    self._config, scratch=self._home / "scratch", limit_s=limit_s or self._limit_s
                ),
                variables=self._variables(spec) if variables is None else variables,
            ),
        )

    def probe(
        self,
        spec: VendorSpec,
        device: Device,
        precision: Precision | None,
        options: Mapping[str, Any],  # Any: each vendor owns its values
    ) -> Plan | Rejection:
        """Asks a vendor's worker whether and how it serves a device.

        A "yes" is remembered for as long as the environment, the vendor's variables, the device and
        the drivers of the machine are the same, so that a second command need not load the runtime;
        a "no" is asked anew each time.
        """
        environment = self.environment(spec)
        if isinstance(environment, Rejection):
            return replace(environment, device=device.id)
        question = [
            spec.revision,
            str(environment.python),
            environment.fingerprint,
            _newest_source(spec),
            processor_features(),
            [] if device.kind == "cpu" else graphics_state(os.environ),
            {**_own_variables(spec), **self._variables(spec)},
            record_to_json(device),
            precision,
            dict(options),
        ]
        note = self._note(spec, question)
        remembered = _read_note(note, question)
        if remembered is not None:
            return remembered
        try:
            client = self.client(spec)
            runtime = client.probe(device)
            if isinstance(runtime, Rejection):
                return runtime
            plan = client.plan(device, precision, options)
        except WorkerError as error:
            return Rejection(
                vendor=spec.name,
                code="worker-failed",
                reason=error.message,
                hint=error.hint,
                device=device.id,
            )
        if isinstance(plan, Rejection):
            return plan
        # It is this vendor on this device, whatever the adapter wrote.
        plan = replace(plan, runtime=runtime, vendor=spec.name, device=device)
        _write_note(note, question, plan)
        return plan

    def _note(self, spec: VendorSpec, question: list[Any]) -> Path:  # Any: JSON data
        text = json.dumps(question, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:32]
        return self._home / "scratch" / "probes" / f"{spec.name}-{digest}.json"

    def forget_answers(self, spec: VendorSpec) -> None:
        """Forgets every remembered "yes" of a vendor, so that it is asked again."""
        for note in (self._home / "scratch" / "probes").glob(f"{spec.name}-*.json"):
            with suppress(OSError):
                note.unlink()

    def _variables(self, spec: VendorSpec) -> dict[str, str]:
        built = built_variables(spec.name, self._home)
        return {name: value for name, value in built.items() if not os.environ.get(name)}

    def stop(self, spec: VendorSpec) -> None:
        """Ends the worker of a vendor, if one runs."""
        client = self._clients.pop(spec.name, None)
        if client is not None:
            client.close()

    def close(self) -> None:
        """Ends all workers."""
        for name in list(self._clients):
            self._clients.pop(name).close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def worker_settings(
    config: Config, *, scratch: Path, limit_s: float | None = None
) -> WorkerSettings:
    """Returns what of a config concerns workers; `limit_s` bounds every request."""
    timeouts_s = dict(config.timeouts_s)
    if limit_s is not None:
        timeouts_s = {method: min(limit_s, value) for method, value in timeouts_s.items()}
    threads = config.threads
    if threads is not None:  # more than there are processors only get in each other's way
        threads = min(threads, os.cpu_count() or 1)
    return WorkerSettings(threads=threads, scratch=scratch, timeouts_s=timeouts_s)


def _own_variables(spec: VendorSpec) -> dict[str, str]:
    """Returns what the user set for this vendor: SDKIT_GGML_DIR, GGML_VK_VISIBLE_DEVICES."""
    name = spec.name.upper().replace("-", "_")
    own = (f"{name}_", f"SDKIT_{name}_")
    return {key: value for key, value in os.environ.items() if key.startswith(own)}


def _newest_source(spec: VendorSpec) -> int:
    """Returns when the vendor's package was last changed: a developer edits it in place."""
    import importlib.util

    found = importlib.util.find_spec(spec.adapter.partition(".")[0].partition(":")[0])
    places = list(found.submodule_search_locations or ()) if found is not None else []
    times = [path.stat().st_mtime_ns for place in places for path in Path(place).glob("*.py")]
    return max(times, default=0)


def _read_note(note: Path, question: list[Any]) -> Plan | None:  # Any: JSON data
    saved = read_note(note)
    with suppress(ValueError, KeyError, TypeError):
        if saved["question"] == json.loads(json.dumps(question)):
            return record_from_json(Plan, saved["plan"])
    return None


def _write_note(note: Path, question: list[Any], plan: Plan) -> None:  # Any: JSON data
    with suppress(OSError):  # no loss: it will be asked again
        write_note(note, {"question": question, "plan": record_to_json(plan)})
