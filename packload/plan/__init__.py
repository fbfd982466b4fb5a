"""Plans: which samples make which batch, on which rank, in which step.

A plan is a pure function of lengths, policy, seed, epoch and world size. Workers do what it says and own no
order of their own.
"""

from .cut import CutDataset
from .planner import Planner
from .policy import Policy
from .sampler import PlanIterator, PlanSampler
from .samplers import BucketBatchSampler, BudgetBatchSampler, FixedBatchSampler, RandomBatchSampler
from .units import Piece, Units
from .window import Bins, Window

__all__ = [
    "Bins",
    "BucketBatchSampler",
    "BudgetBatchSampler",
    "CutDataset",
    "FixedBatchSampler",
    "Piece",
    "PlanIterator",
    "PlanSampler",
    "Planner",
    "Policy",
    "RandomBatchSampler",
    "Units",
    "Window",
]
