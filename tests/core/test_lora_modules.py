"""Which initializer of a graph is which module's weight, in the exports of three exporters."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from lora_examples import MODELS, PIPELINES
from sdkit_dispatch.lora.modules import SCOPES, module_weights
from sdkit_dispatch.lora.names import module_names, original_path, place_of
from sdkit_dispatch.pipeline_files import read_pipeline

STYLES = ("optimum", "torchscript", "dynamo")
SD15 = {"layers_per_block": 2, "up_block_types": ["UpBlock2D", *["CrossAttnUpBlock2D"] * 3]}
SDXL = {"layers_per_block": 2, "up_block_types": [*["CrossAttnUpBlock2D"] * 2, "UpBlock2D"]}


def loaded(name: str, component: str):
    pipeline = read_pipeline(PIPELINES / name)
    path = pipeline.components[component].onnx
    return onnx.load(path, load_external_data=False), pipeline.configs[component]


def found(model: onnx.ModelProto, component: str, config) -> dict:
    rows = module_weights(model.graph, component, config)
    assert len({row.path for row in rows}) == len(rows)
    return {row.path: row for row in rows}


@pytest.mark.parametrize(
    ("family", "component", "layers"),
    [
        ("sd15", "unet", 83),
        ("sd15", "text_encoder", 18),
        ("sdxl", "unet", 95),
        ("sdxl", "text_encoder", 18),
        ("sdxl", "text_encoder_2", 19),
    ],
)
def test_all_exporters_give_the_same_modules(family, component, layers):
    shapes = []
    for style in STYLES:
        model, config = loaded(f"{family}-{style}", component)
        rows = found(model, component, config)
        shapes.append({path: row.shape for path, row in rows.items()})
    assert shapes[0] == shapes[1] == shapes[2]
    assert len(shapes[0]) == layers


def test_the_order_holds_for_four_levels_too():
    """As SD1.5's: a config of more layers than the tiny pipelines have."""
    config = {
        "down_block_types": [*["CrossAttnDownBlock2D"] * 3, "DownBlock2D"],
        "up_block_types": ["UpBlock2D", *["CrossAttnUpBlock2D"] * 3],
        "layers_per_block": 1,
    }
    shapes = []
    for style in ("torchscript", "dynamo"):
        path = MODELS / "odd" / f"deep-{style}" / "unet" / "model.onnx"
        rows = found(onnx.load(path, load_external_data=False), "unet", config)
        shapes.append({name: row.shape for name, row in rows.items()})
    assert shapes[0] == shapes[1]
    assert "up_blocks.3.attentions.1.transformer_blocks.0.attn2.to_v" in shapes[0]


def strip(model: onnx.ModelProto) -> None:
    """Takes all names from the graph that say what a node is."""
    names = {tensor.name: f"w{index}" for index, tensor in enumerate(model.graph.initializer)}
    for tensor in model.graph.initializer:
        tensor.name = names[tensor.name]
    for index, node in enumerate(model.graph.node):
        node.name = f"n{index}"
        for place, name in enumerate(node.input):
            node.input[place] = names.get(name, name)


def test_a_note_of_dynamo_names_a_node():
    model, config = loaded("sd15-dynamo", "text_encoder")
    expected = found(model, "text_encoder", config)
    numbers = {use: row.path for row in expected.values() for use in row.uses}
    strip(model)
    for (index, _), path in numbers.items():
        scopes = ["", "model", "model.encoder", f"model.{path}", "linear_4"]
        model.graph.node[index].metadata_props.add(key=SCOPES, value=repr(scopes))
    rows = found(model, "text_encoder", {})  # no config: the order tells nothing
    assert set(rows) == set(expected)
    assert all(rows[path].uses == expected[path].uses for path in rows)


@pytest.mark.parametrize("note", ["", "[", "['']", "[1, 2]", "__import__('os')", "[" * 9000])
def test_a_note_that_is_none_is_ignored(note):
    model, _ = loaded("sd15-dynamo", "text_encoder")
    strip(model)
    for node in model.graph.node:
        node.metadata_props.add(key=SCOPES, value=note)
    assert found(model, "text_encoder", {}) == {}


def test_the_order_names_what_has_no_name():
    model, config = loaded("sd15-optimum", "text_encoder")
    expected = found(model, "text_encoder", config)
    strip(model)
    rows = found(model, "text_encoder", config)
    assert {path: row.uses for path, row in rows.items()} == {
        path: row.uses for path, row in expected.items()
    }


def test_an_order_that_does_not_fit_names_nothing():
    model, config = loaded("sd15-optimum", "text_encoder")
    strip(model)
    assert found(model, "text_encoder", {**config, "num_hidden_layers": 2}) == {}
    assert found(model, "text_encoder", {**config, "num_hidden_layers": "x"}) == {}
    # One name at another place than the order has it: then the order is not to be believed.
    uses = [index for index, node in enumerate(model.graph.node) if node.op_type == "MatMul"]
    model.graph.node[uses[0]].name = "/encoder/layers.2/mlp/fc2/MatMul"
    assert list(found(model, "text_encoder", config)) == ["encoder.layers.2.mlp.fc2"]


def graph_of(nodes, **initializers) -> onnx.GraphProto:
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, None)
    tensors = [numpy_helper.from_array(array, name) for name, array in initializers.items()]
    return helper.make_graph(nodes, "g", [value], [value], tensors)


def test_a_weight_is_followed_through_what_carries_it():
    nodes = [
        helper.make_node("Cast", ["w"], ["c"], to=TensorProto.FLOAT),
        helper.make_node("Transpose", ["c"], ["t"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "t"], ["y"], "/encoder/layers.0/mlp/fc1/MatMul"),
    ]
    (row,) = module_weights(graph_of(nodes, w=np.ones((6, 4), "f2")), "text_encoder", {})
    assert (row.initializer, row.shape, row.is_transposed) == ("w", (6, 4), False)
    assert row.uses == ((0, 0),)


def test_a_weight_that_another_layer_shares_is_known_as_shared():
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"], "/encoder/layers.0/mlp/fc1/MatMul"),
        helper.make_node("MatMul", ["y", "w"], ["z"], "/encoder/layers.1/mlp/fc1/MatMul"),
    ]
    rows = module_weights(graph_of(nodes, w=np.ones((4, 4), "f4")), "text_encoder", {})
    assert [row.is_shared for row in rows] == [True, True]


@pytest.mark.parametrize(
    ("config", "original", "path"),
    [
        (SD15, "input_blocks.0.0", "conv_in"),
        (SD15, "input_blocks.1.1.proj_in", "down_blocks.0.attentions.0.proj_in"),
        (SD15, "input_blocks.3.0.op", "down_blocks.0.downsamplers.0.conv"),
        (SD15, "input_blocks.11.0.in_layers.2", "down_blocks.3.resnets.1.conv1"),
        (SD15, "middle_block.1.proj_out", "mid_block.attentions.0.proj_out"),
        (SD15, "middle_block.2.emb_layers.1", "mid_block.resnets.1.time_emb_proj"),
        (SD15, "output_blocks.2.1.conv", "up_blocks.0.upsamplers.0.conv"),
        (SD15, "output_blocks.5.2.conv", "up_blocks.1.upsamplers.0.conv"),
        (SD15, "output_blocks.11.1.proj_in", "up_blocks.3.attentions.2.proj_in"),
        (SDXL, "input_blocks.4.1.proj_in", "down_blocks.1.attentions.0.proj_in"),
        (SDXL, "input_blocks.8.1.proj_in", "down_blocks.2.attentions.1.proj_in"),
        (SDXL, "output_blocks.2.2.conv", "up_blocks.0.upsamplers.0.conv"),
        (SDXL, "output_blocks.3.1.proj_in", "up_blocks.1.attentions.0.proj_in"),
        (SDXL, "output_blocks.8.0.skip_connection", "up_blocks.2.resnets.2.conv_shortcut"),
        (SDXL, "label_emb.0.2", "add_embedding.linear_2"),
        (SDXL, "out.2", "conv_out"),
    ],
)
def test_the_original_layout_counts_blocks_through(config, original, path):
    assert original_path(path, config["layers_per_block"], config) == original
    names = module_names("unet", [path], config)
    assert names[original.replace(".", "_")] == names[path.replace(".", "_")] == path


@pytest.mark.parametrize(
    ("module", "place"),
    [
        ("lora_unet_mid_block_attentions_0_proj_in", ("unet", "mid_block_attentions_0_proj_in")),
        ("lora_te_text_model_encoder_layers_0_mlp_fc1",
         ("text_encoder", "encoder_layers_0_mlp_fc1")),
        ("lora_te1_text_model_encoder_layers_0_mlp_fc1",
         ("text_encoder", "encoder_layers_0_mlp_fc1")),
        ("lora_te2_text_projection", ("text_encoder_2", "text_projection")),
        ("text_encoder_2.text_projection", ("text_encoder_2", "text_projection")),
        ("unet.mid_block.attentions.0.proj_in", ("unet", "mid_block_attentions_0_proj_in")),
        ("base_model.model.conv_in", ("unet", "conv_in")),
        ("diffusion_model.input_blocks.1.1.proj_in", ("unet", "input_blocks_1_1_proj_in")),
        ("unet.a.attn1.processor.to_q", ("unet", "a_attn1_to_q")),
        ("unet.a.attn1.processor.to_out", ("unet", "a_attn1_to_out_0")),
    ],
)  # fmt: skip
def test_a_name_in_a_file_says_which_component_it_is_of(module, place):
    assert place_of(module) == place
