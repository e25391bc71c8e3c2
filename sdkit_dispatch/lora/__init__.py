"""LoRAs: small files of differences that are added to the weights of an exported pipeline.

`wish` says what a user asked for, `file` reads a LoRA, `names`, `modules` and `forward_order` find
the initializer of an ONNX graph that a layer of it changes, `component` adds the layers to one
component, `merged` makes a pipeline of it, and `stored` knows those in the home folder.
"""

from .wish import AppliedLora, Lora, lora_from_text

__all__ = ["AppliedLora", "Lora", "lora_from_text"]
