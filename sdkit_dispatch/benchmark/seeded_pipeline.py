"""A suite's own pipeline: the real graphs of full size, with weights from a seeded generator.

Speed does not depend on what weights are, only on how many there are; pictures of these are noise.
The graphs are data of this package, without their weights: each says of every tensor that it lacks
between which bounds PyTorch would draw it (`tests/models/make_suite_graphs.py` writes them).
"""

from __future__ import annotations

import hashlib
import json
import lzma
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sdkit_dispatch.contract import Progress, Report
from sdkit_dispatch.errors import ConfigError
from sdkit_dispatch.pipeline_files import COMPONENTS, TOKENIZERS
from sdkit_dispatch.whole_folder import whole_folder

if TYPE_CHECKING:
    import onnx

DATA = Path(__file__).parents[1] / "_data"
SUITES = DATA / "suites"
SAMPLE = DATA / "sample" / "digits-sd"
"""Its tokenizer has the real vocabulary, and its scheduler the real noise schedule."""
GRAPH = "model.onnx.xz"
WEIGHTS = "model.onnx.data"
SEAL = "seeded.json"
REVISION = 1
"""Raised when other weights are drawn from the same graphs."""
SPARE_BYTES = 1 << 30
"""Left free on the disk."""
CLASS_NAMES = {"sd": "StableDiffusionPipeline", "sdxl": "StableDiffusionXLPipeline"}
OTHER_PAD = {"tokenizer_2": "!"}
"""What tokenizers pad with that differ from the sample's."""


def seeded_pipeline(name: str, family: str, *, home: Path, report: Report) -> Path:
    """Returns the folder of a suite's pipeline, which is filled if it is not there.

    It appears whole: one that was interrupted leaves nothing that would be taken for it.

    Args:
        name: Of the suite.
        family: "sd" or "sdxl".
        home: Under which it lies.
        report: Told of every component's progress.

    Raises:
        ConfigError: The disk has no room for it, or the place cannot be written.
    """
    import filelock

    place = _place(home, name)
    if is_filled(name, family, home=home):
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(place.parent / f"{name}.lock"):  # two would fill the disk twice
            if not is_filled(name, family, home=home):
                _fill(place, name, family, report)
    except OSError as error:
        raise ConfigError(
            f"'{place}' cannot be written: {error.strerror or error}", "name another --home"
        ) from error
    return place


def is_filled(name: str, family: str, *, home: Path) -> bool:
    """Returns whether a suite's pipeline lies there whole, filled from the graphs of today."""
    place = _place(home, name)
    try:
        document = json.loads((place / SEAL).read_text(encoding="utf-8"))
        return document["of"] == _digest(name, family) and all(
            (place / part / WEIGHTS).stat().st_size == size_bytes
            for part, size_bytes in document["bytes"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def seeded_bytes(name: str, family: str) -> int:
    """Returns how much a suite's weights take on the disk."""
    return sum(weights_bytes(_graph(name, part)) for part in COMPONENTS[family])


def weights_bytes(graph: onnx.ModelProto) -> int:
    """Returns the size of the file of weights that a graph lacks."""
    return max((place["offset"] + place["length"] for _, place in _missing(graph)), default=0)


def uniform(
    shape: tuple[int, ...], bound: float, *, dtype: Any, seed: list[int]
) -> Any:  # Any: numpy.dtype, and numpy.ndarray
    """Returns numbers between -`bound` and `bound`, drawn in float32: the same for every type."""
    values = np.random.default_rng(seed).random(shape, np.float32)
    values *= np.float32(2 * bound)
    values -= np.float32(bound)
    return values.astype(dtype, copy=False)


def require_room(place: Path, size_bytes: int, *, what: str, instead: str) -> None:
    """Refuses to fill a disk.

    Raises:
        ConfigError: Less than `size_bytes` and a reserve are free beside `place`.
    """
    free_bytes = shutil.disk_usage(place.parent).free
    if free_bytes < size_bytes + SPARE_BYTES:
        raise ConfigError(
            f"{what} in '{place}', and {free_bytes / 1e9:.1f} GB are free there",
            f"free some, or {instead}",
        )


def suites_folder(home: Path) -> Path:
    """Returns where the suites' own pipelines and checkpoints lie."""
    return home / "suites"


def _place(home: Path, name: str) -> Path:
    return suites_folder(home) / name


def _fill(place: Path, name: str, family: str, report: Report) -> None:
    graphs = {part: _graph(name, part) for part in COMPONENTS[family]}
    sizes = {part: weights_bytes(graph) for part, graph in graphs.items()}
    size_bytes = sum(sizes.values())
    # What is damaged, of other graphs, or was left by a fill that was killed: room is needed.
    for old in [place, *place.parent.glob(f".{name}-*")]:
        shutil.rmtree(old, ignore_errors=True)
    require_room(
        place,
        size_bytes,
        what=f"the suite '{name}' draws with {size_bytes / 1e9:.1f} GB of weights of its own",
        instead=f"measure an exported pipeline: bench FOLDER --suite {name}",
    )
    with whole_folder(place, mark=SEAL, may_replace=True) as folder:
        _write_settings(folder, name, family)
        done_bytes = 0
        for part, graph in graphs.items():
            phase = f"fill suite {name}, {size_bytes / 1e9:.1f} GB of seeded weights: {part}"
            (folder / part / "model.onnx").write_bytes(graph.SerializeToString())
            with (folder / part / WEIGHTS).open("wb") as file:
                for index, (tensor, lies) in enumerate(_missing(graph)):
                    report(Progress(phase=phase, fraction=(done_bytes + file.tell()) / size_bytes))
                    file.seek(lies["offset"])
                    file.write(_drawn(tensor, seed=[REVISION, index]).data)
            done_bytes += sizes[part]
        document = {"of": _digest(name, family), "bytes": sizes}
        (folder / SEAL).write_text(json.dumps(document), encoding="utf-8")


def _digest(name: str, family: str) -> str:
    digest = hashlib.sha256(str(REVISION).encode())
    for part in COMPONENTS[family]:
        digest.update((SUITES / name / part / GRAPH).read_bytes())
    return digest.hexdigest()


def _graph(name: str, part: str) -> onnx.ModelProto:
    import onnx

    graph = onnx.ModelProto()
    graph.ParseFromString(lzma.decompress((SUITES / name / part / GRAPH).read_bytes()))
    return graph


def _missing(graph: onnx.ModelProto) -> Iterator[tuple[onnx.TensorProto, dict[str, int]]]:
    """Yields the tensors whose values are to be drawn, and where they lie."""
    import onnx

    for tensor in graph.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            place = {one.key: one.value for one in tensor.external_data}
            yield tensor, {key: int(place[key]) for key in ("offset", "length")}


def _drawn(tensor: onnx.TensorProto, *, seed: list[int]) -> Any:  # Any: numpy.ndarray
    import onnx

    (note,) = tensor.metadata_props
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    shape, bound = tuple(tensor.dims), float(note.value)
    if note.key == "value":
        return np.full(shape, bound, dtype)
    return uniform(shape, bound, dtype=dtype, seed=seed)


def _write_settings(folder: Path, name: str, family: str) -> None:
    """Writes all but the graphs: configurations, tokenizers and the scheduler."""
    index = json.loads((SAMPLE / "model_index.json").read_text(encoding="utf-8"))
    index["_class_name"] = CLASS_NAMES[family]
    for part in COMPONENTS[family]:
        (folder / part).mkdir(parents=True)
        shutil.copy(SUITES / name / part / "config.json", folder / part)
    for tokenizer in TOKENIZERS[family]:
        shutil.copytree(SAMPLE / "tokenizer", folder / tokenizer)
        if pad := OTHER_PAD.get(tokenizer):
            settings = folder / tokenizer / "tokenizer_config.json"
            values = json.loads(settings.read_text(encoding="utf-8"))
            settings.write_text(json.dumps({**values, "pad_token": pad}), encoding="utf-8")
            index[tokenizer] = index["tokenizer"]
    if "text_encoder_2" in COMPONENTS[family]:
        index["text_encoder_2"] = ["transformers", "CLIPTextModelWithProjection"]
        index["force_zeros_for_empty_prompt"] = True
    shutil.copytree(SAMPLE / "scheduler", folder / "scheduler")
    (folder / "model_index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
