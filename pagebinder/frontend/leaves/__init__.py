"""Capture-time replacements of token mixing that torch.export cannot show us; one file per family."""

import torch

from pagebinder.frontend.leaves.alibi import BLOOM_ALIBI, MPT_ALIBI
from pagebinder.frontend.leaves.base import Leaf, applicable, captured_leaves, patched
from pagebinder.frontend.leaves.deepseek_v4 import DEEPSEEK_V4
from pagebinder.frontend.leaves.deepseek_v4_own import OWN_ATTENTION, OWN_EXPERTS, OWN_PARTS
from pagebinder.frontend.leaves.gated_delta_net import GATED_DELTA_NET, KIMI_DELTA_ATTENTION
from pagebinder.frontend.leaves.latent_attention import LATENT_ATTENTION, LATENT_EXPANSION
from pagebinder.frontend.leaves.mamba import MAMBA, ZAMBA
from pagebinder.frontend.leaves.mamba2 import MAMBA2
from pagebinder.frontend.leaves.minimax import LIGHTNING_ATTENTION
from pagebinder.frontend.leaves.moe import MOE_LEAVES
from pagebinder.frontend.leaves.mpnet import MPNET
from pagebinder.frontend.leaves.ngram_embedding import NGRAM_EMBEDDING, PLE_CONVOLUTION
from pagebinder.frontend.leaves.pool_indexer import POOL_INDEXER
from pagebinder.frontend.leaves.qsa_indexer import QSA_INDEXER
from pagebinder.frontend.leaves.query_bias import INKLING, INKLING_2, INKLING_2_HIDDEN, INKLING_2_LOOP
from pagebinder.frontend.leaves.recurrent_gemma import RECURRENT_GEMMA_CONVOLUTION, RG_LRU
from pagebinder.frontend.leaves.rope_by_length import ROPE_BY_LENGTH
from pagebinder.frontend.leaves.rwkv import RWKV_ATTENTION, RWKV_SHIFT
from pagebinder.frontend.leaves.short_convolution import SHORT_CONVOLUTION
from pagebinder.frontend.leaves.sparse_indexer import SPARSE_INDEXER
from pagebinder.frontend.leaves.token_convolution import TOKEN_CONVOLUTION, TOKEN_CONVOLUTION_OF_LOOPS
from pagebinder.frontend.leaves.xlstm import MLSTM
from pagebinder.frontend.leaves.xmod import XMOD_ADAPTERS
from pagebinder.frontend.leaves.zaya import ZAYA

LEAVES: tuple[Leaf, ...] = (
    GATED_DELTA_NET,
    KIMI_DELTA_ATTENTION,
    MAMBA,
    ZAMBA,
    MAMBA2,
    LIGHTNING_ATTENTION,
    RG_LRU,
    RECURRENT_GEMMA_CONVOLUTION,
    RWKV_ATTENTION,
    RWKV_SHIFT,
    MLSTM,
    SHORT_CONVOLUTION,
    BLOOM_ALIBI,
    DEEPSEEK_V4,
    OWN_ATTENTION,
    OWN_PARTS,
    OWN_EXPERTS,
    LATENT_ATTENTION,
    LATENT_EXPANSION,
    SPARSE_INDEXER,
    QSA_INDEXER,
    POOL_INDEXER,
    NGRAM_EMBEDDING,
    PLE_CONVOLUTION,
    MPT_ALIBI,
    MPNET,
    XMOD_ADAPTERS,
    ZAYA,
    INKLING,
    INKLING_2,
    INKLING_2_HIDDEN,
    INKLING_2_LOOP,
    TOKEN_CONVOLUTION,
    TOKEN_CONVOLUTION_OF_LOOPS,
    ROPE_BY_LENGTH,
    *MOE_LEAVES,
)


def remake_tables(model: torch.nn.Module) -> None:
    """In a copy of a model in a wider dtype: tables that its modules made of numbers that they keep, and rounded."""
    for leaf in applicable(LEAVES, model):
        if leaf.remake is not None:
            for module in leaf.modules(model).values():
                leaf.remake(module)


__all__ = ["LEAVES", "Leaf", "captured_leaves", "patched", "remake_tables"]
