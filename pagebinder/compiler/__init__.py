"""What `compile.py` calls on the way from a model to a compiled one; each module is one concern.

    capture -> checks.py -> paged, fused -> streams.py -> executable.py
                |              |               weights.py, kernels.py: laid out and built meanwhile
                |              verify.py, verify_runs.py: every step against the one before
                probe.py: a user's own code beside its graph; tokenwise.py: ops that he vouches for

encoder.py, verify_encoder.py     the stages of an encoder alone
lock.py                           the plan lock
bisect.py, locate.py, repro.py    the first wrong step, layer and node, and a script that shows it
tensorrt.py                       what TensorRT is given
"""
