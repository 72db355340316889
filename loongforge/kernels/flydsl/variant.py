"""What a compiled kernel is specialised for.  T, C, strides and all numbers stay dynamic."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """Facts of an architecture that change the code."""

    wave: int
    bf16_instruction: bool  # v_cvt_pk_bf16_f32


TARGETS = {
    "gfx942": Target(wave=64, bf16_instruction=False),
    "gfx950": Target(wave=64, bf16_instruction=True),
    "gfx1100": Target(wave=32, bf16_instruction=False),
    "gfx1150": Target(wave=32, bf16_instruction=False),
    "gfx1151": Target(wave=32, bf16_instruction=False),
    "gfx1200": Target(wave=32, bf16_instruction=False),
    "gfx1201": Target(wave=32, bf16_instruction=False),
}
DTYPES = ("bfloat16", "float16", "float32")
KERNELS = ("accumulate", "gradient")


@dataclass(frozen=True)
class Variant:
    """One compiled kernel: the key of the cache."""

    kernel: str  # of KERNELS
    arch: str  # of TARGETS
    dtype: str  # of DTYPES
    scaled: bool = False  # logit_scale is not 1
    capped: bool = False  # there is a softcap
    uniform: bool = False  # there is a weighted sum, or a uniform coefficient
    class_weighted: bool = False  # with a weight per class

    @property
    def target(self) -> Target:
        return TARGETS[self.arch]

    @property
    def unroll(self) -> int:
        """128-bit loads in flight per thread, as many as leave every wave its registers."""
        most = 8 if self.kernel == "accumulate" and self.dtype == "float32" else 4
        return most // 2 if self.capped or self.class_weighted else most

    def __str__(self) -> str:
        flags = [name for name in ("scaled", "capped", "uniform", "class_weighted") if getattr(self, name)]
        return f"{self.kernel} kernel for {self.arch}, {self.dtype}" + (f" ({', '.join(flags)})" if flags else "")
