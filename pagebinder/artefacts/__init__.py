"""A compilation as a directory, and back: JSON, safetensors and shared libraries, no pickle.

save.py, load.py, kinds.py    what is in it, of a decoder and of an encoder; recompiling where it does not fit
files.py, machine.py          the directory, whole or not at all, digests; what it was made with
graphs.py, sizes.py, values.py, weights.py    graphs, symbolic sizes, records, weights by reference
aot.py                        programs for steps without Python
"""
