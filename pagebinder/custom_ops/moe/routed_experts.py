"""`pagebinder::moe_routed_experts`: a mixture of experts from the router's logits on, in one op.

T tokens, E experts, K of them chosen for each token, C width.

    ids, weights = router(logits [T, E], choice_bias [E])           see `router.Router`
    out [T, C]   = moe_experts(x, ids, weights, ...)                see `experts.moe_experts_reference`

The experts are those that the single ops would choose, and their weights have the same bits: nothing here is left to
the order of a sum or to an exponential of our own.
"""

from __future__ import annotations

from dataclasses import fields

import torch

from pagebinder.custom_ops.library import define_op
from pagebinder.custom_ops.moe.experts import fake_experts, moe_experts_reference
from pagebinder.custom_ops.moe.router import Router

_ROUTER_FIELDS = tuple(field.name for field in fields(Router))


def moe_routed_experts_reference(x_TC, logits_TE, choice_bias_E, up, down, up_bias, down_bias, **options):
    """Choose, then compute.

    Args:
        x_TC: [T, C], of the dtype of up and down. logits_TE: [T, E], or scores, of any float dtype.
        choice_bias_E: [E] or None. up, down, up_bias, down_bias: as `moe_experts`.
        options: the fields of `Router` (those left out have its defaults), those of `Gate`, and `transposed`.
    Returns:
        [T, C] in x's dtype.
    Raises:
        ValueError: logits or bias do not fit the experts.
    """
    ids_TK, weights_TK, options = choose(x_TC, logits_TE, choice_bias_E, up, options)
    return moe_experts_reference(x_TC, ids_TK, weights_TK, up, down, up_bias, down_bias, **options)


def choose(x_TC, logits_TE, choice_bias_E, up, options: dict) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """-> ids [T, K], weights [T, K], and the options that are not the router's. Raises ValueError, see above."""
    router = Router(**{name: options.pop(name) for name in _ROUTER_FIELDS if name in options})
    check_routing(x_TC, logits_TE, choice_bias_E, up, router)
    return *router(logits_TE, choice_bias_E), options


def check_routing(x, logits, choice_bias, up, router: Router) -> None:
    """Raises ValueError, see `moe_routed_experts_reference`."""
    experts = up.shape[0]
    if logits.dim() != 2 or logits.shape != (x.shape[0], experts):
        raise ValueError("moe_routed_experts takes logits [T, E] of the experts whose weights it is given")
    if choice_bias is not None and choice_bias.shape != (experts,):
        raise ValueError("moe_routed_experts takes a bias [E], one value an expert, or none")
    if router.top_k > experts or experts % router.num_groups:
        raise ValueError(f"{experts} experts do not give {router.top_k} in {router.num_groups} groups")


ROUTER_OPTIONS = (
    "int top_k, str score, bool sorted_choice=True, int num_groups=1, int top_groups=1, str group_score='best', "
    "bool other_groups_zero=False, bool weigh_rated=False, str normalised='none', float epsilon=0.0, "
    "float least_sum=0.0, "
    "ScalarType? softmax_dtype=None, float scale=1.0, ScalarType? weight_dtype=None"
)


def _fake(x, logits, choice_bias, up, down, up_bias, down_bias, *, transposed, gated, **options):
    torch._check(logits.dim() == 2, lambda: "moe_routed_experts takes logits [T, E]")
    torch._check(logits.shape[1] == up.shape[0], lambda: "logits and experts differ in E")
    return fake_experts(x, logits, logits, up, down, up_bias, down_bias, transposed=transposed, gated=gated)


MOE_ROUTED_EXPERTS = define_op(
    "moe_routed_experts",
    "(Tensor x, Tensor logits, Tensor? choice_bias, Tensor up, Tensor down, Tensor? up_bias, Tensor? down_bias, *, "
    f"{ROUTER_OPTIONS}, bool transposed, "
    "str activation, bool gated, bool interleaved, float? limit, float? alpha, float up_offset, "
    "bool in_float32) -> Tensor",
    reference=moe_routed_experts_reference,
    fake=_fake,
)
