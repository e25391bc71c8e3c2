"""Writes a program as C++ source that computes the same with ggml alone."""
