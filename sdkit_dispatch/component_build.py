"""One component: its request, its engine from the store or from the vendor, and the gate."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from .build_slots import Occupant, build_slot, first_occupant
from .build_tools import BuildTools
from .cache import Manifest, Verdict, new_manifest
from .check import SAFER, require_passed
from .component_gate import ComponentGate, require_unchanged
from .contract import (
    BuildRequest,
    Device,
    Engine,
    Plan,
    Progress,
    Rejection,
    Report,
)
from .errors import (
    CacheError,
    CompileError,
    DispatchError,
    NumericError,
    RunError,
    WorkerError,
)
from .forecast import Forecast, forecast
from .siblings import known_files, remember_files, siblings_of
from .store_cleaning import folder_bytes
from .store_layout import store_error
from .store_use import record_use
from .wanted import Wanted, build_request

log = logging.getLogger(__name__)

LEAST_ROOM_BYTES = 1 << 20
"""With less than this a disk is full while a build is under way: a vendor that wanted to write a
larger piece failed, and left what it had written."""
REMEMBERED_ERRORS = (CompileError, NumericError, WorkerError, CacheError, RunError)


@dataclass(frozen=True, kw_only=True)
class ComponentBuild:
    """The engine of one component, and how it was come by.

    Attributes:
        is_hit: It was in the store: nothing was compiled.
        damage: What was wrong with the stored engine that this one replaced; usually empty.
        elapsed_s: Seconds that this took now; `manifest.build_s` is what building it took.
        is_stored: False if it is gone with the process: the store cannot be written.
    """

    component: str
    engine: Engine
    manifest: Manifest
    is_hit: bool
    elapsed_s: float
    damage: str = ""
    is_stored: bool = True


class ComponentBuilder:
    """Builds the components of one plan; its checking worker lives as long. A context manager."""

    def __init__(self, tools: BuildTools, want: Wanted, plan: Plan, report: Report) -> None:
        self._tools = tools
        self._want = want
        self._plan = plan
        self._spec = tools.workers.specs[plan.vendor]
        self._report = report
        self._gate = ComponentGate(tools, want, self._spec, report)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._gate.close()
        if isinstance(error, DispatchError):  # a device lost in a process is lost to all of it
            self._tools.workers.stop(self._spec)

    def preflight(self, names: Iterable[str]) -> Forecast | None:
        """Says what will be built and what it takes; None if nothing need be built.

        Raises:
            CacheError: The disk is too small; with the sizes.
        """
        store, parts = self._tools.store, self._want.pipeline.components
        found = forecast(
            store,
            self._spec,
            [self.current_request(name) for name in names],
            {name: part.weights_bytes for name, part in parts.items()},
        )
        if found is None:
            return None
        self._report(Progress(phase=str(found)))
        if found.is_short_of_disk:
            raise store_error(f"the disk of '{store.home}' is too full: {found}")
        if found.is_short_of_memory:
            log.warning("memory is short: %s", found)
        return found

    def build(self, name: str) -> ComponentBuild:
        """Builds one component; at the next safer precision if the gate refuses it.

        Raises:
            DispatchError: The vendor failed, now or before.
        """
        plan = self._plan
        earlier: tuple[Verdict, ...] = ()
        while True:
            request = build_request(plan, self._spec, self._want, name)
            try:
                with self._remembering(request, plan.device):
                    return self._engine(request, plan.device, earlier)
            except NumericError as error:
                safer = None if earlier or self._tools.is_strict else self._safer(plan)
                if safer is None:
                    raise
                log.warning("%s; building it again in %s", error.message, safer.precision)
                reason = f"{plan.precision}: {error.message}"
                earlier = (Verdict(status="failed", reason=reason),)
                plan = safer

    def current_request(self, name: str) -> BuildRequest:
        """Returns the request that `build` would look up: the safer one where the first failed."""
        request = build_request(self._plan, self._spec, self._want, name)
        failure = self._tools.failures.recall(self._asked(request), self._plan.device)
        if failure is not None and failure.kind == NumericError.__name__:
            safer = self._safer(self._plan)
            if safer is not None:
                return build_request(safer, self._spec, self._want, name)
        return request

    def _asked(self, request: BuildRequest) -> BuildRequest:
        """As `asked_request`, before there is an engine."""
        return replace(request, shapes=self._want.shapes[request.component])

    def _safer(self, plan: Plan) -> Plan | None:
        precision = SAFER.get(plan.precision)
        if precision is None:
            return None
        again = self._tools.workers.probe(self._spec, plan.device, precision, plan.options)
        return None if isinstance(again, Rejection) else again

    @contextmanager
    def _remembering(self, request: BuildRequest, device: Device) -> Iterator[None]:
        failures = self._tools.failures
        request = self._asked(request)
        if self._tools.may_retry:
            failures.forget(request, device)
        remembered = failures.recall(request, device)
        if remembered is not None:
            raise remembered.as_error()
        try:
            yield
        except REMEMBERED_ERRORS as error:
            if getattr(error, "concerns_store", False):
                raise
            if not getattr(error, "was_killed", False):
                failures.remember(request, device, error)
            raise

    @contextmanager
    def _naming_a_full_disk(self, request: BuildRequest, shop: Path) -> Iterator[None]:
        """Names a full disk, which vendors report in words of their own, or not at all.

        Raises:
            CacheError: With the sizes. It is no failure of the vendor, and is not remembered.
        """
        try:
            yield
        except REMEMBERED_ERRORS as error:
            home = self._tools.store.home
            needed_bytes = self._want.pipeline.components[request.component].weights_bytes
            free_bytes = shutil.disk_usage(home).free
            if free_bytes < max(LEAST_ROOM_BYTES, needed_bytes - folder_bytes(shop)):
                raise store_error(
                    f"the disk of '{home}' is full: building {request.component} needs about "
                    f"{needed_bytes / 1e6:.1f} MB, {free_bytes / 1e6:.1f} MB are free: "
                    f"{error.message}"
                ) from error
            raise

    def _engine(
        self, request: BuildRequest, device: Device, earlier: tuple[Verdict, ...]
    ) -> ComponentBuild:
        started_s = time.monotonic()
        found, damage = self._usable(request, device)
        if found is not None:
            return self._hit(found, started_s)

        def wait() -> None:
            words = f"wait: another process builds {request.component}"
            other = first_occupant(self._tools.store.locks)
            self._report(Progress(phase=words if other is None else f"{words} ({other})"))

        with self._tools.store.locked(request.key, while_waiting=wait):
            # Another process may have built it meanwhile.
            found, damage = self._usable(request, device)
            if found is not None:
                return self._hit(found, started_s)
            if damage:
                log.warning("%s; it is built again", damage)
            engine, manifest = self._make(request, device, earlier)
        return ComponentBuild(
            component=request.component,
            engine=engine,
            manifest=manifest,
            is_hit=False,
            elapsed_s=time.monotonic() - started_s,
            damage=damage,
            is_stored=not self._tools.store.is_temporary,
        )

    def _usable(
        self, request: BuildRequest, device: Device
    ) -> tuple[tuple[Engine, Manifest] | None, str]:
        """Returns the stored engine once it passed the gate, or what is wrong with it.

        One that its runtime refuses when the gate opens it is as good as damaged: it is built
        again, and only if the new one is refused too does the vendor fail.

        Raises:
            NumericError: It computes wrong numbers.
        """
        found, damage = self._found(request)
        if found is None:
            return None, damage
        try:
            return self._gate.admitted(found, device), ""
        except CacheError as error:
            if error.concerns_store:
                raise
            return None, error.message

    def _found(self, request: BuildRequest) -> tuple[tuple[Engine, Manifest] | None, str]:
        """Returns the stored engine, or what is wrong with it."""
        onnx = self._want.pipeline.components[request.component].onnx
        try:
            found = self._tools.store.look_up(request, onnx=onnx)
            return (found and (self._opened(found[0]), found[1])), ""
        except CacheError as error:
            return None, error.message

    def _opened(self, engine: Engine) -> Engine:
        """Says at which shapes an engine that serves a range is to be opened."""
        shapes = self._want.shapes[engine.request.component]
        return engine if shapes == engine.request.shapes else replace(engine, opened_at=shapes)

    def _hit(self, found: tuple[Engine, Manifest], started_s: float) -> ComponentBuild:
        engine, manifest = found
        store = self._tools.store
        is_lost = store.is_temporary and Path(engine.folder).is_relative_to(store.home)
        return ComponentBuild(
            component=engine.request.component,
            engine=engine,
            manifest=manifest,
            is_hit=True,
            elapsed_s=time.monotonic() - started_s,
            is_stored=not is_lost,
        )

    def _make(
        self, request: BuildRequest, device: Device, earlier: tuple[Verdict, ...]
    ) -> tuple[Engine, Manifest]:
        """Compiles, checks and publishes; the caller holds the key's lock."""
        with ExitStack() as borrowed:
            return self._made(request, device, earlier, borrowed)

    def _made(
        self,
        request: BuildRequest,
        device: Device,
        earlier: tuple[Verdict, ...],
        borrowed: ExitStack,
    ) -> tuple[Engine, Manifest]:
        store, onnx = self._tools.store, self._want.pipeline.components[request.component].onnx
        with (
            self._slot(request),
            store.workshop(request.key) as shop,
            self._naming_a_full_disk(request, shop),
        ):
            started_s = time.monotonic()
            out = shop / "engine"
            out.mkdir()
            self._report(Progress(phase=f"{request.vendor}: compile {request.component}"))
            client = self._tools.workers.client(self._spec)
            siblings = siblings_of(store, request, onnx=onnx)
            borrowed.callback(store.let_go, [sibling.key for sibling in siblings])
            known = known_files(store, siblings)
            client.compile(
                request, onnx, out, device=device, report=self._named(request), siblings=siblings
            )
            sealed_ns = time.time_ns()
            files = store.seal(out, known)
            engine = self._opened(
                Engine(key=request.key, request=request, folder=str(out), onnx=str(onnx))
            )
            verdict, facts = self._gate.check(engine, device)
            require_passed(verdict, request.component, request.vendor)
            require_unchanged(out, files)
            manifest = replace(
                new_manifest(request, files, verdict=verdict, started_s=started_s),
                facts=facts,
                earlier=earlier,
            )
            store.publish(out, manifest)
        record_use(store.memo, request.key, onnx=onnx)
        folder = store.folder(request.key)
        remember_files(store, files, folder, siblings=siblings, sealed_ns=sealed_ns)
        return replace(engine, folder=str(folder)), manifest

    def _slot(self, request: BuildRequest) -> AbstractContextManager[None]:
        """Waits for the other builds of this host, and says for which."""

        def wait(other: Occupant | None) -> None:
            words = "" if other is None else f": {other}"
            self._report(Progress(phase=f"wait for another build on this machine{words}"))

        return build_slot(
            self._tools.store.locks,
            f"{request.component} for {request.vendor}",
            count=self._tools.parallel_builds,
            while_waiting=wait,
        )

    def _named(self, request: BuildRequest) -> Report:
        def report(progress: Progress) -> None:
            self._report(replace(progress, phase=f"{request.vendor}: {progress.phase}"))

        return report


def asked_request(engine: Engine) -> BuildRequest:
    """Returns what failures of an engine are remembered under: another size of it may serve."""
    return replace(engine.request, shapes=engine.shapes)
