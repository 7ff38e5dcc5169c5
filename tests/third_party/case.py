"""What a case is: a published model file, how a tiny model is made of it, and how the model itself says its logits.

`@case(...)` stands above a function that takes a `Checkout` and returns a `Built`; it is called in a process of its
own, so that it may change whatever it likes of what is imported there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from tests.third_party.checkouts import Checkout

VOCAB_SIZE = 128
MAX_TOKENS = 256
UNMODIFIED = "unmodified"


@dataclass(frozen=True)
class Built:
    """A tiny model, and its own logits of a list of ids, of all or of the last; by default its forward says them."""

    model: nn.Module
    logits: Callable[[list[int]], torch.Tensor] | None = None

    def logits_of(self, ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            logits = self.logits(ids) if self.logits else tensor_in(self.model(torch.tensor([ids])))
            return logits.float().reshape(-1, logits.shape[-1])


@dataclass(frozen=True)
class Case:
    """`unusual`: why it is worth a check. `adaptation`: what was done around the model's code, which stays as it is.

    `needs`: distributions that its file imports. `options`: more of CompileConfig.
    """

    name: str
    repository: str
    file: str
    class_name: str
    unusual: str
    build: Callable[[Checkout], Built | nn.Module] = field(repr=False)
    adaptation: str = UNMODIFIED
    needs: tuple[str, ...] = ()
    options: dict = field(default_factory=dict)

    def built(self, checkout: Checkout) -> Built:
        torch.manual_seed(0)
        built = self.build(checkout)
        return built if isinstance(built, Built) else Built(built)


CASES: dict[str, Case] = {}


def case(name: str, repository: str, file: str, class_name: str, unusual: str, **more):
    def register(build):
        if name in CASES:
            raise ValueError(f"two cases are called {name}")
        CASES[name] = Case(name, repository, file, class_name, unusual, build, **more)
        return build

    return register


class Called(nn.Module):
    """`call(model, input_ids)`: for a forward that takes more than ids."""

    def __init__(self, model: nn.Module, call: Callable[[nn.Module, torch.Tensor], torch.Tensor]):
        super().__init__()
        self.model, self.call = model, call

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.call(self.model, input_ids)


def tensor_in(output) -> torch.Tensor:
    """The logits in what a forward returned: a tensor, the first of a tuple, or an object that has `.logits`."""
    if isinstance(output, tuple):
        output = output[0]
    return getattr(output, "logits", output)


def scaled(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights that make errors visible: matrices ~ N(0, 1 / fan_in), vectors near what they were, all in float32."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    heads = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() < 2:
                base = parameter if bool(parameter.isfinite().all()) else torch.zeros(())
                parameter.copy_((base if base.abs().max() < 10 else 0.0) + 0.1 * noise)
            elif id(parameter) in embeddings - heads:
                parameter.copy_(noise)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    return model.float().eval()
