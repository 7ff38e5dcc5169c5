"""C++ kernels for the CPU: sources, build on first use, and the provider that serves them."""
