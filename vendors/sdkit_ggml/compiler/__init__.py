"""ONNX -> a program of ggml operations and its weights. Pure Python and numpy; loads no ggml."""
