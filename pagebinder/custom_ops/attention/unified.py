"""`pagebinder::unified_attention` and `attention_part`: one mixed batch, its keys split into up to three parts.

    request 0   |== shared ==|==== unique ====|= causal =|     shared   the first keys of several requests, which lie
    request 1   |== shared ==|== unique ==|c|                           in the same blocks: read once for all of them
    request 2   |======= unique =======|== causal ==|          unique   cached keys of one request
                0            S             context   seq_len   causal   this step's own keys, from `k` and `v`

Each part is a softmax over its own keys; they are merged by their log-sum-exps (`merge_states.py`), so the result is
that of one softmax over all keys, up to rounding. `phases` says which parts run: "csu", or "-" in the place of one.

    keys read           with c: [context, seq_len) from k, v           without: those come from the cache, in u
    of a request        with s: [0, S) from the leader's blocks        without: those come from its own, in u

A phase that is missing where u is missing too would leave keys out, which is an error. Legend as in `paged.py`.
"""

from __future__ import annotations

import itertools

import torch

from pagebinder.custom_ops.attention.merge_states import merge_attention_states_reference
from pagebinder.custom_ops.attention.paged import check_attention, check_options
from pagebinder.custom_ops.attention.semantic import visible_keys
from pagebinder.custom_ops.library import define_op
from pagebinder.custom_ops.query_starts import query_starts

PARTS = "csu"


def unified_attention_reference(*operands, phases, **options):
    """Causal attention of a mixed batch over the paged cache, in parts; `paged_attention` without chunks.

    Args:
        operands: as `paged_attention`: q [T, H, D], kv_cache [N, G, B, D+Dv], block_table, seq_lens and
            query_start_loc; then
            shared_lens [R] int32: S, the leading tokens that are read in the shared part, at most the context.
            shared_leaders [R] int32: the request whose blocks they are read from. It is a leader of its own, with the
            same S, and the tables of both begin with the same blocks. Not read where S is 0: nothing is shared.
            shared_tokens [T] int32: the tokens of all requests with S > 0, those of one leader together; then -1.
            sinks, alibi_slopes: as `paged_attention`.
            k [T, G, D], v [T, G, Dv]: this step's keys and values, for phase c.
        phases: "csu" with "-" for parts that do not run. head_dim_v, scale, window, soft_cap: as `paged_attention`.
    Returns:
        [T, H, Dv] in q's dtype, zeros for padding.
    Raises:
        ValueError: as `paged_attention`; phases that leave keys out, or c without k and v; shared operands that do
            not fit together.
    """
    q, sinks = operands[0], operands[8] if len(operands) > 8 else None
    parts = [part for part in PARTS if part in check_phases(phases)]
    states = [attention_part_reference(*operands, part=part, phases=phases, **options) for part in parts]
    check_all_keys(phases, *operands[3:6])
    return merge_attention_states_reference(*zip(*states), sinks)[0].to(q.dtype)


def attention_part_reference(
    q_THD, kv_cache_NGBE, block_table_RM, seq_lens_R, query_start_loc, shared_lens_R, shared_leaders_R,
    shared_tokens_T, sinks=None, alibi_slopes=None, k_TGD=None, v_TGD=None, *, part, phases, head_dim_v, scale,
    window=None, soft_cap=None,
):  # fmt: skip
    """One part of `unified_attention`: "c", "s" or "u", a letter of `phases`, which say what the others read.

    Returns:
        out [T, H, Dv] float32, normalised over the keys of the part, without the sink; zeros where it has none.
        lse [H, T] float32, -inf there.
    Raises:
        ValueError: as `unified_attention`, but a part may well leave keys to the others.
    """
    check_unified(
        q_THD, kv_cache_NGBE, block_table_RM, seq_lens_R, query_start_loc, shared_lens_R, shared_leaders_R,
        shared_tokens_T, sinks, alibi_slopes, k_TGD, v_TGD, phases=phases, head_dim_v=head_dim_v,
    )  # fmt: skip
    _require(len(part) == 1 and part in phases and part != "-", f"part {part!r} is none of phases {phases!r}")
    check_options(window=window, soft_cap=soft_cap)
    shared_operands = (shared_lens_R, shared_leaders_R, shared_tokens_T)
    check_shared(phases, block_table_RM, seq_lens_R, query_start_loc, *shared_operands, kv_cache_NGBE)
    num_tokens, num_heads, head_dim = q_THD.shape
    group = num_heads // kv_cache_NGBE.shape[1]
    out = q_THD.new_zeros((num_tokens, num_heads, head_dim_v), dtype=torch.float32)
    lse = torch.full((num_heads, num_tokens), float("-inf"), device=q_THD.device)
    starts, shared = query_start_loc.tolist(), shared_lens_R.tolist()
    for r, seq_len in enumerate(seq_lens_R.tolist()):
        start, end = starts[r], starts[r + 1]
        begin, stop = part_keys(part, phases, shared[r], seq_len - (end - start), seq_len)
        if start == end or begin == stop:
            continue
        p = torch.arange(start - end, 0, device=q_THD.device)[:, None] + seq_len
        j = torch.arange(begin, stop, device=q_THD.device)
        visible = visible_keys(p, j[None], window=window)
        j, visible = j[visible.any(0)], visible[:, visible.any(0)]
        if part == "c":
            rows = torch.cat([k_TGD, v_TGD], dim=-1)[start - (seq_len - (end - start)) + j]
        else:
            rows = _cached_rows(kv_cache_NGBE, block_table_RM[shared_leaders_R[r] if part == "s" else r], j)
        k, v = rows.float().repeat_interleave(group, dim=1).split((head_dim, head_dim_v), dim=-1)
        scores = torch.einsum("qhd,khd->hqk", q_THD[start:end].float(), k) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        scores = scores.masked_fill(~visible, float("-inf"))
        if alibi_slopes is not None:
            scores = scores + alibi_slopes[:, None, None] * (j[None] - p)
        row_lse = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - row_lse.masked_fill(row_lse == float("-inf"), 0.0)[..., None])
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, v)
        lse[:, start:end] = row_lse
    return out, lse


def part_keys(part: str, phases: str, shared: int, context: int, seq_len: int) -> tuple[int, int]:
    """[begin, end): keys of a request that a part covers."""
    if part == "c":
        return context, seq_len
    begin = shared if "s" in phases else 0
    if part == "s":
        return 0, begin
    return begin, max(begin, context if "c" in phases else seq_len)


def _cached_rows(kv_cache_NGBE, table, j):
    num_blocks, _, block_size, _ = kv_cache_NGBE.shape
    blocks = table.long()[j // block_size]
    _require(bool(((blocks >= 0) & (blocks < num_blocks)).all()), "a block id in block_table is not valid")
    return kv_cache_NGBE[blocks, :, j % block_size]


# ---- checks ----------------------------------------------------------------------------------------------------


def check_phases(phases: str) -> str:
    known = (
        len(phases) == len(PARTS)
        and all(x in (part, "-") for x, part in zip(phases, PARTS))
        and phases != "---"
    )
    _require(
        known, f'phases {phases!r}: use "csu" with "-" in the place of parts that do not run, at least one'
    )
    return phases


def check_unified(
    q, kv_cache, block_table, seq_lens, query_start_loc, shared_lens, shared_leaders, shared_tokens, sinks,
    alibi_slopes, k, v, *, phases, head_dim_v,
) -> None:  # fmt: skip
    """Shapes, dtypes and phases: what can be told without reading the operands."""
    check_phases(phases)
    check_attention(q, kv_cache, block_table, seq_lens, query_start_loc, sinks, alibi_slopes, head_dim_v)
    named = {"shared_lens": shared_lens, "shared_leaders": shared_leaders, "shared_tokens": shared_tokens}
    for name, tensor in named.items():
        of = q if name == "shared_tokens" else seq_lens
        fits = tensor.dtype == torch.int32 and tensor.shape == of.shape[:1]
        _require(fits, f"{name} must be int32 [{'T' if of is q else 'R'}]")
    if "c" not in phases:
        return
    _require(k is not None and v is not None, f"phases {phases!r} need this step's k and v")
    heads, width = kv_cache.shape[1], q.shape[2]
    fits = k.shape == (len(q), heads, width) and v.shape == (len(q), heads, head_dim_v)
    _require(fits, "k is [T, G, D] and v is [T, G, Dv]")
    _require(k.dtype == v.dtype == q.dtype, "q, k and v must have the same dtype")
    _require(k.stride(2) == 1 and v.stride(2) == 1, "the last strides of k and v must be 1")


def check_shared(
    phases, block_table, seq_lens, query_start_loc, shared_lens, shared_leaders, shared_tokens, kv_cache
) -> None:
    """What the operands of the shared part say."""
    starts = query_starts(query_start_loc, len(shared_tokens))
    lens, capacity = seq_lens.tolist(), block_table.shape[1] * kv_cache.shape[2]
    _require(all(0 <= n <= capacity for n in lens), "a seq_len exceeds its block table")
    if "s" not in phases:
        return
    shared, leaders = shared_lens.tolist(), shared_leaders.tolist()
    contexts = [n - (b - a) for n, (a, b) in zip(lens, itertools.pairwise(starts))]
    members = [r for r, count in enumerate(shared) if count != 0]
    for r in members:
        leader = leaders[r]
        _require(0 < shared[r] <= contexts[r], "a request shares more tokens than its context has")
        fits = 0 <= leader < len(lens) and leaders[leader] == leader and shared[leader] == shared[r]
        _require(fits, "a leader in shared_leaders does not share the same tokens, or follows another one")
        blocks = -(-shared[r] // kv_cache.shape[2])
        same = torch.equal(block_table[r, :blocks], block_table[leader, :blocks])
        _require(same, "a request shares tokens with a leader but not its blocks")
    tokens = shared_tokens.tolist()
    tokens = tokens[: next((i for i, token in enumerate(tokens) if token < 0), len(tokens))]
    expected = [token for r in members for token in range(starts[r], starts[r + 1])]
    _require(
        sorted(tokens) == expected, "shared_tokens must hold every token of the requests that share, once"
    )


def check_all_keys(phases: str, seq_lens, query_start_loc, shared_lens) -> None:
    """Without a unique part the others must cover all keys."""
    if "u" in phases:
        return
    news = query_start_loc[1:] - query_start_loc[:-1]
    covered = shared_lens if "s" in phases else torch.zeros_like(seq_lens)
    covered = covered + (news if "c" in phases else 0)
    _require(
        bool(((covered >= seq_lens) | (news == 0)).all()), f"phases {phases!r} leave keys of a request out"
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _fake(q, kv_cache, *_, head_dim_v, phases, **__):
    check_phases(phases)
    torch._check(q.dim() == 3 and kv_cache.dim() == 4)
    torch._check(q.shape[1] % kv_cache.shape[1] == 0, lambda: "query heads must be a multiple of KV heads")
    torch._check(kv_cache.shape[3] == q.shape[2] + head_dim_v, lambda: "a cache row must be D + head_dim_v")
    return q.new_empty((q.shape[0], q.shape[1], head_dim_v))


def _part_fake(q, *operands, **options):
    out = _fake(q, *operands, **options).to(torch.float32)
    return out, out.new_empty((q.shape[1], q.shape[0]))


_OPERANDS = (
    "(Tensor q, Tensor kv_cache, Tensor block_table, Tensor seq_lens, Tensor query_start_loc, Tensor shared_lens, "
    "Tensor shared_leaders, Tensor shared_tokens, Tensor? sinks=None, Tensor? alibi_slopes=None, Tensor? k=None, "
    "Tensor? v=None, *, {part}str phases, int head_dim_v, float scale, int? window=None, float? soft_cap=None)"
)

UNIFIED_ATTENTION = define_op(
    "unified_attention",
    _OPERANDS.format(part="") + " -> Tensor",
    reference=unified_attention_reference,
    fake=_fake,
)

ATTENTION_PART = define_op(
    "attention_part",
    _OPERANDS.format(part="str part, ") + " -> (Tensor, Tensor)",
    reference=attention_part_reference,
    fake=_part_fake,
)
