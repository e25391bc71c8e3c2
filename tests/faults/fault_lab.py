"""A store to be mistreated: one component, its right engine and outputs, and builders to kill."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import random
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from sdkit_dispatch import reference
from sdkit_dispatch.cache import MANIFEST, EngineStore
from sdkit_dispatch.contract import BuildRequest, Engine, Plan, Progress
from sdkit_dispatch.errors import CacheError, WorkerError
from sdkit_dispatch.failures import Failures
from sdkit_dispatch.wanted import build_request
from sdkit_null import SPEC
from sdkit_null.adapter import NullAdapter
from toy_bench import CPU, Bench, new_workers
from toy_pipeline import make_toy_pipeline

COMPONENT = "unet"
PHASES = ("look up", "start", "compile", "seal", "check", "publish", "done")
"""What a builder is at, in order; "start" and "check" each start a worker."""
SIDE = 512
LAYERS = 5
"""Of `SIDE` x `SIDE` float32: 1 MB a layer and a file each, so that writing takes time."""
REPORTS = 300
"""How often the null vendor reports, which is how long it compiles."""
OK, KILLED, STORE, OTHER, BUG = 0, 3, 5, 6, 70
"""Exit codes of a builder: built, its worker was killed, a named fault of the store, ..."""
END_S = 180.0
"""Longer than any builder takes on a crowded machine: one that has not ended is stuck."""
LOCK_S = 10.0
"""How long a lock may stay held after its holder died; the kernel frees it at once."""


@dataclass(frozen=True, kw_only=True)
class Lab:
    """A home folder, and what is right in it.

    Attributes:
        files: Name -> sha256 of every file of the engine.
        outputs: What it computes on `feeds`.
    """

    home: Path
    pipeline: Path
    plan: Plan
    request: BuildRequest
    files: dict[str, str]
    feeds: dict[str, Any]
    outputs: list[Any]

    @property
    def store(self) -> EngineStore:
        return EngineStore(self.home)

    @property
    def onnx(self) -> Path:
        return self.pipeline / COMPONENT / "model.onnx"

    def elsewhere(self, home: Path) -> Lab:
        """The same with another home, in which only the reference was recorded."""
        shutil.copytree(self.home / "references", home / "references")
        return replace(self, home=home)


def make_lab(folder: Path) -> Lab:
    """Makes a pipeline and builds its engines once, undisturbed."""
    reference.VENDOR, reference.OPTIONS = "null", {}
    pipeline = make_toy_pipeline(folder / "pipeline", external=True)
    _add_layers(pipeline / COMPONENT / "model.onnx")
    answer = NullAdapter().plan(CPU, None, {"holds_weights": True, "compile_steps": REPORTS})
    assert isinstance(answer, Plan)
    bench = Bench(folder / "home", new_workers(folder / "home"))
    want = bench.want(pipeline)
    request = build_request(answer, SPEC, want, COMPONENT)
    feeds = _feeds(request)
    lab = Lab(
        home=folder / "home",
        pipeline=pipeline,
        plan=answer,
        request=request,
        files={},
        feeds=feeds,
        outputs=ReferenceEvaluator(str(pipeline / COMPONENT / "model.onnx")).run(None, feeds),
    )
    builder = Builder(lab, components=tuple(want.shapes))
    assert builder.wait() == OK, builder.said()
    found = lab.store.folder(request.key)
    return replace(lab, files=digests(found))


def _add_layers(path: Path) -> None:
    """Makes the UNet's answer depend on several MB of weights."""
    rng = np.random.default_rng(7)
    model = onnx.load(path)
    graph = model.graph
    sides = [4, *[SIDE] * (LAYERS + 1), 4]
    at = "mean"
    layers = []
    for index, (rows, columns) in enumerate(zip(sides, sides[1:], strict=False)):
        weight = (rng.standard_normal((rows, columns)) / rows**0.5).astype(np.float32)
        graph.initializer.append(numpy_helper.from_array(weight, f"layer{index}"))
        layers.append(helper.make_node("MatMul", [at, f"layer{index}"], [f"at{index}"]))
        at = f"at{index}"
    nodes = list(graph.node)
    place = next(i for i, node in enumerate(nodes) if "mean" in node.output) + 1
    for node in nodes[place:]:
        for index, name in enumerate(node.input):
            node.input[index] = at if name == "mean" else name
    del graph.node[:]
    graph.node.extend([*nodes[:place], *layers, *nodes[place:]])
    path.with_name("model.onnx_data").unlink()
    onnx.save_model(
        model,
        path,
        save_as_external_data=True,
        all_tensors_to_one_file=True,
        location="model.onnx_data",
        size_threshold=0,
    )


def _feeds(request: BuildRequest) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    return {
        name: np.asarray(rng.standard_normal(shape), np.float32)
        for name, shape in request.shapes.items()
    }


def digests(folder: Path) -> dict[str, str]:
    """Returns name -> sha256 of the engine's files; not asked of the store, which is on trial."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.name != MANIFEST
    }


def use(lab: Lab) -> str:
    """Takes the engine from the store as a build does: "none", "refused", "right" or "WRONG"."""
    try:
        found = lab.store.look_up(lab.request, onnx=lab.onnx)
    except CacheError:
        return "refused"
    if found is None:
        return "none"
    engine: Engine = found[0]
    if digests(Path(engine.folder)) != lab.files:
        return "WRONG"
    given = NullAdapter().load(engine, CPU).run(lab.feeds)
    same = all(
        np.array_equal(one, other) for one, other in zip(given.values(), lab.outputs, strict=True)
    )
    return "right" if same else "WRONG"


def has_free_lock(lab: Lab) -> bool:
    """True if the key's lock can be taken."""
    lock = filelock.FileLock(lab.home / "locks" / f"{lab.request.key}.lock")
    if not Path(lock.lock_file).parent.exists():
        return True
    try:
        with lock.acquire(timeout=LOCK_S):
            return True
    except filelock.Timeout:
        return False


def leftovers(lab: Lab) -> list[Path]:
    """Sweeps, and returns what is still there that no engine, note or recording is."""
    for partial in lab.home.rglob("*.tmp"):
        os.utime(partial, (0, 0))  # a sweep leaves the young ones
    lab.store.sweep()
    folder = lab.home / "tmp"
    found = list(folder.iterdir()) if folder.exists() else []
    return found + list(lab.home.rglob("*.tmp"))


class Builder:
    """A process of its own that builds the engine; forked, so that it starts at once."""

    def __init__(
        self, lab: Lab, *, components: tuple[str, ...] = (COMPONENT,), gate: int | None = None
    ) -> None:
        """Starts it; with `gate`, it waits until that descriptor is closed."""
        self._lab = lab
        self._state = mmap.mmap(-1, 2)
        # Not beside the home, whose disk may be full.
        self._said = lab.pipeline.with_name(f"said-{os.urandom(6).hex()}.txt")
        self.pid = os.fork()
        if self.pid == 0:
            code = BUG
            try:
                with self._said.open("w", buffering=1) as log, contextlib.redirect_stderr(log):
                    if gate is not None:
                        os.read(gate, 1)
                    code = _build(lab, components, self._enter, self._count)
            except BaseException:
                with self._said.open("a") as log:
                    traceback.print_exc(file=log)
            finally:
                os._exit(code)

    def _enter(self, phase: str) -> None:
        self._state[0] = PHASES.index(phase)

    def _count(self) -> None:
        self._state[1] += 1

    @property
    def phase(self) -> int:
        """Index of the phase that it is, or died, in."""
        return self._state[0]

    @property
    def published(self) -> int:
        """How many engines it moved into the store."""
        return self._state[1]

    def said(self) -> str:
        """What it wrote to stderr."""
        return self._said.read_text() if self._said.exists() else ""

    def forget(self) -> None:
        """Removes what it wrote to stderr."""
        self._said.unlink(missing_ok=True)

    def workers(self) -> list[int]:
        """Process ids of the workers that it has now."""
        return [pid for pid, parent in _processes() if parent == self.pid]

    def reach(self, phase: int) -> bool:
        """Waits until it is in a phase, or past it; False if it ended before."""
        return _until(lambda: self.phase >= phase or self._has_ended()) and self.phase >= phase

    def wait(self) -> int | None:
        """Returns its exit code (negative: the signal); None if it is stuck, and is then killed."""
        if not _until(self._has_ended):
            os.kill(self.pid, signal.SIGKILL)
            _until(self._has_ended)
            return None
        return self._code

    _code: int | None = None

    def _has_ended(self) -> bool:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code is not None


def _until(condition: Callable[[], bool], *, limit_s: float = END_S) -> bool:
    end_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.0005)
    return True


def are_gone(pids: list[int], *, limit_s: float = 20.0) -> bool:
    """Waits until none of these processes runs."""
    return _until(lambda: not {pid for pid, _ in _processes()} & set(pids), limit_s=limit_s)


def _processes() -> Iterator[tuple[int, int]]:
    """Yields process id and parent of everything that runs."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z":
                    yield int(entry), int(fields[1])


class WatchedStore(EngineStore):
    """A store that says what it is at."""

    def __init__(self, home: Path, enter: Callable[[str], None], count: Callable[[], None]) -> None:
        super().__init__(home)
        self._enter = enter
        self._count = count

    def seal(self, folder: Path, known: Any = None) -> Any:
        self._enter("seal")
        return super().seal(folder, known)

    def publish(self, folder: Path, manifest: Any) -> None:
        self._enter("publish")
        super().publish(folder, manifest)
        self._count()


def _build(
    lab: Lab,
    components: tuple[str, ...],
    enter: Callable[[str], None],
    count: Callable[[], None],
) -> int:
    """What a builder does; returns its exit code."""
    reference.VENDOR, reference.OPTIONS = "null", {}

    def report(progress: Progress) -> None:
        if progress.phase == "null: compile unet":
            enter("start" if progress.fraction is None else "compile")
        elif progress.phase == "null: check unet":
            enter("check")

    with new_workers(lab.home) as workers:
        bench = Bench(lab.home, workers)
        bench.store = WatchedStore(lab.home, enter, count)
        want = bench.want(lab.pipeline)
        want = replace(want, shapes={name: want.shapes[name] for name in components})
        try:
            bench.builder().build(want, [lab.plan], report)
        except WorkerError as error:
            traceback.print_exc()
            return KILLED if error.was_killed else OTHER
        except CacheError as error:
            traceback.print_exc()
            return STORE if error.concerns_store else OTHER
        enter("done")
        return OK


def remembers_failure(lab: Lab) -> bool:
    """True if the build would not be tried again."""
    return Failures(lab.home).recall(lab.request, CPU) is not None


def flip_or_cut(path: Path, chance: random.Random, *, keeps_times: bool) -> None:
    """Flips one bit of a file, or cuts it short; with its time stamps kept, if asked."""
    before, content = path.stat(), bytearray(path.read_bytes())
    place = chance.randrange(len(content) or 1)
    if not content:  # cut to nothing before
        content += b"x"
    elif chance.random() < 0.5:
        content[place] ^= 1 << chance.randrange(8)
    else:
        del content[place:]
    path.write_bytes(content)
    if keeps_times:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
