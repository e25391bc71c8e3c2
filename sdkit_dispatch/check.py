"""The numeric gate: an engine's outputs against the reference's, on recorded inputs.

The inputs are what the pipeline really feeds its components: the `cpu` vendor runs it once, graphs
unoptimised, with a fixed prompt and seed, and every call is recorded (`Recording`). So the UNet is
checked on latents at several noise levels with real text embeddings, the decoder on denoised ones.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import math
import re
import struct
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .cache import Verdict
from .contract import Arrays, GenerateRequest, Precision
from .errors import NumericError
from .whole_file import write_whole

log = logging.getLogger(__name__)

CHECK_REVISION = 1
"""Raised when the recorded run changes; part of a recording's name."""
MAX_ARRAYS = 4096
MAX_REFERENCE = 200
NPY = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '(?P<dtype>(?:[<|][biuf]|<U)[0-9]{1,4})', "
    rb"'fortran_order': False, 'shape': \((?P<shape>[0-9, ]{0,200})\), \} *\n",
    re.DOTALL,
)
"""The start of an array as `numpy.savez` writes those that we record: numbers, and one text."""
DIGEST_BYTES = hashlib.sha256().digest_size
CASES_PER_COMPONENT = 4
PROMPT = "a photograph of a red fox in the snow, sharp focus"
NEGATIVE_PROMPT = "blurry, low quality"
SEED = 20260101
STEPS = 3
"""Noise levels at which the UNet is checked: euler goes from pure noise to little."""

LIMITS: Mapping[Precision, Mapping[str, float]] = {
    # Two fp32 runtimes differ by the order of their sums: 2e-6 to 3e-5 of the largest value was
    # seen between ONNX Runtime, OpenVINO and ggml, 1e-4 with Winograd convolutions.
    "fp32": {"relative_max": 1e-3, "cosine": 0.99999},
    # 11 bits of mantissa: 2.6e-4 mean and up to 1e-2 of the largest value were seen.
    "fp16": {"relative_max": 3e-2, "cosine": 0.9995},
    # 8 bits of mantissa: eight times fp16's rounding.
    "bf16": {"relative_max": 1.5e-1, "cosine": 0.997},
    "int8": {"relative_max": 1.5e-1, "cosine": 0.995},
    "q8_0": {"relative_max": 1e-1, "cosine": 0.998},
    "q5_0": {"relative_max": 2e-1, "cosine": 0.99},
    "q4_0": {"relative_max": 3e-1, "cosine": 0.98},
}
"""Precision -> the largest error over the largest reference value, and the least cosine.

A wrong weight, layout or operator is off by a multiple of these; a wrong engine by 1.
"""
FLAT = 1e-3
"""Outputs that vary less than this share of the reference's standard deviation are flat."""

SAFER: Mapping[Precision, Precision] = {
    "q4_0": "q8_0",
    "q5_0": "q8_0",
    "q8_0": "fp32",
    "int8": "fp32",
    "fp16": "fp32",
    "bf16": "fp32",
}
"""What a component that failed the gate is rebuilt at, once."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One recorded call of a component by the reference."""

    feeds: Arrays
    outputs: Arrays


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The recorded calls of every component, and who made them."""

    reference: str
    cases: Mapping[str, tuple[Case, ...]]


GRAPH_PRECISION: Mapping[str, Precision] = {"float16": "fp16", "bfloat16": "bf16"}
WIDEST_DTYPE = "bfloat16"
"""Of the graphs whose engines may be off by most."""


def limits_for(precision: Precision, graph_dtype: str) -> dict[str, float]:
    """Returns what is allowed for an engine of `precision`, built from a graph of that dtype.

    A graph exported in half precision rounds at every node, whatever the vendor computes in: two
    right answers to it differ as half precisions do. So the looser limits count.
    """
    engine, graph = LIMITS[precision], LIMITS[GRAPH_PRECISION.get(graph_dtype, "fp32")]
    return {
        "relative_max": max(engine["relative_max"], graph["relative_max"]),
        "cosine": min(engine["cosine"], graph["cosine"]),
    }


def recorded_request(request: GenerateRequest) -> GenerateRequest:
    """Returns the request that is recorded for engines of the same shapes as `request` needs."""
    return GenerateRequest(
        prompt=PROMPT,
        negative_prompt=NEGATIVE_PROMPT,
        width_px=request.width_px,
        height_px=request.height_px,
        steps=STEPS,
        guidance=5.0 if request.guidance > 1 else 1.0,
        seed=SEED,
        batch=request.batch,
        scheduler="euler",
    )


def judge(
    cases: Sequence[Case],
    outputs: Sequence[Arrays],
    limits: Mapping[str, float],
    *,
    reference: str,
) -> Verdict:
    """Compares what an engine gave for each case with what the reference gave."""
    if not any(case.outputs for case in cases):
        return Verdict(status="unchecked", reason="the reference recorded no output")
    metrics: dict[str, dict[str, float]] = {}
    complaints: list[str] = []
    for index, (case, given) in enumerate(zip(cases, outputs, strict=True)):
        for name, expected in case.outputs.items():
            if name not in given:
                complaints.append(f"output '{name}' is missing")
                continue
            actual = np.asarray(given[name])
            wrong = _disqualified(actual, expected)
            if wrong:
                complaints.append(f"output '{name}' of case {index + 1} {wrong}")
                continue
            measured = measure(actual, expected)
            worst = metrics.setdefault(name, dict(measured))
            for metric, value in measured.items():
                is_least = metric == "cosine"
                worst[metric] = (min if is_least else max)(worst[metric], value)
    for name, worst in metrics.items():
        # Written so that a NaN complains too.
        if not worst["relative_max"] <= limits["relative_max"]:
            complaints.append(
                f"output '{name}' is off by {worst['relative_max']:.2g} of its largest value; "
                f"{limits['relative_max']:g} is allowed"
            )
        if not worst["cosine"] >= limits["cosine"]:
            complaints.append(
                f"output '{name}' has the cosine {worst['cosine']:.6f} to the reference; "
                f"{limits['cosine']:g} is allowed"
            )
    return Verdict(
        status="failed" if complaints else "passed",
        reason="; ".join(complaints),
        reference=reference,
        metrics=metrics,
        limits=dict(limits),
    )


def measure(actual: Any, expected: Any) -> dict[str, float]:  # Any: numpy.ndarray
    """Returns max_abs, mean_abs, relative_max (max_abs over the largest reference) and cosine."""
    given = np.asarray(actual, np.float64).ravel()
    wanted = np.asarray(expected, np.float64).ravel()
    if not wanted.size:
        return {"max_abs": 0.0, "mean_abs": 0.0, "relative_max": 0.0, "cosine": 1.0}
    error = np.abs(given - wanted)
    largest = float(np.abs(wanted).max())
    lengths = float(np.linalg.norm(given) * np.linalg.norm(wanted))
    return {
        "max_abs": float(error.max()),
        "mean_abs": float(error.mean()),
        "relative_max": float(error.max()) / largest if largest else float(error.max()),
        "cosine": float(given @ wanted) / lengths if lengths else float(not error.any()),
    }


def require_passed(verdict: Verdict, component: str, vendor: str) -> None:
    """Does nothing unless the verdict is "failed".

    Raises:
        NumericError: With what was wrong.
    """
    if verdict.status == "failed":
        raise NumericError(
            f"the {vendor} engine of {component} computes wrong numbers: {verdict.reason}",
            "sdkit-dispatch doctor",
        )


def _disqualified(actual: Any, expected: Any) -> str:  # Any: numpy.ndarray
    if actual.shape != expected.shape:
        return f"has the shape {list(actual.shape)}, not {list(expected.shape)}"
    if actual.dtype.kind in "iub":
        return "" if np.array_equal(actual, expected) else "differs in whole numbers"
    if not np.isfinite(expected).all():
        return "has no finite reference to be compared with"
    bad = int(np.size(actual) - np.count_nonzero(np.isfinite(actual)))
    if bad:
        return f"holds {bad} values that are not finite"
    spread = float(np.std(np.asarray(expected, np.float64)))
    if np.size(actual) > 1 and spread > 0:
        found = float(np.std(np.asarray(actual, np.float64)))
        if found < FLAT * spread:
            return f"is flat (standard deviation {found:.2g}, the reference has {spread:.2g})"
    return ""


def recording_name(
    digests: Mapping[str, tuple[str, str]],
    configs: Mapping[str, Any],  # Any: JSON data
    request: GenerateRequest,
    maker: Sequence[Any],  # Any: JSON data
) -> str:
    """Returns the content key of a recording: graphs, weights, settings, request and its maker."""
    facts = [CHECK_REVISION, sorted(digests.items()), configs, vars(request), list(maker)]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=list).encode()).hexdigest()


def recording_from_arrays(arrays: Arrays, *, reference: str) -> Recording:
    """Returns the recording that a worker sends: "unet/0/feeds/sample" -> tensor, ..."""
    tree: dict[str, dict[int, dict[str, dict[str, Any]]]] = {}  # Any: numpy.ndarray
    for path, array in arrays.items():
        component, index, side, name = path.split("/", 3)
        sides = tree.setdefault(component, {}).setdefault(int(index), {"feeds": {}, "outputs": {}})
        sides[side][name] = array
    return Recording(
        reference=reference,
        cases={
            component: tuple(Case(**calls[index]) for index in sorted(calls))
            for component, calls in tree.items()
        },
    )


def arrays_from_recording(recording: Recording) -> dict[str, Any]:  # Any: numpy.ndarray
    """The inverse of `recording_from_arrays`."""
    return {
        f"{component}/{index}/{side}/{name}": array
        for component, cases in recording.cases.items()
        for index, case in enumerate(cases)
        for side, arrays in (("feeds", case.feeds), ("outputs", case.outputs))
        for name, array in arrays.items()
    }


def recording_bytes(recording: Recording) -> bytes:
    """Returns a recording as it is stored: the sha256 of an npz archive, and the archive."""
    buffer = io.BytesIO()
    np.savez(buffer, reference=np.array(recording.reference), **arrays_from_recording(recording))
    data = buffer.getvalue()
    return hashlib.sha256(data).digest() + data


def save_recording(path: Path, recording: Recording) -> None:
    """Writes a recording whole or not at all.

    Raises:
        OSError: The disk is full or read-only.
    """
    write_whole(path, recording_bytes(recording))


def index_recording(path: Path, digests: Mapping[str, tuple[str, str]]) -> None:
    """Writes beside a recording which graphs and weights it is of; may be lost."""
    note = path.with_suffix(".json")
    if not note.exists():
        with suppress(OSError):
            write_whole(note, json.dumps(digests, sort_keys=True).encode())


def recordings_of(home: Path, component: str, digests: tuple[str, str]) -> list[Path]:
    """Returns the recordings that hold a component of that graph and those weights."""
    found = []
    for note in sorted((home / "references").glob("??/*.json")):
        with suppress(OSError, ValueError, AttributeError, RecursionError):
            if json.loads(note.read_text(encoding="utf-8")).get(component) == list(digests):
                found.append(note.with_suffix(".npz"))
    return found


def load_recording(path: Path) -> Recording | None:
    """Reads a recording; None if there is none, or it is damaged."""
    try:
        return recording_from_bytes(path.read_bytes())
    except OSError:
        return None


def recording_from_bytes(sealed: bytes) -> Recording | None:
    """Returns what `recording_bytes` stored; None if it is damaged.

    It may come from elsewhere: no array is larger than the bytes that hold it, and none holds
    objects, which would have to be unpickled.
    """
    digest, data = sealed[:DIGEST_BYTES], sealed[DIGEST_BYTES:]
    if hashlib.sha256(data).digest() != digest:
        return None
    try:
        arrays = _arrays_from_npz(data)
        reference = str(arrays.pop("reference"))
        if not reference.isprintable() or len(reference) > MAX_REFERENCE:
            return None
        return recording_from_arrays(arrays, reference=reference)
    except (
        *(zipfile.BadZipFile, struct.error, EOFError, OSError, NotImplementedError),
        *(RuntimeError, ValueError, KeyError, TypeError, OverflowError),
    ) as error:
        log.warning("a recording is not used: %s", error)
        return None


def _arrays_from_npz(data: bytes) -> dict[str, Any]:  # Any: numpy.ndarray
    arrays: dict[str, Any] = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        infos = archive.infolist()
        total_bytes = sum(info.file_size for info in infos)
        if len(infos) > MAX_ARRAYS or total_bytes > len(data):
            raise ValueError(f"{len(infos)} arrays of {total_bytes} bytes in {len(data)}")
        for info in infos:
            name, suffix = info.filename[:-4], info.filename[-4:]
            if info.compress_type != zipfile.ZIP_STORED or suffix != ".npy" or name in arrays:
                raise ValueError(f"'{info.filename[:80]}' is no array of a recording")
            arrays[name] = _array_from_npy(archive.read(info))
    return arrays


def _array_from_npy(data: bytes) -> Any:  # numpy.ndarray
    """Reads an array whose header says no more than its bytes hold.

    numpy's own reader evaluates the header as Python and takes memory by what it says.
    """
    header = NPY.match(data)
    if header is None:
        raise ValueError("it holds an array whose header numpy would not have written for us")
    dtype = np.dtype(header["dtype"].decode())
    shape = tuple(int(size) for size in header["shape"].replace(b",", b" ").split())
    held_bytes = len(data) - header.end()
    if dtype.itemsize == 0 or math.prod(shape) * dtype.itemsize != held_bytes:
        raise ValueError(f"it holds {dtype}{list(shape)[:8]} in {held_bytes} bytes")
    if dtype.kind == "U":
        data[header.end() :].decode("utf-32-le")  # numpy does not look, and Python then fails
    return np.ndarray(shape, dtype, buffer=data, offset=header.end()).copy()
