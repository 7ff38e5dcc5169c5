"""Without a GPU, Triton's interpreter runs the kernels; triton reads that as it is first imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
