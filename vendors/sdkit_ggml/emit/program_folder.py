"""Writes the folder of a C++ program that computes the component of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from sdkit_dispatch.contract import Engine
from sdkit_dispatch.errors import CacheError, UnsupportedOpError
from sdkit_ggml.compiler.weights import layout_digest
from sdkit_ggml.emit.component_source import component_source, header_source
from sdkit_ggml.emit.graph_source import Stored, graph_source, namespace_of
from sdkit_ggml.emit.host_source import DTYPES, FeedField, set_inputs_source
from sdkit_ggml.emit.names import comment, identifier, identifiers
from sdkit_ggml.engine_files import WEIGHTS_FILE, copy_weights, map_weights, read_program
from sdkit_ggml.program import Feed, Program, Variant
from sdkit_ggml.runtime.executor import check_variant

SOURCE = Path(__file__).with_name("source")
"""What is the same in every program."""
FOLDER = "src"


def write_program(engine: Engine, out: Path) -> None:
    """Writes a program into the empty folder `out`; the weights are copied.

    Raises:
        CacheError: The engine does not open.
        UnsupportedOpError: The host's part of it cannot be written in C++.
        OSError: The folder cannot be written.
    """
    component, folder = engine.request.component, Path(engine.folder)
    try:
        program = read_program(folder)
        for variant in program.variants:
            check_variant(variant, program.all_weights_bytes)
        map_weights(folder, program)
    except Exception as error:  # a damaged file makes any of the readers raise anything
        raise CacheError(
            f"ggml: the engine of {component} in {folder} does not open: {error}"
        ) from error
    stored = copy_weights(folder, program, out / WEIGHTS_FILE)
    program = msgspec.structs.replace(program, weights_digest=layout_digest(stored))
    weights = _stored_weights(out / WEIGHTS_FILE)
    version = _version(engine.request.runtime)
    texts = program_texts(program, weights, component=component, ggml_version=version)
    (out / FOLDER).mkdir()
    for path in sorted(SOURCE.glob("*.cpp")) + sorted(SOURCE.glob("*.h")):
        texts[f"{FOLDER}/{path.name}"] = path.read_text(encoding="utf-8")
    for name, text in texts.items():
        (out / name).write_text(text, encoding="utf-8", newline="\n")


def _version(runtime: str) -> str:
    """Returns "0.20.2" of "ggml 0.20.2-dirty" and of "ggml 0.20.2 (build 1a2b3c4d)"."""
    return runtime.removeprefix("ggml ").split(" ")[0].split("-")[0]


def program_texts(
    program: Program, weights: Sequence[Stored], *, component: str, ggml_version: str
) -> dict[str, str]:
    """Returns path in the folder -> text, of what differs from program to program.

    Raises:
        UnsupportedOpError: See `write_program`.
    """
    for spec in program.outputs:
        if spec.dtype not in DTYPES:
            raise UnsupportedOpError(
                f"ggml: {component}: emit writes no output of {spec.dtype}",
                "export the component with outputs of float32",
            )
    feeds = _feed_fields(program)
    fields = {(one.name, one.type, one.limit): one.field for one in feeds}
    files = {
        "inputs": identifiers(spec.name for spec in program.inputs),
        "outputs": identifiers(spec.name for spec in program.outputs),
    }
    computed = [one for one in program.variants[0].outputs if one.operand is not None]
    hosted = [one for one in program.variants[0].outputs if one.operand is None]
    outputs = {one.name: files["outputs"][one.name] for one in computed}
    texts = {}
    for variant in program.variants:
        texts[f"{FOLDER}/graph_{namespace_of(variant)}.cpp"] = graph_source(
            program,
            variant,
            weights=weights,
            inputs={
                place: fields[_feed_key(variant, feed)] for place, feed in enumerate(variant.feeds)
            },
            outputs=outputs,
        )
    texts[f"{FOLDER}/component.h"] = header_source(
        program, component=component, weights=weights, feeds=feeds, outputs=outputs
    )
    texts[f"{FOLDER}/component.cpp"] = component_source(
        program,
        component=component,
        weights=weights,
        outputs=outputs,
        files=files,
        set_inputs=set_inputs_source(
            program,
            component=component,
            feeds=feeds,
            files=files["inputs"],
            results={one.name: files["outputs"][one.name] for one in hosted},
        ),
    )
    target = identifier(component).lower()
    sources = sorted(
        [*(name for name in texts if name.endswith(".cpp"))]
        + [f"{FOLDER}/{path.name}" for path in SOURCE.glob("*.cpp")]
    )
    cmake = (SOURCE / "CMakeLists.txt").read_text(encoding="utf-8")
    for mark, text in (
        ("@TARGET@", target),
        ("@GGML_VERSION@", ggml_version),
        ("@SOURCES@", "\n".join(f"    {name}" for name in sources)),
    ):
        cmake = cmake.replace(mark, text)
    texts["CMakeLists.txt"] = cmake
    texts["README.md"] = _readme(program, component=component, target=target)
    return texts


def _feed_key(variant: Variant, feed: Feed) -> tuple[str, str, int]:
    return feed.name, variant.operands[feed.operand].type, feed.limit


def _feed_fields(program: Program) -> list[FeedField]:
    """Returns what any variant is fed with; one value may go into tensors of two kinds."""
    keys = dict.fromkeys(
        _feed_key(variant, feed) for variant in program.variants for feed in variant.feeds
    )
    seen: set[str] = set()
    titles = []
    for name, kind, limit in keys:
        titles.append(f"{name} {kind} {limit}" if name in seen else name)
        seen.add(name)
    names = identifiers(titles)
    return [FeedField(names[title], *key) for title, key in zip(titles, keys, strict=True)]


def _stored_weights(path: Path) -> list[Stored]:
    # Importing it takes most of a second.
    import gguf

    reader = gguf.GGUFReader(path)
    origins, forms = (reader.fields[f"sdkit.{name}"].contents() for name in ("origins", "forms"))
    start = min(tensor.data_offset for tensor in reader.tensors)
    found = []
    for tensor, origin, form in zip(reader.tensors, origins, forms, strict=True):
        ne = [*map(int, tensor.shape), 1, 1, 1, 1][:4]
        kind = tensor.tensor_type.name.lower()
        words = origin or "computed while it was compiled"
        found.append(
            Stored(
                tensor=tensor.name,
                # The tensor's name makes it unlike any other, any keyword and any macro.
                name=f"{identifier(origin or 'constant').rstrip('_')}_{tensor.name}",
                note=f"{kind} {list(map(int, tensor.shape))}: {words}{f', {form}' if form else ''}",
                offset=int(tensor.data_offset) - int(start),
                type=kind,
                ne=(ne[0], ne[1], ne[2], ne[3]),
            )
        )
    return sorted(found, key=lambda one: one.offset)


def _readme(program: Program, *, component: str, target: str) -> str:
    lines = [
        f"# {comment(component)}",
        "",
        f"A program that computes `{target}` with ggml, weights in {program.precision}; written by",
        "`sdkit-dispatch emit`.",
        "",
        "```bash",
        "cmake -B build                # for a GPU: -DGGML_CUDA=1, _VULKAN=1, _METAL=1 or _HIP=1",
        "cmake --build build",
        f"./build/{target} --help",
        f"./build/{target} {WEIGHTS_FILE} --in inputs --out outputs",
        f"./build/{target} {WEIGHTS_FILE} --bench 10",
        "```",
        "",
        "`-DGGML_DIR=...` names an installed ggml or its source; without it, `./ggml`, an",
        "installed one, or a download is taken (see `CMakeLists.txt`).",
        "",
        "| file | holds |",
        "|---|---|",
        *(
            f"| `{FOLDER}/graph_{namespace_of(one)}.cpp` | `build_graph` for {one.name} |"
            for one in program.variants
        ),
        f"| `{FOLDER}/component.h` | weights, inputs and outputs |",
        f"| `{FOLDER}/component.cpp` | their names, and what the host computes |",
        f"| `{FOLDER}/graph.h` | how tensors get their places |",
        f"| `{FOLDER}/main.cpp` | the command line |",
        "",
    ]
    return "\n".join(lines)
