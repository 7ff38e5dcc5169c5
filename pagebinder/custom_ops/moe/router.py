"""How a mixture chooses experts: a `Router`, as data and as a function of rows of logits.

T tokens, E experts, K of them chosen for each token, in G groups of E / G neighbours.

    scores  = softmax(logits) | sigmoid(logits) | logits            in float32
    rated   = scores + correction bias                              decides who is chosen, never the weights
    rated   = rated, but -inf or 0 outside the best groups          a group's score: its best, or best two added
    experts = topk(rated, K)                                        ties as torch.topk decides them
    weights = scores[experts] or rated[experts], then w / max(sum w + epsilon, least_sum) | softmax(w), then times
              scale, rounded
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

import torch

SCORES = {
    "softmax": lambda logits: logits.softmax(dim=-1),
    "sigmoid": torch.sigmoid,
    "logits": lambda logits: logits,
}
GROUP_SCORES = {
    "best": lambda rated_TGN: rated_TGN.amax(dim=-1),
    "best_two": lambda rated_TGN: rated_TGN.topk(2, dim=-1).values.sum(dim=-1),
}
NORMALISED = ("none", "sum", "softmax")


@dataclass(frozen=True, kw_only=True)
class Router:
    """top_k: K. score: a name in SCORES. sorted_choice: topk's `sorted`, which decides the order of slots.

    num_groups, top_groups: groups, and how many of them a token may choose from (1 and 1: no groups). group_score: a
    name in GROUP_SCORES. other_groups_zero: experts outside the best groups rate 0, else -inf.
    weigh_rated: weights start from what was rated, else from the scores.
    normalised: one of NORMALISED. epsilon: added to the sum, which is `least_sum` at least. softmax_dtype: what a
    softmax of weights computes in.
    scale: a factor at the end. weight_dtype: to which the weights are rounded then. Both dtypes: None is float32.
    """

    top_k: int
    score: str
    sorted_choice: bool = True
    num_groups: int = 1
    top_groups: int = 1
    group_score: str = "best"
    other_groups_zero: bool = False
    weigh_rated: bool = False
    normalised: str = "none"
    epsilon: float = 0.0
    least_sum: float = 0.0
    softmax_dtype: torch.dtype | None = None
    scale: float = 1.0
    weight_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for field, known in (
            ("score", SCORES),
            ("group_score", GROUP_SCORES),
            ("normalised", NORMALISED),
        ):
            if getattr(self, field) not in known:
                raise ValueError(f"{field}={getattr(self, field)!r}: use one of {', '.join(known)}")
        if not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(f"top_groups={self.top_groups} of {self.num_groups} groups makes no sense")

    def __call__(
        self, logits_TE: torch.Tensor, bias_E: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """-> expert ids [T, K] int64, their weights [T, K]."""
        scores_TE = SCORES[self.score](logits_TE.float())
        rated_TE = scores_TE if bias_E is None else scores_TE + bias_E
        if self.num_groups > 1:
            rated_TE = self._in_best_groups(rated_TE)
        chosen_TK, ids_TK = rated_TE.topk(self.top_k, dim=-1, sorted=self.sorted_choice)
        weights_TK = chosen_TK if self.weigh_rated else scores_TE.gather(1, ids_TK)
        if self.normalised == "sum":
            sum_T1 = weights_TK.sum(dim=-1, keepdim=True) + self.epsilon
            weights_TK = weights_TK / (sum_T1.clamp(min=self.least_sum) if self.least_sum else sum_T1)
        elif self.normalised == "softmax":
            weights_TK = weights_TK.to(self.softmax_dtype or torch.float32).softmax(dim=-1)
        return ids_TK, (weights_TK * self.scale).to(self.weight_dtype or torch.float32)

    def _in_best_groups(self, rated_TE: torch.Tensor) -> torch.Tensor:
        rated_TGN = rated_TE.unflatten(1, (self.num_groups, -1))
        best = GROUP_SCORES[self.group_score](rated_TGN).topk(self.top_groups, dim=-1, sorted=False).indices
        is_out_TG = torch.ones_like(rated_TGN[..., 0], dtype=torch.bool).scatter(1, best, False)
        fill = 0.0 if self.other_groups_zero else float("-inf")
        return rated_TGN.masked_fill(is_out_TG.unsqueeze(-1), fill).flatten(1)

    def as_options(self) -> dict:
        """The keyword arguments of `moe_routed_experts` that say this router: each one costs a call its time, so
        those that have their default are left out."""
        defaults = {field.name: field.default for field in fields(self)}
        return {name: value for name, value in asdict(self).items() if value != defaults[name]}

    def __str__(self) -> str:
        """ "softmax, top 8, weights / sum, times 2.5" for reports."""
        parts = [self.score, f"top {self.top_k}"]
        if self.num_groups > 1:
            parts.append(f"in {self.top_groups} of {self.num_groups} groups")
        by_sum = "weights / sum" + (f" of at least {self.least_sum:g}" if self.least_sum else "")
        parts += {"none": [], "sum": [by_sum], "softmax": ["softmax of weights"]}[self.normalised]
        return ", ".join(parts + [f"times {self.scale:g}"] * (self.scale != 1.0))
