"""The reference consumer of a dispatcher: an MoE layer and the experts behind it, as ordinary `torch.nn` modules."""

from .experts import GroupedExperts
from .moe import MoE, MoEResult

__all__ = ["GroupedExperts", "MoE", "MoEResult"]
