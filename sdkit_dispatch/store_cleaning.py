"""What a store takes on the disk, and which engines to remove when that is too much.

The weights of several engines may be one file with several names (hard links): it is counted once,
and removing one of those engines frees nothing of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from .cache import EngineStore, Entry
from .contract import BuildRequest
from .lora.stored import merged_entries
from .store_use import last_use

FileId = tuple[int, int]
"""Device and inode: the same for all names of one file."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What the engines of one vendor and component take.

    Attributes:
        size_bytes: Of all their files.
        own_bytes: Without what an earlier row counted already.
    """

    vendor: str
    component: str
    engines: int
    size_bytes: int
    own_bytes: int


@dataclass(frozen=True, kw_only=True)
class Removal:
    """An engine that goes, or would go, and why.

    Attributes:
        frees_bytes: What the disk gains; less than its size if it shares files with others.
        kept: Why it stays nevertheless; empty if it goes.
    """

    key: str
    vendor: str
    component: str
    frees_bytes: int
    reason: str
    kept: str = ""


def used_at_s(store: EngineStore, entry: Entry) -> float:
    """Returns when an engine was used last, else built, in seconds since 1970."""
    use = last_use(store.memo, entry.key)
    return max(use.at_s if use else 0.0, built_at_s(entry))


def built_at_s(entry: Entry) -> float:
    """Returns when an engine was built, in seconds since 1970; 0 if that cannot be read."""
    if entry.manifest is None:
        return _changed_at_s(entry) if entry.what == "merged" else 0.0
    with suppress(ValueError):
        return datetime.fromisoformat(entry.manifest.created_at).timestamp()
    return 0.0


def _changed_at_s(entry: Entry) -> float:
    with suppress(OSError):
        return entry.folder.stat().st_mtime
    return 0.0


def removable(store: EngineStore) -> list[Entry]:
    """Returns all that may be removed to make room: our engines, and merged pipelines."""
    return [*(one for one in store.entries() if not one.is_shared), *merged_entries(store)]


def usage(entries: Iterable[Entry]) -> list[Usage]:
    """Returns what engines take on the disk, a row for each vendor and component."""
    rows: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        rows.setdefault(_owner(entry), []).append(entry)
    seen: set[FileId] = set()
    found = []
    for (vendor, component), members in sorted(rows.items()):
        size_bytes = own_bytes = 0
        for entry in members:
            for file, file_bytes in _files(entry.folder):
                size_bytes += file_bytes
                own_bytes += 0 if file in seen else file_bytes
                seen.add(file)
        found.append(
            Usage(
                vendor=vendor,
                component=component,
                engines=len(members),
                size_bytes=size_bytes,
                own_bytes=own_bytes,
            )
        )
    return found


def folder_bytes(folder: Path) -> int:
    """Returns what the files below a folder take, each counted once."""
    return sum(dict(_files(folder)).values())


def unused_since(store: EngineStore, entries: Sequence[Entry], *, before_s: float) -> list[Removal]:
    """Returns the engines that were not used since a time (seconds since 1970)."""
    chosen = {
        entry.key: "not used since " + datetime.fromtimestamp(at_s).strftime("%Y-%m-%d")
        for entry in entries
        if (at_s := used_at_s(store, entry)) < before_s
    }
    return _removals(entries, chosen)


def superseded(
    entries: Sequence[Entry],
    *,
    revisions: Mapping[str, int],
    passes: int,
    runtimes: Mapping[str, frozenset[str]],
) -> list[Removal]:
    """Returns the engines that no build here can hit any more.

    Args:
        entries: All engines.
        revisions: Vendor -> its adapter's revision; vendors that are not listed are not judged.
        passes: Revision of the graph passes.
        runtimes: Vendor -> what its installed runtime calls itself. Of a vendor that is not
            installed an engine is superseded by a newer one that differs in the runtime only.
    """
    newest: dict[str, tuple[str, str]] = {}
    for entry in entries:
        if entry.manifest is not None:
            kin = _kin(entry.manifest.request)
            newest[kin] = max(newest.get(kin, ("", "")), (entry.manifest.created_at, entry.key))
    chosen = {}
    for entry in entries:
        if entry.manifest is None:
            continue
        request = entry.manifest.request
        revision = revisions.get(request.vendor, request.revision)
        known = runtimes.get(request.vendor)
        if request.revision != revision:
            reason = f"built by revision {request.revision} of the adapter, now {revision}"
        elif request.passes != passes:
            reason = f"built after revision {request.passes} of the graph passes, now {passes}"
        elif known is not None and request.runtime not in known:
            reason = f"built with {request.runtime}, now {' or '.join(sorted(known))}"
        elif known is None and newest[_kin(request)][1] != entry.key:
            reason = f"built with {request.runtime}; {newest[_kin(request)][1][:12]} is newer"
        else:
            continue
        chosen[entry.key] = reason
    return _removals(entries, chosen)


def over_size(
    store: EngineStore,
    entries: Sequence[Entry],
    *,
    limit_bytes: int,
    spared: frozenset[str] = frozenset(),
) -> list[Removal]:
    """Returns the engines to remove, the longest unused first, until the rest fits.

    Args:
        store: Knows when they were used.
        entries: All that count.
        limit_bytes: What they may take together.
        spared: Keys of those that stay.
    """
    names = _name_counts(entries)
    total_bytes = sum(dict(pair for one in entries for pair in _files(one.folder)).values())
    removals = []
    for entry in sorted(entries, key=lambda one: used_at_s(store, one)):
        if total_bytes <= limit_bytes:
            break
        if entry.key not in spared:
            reason = f"the engines may take {limit_bytes / 1e6:.0f} MB together"
            removals.append(_removal(entry, reason, names))
            total_bytes -= removals[-1].frees_bytes
    return removals


def remove_unused(store: EngineStore, removals: Iterable[Removal]) -> list[Removal]:
    """Removes engines; those that are in use stay, and say so."""
    done = []
    for removal in removals:
        is_gone = store.evict(removal.key)
        kept = "" if is_gone else "it is in use, or its folder cannot be written"
        done.append(
            Removal(
                key=removal.key,
                vendor=removal.vendor,
                component=removal.component,
                frees_bytes=removal.frees_bytes if is_gone else 0,
                reason=removal.reason,
                kept=kept,
            )
        )
    return done


def shrink(store: EngineStore, *, limit_bytes: int) -> list[Removal]:
    """Removes the longest unused engines of ours until the rest fits; never one in use.

    Returns:
        Those that went, and those that stayed because they are in use.
    """
    gone: list[Removal] = []
    kept: dict[str, Removal] = {}
    while True:
        ours = removable(store)
        chosen = over_size(store, ours, limit_bytes=limit_bytes, spared=frozenset(kept))
        done = remove_unused(store, chosen)
        gone += [one for one in done if not one.kept]
        stuck = {one.key: one for one in done if one.kept}
        if not stuck:
            return [*gone, *kept.values()]
        kept |= stuck


def _removals(entries: Sequence[Entry], chosen: Mapping[str, str]) -> list[Removal]:
    names = _name_counts(entries)
    return [_removal(entry, chosen[entry.key], names) for entry in entries if entry.key in chosen]


def _removal(entry: Entry, reason: str, names: Counter[FileId]) -> Removal:
    """Takes the names of an engine's files from `names`; a file goes with its last one."""
    frees_bytes = 0
    for file, file_bytes in _files(entry.folder):
        names[file] -= 1
        frees_bytes += file_bytes if names[file] == 0 else 0
    vendor, component = _owner(entry)
    return Removal(
        key=entry.key,
        vendor=vendor,
        component=component,
        frees_bytes=frees_bytes,
        reason=reason,
    )


def _name_counts(entries: Iterable[Entry]) -> Counter[FileId]:
    names: Counter[FileId] = Counter()
    outside: dict[FileId, int] = {}
    for entry in entries:
        for path, file, _ in _found(entry.folder):
            names[file] += 1
            if entry.what == "merged":  # it may be a file of the user's pipeline, which stays
                with suppress(OSError):
                    outside[file] = path.lstat().st_nlink
    for file, count in outside.items():
        names[file] = max(names[file], count)
    return names


def _files(folder: Path) -> list[tuple[FileId, int]]:
    """Returns identity and size of every plain file below a folder, once for each name."""
    return [(file, size_bytes) for _, file, size_bytes in _found(folder)]


def _found(folder: Path) -> list[tuple[Path, FileId, int]]:
    found = []
    with suppress(OSError):
        for path in folder.rglob("*"):
            with suppress(OSError):
                stat = path.lstat()
                if path.is_file() and not path.is_symlink():
                    found.append((path, (stat.st_dev, stat.st_ino), stat.st_size))
    return found


def _owner(entry: Entry) -> tuple[str, str]:
    if entry.what == "merged":
        return "merged", "pipeline"
    request = entry.manifest.request if entry.manifest else None
    return (request.vendor, request.component) if request else ("damaged", "-")


def _kin(request: BuildRequest) -> str:
    """Returns what requests have in common that differ in the runtime only."""
    from dataclasses import replace

    return replace(request, runtime="", revision=0, passes=0).key
