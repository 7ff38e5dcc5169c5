"""`pagebinder::moe_experts`: a mixture of experts after routing. `expert_linear`: one projection of it.

T tokens, K experts chosen for each, E experts, C width, I inner width. With e = ids[t, k]:

    out[t] = sum_k weights[t, k] * (gate(x[t] @ up[e] + up_bias[e]) @ down[e] + down_bias[e])

    ids     3 0 | 0 5 | 3 5       slots t * K + k       0 1 | 2 3 | 4 5
    sorted by expert              0: slots 1 2     3: slots 0 4     5: slots 3 5      one product for each run

A token's result depends on its own row alone. Slots are added in the order of k whoever shares the batch, so only
the rounding of the products can follow the number of rows. An id outside [0, E) chooses no expert and adds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from pagebinder.custom_ops.library import define_op
from pagebinder.custom_ops.linear.packed_weights import dtype_of_numbers, plain, plain_shape
from pagebinder.custom_ops.moe.gates import Gate


def moe_experts_reference(
    x_TC, expert_ids_TK, expert_weights_TK, up, down, up_bias, down_bias, *, transposed, **gate
):  # fmt: skip
    """Only experts that some token chose are read.

    Args:
        x_TC: [T, C], of the dtype of up and down. expert_ids_TK: [T, K] int64. expert_weights_TK: [T, K].
        up: [E, J, C], J = 2 I for gated experts, else I; [E, C, J] if `transposed`. up_bias: [E, J] or None. If
            they are not transposed, up and down may be packed, or packed and coded (linear/packed_weights.py).
        down: [E, C, I]; [E, I, C] if `transposed`. down_bias: [E, C] or None.
        gate: the fields of `Gate`.
    Returns:
        [T, C] in x's dtype; the sum over slots has the wider of x's dtype and the weights'.
    """
    check_experts(x_TC, expert_ids_TK, expert_weights_TK, up, down)
    gate = Gate(**gate)

    def run_expert(expert, rows):
        return _project(
            gate(_project(rows, up, up_bias, expert, transposed)), down, down_bias, expert, transposed
        )

    return mixture(x_TC, expert_ids_TK, expert_weights_TK, up.shape[0], run_expert)


def mixture(x_TC, expert_ids_TK, expert_weights_TK, num_experts: int, run_expert: Callable) -> torch.Tensor:
    """The weighted sum over slots of run_expert(expert, rows [n, C]) -> [n, C], see `moe_experts_reference`."""
    num_slots = expert_ids_TK.shape[1]
    out_SC = x_TC.new_zeros((expert_ids_TK.numel(), x_TC.shape[1]))
    for expert, slots in slots_by_expert(expert_ids_TK, num_experts):
        out_SC[slots] = run_expert(expert, x_TC[slots // num_slots])
    out_TKC = out_SC.view(*expert_ids_TK.shape, x_TC.shape[1]) * expert_weights_TK.unsqueeze(-1)
    return out_TKC.sum(dim=1).to(x_TC.dtype)


def expert_linear_reference(x, expert_ids_TK, weight, bias, *, transposed):
    """One projection by the expert of each slot.

    Args:
        x: [T, C], the same row for all slots of a token, or [T, K, C]. expert_ids_TK: [T, K] int64.
        weight: [E, O, C], or [E, C, O] if `transposed`. bias: [E, O] or None.
    Returns:
        [T, K, O] in x's dtype; zeros where the id is outside [0, E).
    """
    if x.dim() not in (2, 3) or x.shape[:-1] != expert_ids_TK.shape[: x.dim() - 1]:
        raise ValueError("expert_linear takes x [T, C] or [T, K, C] and ids [T, K]")
    out_SO = x.new_zeros((expert_ids_TK.numel(), weight.shape[2 if transposed else 1]))
    rows, slots_per_row = x.reshape(-1, x.shape[-1]), expert_ids_TK.shape[1] if x.dim() == 2 else 1
    for expert, slots in slots_by_expert(expert_ids_TK, weight.shape[0]):
        out_SO[slots] = _project(rows[slots // slots_per_row], weight, bias, expert, transposed)
    return out_SO.view(*expert_ids_TK.shape, out_SO.shape[1])


def slots_by_expert(expert_ids_TK: torch.Tensor, num_experts: int) -> Iterator[tuple[int, torch.Tensor]]:
    """(expert, the slots that chose it, ascending) for each expert that was chosen, in order."""
    ids, slots = expert_ids_TK.reshape(-1).sort(stable=True)
    chosen, counts = ids.unique_consecutive(return_counts=True)
    for expert, run in zip(chosen.tolist(), slots.split(counts.tolist())):
        if 0 <= expert < num_experts:
            yield expert, run


def _project(rows, weight, bias, expert, transposed):
    matrix = weight[expert].t() if transposed else plain(weight[expert])
    return F.linear(rows, matrix, None if bias is None else bias[expert])


def check_experts(x, ids, weights, up, down) -> None:
    """Raises ValueError, see `moe_experts_reference`."""
    check_slots(x, ids, weights)
    if len(plain_shape(up)) != 3 or up.dim() != down.dim() or up.shape[0] != down.shape[0]:
        raise ValueError("moe_experts takes the weights of all experts, [E, ., .]")
    if not x.dtype == dtype_of_numbers(up) == dtype_of_numbers(down):
        raise ValueError(f"x is {x.dtype} and the experts are {up.dtype} and {down.dtype}: cast x first")


def check_slots(x, ids, weights) -> None:
    """Raises ValueError: see `moe_experts_reference`."""
    if x.dim() != 2 or ids.dim() != 2 or ids.shape != weights.shape or ids.shape[0] != x.shape[0]:
        raise ValueError("moe_experts takes x [T, C], expert ids and weights [T, K]")


def fake_experts(x, expert_ids, expert_weights, up, down, up_bias, down_bias, *, transposed, gated, **gate):
    torch._check(x.dim() == 2 and expert_ids.dim() == 2, lambda: "moe_experts takes x [T, C], ids [T, K]")
    same = x.dtype == dtype_of_numbers(up) == dtype_of_numbers(down)
    torch._check(same, lambda: f"x is {x.dtype}, the experts are {up.dtype}")
    width, inner_up = (1, 2) if transposed else (2, 1)
    of_up, of_down = plain_shape(up), plain_shape(down)
    inner = of_down[width]
    torch._check(of_up[width] == x.shape[1] == of_down[inner_up], lambda: "x and the experts differ in C")
    torch._check(
        of_up[inner_up] == (2 if gated else 1) * inner, lambda: "up and down differ in the inner width"
    )
    return x.new_empty(x.shape)


def _fake_linear(x, expert_ids, weight, bias, *, transposed):
    torch._check(x.dim() in (2, 3), lambda: "expert_linear takes x [T, C] or [T, K, C]")
    torch._check(x.dtype == weight.dtype, lambda: f"x is {x.dtype} and the experts are {weight.dtype}")
    torch._check(x.shape[-1] == weight.shape[1 if transposed else 2], lambda: "x and the experts differ in C")
    return x.new_empty((*expert_ids.shape, weight.shape[2 if transposed else 1]))


MOE_EXPERTS = define_op(
    "moe_experts",
    "(Tensor x, Tensor expert_ids, Tensor expert_weights, Tensor up, Tensor down, Tensor? up_bias, "
    "Tensor? down_bias, *, bool transposed, str activation, bool gated, bool interleaved, float? limit, "
    "float? alpha, float up_offset, bool in_float32) -> Tensor",
    reference=moe_experts_reference,
    fake=fake_experts,
)

EXPERT_LINEAR = define_op(
    "expert_linear",
    "(Tensor x, Tensor expert_ids, Tensor weight, Tensor? bias, *, bool transposed) -> Tensor",
    reference=expert_linear_reference,
    fake=_fake_linear,
)
