"""Plans: which samples make which batch, on which rank, in which step.

A plan is a pure function of lengths, policy, seed, epoch and world size. Workers do what it says and own no
order of their own.
"""

from .planner import Planner
from .sampler import PlanIterator, PlanSampler
from .samplers import BucketBatchSampler, BudgetBatchSampler, FixedBatchSampler, RandomBatchSampler
from .units import Piece
from .window import Window

__all__ = [
    "BucketBatchSampler",
    "BudgetBatchSampler",
    "FixedBatchSampler",
    "Piece",
    "PlanIterator",
    "PlanSampler",
    "Planner",
    "RandomBatchSampler",
    "Window",
]
