"""The leaves of mixtures of experts that do not go through transformers' experts interface."""

from pagebinder.frontend.leaves.moe_capacity import EXPERTS_WITH_CAPACITY
from pagebinder.frontend.leaves.moe_dbrx import DBRX_EXPERTS
from pagebinder.frontend.leaves.moe_jetmoe import JETMOE_ATTENTION, JETMOE_FEED_FORWARD
from pagebinder.frontend.leaves.moe_llama4 import LLAMA4_MOE
from pagebinder.frontend.leaves.moe_longcat import LONGCAT_EXPERTS
from pagebinder.frontend.leaves.moe_step3p7 import STEP3P7_EXPERTS

MOE_LEAVES = (
    DBRX_EXPERTS,
    JETMOE_FEED_FORWARD,
    JETMOE_ATTENTION,
    LLAMA4_MOE,
    LONGCAT_EXPERTS,
    STEP3P7_EXPERTS,
    EXPERTS_WITH_CAPACITY,
)
