"""Passes: graph -> graph, one a file. Each has the signature `run(gm) -> PassResult`."""
