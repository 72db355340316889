"""loongforge: the output layer and its cross-entropy as one operation that never holds the logits."""

from loongforge.cross_entropy import cross_entropy
from loongforge.loss import LinearCrossEntropy, linear_cross_entropy
from loongforge.options import LossOptions
from loongforge.outputs.distillation import linear_distillation
from loongforge.outputs.logprobs import LogProbs, linear_logprobs
from loongforge.outputs.teacher_head import TeacherHead
from loongforge.outputs.teacher_top_k import TeacherTopK
from loongforge.outputs.top_k import TopK, linear_top_k

__version__ = "0.1.0"
__all__ = [
    "LinearCrossEntropy",
    "LogProbs",
    "LossOptions",
    "TeacherHead",
    "TeacherTopK",
    "TopK",
    "cross_entropy",
    "linear_cross_entropy",
    "linear_distillation",
    "linear_logprobs",
    "linear_top_k",
]
