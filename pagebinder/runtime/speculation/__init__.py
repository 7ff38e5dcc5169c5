"""Speculative decoding without loss: tokens are guessed, and a step checks several of them at once.

drafter.py          what guesses: the interface
                    what a request's guide forces comes before it, whoever guesses
ngram.py            what followed the last tokens when they came before (prompt lookup)
model_drafter.py    a second, cheaper model, for example the same one with weights of 4 bits
speculator.py       whom to guess for, how many tokens, and what came of it
verification.py     logits of the guessed tokens -> those that stand, and the one behind them
"""

from pagebinder.runtime.speculation.drafter import Drafter, DraftRequest
from pagebinder.runtime.speculation.model_drafter import ModelDrafter
from pagebinder.runtime.speculation.ngram import NgramDrafter
from pagebinder.runtime.speculation.speculator import Speculator, make_drafter

__all__ = ["DraftRequest", "Drafter", "ModelDrafter", "NgramDrafter", "Speculator", "make_drafter"]
