"""The kinds of faults of the run: each part does many of one kind and returns its figures."""

from __future__ import annotations

import collections
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from fault_lab import (
    KILLED,
    OK,
    PHASES,
    STORE,
    Builder,
    Lab,
    are_gone,
    flip_or_cut,
    has_free_lock,
    leftovers,
    remembers_failure,
    use,
)

from sdkit_dispatch.cache import MANIFEST, LaterVerdict, Verdict
from sdkit_dispatch.check import arrays_from_recording, load_recording
from sdkit_dispatch.errors import CompileError
from sdkit_dispatch.failures import Failures
from sdkit_dispatch.pipeline_files import MEMO_FROM_BYTES, RACY_S, file_digest, read_pipeline
from toy_bench import CPU

VICTIMS = ("caller", "worker", "both")
DISK_MB = 32
"""Of the tmpfs: the reference, and an engine of 6 MB with as much again in the workshop."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """How often each fault is made."""

    kills: int
    damages: int
    rebuilds: int
    races: int
    racers: int
    disks: int
    real_kills: int


@dataclass(kw_only=True)
class Figures:
    """What one part did and found.

    Attributes:
        counts: What happened -> how often.
        faults: What must not happen; empty if all is well.
    """

    name: str
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    faults: list[str] = field(default_factory=list)

    def add(self, other: Figures) -> None:
        """Adds what another process did."""
        self.counts += other.counts
        self.faults += other.faults

    def check(self, is_right: bool, words: str) -> None:
        """Counts a fault unless `is_right`."""
        if not is_right:
            self.faults.append(words)

    def __str__(self) -> str:
        rows = "".join(f"\n    {count:5} {what}" for what, count in sorted(self.counts.items()))
        bad = "".join(f"\n    FAULT {words}" for words in self.faults[:20])
        return f"{self.name}: {len(self.faults)} faults{rows}{bad}"


def kills(lab: Lab, size: Size, seed: int) -> Figures:
    """Kills the caller, a worker, or both, in every phase of builds."""
    figures, chance = Figures(name="SIGKILLs"), random.Random(seed)
    lab = lab.elsewhere(lab.home.with_name(f"kills {seed}"))
    lasts_s = _durations(lab)
    for number in range(size.kills):
        phase = number % (len(PHASES) - 1)
        victim = VICTIMS[(number + number // (len(PHASES) - 1)) % 3]
        _spoil_or_remove(lab, chance)
        builder = Builder(lab)
        if not builder.reach(phase):
            figures.counts["ended before the kill"] += 1
        time.sleep(chance.random() * lasts_s[phase])
        workers, at = builder.workers(), PHASES[builder.phase]
        _kill(builder, victim if workers else "caller", workers, chance)
        figures.counts[f"killed in '{at}'"] += 1
        figures.counts[f"{victim if workers else 'caller'} killed"] += 1
        code = builder.wait()
        allowed = (KILLED, OK) if victim == "worker" and workers else (-signal.SIGKILL, OK)
        place = f"kill {number} ({victim} in '{at}')"
        figures.check(code in allowed, f"{place}: exit code {code}\n{builder.said()}")
        builder.forget()
        figures.check(are_gone(workers), f"{place}: a worker outlived its caller")
        figures.check(has_free_lock(lab), f"{place}: the lock is stuck")
        figures.check(not remembers_failure(lab), f"{place}: remembered as the vendor's failure")
        state = use(lab)
        figures.counts[f"engine afterwards: {state}"] += 1
        figures.check(state != "WRONG", f"{place}: a wrong engine was used")
        if number % 25 == 24 or number == size.kills - 1:
            _build_undisturbed(lab, figures, place)
    return figures


def _durations(lab: Lab) -> list[float]:
    """Seconds that each phase takes here: what kills are spread over."""
    builder, seen = Builder(lab), []
    for phase in range(len(PHASES)):
        builder.reach(phase)
        seen.append(time.monotonic())
    assert builder.wait() == OK, builder.said()
    builder.forget()
    return [max(after - before, 0.002) for before, after in zip(seen, seen[1:], strict=False)]


def _spoil_or_remove(lab: Lab, chance: random.Random) -> None:
    """Leaves something to do for the next build: nothing stored, or a damaged engine."""
    folder = lab.store.folder(lab.request.key)
    if chance.random() < 0.5:
        lab.store.remove(lab.request.key)
    elif folder.exists():
        flip_or_cut(folder / "weights-3.bin", chance, keeps_times=False)


def _kill(builder: Builder, victim: str, workers: list[int], chance: random.Random) -> None:
    pids = {
        "caller": [builder.pid],
        "worker": [chance.choice(workers)] if workers else [],
        "both": [builder.pid, *workers],
    }[victim]
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _build_undisturbed(lab: Lab, figures: Figures, place: str) -> None:
    """A build that nobody disturbs must find or repair the engine, and leave nothing behind."""
    builder = Builder(lab)
    code = builder.wait()
    figures.check(code == OK, f"{place}: the next build ended with {code}\n{builder.said()}")
    figures.check(builder.published <= 1, f"{place}: {builder.published} engines were published")
    builder.forget()
    figures.check(use(lab) == "right", f"{place}: the next build's engine is not right")
    figures.check(not leftovers(lab), f"{place}: leftovers {leftovers(lab)}")
    figures.counts["undisturbed builds in between"] += 1


def damages(lab: Lab, size: Size, seed: int) -> Figures:
    """Flips bits in, and cuts short, every kind of file that a home folder holds."""
    figures, chance = Figures(name="flips and cuts"), random.Random(seed)
    shutil.copytree(lab.home, lab.home.with_name("damages"))
    lab = replace(lab, home=lab.home.with_name("damages"))
    targets = list(_targets(lab))
    for number in range(size.damages):
        kind, path, is_right = targets[number % len(targets)]
        before = path.read_bytes()
        flip_or_cut(path, chance, keeps_times=chance.random() < 0.5)
        try:
            answer = is_right()
        except Exception as error:  # whatever a damaged file makes of us is a fault
            answer = repr(error)
        path.write_bytes(before)
        figures.counts[f"{kind}: {answer}"] += 1
        figures.check(answer in ("refused", "right"), f"{kind}, damage {number}: {answer}")
    for number in range(size.rebuilds):
        folder = lab.store.folder(lab.request.key)
        flip_or_cut(chance.choice(sorted(folder.iterdir())), chance, keeps_times=True)
        figures.counts["damaged engines built again"] += 1
        _build_undisturbed(lab, figures, f"rebuild {number}")
    return figures


Check = Callable[[], str]


def _targets(lab: Lab) -> Iterator[tuple[str, Path, Check]]:
    """Yields what can be damaged: its kind, the file, and what using it then says."""
    folder = lab.store.folder(lab.request.key)
    for path in sorted(folder.iterdir()):
        kind = {MANIFEST: "manifest"}.get(path.name, f"engine file *{path.suffix}")
        yield kind, path, lambda: use(lab)

    (recording,) = (lab.home / "references").rglob("*.npz")
    recorded = _bytes_of(recording)
    yield "recording", recording, lambda: _compared(_bytes_of(recording), recorded)

    verdict = Verdict(status="passed", reason="", metrics={"out": {"cosine": 0.5}})
    later = LaterVerdict(verdict=verdict, facts={"device": "a card"})
    lab.store.keep_later_verdict(lab.request.key, "a card", later)
    (note,) = (lab.store.memo / "verdicts").rglob("*.json")
    yield (
        "verdict",
        note,
        lambda: _compared(lab.store.later_verdict(lab.request.key, "a card"), later),
    )

    failures = Failures(lab.home.with_name("failures home"))
    failures.remember(lab.request, CPU, CompileError("no"))
    failure = failures.recall(lab.request, CPU)
    (file,) = (lab.home.with_name("failures home") / "failures").iterdir()
    yield "failure", file, lambda: _compared(failures.recall(lab.request, CPU), failure)

    memo = lab.home.with_name("memo")
    pipeline = read_pipeline(lab.pipeline, memo=memo)
    for path in sorted((memo / "graphs").iterdir()):
        yield (
            "graph memo",
            path,
            lambda: _compared(read_pipeline(lab.pipeline, memo=memo), pipeline),
        )

    weights = lab.home.with_name("weights")
    weights.write_bytes(b"\1" * MEMO_FROM_BYTES)
    time.sleep(RACY_S + 0.1)  # a file is not memoised while it is that young
    digest = file_digest(weights, memo=memo)
    (path,) = (memo / "digests").iterdir()
    yield "digest memo", path, lambda: _compared(file_digest(weights, memo=memo), digest)


def _bytes_of(recording: Path) -> dict[str, bytes] | None:
    found = load_recording(recording)
    if found is None:
        return None
    return {name: np.asarray(one).tobytes() for name, one in arrays_from_recording(found).items()}


def _compared(found: Any, right: Any) -> str:  # Any: what a check compares
    return "refused" if found is None else "right" if found == right else "WRONG"


def races(lab: Lab, size: Size, seed: int) -> Figures:
    """Lets builders race for one key: for nothing, a damaged engine, and past a killed builder."""
    figures = Figures(name=f"races of {size.racers} processes for one key")
    chance = random.Random(seed)
    kinds = ("nothing stored", "a damaged engine", "the first builder killed")
    for number in range(size.races):
        kind = kinds[number % len(kinds)]
        here = lab.elsewhere(lab.home.with_name(f"race {number}"))
        if kind == "a damaged engine":
            _build_undisturbed(here, Figures(name=""), "")
            folder = here.store.folder(here.request.key)
            flip_or_cut(folder / "weights-3.bin", chance, keeps_times=False)
        gate, opener = os.pipe()
        builders = [Builder(here, gate=gate) for _ in range(size.racers)]
        os.close(gate)
        os.write(opener, b"x" * size.racers)
        if kind == "the first builder killed":
            first = _first_in(builders, PHASES.index("compile"))
            os.kill(first.pid, signal.SIGKILL)
        codes = [builder.wait() for builder in builders]
        os.close(opener)
        published = sum(builder.published for builder in builders)
        place = f"race {number} ({kind})"
        expected = size.racers - (kind == "the first builder killed")
        figures.check(codes.count(OK) == expected, f"{place}: exit codes {codes}")
        figures.check(published == 1, f"{place}: {published} engines were published")
        figures.check(use(here) == "right", f"{place}: the engine is {use(here)}")
        figures.check(has_free_lock(here), f"{place}: the lock is stuck")
        figures.check(not leftovers(here), f"{place}: leftovers {leftovers(here)}")
        figures.counts[f"races with {kind}: 1 build each"] += published == 1
        for builder in builders:
            builder.forget()
        shutil.rmtree(here.home)
    return figures


def _first_in(builders: list[Builder], phase: int) -> Builder:
    end_s = time.monotonic() + 120
    while time.monotonic() < end_s:
        for builder in builders:
            if builder.phase >= phase:
                return builder
        time.sleep(0.0005)
    raise TimeoutError("no builder began to compile")


def full_disks(lab: Lab, size: Size, seed: int) -> Figures:
    """Builds with a little less room each time, from too much to none."""
    figures = Figures(name="full disks")
    with _small_disk(lab.home.with_name("disk")) as disk:
        if disk is None:
            figures.counts["skipped: a tmpfs cannot be mounted (it takes root)"] += 1
            return figures
        here = lab.elsewhere(disk / "home")
        engine_bytes = sum(
            path.stat().st_size for path in lab.store.folder(lab.request.key).iterdir()
        )
        for number in range(size.disks):
            room_bytes = int(1.2 * engine_bytes * number / max(size.disks - 1, 1))
            here.store.remove(here.request.key)
            _fill(disk, room_bytes)
            builder = Builder(here)
            code = builder.wait()
            place = f"disk {number} ({room_bytes} bytes free)"
            figures.check(code in (OK, STORE), f"{place}: exit code {code}\n{builder.said()}")
            builder.forget()
            figures.counts["built" if code == OK else "refused by name"] += 1
            (disk / "filler").unlink()
            state = use(here)
            figures.check(state in ("right", "none"), f"{place}: the engine is {state}")
            figures.check(has_free_lock(here), f"{place}: the lock is stuck")
            figures.check(not remembers_failure(here), f"{place}: remembered as a failure")
            figures.check(not leftovers(here), f"{place}: leftovers {leftovers(here)}")
            if number % 10 == 0:
                _build_undisturbed(here, figures, place)
    return figures


@contextmanager
def _small_disk(folder: Path) -> Iterator[Path | None]:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except OSError:
        done = None
    if done is None or done.returncode:
        yield None
        return
    try:
        yield folder
    finally:
        # Lazily: engines that were looked up here are in use, so their manifests are open.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _fill(disk: Path, room_bytes: int) -> None:
    free_bytes = shutil.disk_usage(disk).free
    with (disk / "filler").open("wb") as stream:
        os.posix_fallocate(stream.fileno(), 0, max(free_bytes - room_bytes, 1))


def real_vendor(lab: Lab, size: Size, seed: int) -> Figures:
    """Kills builds of the sample with a real vendor, through the command line."""
    from fault_real import kill_real_builds

    return kill_real_builds(
        lab.home.with_name("real"),
        Figures(name="SIGKILLs of a real vendor's builds"),
        count=size.real_kills,
        chance=random.Random(seed),
    )
