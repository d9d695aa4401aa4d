"""Kernels in C++ for the CPU: compiled once for the processor at hand, used where they can be."""
