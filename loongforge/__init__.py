"""loongforge: the output layer and its cross-entropy as one operation that never holds the logits."""

from loongforge.cross_entropy import cross_entropy
from loongforge.loss import LinearCrossEntropy, linear_cross_entropy
from loongforge.options import LossOptions

__version__ = "0.1.0"
__all__ = ["LinearCrossEntropy", "LossOptions", "cross_entropy", "linear_cross_entropy"]
