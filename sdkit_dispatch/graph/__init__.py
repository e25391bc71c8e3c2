"""What any vendor may need to do with an ONNX graph before its compiler sees it.

A pass is one file and its test. Weights in external files are read by the precision pass only, a
piece at a time; every other pass sees the graph, and a runtime maps the files.
"""

REVISION = 2
"""Raised when a pass gives another graph; part of every engine's key."""
