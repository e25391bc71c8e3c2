"""An exported ONNX pipeline folder -> its components, configuration files and digests."""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .contract import SCHEMA_VERSION
from .errors import PipelineError
from .pipeline_config import check_configs
from .whole_file import read_note, write_note

if TYPE_CHECKING:
    import onnx

FAMILIES: Mapping[str, Literal["sd", "sdxl"]] = {
    "StableDiffusionPipeline": "sd",
    "StableDiffusionImg2ImgPipeline": "sd",
    "StableDiffusionInpaintPipeline": "sd",
    "LatentConsistencyModelPipeline": "sd",
    "OnnxStableDiffusionPipeline": "sd",
    "ORTStableDiffusionPipeline": "sd",
    "StableDiffusionXLPipeline": "sdxl",
    "ORTStableDiffusionXLPipeline": "sdxl",
}
"""`_class_name` of model_index.json -> family."""

COMPONENTS: Mapping[str, tuple[str, ...]] = {
    "sd": ("text_encoder", "unet", "vae_decoder"),
    "sdxl": ("text_encoder", "text_encoder_2", "unet", "vae_decoder"),
}
"""The components that text to image needs, in the order they run."""
OPTIONAL_COMPONENTS = ("vae_encoder",)
TOKENIZERS: Mapping[str, tuple[str, ...]] = {
    "sd": ("tokenizer",),
    "sdxl": ("tokenizer", "tokenizer_2"),
}
PICKLES = frozenset({".ckpt", ".bin", ".pt", ".pth", ".pkl"})
MAX_JSON_BYTES = 8 << 20
MAX_GRAPH_BYTES = (2 << 30) - 1
"""Protobuf's own limit."""
MEMO_FROM_BYTES = 32 << 20
"""Smaller files are hashed each time: it costs a few milliseconds."""
MAX_GRAPH_ENDS = 1000
"""Inputs, and outputs, of a graph."""
GRAPH_FACTS_REVISION = 3
"""Raised when `_graph_facts` says something new."""
RACY_S = 2.0
"""A file changed more recently is not memoised: a second change could keep the same time stamp."""


@dataclass(frozen=True, kw_only=True)
class GraphTensor:
    """An input or output of an ONNX graph.

    Attributes:
        dtype: As numpy has it: "float32", "int64".
        dims: An int where the graph fixes the size, else the symbolic name ("" if it has none).
    """

    name: str
    dtype: str
    dims: tuple[int | str, ...]


@dataclass(frozen=True, kw_only=True)
class Component:
    """One graph of a pipeline.

    Attributes:
        name: "text_encoder", "text_encoder_2", "unet", "vae_decoder" or "vae_encoder".
        external: External data files of the graph, all inside the folder of `onnx`, sorted.
        dtype: Of most of its weights: "float32", "float16", "bfloat16", ...
        weights_bytes: Size of the graph file and its external data together.
    """

    name: str
    onnx: Path
    inputs: tuple[GraphTensor, ...]
    outputs: tuple[GraphTensor, ...]
    external: tuple[Path, ...]
    dtype: str
    weights_bytes: int


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A pipeline folder in the layout that optimum writes.

    Attributes:
        family: "sd" (one text encoder) or "sdxl" (two, with pooled output and time ids).
        configs: "model_index", "scheduler", "unet", "vae_decoder", "text_encoder", ... -> the
            parsed JSON file (`Any`: values are whatever diffusers wrote).
        tokenizers: "tokenizer" and, for SDXL, "tokenizer_2" -> their folders.
    """

    folder: Path
    family: Literal["sd", "sdxl"]
    components: Mapping[str, Component]
    configs: Mapping[str, Mapping[str, Any]]
    tokenizers: Mapping[str, Path]


def read_pipeline(folder: Path, *, memo: Path | None = None) -> Pipeline:
    """Reads a pipeline folder; the weights are not read.

    Args:
        folder: Holds model_index.json.
        memo: A folder for what was learned of unchanged graph files; may be lost at any time.

    Raises:
        PipelineError: Something is missing, broken, or points outside the folder; says what.
    """
    try:
        folder = Path(os.path.abspath(folder))
        is_folder, is_file = folder.is_dir(), folder.is_file()
    except OSError as error:  # a name that is too long, or a current folder that is gone
        raise PipelineError(f"'{folder}' cannot be read: {error.strerror or error}") from error
    if is_file and folder.suffix.lower() in PICKLES:
        raise PipelineError(
            f"'{folder}' is a pickled checkpoint: whoever made it runs code where it is opened, so "
            "it never is",
            "take the model's .safetensors file, and export that to an ONNX pipeline folder",
        )
    if not is_folder:
        raise PipelineError(
            f"'{folder}' is {'a file' if is_file else 'not there'}; a pipeline folder was expected",
            "give the folder that holds model_index.json",
        )
    index = _read_json(folder / "model_index.json")
    class_name = index.get("_class_name")
    family = FAMILIES.get(class_name) if isinstance(class_name, str) else None
    if family is None:
        raise PipelineError(
            f"'{folder / 'model_index.json'}' names the pipeline class {class_name!r}; "
            f"known are {', '.join(FAMILIES)}",
            "export a Stable Diffusion 1.x, 2.x or XL pipeline",
        )
    configs = {"model_index": index, "scheduler": _read_json(_scheduler_file(folder))}
    components: dict[str, Component] = {}
    for name in (*COMPONENTS[family], *OPTIONAL_COMPONENTS):
        onnx_file = folder / name / "model.onnx"
        if name in OPTIONAL_COMPONENTS and not onnx_file.exists():
            continue
        components[name] = _read_component(name, onnx_file, memo)
        configs[name] = _read_json(folder / name / "config.json")
    check_configs(folder, configs)
    tokenizers = {name: folder / name for name in TOKENIZERS[family]}
    for name, place in tokenizers.items():
        if not ((place / "tokenizer.json").is_file() or (place / "vocab.json").is_file()):
            raise PipelineError(
                f"'{place}' holds neither tokenizer.json nor vocab.json",
                f"copy the folder '{name}' of the original model there",
            )
    return Pipeline(
        folder=folder, family=family, components=components, configs=configs, tokenizers=tokenizers
    )


Mark = tuple[tuple[Any, ...], ...]  # Any: a path and numbers


def pipeline_mark(folder: Path, *, known: Mark | None = None) -> Mark | None:
    """Returns what changes with any file of a pipeline folder; None where that cannot be told.

    Args:
        folder: Of the pipeline.
        known: An earlier mark of it: no folder is listed then. One that has gained or lost a file
            is another one by its times.

    It stands for a `read_pipeline` that hashes: see `file_digest` for why a file that was changed
    a moment ago, and all files on Windows, cannot be judged by their times.
    """
    if os.name == "nt":
        return None
    root = os.path.abspath(folder)
    paths = [row[0] for row in known] if known and known[0][0] == root else _paths_below(root)
    marks = []
    now_s = time.time()
    try:
        for path in paths:
            entry = os.stat(path)
            times = (entry.st_mtime_ns, entry.st_ctime_ns)
            if now_s - max(times) / 1e9 <= RACY_S:
                return None
            marks.append((path, entry.st_size, entry.st_ino, entry.st_dev, *times))
    except OSError:
        return None
    return tuple(marks)


def _paths_below(root: str) -> list[str]:
    """Returns the folder itself and, sorted, every folder and file below it."""
    return sorted(
        path
        for parent, _, names in os.walk(root)
        for path in (parent, *(os.path.join(parent, name) for name in names))
    )


def component_digests(component: Component, *, memo: Path | None = None) -> tuple[str, str]:
    """Returns the sha256 of the graph file, and one over all external data ("" without any).

    Raises:
        PipelineError: A file cannot be read.
    """
    graph = file_digest(component.onnx, memo=memo)
    if not component.external:
        return graph, ""
    total = hashlib.sha256()
    for path in component.external:
        location = path.relative_to(component.onnx.parent).as_posix()
        total.update(f"{location}\0{file_digest(path, memo=memo)}\0".encode())
    return graph, total.hexdigest()


def file_digest(path: Path, *, memo: Path | None = None) -> str:
    """Returns the sha256 of a file.

    A large file's digest is remembered under its path, size, inode, and the times of its last
    modification and last status change. The latter cannot be set back by a program, so a file
    that was changed with its modification time kept is hashed again. Windows has no such time in
    `stat`: there every call hashes.

    Raises:
        PipelineError: The file cannot be read.
    """
    try:
        before = path.stat()
        mark = _mark(before)
        note = _memo_file(memo, path) if before.st_size >= MEMO_FROM_BYTES else None
        remembered = _read_memo(note, mark)
        if isinstance(remembered, str):
            return remembered
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        after = path.stat()
    except OSError as error:
        raise PipelineError(f"'{path}' cannot be read: {error.strerror or error}") from error
    unchanged = (before.st_mtime_ns, before.st_ctime_ns) == (after.st_mtime_ns, after.st_ctime_ns)
    if note is not None and unchanged and os.name != "nt":
        newest_s = max(after.st_mtime_ns, after.st_ctime_ns) / 1e9
        if time.time() - newest_s > RACY_S:
            _write_memo(note, mark, digest)
    return digest


def remember_digest(path: Path, digest: str, *, memo: Path, hashed_ns: int) -> None:
    """Keeps the sha256 of a large file as `file_digest` does, if it is as old as that is.

    Args:
        path: A file.
        digest: Its sha256.
        memo: A folder for what was learned of files.
        hashed_ns: When hashing began (`time.time_ns`).
    """
    try:
        found = path.stat()
    except OSError:
        return
    newest_ns = max(found.st_mtime_ns, found.st_ctime_ns)
    is_settled = newest_ns < hashed_ns and time.time() - newest_ns / 1e9 > RACY_S
    if found.st_size >= MEMO_FROM_BYTES and is_settled and os.name != "nt":
        _write_memo(_memo_file(memo, path), _mark(found), digest)


def _mark(found: os.stat_result) -> list[int]:
    """Returns what changes with a file."""
    mark = [found.st_size, found.st_ino, found.st_dev, found.st_mtime_ns]
    return [*mark, found.st_ctime_ns, SCHEMA_VERSION]


def _scheduler_file(folder: Path) -> Path:
    for name in ("scheduler_config.json", "config.json"):
        if (folder / "scheduler" / name).is_file():
            return folder / "scheduler" / name
    return folder / "scheduler" / "scheduler_config.json"


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        mode = path.stat()
        if not stat.S_ISREG(mode.st_mode):
            raise PipelineError(f"'{path}' is not a plain file")
        if mode.st_size > MAX_JSON_BYTES:
            raise PipelineError(f"'{path}' has {mode.st_size} bytes; that is no config file")
        # Some editors begin a file with a byte order mark.
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise PipelineError(
            f"'{path}' is missing", "export the pipeline again, or copy the file there"
        ) from error
    except OSError as error:
        raise PipelineError(f"'{path}' cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise PipelineError(f"'{path}' is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise PipelineError(f"'{path}' holds a JSON {type(data).__name__}, not an object")
    return data


def _read_component(name: str, path: Path, memo: Path | None) -> Component:
    if not path.is_file():
        raise PipelineError(
            f"the component '{name}' is missing: '{path}' does not exist",
            "export the pipeline again with this component",
        )
    size_bytes = path.stat().st_size
    if size_bytes > MAX_GRAPH_BYTES:
        raise PipelineError(
            f"'{path}' has {size_bytes} bytes; an ONNX file above 2 GiB needs external data"
        )
    digest = file_digest(path, memo=memo)
    facts = _known_facts(digest, memo)
    if facts is None:
        facts = _graph_facts(path)
        _write_memo(_facts_file(digest, memo), [GRAPH_FACTS_REVISION], facts)
    external = tuple(_checked_external(path, *row) for row in facts["external"])
    return Component(
        name=name,
        onnx=path,
        inputs=_tensors(facts["inputs"]),
        outputs=_tensors(facts["outputs"]),
        external=external,
        dtype=facts["dtype"],
        weights_bytes=size_bytes + sum(part.stat().st_size for part in external),
    )


def known_dtype(graph_digest: str, *, memo: Path) -> str:
    """Returns what `Component.dtype` was when that graph was last read; empty if nobody knows."""
    facts = _known_facts(graph_digest, memo)
    return str(facts["dtype"]) if facts else ""


def _known_facts(digest: str, memo: Path | None) -> dict[str, Any] | None:
    facts = _read_memo(_facts_file(digest, memo), [GRAPH_FACTS_REVISION])
    is_whole = isinstance(facts, dict) and set(facts) == {"inputs", "outputs", "external", "dtype"}
    return facts if is_whole else None


def _facts_file(digest: str, memo: Path | None) -> Path | None:
    return None if memo is None else memo / "graphs" / f"{digest}.json"


def _tensors(rows: list[Any]) -> tuple[GraphTensor, ...]:  # Any: rows of JSON data
    return tuple(GraphTensor(name=row[0], dtype=row[1], dims=tuple(row[2])) for row in rows)


def _checked_external(graph: Path, location: str, least_bytes: int) -> Path:
    """Returns the external data file, which must really lie inside the folder of the graph."""
    path = graph.parent / location
    try:
        base, real = graph.parent.resolve(), path.resolve()
        is_inside = bool(location) and not Path(location).is_absolute()
        is_inside = is_inside and ".." not in Path(location).parts and real.is_relative_to(base)
        is_file = path.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null byte, a loop of links
        raise PipelineError(f"'{graph}' has external data at {location[:80]!r}: {error}") from error
    if not is_inside:
        raise PipelineError(
            f"'{graph}' has external data at '{location}', outside its folder",
            "copy the data file beside the graph and export again; links out are not followed",
        )
    if not is_file:
        raise PipelineError(
            f"'{graph}' needs the external data file '{path}', which is missing",
            "copy it from where the pipeline was exported",
        )
    if path.stat().st_size < least_bytes:
        raise PipelineError(
            f"'{graph}' has tensors that end at byte {least_bytes} of '{path}', which has "
            f"{path.stat().st_size} bytes",
            "copy it again from where the pipeline was exported",
        )
    return path


def _graph_facts(path: Path) -> dict[str, Any]:
    """Reads inputs, outputs and external data locations of a graph, without the weights."""
    import onnx
    from google.protobuf.message import DecodeError

    from .graph.external_data import external_sizes, tensors_of
    from .graph.static_shapes import free_inputs
    from .graph.tensor_sizes import require_held

    try:
        model = onnx.load(path, load_external_data=False)
    except (DecodeError, OSError, ValueError) as error:
        raise PipelineError(
            f"'{path}' is not an ONNX file: {error}", "export the pipeline again"
        ) from error
    if not model.graph.node:
        raise PipelineError(f"'{path}' holds an ONNX graph without nodes")
    inputs, outputs = free_inputs(model.graph), list(model.graph.output)
    if max(len(inputs), len(outputs)) > MAX_GRAPH_ENDS:
        raise PipelineError(f"'{path}' has {len(inputs)} inputs and {len(outputs)} outputs")
    try:
        for tensor in tensors_of(model.graph):
            require_held(tensor)
        locations = external_sizes(model)
    except PipelineError as error:
        raise PipelineError(f"'{path}': {error.message}", "export the pipeline again") from error
    names = [value.name for value in (*inputs, *outputs)]
    if not all(isinstance(text, str) for text in (*names, *locations)):
        raise PipelineError(f"'{path}' holds names that are no text", "export the pipeline again")
    return {
        "inputs": [_tensor_row(path, value) for value in inputs],
        "outputs": [_tensor_row(path, value) for value in outputs],
        "dtype": _weights_dtype(model.graph),
        "external": sorted(locations.items()),
    }


def _weights_dtype(graph: onnx.GraphProto) -> str:
    """Returns the floating dtype that most weights have, counted by elements."""
    import onnx

    from .graph.external_data import tensors_of

    counts: dict[str, int] = {}
    for tensor in tensors_of(graph):
        name = onnx.TensorProto.DataType.Name(tensor.data_type).lower()
        if "float" in name or name == "double":
            counts[name] = counts.get(name, 0) + math.prod(tensor.dims)
    names = {"float": "float32", "double": "float64"}
    most = max(counts, key=lambda name: counts[name], default="float")
    return names.get(most, most)


def _tensor_row(path: Path, value: onnx.ValueInfoProto) -> list[Any]:
    import onnx

    kind = value.type.tensor_type
    try:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type).name
    except (KeyError, ValueError) as error:
        raise PipelineError(f"'{path}': '{value.name}' is not a tensor of numbers") from error
    dims = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in kind.shape.dim]
    return [value.name, dtype, dims]


def _memo_file(memo: Path | None, path: Path) -> Path | None:
    if memo is None:
        return None
    name = hashlib.sha256(os.fsencode(path)).hexdigest()
    return memo / "digests" / f"{name}.json"


def _read_memo(note: Path | None, mark: list[int]) -> Any:  # Any: JSON data
    saved: Any = None if note is None else read_note(note)
    with suppress(KeyError, TypeError):
        return saved["value"] if saved["mark"] == mark else None
    return None


def _write_memo(note: Path | None, mark: list[int], value: Any) -> None:
    """Writes a memo whole or not at all; a memo that cannot be written is no loss."""
    if note is None:
        return
    with suppress(OSError):
        write_note(note, {"mark": mark, "value": value})
