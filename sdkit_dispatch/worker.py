"""The child side: one process, one vendor's adapter, requests in and replies out.

Frames that come in: `{"id", "method", "params"}` and `{"cancel": id}`. Frames that go out:
`{"id", "result"}` (with tensors), `{"id", "error": {kind, message, hint}}`, `{"id", "cancelled"}`,
`{"id", "progress": {phase, fraction}}` and `{"heartbeat"}`, once a second while the interpreter
lives. Requests are served one after the other by the main thread; a thread reads ahead, so that a
cancellation is seen by the next `report`.

When the caller is gone, so is this process: at once on Linux and Windows, where the kernel ends it;
on macOS as soon as the vendor's library lets go of the interpreter lock.
"""

from __future__ import annotations

import faulthandler
import importlib
import itertools
import json
import logging
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from .contract import (
    BuildRequest,
    Device,
    EmittingVendor,
    Engine,
    GenerateRequest,
    PipelineVendor,
    Plan,
    Progress,
    Rejection,
    Session,
    Vendor,
    record_from_json,
    record_to_json,
)
from .errors import CancelledByUser, ConfigError, DispatchError, RunError, WorkerError
from .store_use import HeldSession, hold_engine
from .wire import Frame, read_frame, write_frame

if TYPE_CHECKING:
    from .worker_checkpoints import CheckpointDesk
    from .worker_images import ImageDesk

HEARTBEAT_S = 1.0
PROGRESS_EVERY_S = {"generate": 0.05}
"""Method -> seconds between frames of one phase, but for its last: a frame wakes two threads of
the caller, which a denoising step of a few milliseconds would feel."""
Params = Mapping[str, Any]  # Any: JSON data, checked by record_from_json
Reply = tuple[dict[str, Any], Mapping[str, Any]]  # a JSON result, and tensors

log = logging.getLogger(__name__)


def serve(adapter: str, *, vendor: str, lifeline: int | None = None) -> None:
    """Serves requests until the caller closes the wire; does not return.

    Args:
        adapter: "module:Class" of the vendor's adapter.
        vendor: Name of the vendor, for messages.
        lifeline: Read end of a pipe whose write end only the caller holds (Linux).
    """
    incoming, outgoing = _take_the_wire()
    faulthandler.enable(all_threads=False)
    if lifeline is not None:
        _die_with(lifeline)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches us as a cancel frame
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s", stream=sys.stderr)
    channel = _Channel(incoming, outgoing)
    threading.Thread(target=channel.read, name="wire reader", daemon=True).start()
    threading.Thread(target=channel.beat, name="heartbeat", daemon=True).start()
    desk = Desk(adapter, vendor)
    while True:
        channel.answer(channel.requests.get(), desk)


def _take_the_wire() -> tuple[BinaryIO, BinaryIO]:
    """Moves the wire off fd 0 and 1, which vendor libraries read and print to."""
    incoming = os.fdopen(os.dup(0), "rb")
    outgoing = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return incoming, outgoing


def _die_with(lifeline: int) -> None:
    """Asks the kernel for a SIGKILL when the last write end of the pipe closes.

    The reader thread's end of file does the same on every platform, but not while a vendor's
    library computes with the interpreter lock held. PR_SET_PDEATHSIG would tie us to the thread
    that started us, not to the process.
    """
    import fcntl

    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC)
    import select

    if select.select([lifeline], [], [], 0)[0]:  # it closed before we asked
        os._exit(1)


class _Channel:
    """The two ends of the wire, shared by the three threads of a worker."""

    def __init__(self, incoming: BinaryIO, outgoing: BinaryIO) -> None:
        self.requests: queue.Queue[Frame] = queue.Queue()
        self._incoming = incoming
        self._outgoing = outgoing
        self._lock = threading.Lock()
        self._cancelled: set[int] = set()

    def send(self, header: Mapping[str, Any], arrays: Mapping[str, Any] | None = None) -> None:
        try:
            with self._lock:
                write_frame(self._outgoing, Frame(header=header, arrays=arrays or {}))
        except OSError:  # the caller is gone
            os._exit(1)

    def read(self) -> None:
        while True:
            try:
                frame = read_frame(self._incoming)
            except WorkerError as error:
                log.error("%s", error)
                os._exit(1)
            if frame is None:
                os._exit(0)
            if "cancel" in frame.header:
                self._cancelled.add(frame.header["cancel"])
            else:
                self.requests.put(frame)

    def beat(self) -> None:
        pause = threading.Event()
        while True:
            pause.wait(HEARTBEAT_S)
            self.send({"heartbeat": True})

    def answer(self, frame: Frame, desk: Desk) -> None:
        number = frame.header["id"]
        every_s = PROGRESS_EVERY_S.get(frame.header["method"], 0.0)
        phase, due_s = "", 0.0

        def report(progress: Progress) -> None:
            nonlocal phase, due_s
            if number in self._cancelled:
                raise CancelledByUser
            now_s = time.monotonic()
            if progress.phase == phase and progress.fraction != 1 and now_s < due_s:
                return
            phase, due_s = progress.phase, now_s + every_s
            self.send({"id": number, "progress": record_to_json(progress)})

        try:
            handle = desk.methods[frame.header["method"]]
            result, arrays = handle(frame.header["params"], frame.arrays, report)
            self.send({"id": number, "result": result}, arrays)
        except CancelledByUser:
            self.send({"id": number, "cancelled": True})
        except DispatchError as error:
            self.send({"id": number, "error": _error_json(error)})
        except Exception as error:
            log.error("%s", traceback.format_exc())
            self.send({"id": number, "error": _error_json(desk.unexpected(error))})
        finally:
            self._cancelled.discard(number)


def _error_json(error: DispatchError) -> dict[str, str]:
    return {"kind": type(error).__name__, "message": error.message, "hint": error.hint}


class Desk:
    """What a worker keeps between requests (adapter, sessions, pipeline) and its methods."""

    def __init__(self, adapter: str, vendor: str) -> None:
        self._vendor_name = vendor
        self._adapter_path = adapter
        self._adapter: Any = None  # Vendor or PipelineVendor, as the caller knows from its spec
        self._threads: int | None = None
        self._scratch: str | None = None
        self._sessions: dict[int, Session] = {}
        self._numbers = itertools.count(1)
        self._images: ImageDesk | None = None
        self._checkpoints: CheckpointDesk | None = None
        self._bare: dict[str, Any] = {}  # what was asked for -> the vendor's `bare.BareSession`
        self.methods: Mapping[str, Callable[[Params, Mapping[str, Any], Any], Reply]] = {
            "configure": self._configure,
            "probe": self._probe,
            "plan": self._plan,
            "compile": self._compile,
            "can_emit": self._can_emit,
            "emit": self._emit,
            "load": self._load,
            "run": self._run,
            "time": self._time,
            "close": self._close,
            "generate": self._generate,
            "record": self._record,
        }

    def unexpected(self, error: Exception) -> WorkerError:
        """Names an exception that an adapter should have turned into one of ours."""
        return WorkerError(
            f"the {self._vendor_name} worker failed with {type(error).__name__}: {error}",
            "run the command again with --verbose to see the worker's log",
        )

    @property
    def adapter(self) -> Vendor:
        """The adapter, imported with its runtime at the first use."""
        if self._adapter is None:
            module, _, name = self._adapter_path.partition(":")
            adapter = getattr(importlib.import_module(module), name)()
            adapter.threads = self._threads
            if self._scratch is not None and hasattr(adapter, "scratch"):
                adapter.scratch = Path(self._scratch)
            self._adapter = adapter
        return cast(Vendor, self._adapter)

    def _configure(self, params: Params, arrays: Mapping[str, Any], report: Any) -> Reply:
        self._threads = params["threads"]
        self._scratch = params["scratch"]
        return {}, {}

    def _probe(self, params: Params, arrays: Mapping[str, Any], report: Any) -> Reply:
        device = record_from_json(Device, params["device"])
        try:
            answer = self.adapter.probe(device)
        except ImportError as error:
            answer = Rejection(
                vendor=self._vendor_name,
                code="runtime-broken",
                reason=f"its runtime cannot be imported: {error}",
                hint=f"sdkit-dispatch vendors install {self._vendor_name}",
                device=device.id,
            )
        if isinstance(answer, Rejection):
            return {"rejection": record_to_json(answer)}, {}
        if not isinstance(answer, str):
            raise TypeError(f"probe() returned {answer!r}, which is no text and no Rejection")
        return {"runtime": answer}, {}

    def _plan(self, params: Params, arrays: Mapping[str, Any], report: Any) -> Reply:
        device = record_from_json(Device, params["device"])
        answer = self.adapter.plan(device, params["precision"], params["options"])
        if not isinstance(answer, Plan | Rejection):
            raise TypeError(f"plan() returned {answer!r}, which is no Plan and no Rejection")
        kind = "rejection" if isinstance(answer, Rejection) else "plan"
        return {kind: record_to_json(answer)}, {}

    def _compile(self, params: Params, arrays: Mapping[str, Any], report: Any) -> Reply:
        request = record_from_json(BuildRequest, params["request"])
        device = record_from_json(Device, params["device"])
        self.adapter.compile(
            request,
            Path(params["onnx"]),
            Path(params["out"]),
            device=device,
            report=report,
            siblings=tuple(record_from_json(Engine, one) for one in params["siblings"]),
        )
        return {}, {}

    def _can_emit(self, params: Params, arrays: Mapping[str, Any], report: Any) -> Reply:
        return {"can_emit": isinstance(self.adapter, EmittingVendor)}, {}

    def _emit(self, params: Params, arrays: Mapping[str, Any], report: Any) -> Reply:
        adapter = self.adapter
        if not isinstance(adapter, EmittingVendor):
            raise ConfigError(f"the vendor '{self._vendor_name}' writes no source code")
        adapter.emit(record_from_json(Engine, params["engine"]), Path(params["out"]))
        return {}, {}

    def _load(self, params: Params, arrays: Mapping[str, Any], report: Any) -> Reply:
        engine = record_from_json(Engine, params["engine"])
        session = self._open(engine, params["device"])
        number = next(self._numbers)
        self._sessions[number] = session
        return {
            "session": number,
            "inputs": record_to_json(session.inputs),
            "outputs": record_to_json(session.outputs),
            "facts": dict(session.facts),
        }, {}

    def _open(self, engine: Any, device: Any) -> Session:  # Any: JSON data
        engine = record_from_json(Engine, engine)
        hold = hold_engine(Path(engine.folder))
        try:
            session = self.adapter.load(engine, record_from_json(Device, device))
        except BaseException:
            if hold is not None:
                hold.close()
            raise
        return session if hold is None else HeldSession(session, hold)

    def _session(self, params: Params) -> Session:
        try:
            return self._sessions[params["session"]]
        except KeyError:
            raise RunError(f"session {params['session']} is not open") from None

    def _run(self, params: Params, arrays: Mapping[str, Any], report: Any) -> Reply:
        return {}, self._session(params).run(arrays)

    def _time(self, params: Params, arrays: Mapping[str, Any], report: Any) -> Reply:
        """Runs a step `runs` times on the same feeds; wall and CPU seconds of each.

        With a `session` that is our step, as the denoising loop takes it; without one it is the
        runtime used directly, by the vendor's `bare` module.
        """
        step = self._bare_step(params) if params["session"] is None else self._our_step(params)
        wall_s, cpu_s = [], []
        for index in range(params["runs"]):
            report(Progress(phase="measure", fraction=index / params["runs"]))
            started = time.perf_counter(), time.process_time()
            step(arrays)
            wall_s.append(time.perf_counter() - started[0])
            cpu_s.append(time.process_time() - started[1])
        return {"wall_s": wall_s, "cpu_s": cpu_s}, {}

    def _our_step(self, params: Params) -> Callable[[Mapping[str, Any]], Any]:
        from .diffusion.feeds import run_component

        session = self._session(params)
        return lambda feeds: run_component(params["component"], session, feeds)

    def _bare_step(self, params: Params) -> Callable[[Mapping[str, Any]], Any]:
        asked = json.dumps([params["onnx"], params["shapes"], params["device"]], sort_keys=True)
        if asked not in self._bare:
            package = self._adapter_path.partition(":")[0].rpartition(".")[0]
            try:
                module = importlib.import_module(f"{package}.bare")
            except ModuleNotFoundError as error:
                raise RunError(f"{package} has no module `bare` to measure against") from error
            self._bare[asked] = module.BareSession(
                Path(params["onnx"]),
                {name: tuple(shape) for name, shape in params["shapes"].items()},
                record_from_json(Device, params["device"]),
                threads=self._threads,
            )
        return self._bare[asked].run  # type: ignore[no-any-return]

    def _close(self, params: Params, arrays: Mapping[str, Any], report: Any) -> Reply:
        session = self._sessions.pop(params["session"], None)
        if session is not None:
            session.close()
        return {}, {}

    def _generate(self, params: Params, arrays: Mapping[str, Any], report: Any) -> Reply:
        request = record_from_json(GenerateRequest, params["request"])
        if "checkpoint" in params:
            return self._checkpoint_desk().generate(params, request, report)
        return self._image_desk().generate(params, request, arrays, report)

    def _record(self, params: Params, arrays: Mapping[str, Any], report: Any) -> Reply:
        request = record_from_json(GenerateRequest, params["request"])
        return self._image_desk().record(params, request, report)

    def _image_desk(self) -> ImageDesk:
        if self._images is None:
            from .worker_images import ImageDesk

            self._images = ImageDesk(self._open)
        return self._images

    def _checkpoint_desk(self) -> CheckpointDesk:
        if self._checkpoints is None:
            from .worker_checkpoints import CheckpointDesk

            self._checkpoints = CheckpointDesk(cast(PipelineVendor, self.adapter))
        return self._checkpoints
