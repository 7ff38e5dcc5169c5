"""The commands of `cli.py`, one a module.

bench.py       this machine and a model, side by side
bisect.py      the first step, layer and node that differ from the source model
compile.py     compile, check or write the plan lock, save
demo.py        the shipped model streams three texts
export.py      ONNX
generate.py    prompts in, texts out
kv.py          kv-picture: the pool over time
plan.py        doctor --kv: a cache's plan from a config alone
serve.py       the HTTP server
artefact.py, draft.py, support.py    what they share: artefacts as models, --draft, consoles and exits
"""
