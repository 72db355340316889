"""Row kernels for AMD GPUs in FlyDSL (Apache-2.0, https://github.com/ROCm/FlyDSL).

One workgroup sweeps one row with 128-bit buffer accesses whatever the row's alignment, several loads in flight per
thread.  A kernel is compiled once per (architecture, dtype, static options) and serves every T, C and stride.
``docs/amd_kernels.md`` shows what the machine code looks like.

flydsl is imported when the first kernel is compiled; importing this module needs torch only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from loongforge.arch import Arch, detect
from loongforge.kernels.flydsl.compile import launcher
from loongforge.kernels.flydsl.variant import DTYPES, TARGETS, Variant
from loongforge.kernels.interface import Chunk, LogitTransform, RowCoefficients, RowStats

MAX_ROW_BYTES = 1 << 31  # offsets inside a row are 32-bit


class FlyDSLRowKernels:
    """:class:`loongforge.kernels.interface.RowKernels` in FlyDSL for bfloat16, float16 and float32 logits.

    Raises ``NotImplementedError`` by name for a dtype or an architecture that the kernels lack.
    """

    name = "flydsl"

    def accumulate(self, logits_TC: torch.Tensor, chunk: Chunk, stats: RowStats) -> None:
        tensors = (stats.max_T, stats.sum_exp_T, stats.label_logit_T, stats.weighted_sum_T)
        self._run("accumulate", logits_TC, chunk, tensors)

    def gradient_(self, logits_TC: torch.Tensor, chunk: Chunk, coefficients: RowCoefficients) -> None:
        tensors = (coefficients.max_T, coefficients.softmax_over_sum_T, coefficients.onehot_T, coefficients.uniform_T)
        self._run("gradient", logits_TC, chunk, tensors)

    def prepare(
        self,
        device: torch.device,
        dtype: torch.dtype,
        transform: LogitTransform,
        uniform: bool,
        class_weighted: bool,
    ) -> None:
        """Compile both kernels for these options ahead of their first use, without launching anything."""
        for kernel in ("accumulate", "gradient"):
            self._launcher(self._variant(kernel, device, dtype, transform, uniform, class_weighted))

    def _run(
        self, kernel: str, logits_TC: torch.Tensor, chunk: Chunk, per_token: Sequence[torch.Tensor | None]
    ) -> None:
        num_rows, num_classes = logits_TC.shape
        if num_rows == 0 or num_classes == 0:
            return
        uniform = per_token[-1] is not None
        class_weighted = uniform and chunk.class_weight_C is not None
        variant = self._variant(kernel, logits_TC.device, logits_TC.dtype, chunk.transform, uniform, class_weighted)
        _check_layout(logits_TC, chunk, per_token)
        tensors = (logits_TC, chunk.label_T, *per_token, chunk.class_weight_C if class_weighted else None)
        scale, softcap = chunk.transform.logit_scale, chunk.transform.softcap or 1.0
        numbers = (logits_TC.stride(0), num_classes, chunk.first_class, scale, softcap, 1 / softcap, num_rows)
        self._launch(self._launcher(variant), logits_TC.device, tensors, numbers)

    def _variant(
        self,
        kernel: str,
        device: torch.device,
        dtype: torch.dtype,
        transform: LogitTransform,
        uniform: bool,
        class_weighted: bool,
    ) -> Variant:
        arch = self._arch(device)
        if arch.name not in TARGETS:
            raise NotImplementedError(f"the flydsl row kernels exist for {', '.join(TARGETS)}; the device is {arch}")
        name = str(dtype).removeprefix("torch.")
        if name not in DTYPES:
            raise NotImplementedError(f"the flydsl row kernels take logits in {', '.join(DTYPES)}, got {name}")
        scaled, capped = transform.logit_scale != 1.0, transform.softcap is not None
        return Variant(kernel, arch.name, name, scaled, capped, uniform, class_weighted)

    def _arch(self, device: torch.device) -> Arch:
        return detect(device)

    def _launcher(self, variant: Variant) -> Callable[..., None]:
        return launcher(variant)

    def _launch(
        self,
        launch: Callable[..., None],
        device: torch.device,
        tensors: Sequence[torch.Tensor | None],
        numbers: Sequence[float],
    ) -> None:
        """Launch on the current stream of ``device``, which need not be the current device."""
        with torch.cuda.device(device):
            launch(*addresses(tensors), *numbers, torch.cuda.current_stream(device).cuda_stream)


def addresses(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    """Device addresses of tensors; 0 for None, which the kernel's variant never reads."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def _check_layout(logits_TC: torch.Tensor, chunk: Chunk, per_token: Sequence[torch.Tensor | None]) -> None:
    """The kernels get bare addresses: what would read or write the wrong memory is refused here."""
    num_rows, num_classes = logits_TC.shape
    if num_classes > 1 and logits_TC.stride(1) != 1:
        raise ValueError(f"logits must have unit stride along the classes, got strides {logits_TC.stride()}")
    if num_classes * logits_TC.element_size() >= MAX_ROW_BYTES:
        raise ValueError(f"a row of logits must be smaller than 2 GiB, got {num_classes} of {logits_TC.dtype}")
    expected = [
        ("label", chunk.label_T, torch.int64, num_rows),
        ("class_weight", chunk.class_weight_C, torch.float32, num_classes),
        *(("per-token tensors", tensor, torch.float32, num_rows) for tensor in per_token),
    ]
    for name, tensor, dtype, length in expected:
        if tensor is None:
            continue
        if tensor.shape != (length,) or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous, of shape ({length},) and {dtype}, "
                f"got shape {tuple(tensor.shape)}, strides {tensor.stride()} and {tensor.dtype}"
            )
        if tensor.device != logits_TC.device:
            raise ValueError(f"{name} must be on {logits_TC.device} like the logits, got {tensor.device}")
