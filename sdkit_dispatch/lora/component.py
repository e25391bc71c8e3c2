"""One component with LoRAs in its weights: W' = W + strength * alpha / rank * up @ down.

The sums are made in float32, one weight at a time, and rounded once to the type of the weight. A
graph whose weights are all in external files stays byte for byte what it was: what vendors keep for
other weights of the same graph is of use then. Of a graph with weights inside, all that a LoRA
could ever change goes to one external file, so that its graph is the same for every LoRA.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto
from onnx.external_data_helper import uses_external_data

from sdkit_dispatch.errors import PipelineError
from sdkit_dispatch.graph.external_data import tensors_of
from sdkit_dispatch.graph.tensor_sizes import ExternalPart, external_part
from sdkit_dispatch.graph.weight_files import ALIGNMENT, converted, values_of
from sdkit_dispatch.pipeline_files import Component

from .file import Layer, LoraFile
from .modules import ModuleWeight, module_weights
from .names import module_names, place_of

FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
NEW_DATA = "lora.onnx_data"
"""The external file of weights that were inside the graph."""

OnFraction = Callable[[float], None]


@dataclass(frozen=True, kw_only=True)
class Change:
    """A layer of a LoRA that is added to a weight."""

    file: LoraFile
    layer: Layer

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the product."""
        down, mid = self.layer.down.shape, self.layer.mid
        return (self.layer.up.shape[0], *(down[1:] if mid is None else (down[1], *mid.shape[2:])))

    def difference(self) -> Any:  # Any: numpy.ndarray
        """Returns what is added, as float32 in `shape`.

        Raises:
            PipelineError: The file changed, or holds numbers that are not finite.
        """
        layer, read = self.layer, self.file.array
        scale = np.float32(self.file.lora.strength * layer.alpha / layer.rank)
        up = read(layer.up).reshape(layer.up.shape[0], layer.rank) * scale
        down = read(layer.down).reshape(layer.rank, -1)
        with np.errstate(over="ignore", invalid="ignore"):
            if layer.mid is None:
                product = up @ down
            else:
                core = np.tensordot(up, read(layer.mid), axes=(1, 0))
                product = np.moveaxis(np.tensordot(core, down, axes=(1, 0)), -1, 1)
        if not np.isfinite(product).all():
            raise PipelineError(
                f"the LoRA '{self.file.path}' at strength {self.file.lora.strength} makes numbers "
                f"for '{layer.module}' that are not finite",
                "give a smaller strength",
            )
        return product.reshape(self.shape)


@dataclass(frozen=True, kw_only=True)
class ComponentMerge:
    """What is to be done to one component.

    Attributes:
        model: Its graph, without the contents of external files.
        weights: All that a LoRA could change.
        changes: Path of a module -> what is added to its weight, in order.
    """

    component: Component
    model: onnx.ModelProto
    weights: Sequence[ModuleWeight]
    changes: Mapping[str, Sequence[Change]]


def component_merge(
    component: Component, config: Mapping[str, Any], files: Iterable[LoraFile]
) -> ComponentMerge | None:  # Any: JSON data
    """Finds the place of every layer that belongs to a component; None if no layer does.

    Raises:
        PipelineError: A layer has another shape than the weight, which is of another kind of model.
    """
    wanted = [
        (Change(file=file, layer=layer), name)
        for file in files
        for layer in file.layers.values()
        for place, name in (place_of(layer.module),)
        if place == component.name
    ]
    if not wanted:
        return None
    model = onnx.load(component.onnx, load_external_data=False)
    weights = module_weights(model.graph, component.name, config)
    shapes = {weight.path: weight.shape for weight in weights}
    names = module_names(component.name, shapes, config)
    changes: dict[str, list[Change]] = {}
    for change, name in wanted:
        path = names.get(name)
        if path is not None:
            _require_shape(change, shapes[path], component.name)
            changes.setdefault(path, []).append(change)
    if not changes:
        return None
    return ComponentMerge(component=component, model=model, weights=weights, changes=changes)


def write_component(merge: ComponentMerge, out: Path, *, on_fraction: OnFraction) -> None:
    """Writes the graph and the external files of a component into an empty folder.

    A graph that stays as it was is linked to the pipeline's own file, or copied where that cannot
    be. The graph of `merge` is used up.

    Raises:
        PipelineError: A weight is of a type that cannot be merged.
        OSError: `out` cannot be written.
    """
    _Writer(merge, out, on_fraction).write()


def link_or_copy(source: Path, target: Path) -> None:
    """Gives a file a second name, or copies it where there are no links across.

    Not for external data: onnx 1.23 reads none from a file that has two names.

    Raises:
        OSError: `target` cannot be written.
    """
    real = os.path.realpath(source)
    try:
        os.link(real, target)
    except OSError:
        shutil.copyfile(real, target)


class _Writer:
    def __init__(self, merge: ComponentMerge, out: Path, on_fraction: OnFraction) -> None:
        self._merge = merge
        self._out = out
        self._folder = merge.component.onnx.parent
        self._on_fraction = on_fraction
        self._done, self._total = 0, len(merge.changes)
        self._tensors = {tensor.name: tensor for tensor in merge.model.graph.initializer}

    def write(self) -> None:
        graph = self._merge.model.graph
        parts = {
            tensor.name: external_part(tensor)
            for tensor in tensors_of(graph)
            if uses_external_data(tensor)
        }
        entangled = _entangled(parts)
        changed = [one for one in self._merge.weights if one.path in self._merge.changes]
        for one in changed:
            self._require_float(one)
        in_place = [
            one
            for one in changed
            if one.initializer in parts and not one.is_shared and one.initializer not in entangled
        ]
        apart = [one for one in changed if one not in in_place and one.initializer in parts]
        apart += [one for one in changed if one.is_shared and one.initializer not in parts]
        inside = {
            one.initializer: one
            for one in self._merge.weights
            if one.initializer not in parts and self._tensors[one.initializer].data_type in FLOATS
        }
        self._write_files(in_place, parts)
        if not apart and not inside:
            link_or_copy(self._merge.component.onnx, self._out / "model.onnx")
            return
        location = NEW_DATA
        while location in {part.location for part in parts.values()}:
            location = f"_{location}"
        with (self._out / location).open("wb") as stream:
            data = _Appender(stream, location)
            for one in apart:
                is_shared = one.is_shared
                tensor = self._own_tensor(one) if is_shared else self._tensors[one.initializer]
                data.move(tensor, self._merged(one, tensor))
            for name, one in inside.items():
                tensor = self._tensors[name]
                is_changed = one.path in self._merge.changes and not one.is_shared
                data.move(
                    tensor,
                    self._merged(one, tensor) if is_changed else values_of(tensor, self._folder),
                )
        (self._out / "model.onnx").write_bytes(
            self._merge.model.SerializeToString(deterministic=True)
        )

    def _write_files(
        self, weights: Sequence[ModuleWeight], parts: Mapping[str, ExternalPart]
    ) -> None:
        """Writes the external files of the graph, with new numbers where the old ones were."""
        for source in self._merge.component.external:
            location = source.relative_to(self._folder).as_posix()
            target = self._out / location
            target.parent.mkdir(parents=True, exist_ok=True)
            here = [
                one
                for one in weights
                if Path(parts[one.initializer].location).as_posix() == location
            ]
            shutil.copyfile(source, target)
            with target.open("r+b") as stream:
                for one in here:
                    stream.seek(parts[one.initializer].start)
                    stream.write(memoryview(self._merged(one, self._tensors[one.initializer])))

    def _own_tensor(self, weight: ModuleWeight) -> onnx.TensorProto:
        """Returns a tensor for this module alone; others keep the one that they shared."""
        graph, old = self._merge.model.graph, self._tensors[weight.initializer]
        mine = set(weight.uses)
        if any(mine & set(one.uses) for one in self._merge.weights if one.path != weight.path):
            raise PipelineError(
                f"'{self._merge.component.onnx}' computes the weight of '{weight.path}' together "
                "with that of another layer; they cannot be told apart",
                "export the pipeline again",
            )
        name = f"{weight.initializer}.{weight.path}"
        while name in self._tensors:
            name = f"{name}_"
        tensor = graph.initializer.add()
        tensor.CopyFrom(old)
        tensor.name = name
        self._tensors[name] = tensor
        for node, place in weight.uses:
            graph.node[node].input[place] = name
        return tensor

    def _require_float(self, weight: ModuleWeight) -> None:
        kind = self._tensors[weight.initializer].data_type
        if kind not in FLOATS:
            raise PipelineError(
                f"'{self._merge.component.onnx}' has the weight of '{weight.path}' in "
                f"{TensorProto.DataType.Name(kind)}; a LoRA is merged into FLOAT, FLOAT16 and "
                "BFLOAT16",
                "merge into the pipeline before it is quantised",
            )

    def _merged(self, weight: ModuleWeight, tensor: onnx.TensorProto) -> Any:  # numpy.ndarray
        """Returns the bytes of a weight with all LoRAs in it."""
        kind = tensor.data_type
        data = converted(values_of(tensor, self._folder), kind, TensorProto.FLOAT)
        values = np.array(data).view(np.float32).reshape(tuple(tensor.dims))
        for change in self._merge.changes[weight.path]:
            added = change.difference().reshape(weight.shape)
            values += added.T if weight.is_transposed else added
        self._done += 1
        self._on_fraction(min(self._done / self._total, 1.0))
        return np.ascontiguousarray(
            converted(values.reshape(-1).view(np.uint8), TensorProto.FLOAT, kind)
        )


class _Appender:
    """Appends the values of tensors to an external file."""

    def __init__(self, stream: Any, location: str) -> None:  # Any: a binary file
        self._stream = stream
        self._location = location

    def move(self, tensor: onnx.TensorProto, values: Any) -> None:  # Any: numpy.ndarray
        """Writes values to the file, and makes them those of a tensor."""
        if values.size >= ALIGNMENT:
            self._stream.write(b"\0" * (-self._stream.tell() % ALIGNMENT))
        start = self._stream.tell()
        self._stream.write(memoryview(values))
        new = TensorProto(name=tensor.name, dims=tensor.dims, data_type=tensor.data_type)
        new.data_location = TensorProto.EXTERNAL
        for key, value in (
            ("location", self._location),
            ("offset", str(start)),
            ("length", str(values.size)),
        ):
            new.external_data.add(key=key, value=value)
        tensor.CopyFrom(new)


def _entangled(parts: Mapping[str, ExternalPart]) -> set[str]:
    """Returns the tensors whose bytes are those of another one, too."""
    found: set[str] = set()
    last_name, last = "", ExternalPart(location="", start=0, end=0)
    for name, part in sorted(parts.items(), key=lambda one: (one[1].location, one[1].start)):
        if part.location == last.location and part.start < last.end:
            found |= {name, last_name}
        if part.location != last.location or part.end > last.end:
            last_name, last = name, part
    return found


def _require_shape(change: Change, shape: tuple[int, ...], component: str) -> None:
    if _matrix(change.shape) != _matrix(shape):
        raise PipelineError(
            f"the LoRA '{change.file.path}' is for another model: its '{change.layer.module}' "
            f"changes a weight of {list(change.shape)}, and the {component} here has "
            f"{list(shape)} there",
            "take a LoRA that was trained for a model of this family",
        )


def _matrix(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A convolution of one pixel is a matrix: files have either."""
    return shape[:2] if shape[2:] == (1, 1) else shape
