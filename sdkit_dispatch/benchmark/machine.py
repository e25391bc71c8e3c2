"""What the machine does while it is measured: load, heat, power, and who else is at work."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from sdkit_dispatch.benchmark.records import Machine, MachineState
from sdkit_dispatch.contract import Device
from sdkit_dispatch.detect import host

BUSY_OTHERS = 0.1
"""Share of the processors that others may use before the report says so."""
SLOWER_CLOCK = 0.1
"""Change of the processor's frequency between two readings that is worth a word."""

PROC, SYS = Path("/proc"), Path("/sys")


class Watch:
    """Reads the state of the machine between rounds.

    Args:
        own_pids: Returns the processes that belong to the benchmark right now.
    """

    def __init__(self, own_pids: Callable[[], Sequence[int]]) -> None:
        self._own_pids = own_pids
        self._started_s = time.monotonic()
        self._before: tuple[float, float, float] | None = None
        self.states: list[MachineState] = []

    def read(self) -> MachineState:
        """Takes a reading and keeps it."""
        state = MachineState(
            at_s=round(time.monotonic() - self._started_s, 2),
            load=_load(),
            others_cpu=self._others(),
            frequency_mhz=_frequency_mhz(),
            governor=_text(SYS / "devices/system/cpu/cpu0/cpufreq/scaling_governor"),
            throttles=_throttles(),
            on_battery=_on_battery(),
            free_memory_bytes=free_memory_bytes(),
        )
        self.states.append(state)
        return state

    def _others(self) -> float | None:
        """Returns how many processors others kept busy since the last reading."""
        busy_s = _busy_s()
        if busy_s is None:
            return None
        now_s = time.monotonic()
        # Who does not fit beside the others in memory is ended after each turn: a child by then.
        ended = os.times()
        own_s = time.process_time() + ended.children_user + ended.children_system
        own_s += sum(cpu_seconds(pid) or 0.0 for pid in self._own_pids())
        before, self._before = self._before, (now_s, busy_s, own_s)
        if before is None or now_s - before[0] < 0.2:  # ticks are 10 ms: too few to judge
            return None
        others_s = (busy_s - before[1]) - (own_s - before[2])
        return round(max(0.0, others_s / (now_s - before[0])), 3)


def remarks_on(states: Sequence[MachineState], processors: int) -> list[str]:
    """Returns what of the machine's state a reader must know, as sentences."""
    remarks = []
    others = sorted(one.others_cpu for one in states if one.others_cpu is not None)
    if others and (middle := others[len(others) // 2]) > BUSY_OTHERS * processors:
        remarks.append(
            f"other programs kept {middle:.1f} of {processors} processors busy (median between "
            f"rounds, at most {others[-1]:.1f}): times are too long, ratios are noisier"
        )
    if not states:
        return remarks
    first, last = states[0], states[-1]
    governors = list(dict.fromkeys(one.governor for one in states if one.governor))
    if len(governors) > 1:
        remarks.append(f"the frequency governor changed: {' -> '.join(governors)}")
    elif governors and governors[0] == "powersave":
        remarks.append("the frequency governor is 'powersave'")
    if first.throttles is not None and last.throttles is not None:
        times = last.throttles - first.throttles
        if times > 0:
            remarks.append(f"the processor was slowed down for heat {times} times meanwhile")
    clocks = [one.frequency_mhz for one in states if one.frequency_mhz]
    if clocks and min(clocks) < (1 - SLOWER_CLOCK) * max(clocks):
        remarks.append(
            f"the processor's clock was between {min(clocks):.0f} and {max(clocks):.0f} MHz"
        )
    power = {one.on_battery for one in states if one.on_battery is not None}
    if len(power) > 1:
        remarks.append("the power supply was plugged in or out meanwhile")
    elif True in power:
        remarks.append("it ran on battery")
    return remarks


def machine_of(devices: Sequence[Device]) -> Machine:
    """Returns what of this machine bears on speed."""
    here = host()
    return Machine(
        platform=here.platform,
        kernel=f"{platform.system()} {here.kernel}",
        python=sys.version.split()[0],
        processors=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        is_container=here.is_container,
        devices=tuple(devices),
    )


def peak_rss_bytes(pid: int) -> int | None:
    """Returns the most memory that a process has had at once; None outside Linux."""
    for line in _text(PROC / str(pid) / "status").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def free_memory_bytes() -> int | None:
    """Returns the memory that programs can still have without swapping; None outside Linux."""
    for line in _text(PROC / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def cpu_seconds(pid: int) -> float | None:
    """Returns the CPU time of a process, all threads; None outside Linux, or if it is gone."""
    # The name of the program, in parentheses, may hold anything.
    fields = _text(PROC / str(pid) / "stat").rpartition(")")[2].split()
    if len(fields) < 13:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def drop_from_memory(place: Path) -> bool:
    """Asks the system to forget a file, or the files below a folder; False where it cannot be.

    Needs no rights: it concerns clean pages only, which the engine store's are.
    """
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in [place] if place.is_file() else place.rglob("*"):
        with suppress(OSError):
            handle = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)
    return True


def _busy_s() -> float | None:
    """Returns the CPU seconds that all programs have used since the system started."""
    fields = _text(PROC / "stat").partition("\n")[0].split()
    if len(fields) < 8 or fields[0] != "cpu":
        return None
    user, nice, system, _, _, interrupts, soft = map(int, fields[1:8])
    return (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")


def _load() -> float | None:
    with suppress(OSError, AttributeError):
        return round(os.getloadavg()[0], 2)
    return None


def _frequency_mhz() -> float | None:
    texts = [
        _text(path) for path in (SYS / "devices/system/cpu").glob("cpu*/cpufreq/scaling_cur_freq")
    ]
    known = [int(text) / 1000 for text in texts if text.isdigit()]
    return round(sum(known) / len(known), 1) if known else None


def _throttles() -> int | None:
    pattern = "cpu*/thermal_throttle/core_throttle_count"
    texts = [_text(path) for path in (SYS / "devices/system/cpu").glob(pattern)]
    known = [int(text) for text in texts if text.isdigit()]
    return sum(known) if known else None


def _on_battery() -> bool | None:
    states = [_text(path) for path in (SYS / "class/power_supply").glob("*/online")]
    known = [text == "1" for text in states if text]
    return not any(known) if known else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
