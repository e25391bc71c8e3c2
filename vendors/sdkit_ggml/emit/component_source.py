"""What all variants of a component share, as component.h and component.cpp."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sdkit_dispatch.contract import TensorSpec
from sdkit_ggml.emit.graph_source import Stored, namespace_of
from sdkit_ggml.emit.host_source import DTYPES, FeedField
from sdkit_ggml.emit.names import comment, literal
from sdkit_ggml.program import Program


def header_source(
    program: Program,
    *,
    component: str,
    weights: Sequence[Stored],
    feeds: Sequence[FeedField],
    outputs: Mapping[str, str],
) -> str:
    """Returns component.h. `outputs`: what the device computes -> its field of `Outputs`."""
    namespaces = [
        line
        for variant in program.variants
        for line in (
            "",
            f"namespace {namespace_of(variant)} {{  // for: {variant.name}",
            "Inputs make_inputs(Graph & g);",
            "Outputs build_graph(Graph & g, const Weights & w, const Inputs & in);",
            "}",
        )
    ]
    specs = (*program.inputs, *program.outputs)
    shapes = {spec.name: f", {spec.dtype} {list(spec.shape)} in ONNX" for spec in specs}
    lines = [
        f"// {comment(component)}: weights, inputs, outputs, and the graphs that compute it.",
        "#pragma once",
        "",
        '#include "arrays.h"',
        '#include "weights_file.h"',
        "",
        "extern const char * const component_name;",
        "extern const char * const weights_layout;  // of the file of weights that belongs here",
        "extern const bool is_exact;                // whether GPUs are to compute in float32",
        "extern const std::vector<TensorSpec> inputs;",
        "extern const std::vector<TensorSpec> outputs;",
        "",
        "// Made of the initializers of the ONNX model, in the order and type that is read.",
        "struct Weights {",
        *(f"    ggml_tensor * {one.name};  // {comment(one.note)}" for one in weights),
        "};",
        "",
        "Weights find_weights(const WeightsFile & file);",
        "",
        "// Filled before each run.",
        "struct Inputs {",
        *(
            f"    ggml_tensor * {one.field};  // "
            f"{comment(f'{one.type} of {one.name}{shapes.get(one.name, str())}')}"
            for one in feeds
        ),
        "};",
        "",
        "struct Outputs {",
        *(
            f"    ggml_tensor * {field};  // {comment(f'{name}{shapes[name]}')}"
            for name, field in outputs.items()
        ),
        "};",
        "",
        "// Fills the inputs; returns those outputs that are computed from integers alone.",
        "Arrays set_inputs(const Inputs & in, const Arrays & given);",
        "",
        "// Adds the outputs that the device has computed.",
        "void get_outputs(const Outputs & out, Arrays & results);",
        *namespaces,
        "",
        "// A way to compute the component; a device takes the first that it supports.",
        "struct Variant {",
        "    const char * name;",
        "    bool is_for_cpu;",
        "    size_t arena_bytes;",
        "    size_t tensor_count;  // no fewer than build_graph() makes",
        "    Inputs (*make_inputs)(Graph & g);",
        "    Outputs (*build_graph)(Graph & g, const Weights & w, const Inputs & in);",
        "};",
        "",
        "extern const std::vector<Variant> variants;",
    ]
    return "\n".join(lines) + "\n"


def component_source(
    program: Program,
    *,
    component: str,
    weights: Sequence[Stored],
    outputs: Mapping[str, str],
    files: Mapping[str, Mapping[str, str]],
    set_inputs: Sequence[str],
) -> str:
    """Returns component.cpp.

    Args:
        program: Of the engine.
        component: Its name.
        weights: All of them.
        outputs: As for `header_source`.
        files: "inputs" and "outputs" -> name of a tensor -> name of its file.
        set_inputs: The body of that function.
    """
    places = {spec.name: place for place, spec in enumerate(program.outputs)}
    lines = [
        '#include "component.h"',
        "",
        '#include "host.h"',
        "",
        f"const char * const component_name = {literal(component)};",
        f"const char * const weights_layout = {literal(program.weights_digest)};",
        f"const bool is_exact = {'true' if program.precision == 'fp32' else 'false'};",
        "",
        *_specs("inputs", program.inputs, files["inputs"]),
        "",
        *_specs("outputs", program.outputs, files["outputs"]),
        "",
        "Weights find_weights(const WeightsFile & file) {",
        "    Weights w = {};",
        *(f"    w.{one.name} = file.tensor({literal(one.tensor)});" for one in weights),
        "    return w;",
        "}",
        "",
        "Arrays set_inputs([[maybe_unused]] const Inputs & in, "
        "[[maybe_unused]] const Arrays & given) {",
        *set_inputs,
        "}",
        "",
        "void get_outputs([[maybe_unused]] const Outputs & out, "
        "[[maybe_unused]] Arrays & results) {",
        *(
            f"    results[{literal(files['outputs'][name])}] = "
            f"array_of(outputs[{places[name]}], get_floats(out.{field}));"
            for name, field in outputs.items()
        ),
        "}",
        "",
        "const std::vector<Variant> variants = {",
        *(
            f"    {{{literal(one.name)}, {'true' if one.device == 'cpu' else 'false'}, "
            f"{one.arena_bytes}, {2 * len(one.ops) + len(one.operands) + len(one.feeds)}, "
            f"{namespace_of(one)}::make_inputs, {namespace_of(one)}::build_graph}},"
            for one in program.variants
        ),
        "};",
    ]
    return "\n".join(lines) + "\n"


def _specs(name: str, specs: Sequence[TensorSpec], files: Mapping[str, str]) -> list[str]:
    rows = [
        f"    {{{literal(one.name)}, {literal(files[one.name])}, Dtype::{DTYPES[one.dtype]}, "
        f"{{{', '.join(map(str, one.shape))}}}}},"
        for one in specs
    ]
    return [f"const std::vector<TensorSpec> {name} = {{", *rows, "};"]
