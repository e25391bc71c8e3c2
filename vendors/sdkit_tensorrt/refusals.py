"""What the runtime's errors mean, as a table: its words -> our error and what to do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sdkit_dispatch.errors import CompileError, UnsupportedOpError


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """A row of the table.

    Attributes:
        pattern: Found anywhere in the words.
        message: Takes the groups of the pattern.
        hint: One edit or command.
    """

    pattern: str
    message: str
    hint: str


MEANINGS: tuple[Meaning, ...] = (
    Meaning(
        pattern=r"Cannot compile for target\(s\) ([\w, ]+), because the model contains "
        r"HW-specific datatypes: ([\w, ]+)",
        message="{0} does not compute in {1}",
        hint="ask for --precision fp16, or build for a newer card",
    ),
    Meaning(
        pattern=r"no optimization profile has been defined",
        message="the graph has free sizes, and no optimization profile says which",
        hint="give the component a row under options.tensorrt-rtx.profiles, or none at all",
    ),
    Meaning(
        pattern=r"Dynamic input tensor (\S+) is missing dimensions in profile (\d+)",
        message='optimization profile {1} says nothing of the input "{0}"',
        hint="name every free size under options.tensorrt-rtx.profiles",
    ),
    Meaning(
        pattern=r"MIN<=OPT<=MAX",
        message="the sizes of an optimization profile do not rise",
        hint="write [least, usual, largest] under options.tensorrt-rtx.profiles",
    ),
    Meaning(
        pattern=r"tensor volume exceeds",
        message="a tensor of this size has more than 2^31 - 1 values",
        hint="ask for a smaller image or batch",
    ),
    Meaning(
        pattern=r"MyelinCheckException.*CUDA_SUCCESS|not found in the accelerator list",
        message="a refittable or weightless engine is compiled on the card only, and none is here",
        hint="build without refit, or on the machine that has the card",
    ),
    Meaning(
        pattern=r"libnvinfer_lean",
        message="an engine for several versions needs the lean runtime, which is not installed",
        hint="build for this version alone",
    ),
    Meaning(
        pattern=r"cudaError 35|CUDA driver version is insufficient|error: 35",
        message="there is no NVIDIA driver here, or it is older than the runtime needs",
        hint="install NVIDIA driver 580 or newer, or build with --for",
    ),
    Meaning(
        pattern=r"cudaError 100|no CUDA-capable device",
        message="the NVIDIA driver finds no card",
        hint="check `nvidia-smi`, or build with --for",
    ),
    Meaning(
        pattern=r"Could not find any implementation for node (\S+)",
        message="the builder has no implementation for the node {0}",
        hint="keep it in float32: options.tensorrt-rtx.keep_fp32",
    ),
    Meaning(
        pattern=r"OutOfMemory|out of memory|bad_alloc",
        message="the builder ran out of memory",
        hint="close other programs, or build on a machine with more memory",
    ),
    Meaning(
        pattern=r"factory function returned nullptr",
        message="the runtime cannot use the driver or the card",
        hint="check `nvidia-smi`",
    ),
)

MISSING_OPERATOR = re.compile(r"Plugin not found|No importer registered|UNSUPPORTED_NODE")
CONTRIB_DOMAINS = frozenset({"com.microsoft", "com.microsoft.nchwc", "com.ms.internal.nhwc"})


@dataclass(frozen=True, kw_only=True)
class BadNode:
    """A node that the parser does not take, and why."""

    op_type: str
    name: str
    reason: str
    is_missing: bool


def compile_error(who: str, component: str, words: str) -> CompileError:
    """Returns the error that the runtime's words make."""
    for one in MEANINGS:
        found = re.search(one.pattern, words)
        if found:
            message = one.message.format(*found.groups())
            return CompileError(f"{who} refuses {component}: {message} ({words})", one.hint)
    return CompileError(f"{who} refuses {component}: {words}")


def parse_error(who: str, component: str, bad: Sequence[BadNode], words: str) -> CompileError:
    """Returns the error of a graph that the parser does not take."""
    missing = [one for one in bad if one.is_missing]
    if not missing:
        listed = "; ".join(f"{one.op_type} {one.name}: {one.reason}" for one in bad)
        return compile_error(who, component, listed or words)
    names = sorted({one.op_type for one in missing})
    where = ", ".join(f"{one.op_type} ({one.name or 'unnamed'})" for one in missing[:20])
    is_fused = any(name.partition(":")[0] in CONTRIB_DOMAINS for name in names)
    return UnsupportedOpError(
        f"{who} refuses {component}; operators it does not have: {', '.join(names)}; at: {where}"
        + (f" and {len(missing) - 20} more nodes" if len(missing) > 20 else ""),
        hint="the graph went through ONNX Runtime's optimiser: take the graph as it was exported"
        if is_fused
        else "",
    )
