"""Pipelines with LoRAs in their weights, made when they are asked for the first time.

The key of one is made of everything that decides what is in it. To all who build and run engines it
is a pipeline folder like any other.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from sdkit_dispatch.cache import EngineStore
from sdkit_dispatch.contract import (
    SCHEMA_VERSION,
    Progress,
    Report,
    no_report,
)
from sdkit_dispatch.errors import PipelineError
from sdkit_dispatch.pipeline_files import Pipeline, file_digest, remember_digest
from sdkit_dispatch.store_layout import (
    UNWRITABLE,
    as_store_error,
    close_to_others,
    merged_folder,
)
from sdkit_dispatch.store_manifest import MANIFEST, write_sealed
from sdkit_dispatch.store_use import Hold, hold_engine, record_use
from sdkit_dispatch.version import __version__

from .component import ComponentMerge, component_merge, link_or_copy, write_component
from .file import LoraFile, read_lora
from .names import ROOTS, place_of
from .stored import MergedManifest, look_up
from .wish import SHOWN_KEYS, AppliedLora, Lora

REVISION = 1
"""Raised whenever the same LoRAs give other weights."""
Marks = Mapping[str, tuple[int, int, int]]


@dataclass(frozen=True, kw_only=True)
class MergedPipeline:
    """A pipeline folder with LoRAs in its weights.

    Attributes:
        loras: What was asked for, in order, and what became of it.
        hold: Keeps the folder from being removed until it is closed; None if it is not ours.
    """

    folder: Path
    loras: tuple[AppliedLora, ...]
    hold: Hold | None

    def close(self) -> None:
        """Lets the folder go; call it once."""
        if self.hold is not None:
            self.hold.close()


def merged_pipeline(
    store: EngineStore, base: Pipeline, loras: Sequence[Lora], *, report: Report = no_report
) -> MergedPipeline:
    """Returns the pipeline with LoRAs in its weights; makes it if there is none yet.

    Args:
        store: Its home keeps what is made.
        base: Without any LoRA.
        loras: In the order in which they are added. With none but such of strength 0 the result
            is `base` itself.
        report: Called while it is made.

    Raises:
        PipelineError: A LoRA is damaged, or is not for this pipeline.
        CacheError: The result cannot be kept anywhere.
    """
    files = [read_lora(lora, memo=store.memo) for lora in loras]
    active = [file for file in files if file.lora.strength != 0]
    if not active:
        return MergedPipeline(folder=base.folder, loras=_applied(files, ()), hold=None)
    sources = _sources(base)
    marks = _marks(sources)
    key = _key(sources, active, store.memo)

    def made() -> tuple[Path, MergedManifest, Hold]:
        return _made(store, base, active, key=key, sources=sources, marks=marks, report=report)

    found = look_up(store, key)
    if found is None:
        try:
            found = made()
        except OSError as error:
            reason = as_store_error(error, store.home)
            if error.errno not in UNWRITABLE or store.is_temporary:
                raise reason from error
            store.retreat(reason.message)
            try:
                found = made()
            except OSError as again:
                raise reason from again
    folder, manifest, hold = found
    return MergedPipeline(folder=folder, loras=_applied(files, manifest.loras), hold=hold)


def _made(
    store: EngineStore,
    base: Pipeline,
    files: Sequence[LoraFile],
    *,
    key: str,
    sources: Mapping[str, Path],
    marks: Marks,
    report: Report,
) -> tuple[Path, MergedManifest, Hold]:
    """Makes a merged pipeline, unless another process makes it meanwhile."""

    def wait() -> None:
        report(Progress(phase="wait for another process that merges the same LoRAs"))

    with store.locked(key, while_waiting=wait):
        found = look_up(store, key)
        if found is not None:
            return found
        merges, loras = _planned(base, files)
        store.remove(key)  # a damaged one
        needed_bytes = sum(part.weights_bytes for part in base.components.values())
        if shutil.disk_usage(store.home).free < needed_bytes:  # rather than to fill it first
            raise OSError(errno.ENOSPC, f"{needed_bytes / 1e6:.0f} MB are needed", str(store.home))
        with store.workshop(key) as shop:
            out = shop / "pipeline"
            out.mkdir()
            linked = _fill(out, base, merges, sources, report)
            for file in files:
                file.require_unchanged()
            if _marks(sources) != marks:
                raise PipelineError(
                    f"the pipeline '{base.folder}' was changed while it was read", "run it again"
                )
            for path in (out, *out.rglob("*")):
                if path.is_dir() or path not in linked:  # a mode is the file's, not the name's
                    close_to_others(path)
            report(Progress(phase="hash the merged pipeline"))
            sealed_ns = time.time_ns()
            stored = store.seal(out)
            manifest = MergedManifest(
                key=key,
                files=stored,
                loras=loras,
                created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
                tool=f"sdkit-dispatch {__version__}",
            )
            write_sealed(out / MANIFEST, manifest)
            folder = merged_folder(store.home) / key
            store.move_in(out, folder)
        hold = hold_engine(folder)
        if hold is None:
            raise OSError(f"'{folder}' is gone")
        record_use(store.memo, key, onnx=folder)
        # A new link changes the status of the pipeline's own file, which would be hashed again.
        names = {path.relative_to(out).as_posix(): source for path, source in linked.items()}
        for name, one in stored.items():
            for path in (folder / name, *([names[name]] if name in names else [])):
                remember_digest(path, one.sha256, memo=store.memo, hashed_ns=sealed_ns)
        return folder, manifest, hold


def _fill(
    out: Path,
    base: Pipeline,
    merges: Mapping[str, ComponentMerge],
    sources: Mapping[str, Path],
    report: Report,
) -> dict[Path, Path]:
    """Writes all files of a merged pipeline. Returns those that are links -> the file they are."""
    for name, source in sources.items():
        target = out / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.name == "model.onnx":
            if Path(name).parts[0] not in merges:
                link_or_copy(source, target)
        elif Path(name).parts[0] not in merges or source.name == "config.json":
            shutil.copyfile(source, target)
    for name, merge in merges.items():
        phase = f"merge LoRAs into {name}"

        def on_fraction(fraction: float, phase: str = phase) -> None:
            report(Progress(phase=phase, fraction=fraction))

        on_fraction(0.0)
        write_component(merge, out / name, on_fraction=on_fraction)
    return {
        out / name: source
        for name, source in sources.items()
        if (out / name).exists() and os.path.samefile(source, out / name)
    }


def _planned(
    base: Pipeline, files: Sequence[LoraFile]
) -> tuple[dict[str, ComponentMerge], tuple[AppliedLora, ...]]:
    """Returns the components that change, and how many layers of each LoRA have a place.

    Raises:
        PipelineError: A LoRA has none.
    """
    merges = {}
    for name in ROOTS:
        if name in base.components:
            merge = component_merge(base.components[name], base.configs[name], files)
            if merge is not None:
                merges[name] = merge
    placed = {
        (id(change.file), change.layer.module)
        for merge in merges.values()
        for changes in merge.changes.values()
        for change in changes
    }
    loras = []
    for file in files:
        missing = [one for one in file.layers.values() if (id(file), one.module) not in placed]
        unmatched = [*(one.down.name for one in missing), *file.strange]
        count = sum(one.tensors for one in missing) + len(file.strange)
        layers = len(file.layers) - len(missing)
        if not layers:
            parts = sorted({place_of(one.module)[0] for one in missing})
            raise PipelineError(
                f"the LoRA '{file.path}' has nothing for this pipeline: none of its "
                f"{len(file.layers)} layers ({', '.join(unmatched[:SHOWN_KEYS])}, ...) is found in "
                f"{', '.join(name for name in ROOTS if name in base.components)} of "
                f"'{base.folder}' (they look like parts of {' and '.join(parts)})",
                "take a LoRA for this kind of model; a graph whose nodes were renamed by a tool "
                "must be exported again",
            )
        loras.append(
            AppliedLora(
                name=file.path.stem,
                strength=file.lora.strength,
                sha256=file.sha256,
                layers=layers,
                unmatched=count,
                examples=tuple(unmatched[:SHOWN_KEYS]),
            )
        )
    return merges, tuple(loras)


def _sources(base: Pipeline) -> dict[str, Path]:
    """Returns every file that a pipeline is made of, by its name in the folder."""
    paths = [base.folder / "model_index.json"]
    folders = [base.folder / "scheduler", *base.tokenizers.values()]
    for folder in folders:
        paths += [path for path in sorted(folder.iterdir()) if path.is_file()]
    for component in base.components.values():
        paths += [component.onnx.parent / "config.json", component.onnx, *component.external]
    return {path.relative_to(base.folder).as_posix(): path for path in paths}


def _marks(sources: Mapping[str, Path]) -> Marks:
    """Returns what changes with the files of a pipeline, and not when they get another name."""
    found = {name: path.stat() for name, path in sources.items()}
    return {name: (one.st_ino, one.st_size, one.st_mtime_ns) for name, one in found.items()}


def _key(sources: Mapping[str, Path], files: Sequence[LoraFile], memo: Path) -> str:
    content = {
        "schema": SCHEMA_VERSION,
        "revision": REVISION,
        "pipeline": {name: file_digest(path, memo=memo) for name, path in sources.items()},
        "loras": [[file.sha256, file.lora.strength] for file in files],
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _applied(files: Sequence[LoraFile], known: Sequence[AppliedLora]) -> tuple[AppliedLora, ...]:
    """Returns what became of every LoRA that was asked for; a file may have a new name by now."""
    rest = list(known)
    return tuple(
        replace(rest.pop(0), name=file.path.stem)
        if file.lora.strength
        else AppliedLora(
            name=file.path.stem, strength=file.lora.strength, sha256=file.sha256, layers=0
        )
        for file in files
    )
