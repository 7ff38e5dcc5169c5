"""GGUF files: source.py makes a model of one, the other files what it takes."""
