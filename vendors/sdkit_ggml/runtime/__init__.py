"""Finds libggml on this machine, binds it with ctypes, and runs programs on its devices."""
