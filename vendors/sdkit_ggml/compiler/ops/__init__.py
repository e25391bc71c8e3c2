"""One small function an ONNX operator: inputs by position, attributes as keyword arguments.

A function gets the `Lowering`, the node's input names and its attributes, and returns the value of
the (first) output, or a list of values. `TABLE` in `table.py` says which function lowers what.
"""
