"""Kernels in Triton, for CUDA; under TRITON_INTERPRET=1 the same source runs on a CPU, slowly, for tests."""
