"""The rows that the hook is tested on, and which of them the fast tier keeps."""

from __future__ import annotations

from dataclasses import dataclass, fields

INSTALLED = "0.16.1"
UNPACKED = ("0.17.1", "0.18.2", "0.19.2")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One layout; every field that is not at its default appears in the name."""

    model: str = "gpt"  # or "hybrid": MambaModel up to 0.17, HybridModel after
    tied: bool = False
    tp: int = 1
    sp: bool = False
    pp: int = 1
    vpp: int = 1  # model chunks of each pipeline stage
    cp: int = 1  # a hybrid model of MLP layers: attention over several ranks needs Transformer Engine
    dp: int = 1
    ep: int = 1  # of the dp ranks
    experts: int = 0
    overlap: bool = False  # the schedule that runs experts' communication beside other micro batches' layers
    mtp: int = 0
    detach: bool = False  # MTP heads do not train the output layer
    mup: bool = False
    bf16: bool = False
    fp16: bool = False  # with a loss scale
    low_grads: bool = False  # main_grad in the dtype of the weights
    dist_opt: bool = False  # distributed optimizer with overlapped gather and reduce
    per_token: bool = False
    accumulation_fusion: bool = False
    recompute: bool = False  # activations of every layer

    @property
    def world(self) -> int:
        """Processes this row needs."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def low(self) -> bool:
        """Whether it trains in less than fp32."""
        return self.bf16 or self.fp16

    @property
    def name(self) -> str:
        """Such as ``gpt-tied-tp2``."""
        parts = [self.model]
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value != field.default:
                parts.append(field.name if value is True else f"{field.name}{value}")
        return "-".join(parts)


def full(version: str) -> list[Row]:
    """Every row that this version has the parts for."""
    rows = [Row(tied=tied, **layout) for tied in (False, True) for layout in _LAYOUTS]
    rows += [Row(model="hybrid", tied=number % 2 == 1, **layout) for number, layout in enumerate(_LAYOUTS)]
    rows += [Row(tied=tied, mtp=2, **layout) for tied in (False, True) for layout in _MTP_LAYOUTS]
    rows += [Row(tied=tied, **layout) for tied in (False, True) for layout in _GPT_LAYOUTS]
    if version == "0.16.1":  # its router needs Transformer Engine
        rows = [row for row in rows if not row.experts]
    rows += [Row(model="hybrid", cp=2), Row(model="hybrid", cp=2, tied=True, per_token=True)]
    if version != "0.16.1":  # muP and the hybrid model's MTP came with 0.17
        rows += [Row(model=model, tied=tied, mup=True) for model in ("gpt", "hybrid") for tied in (False, True)]
        rows += [Row(mup=True, mtp=1), Row(mup=True, bf16=True, tp=2, sp=True)]
        rows += [Row(model="hybrid", mtp=2), Row(model="hybrid", tied=True, mtp=1, tp=2, sp=True)]
    if version == "0.19.2":
        rows += [Row(tied=tied, mtp=1, detach=True, accumulation_fusion=tied) for tied in (False, True)]
    return rows


def fast(version: str) -> list[Row]:
    """At least one row of each kind over all versions together, few of each version."""
    return _FAST[version]


_LAYOUTS = (
    {},
    {"bf16": True},
    {"fp16": True},
    {"bf16": True, "low_grads": True},
    {"bf16": True, "low_grads": True, "accumulation_fusion": True},
    {"per_token": True},
    {"dist_opt": True},
    {"accumulation_fusion": True},
    {"tp": 2},
    {"tp": 2, "sp": True},
    {"tp": 2, "sp": True, "bf16": True, "dist_opt": True},
    {"tp": 2, "sp": True, "accumulation_fusion": True},
    {"pp": 2},
    {"pp": 2, "accumulation_fusion": True},
    {"dp": 2, "dist_opt": True},
    {"dp": 2, "dist_opt": True, "accumulation_fusion": True, "per_token": True},
)
_GPT_LAYOUTS = (
    {"recompute": True},
    {"pp": 2, "vpp": 2},
    {"pp": 2, "vpp": 2, "mtp": 1},
    {"experts": 4},
    {"experts": 4, "dp": 2, "ep": 2, "dist_opt": True},
    {"experts": 4, "dp": 2, "ep": 2, "bf16": True, "overlap": True},
)
_MTP_LAYOUTS = (
    {},
    {"bf16": True},
    {"accumulation_fusion": True},
    {"per_token": True, "dist_opt": True},
    {"tp": 2, "sp": True},
    {"pp": 2},
)
_FAST = {
    "0.16.1": [
        Row(tied=True, accumulation_fusion=True),
        Row(mtp=1, bf16=True),
        Row(model="hybrid", tied=True),
        Row(tp=2, sp=True, bf16=True, dist_opt=True),
        Row(pp=2, tied=True),
        Row(pp=2, vpp=2, tied=True),
        Row(recompute=True),
    ],
    "0.17.1": [Row(mup=True, tied=True), Row(model="hybrid", per_token=True)],
    "0.18.2": [
        Row(fp16=True),
        Row(bf16=True, low_grads=True, accumulation_fusion=True),
        Row(model="hybrid", mtp=1, dist_opt=True),
        Row(tied=True, mtp=1, accumulation_fusion=True),
    ],
    "0.19.2": [
        Row(mup=True, mtp=1),
        Row(mtp=1, detach=True),
        Row(model="hybrid", bf16=True),
        Row(tp=2, sp=True, tied=True, mtp=1),
        Row(model="hybrid", tp=2),
        Row(dp=2, dist_opt=True, accumulation_fusion=True),
        Row(experts=4, dp=2, ep=2),
        Row(experts=4, dp=2, ep=2, bf16=True, overlap=True),
        Row(model="hybrid", cp=2, per_token=True),
    ],
}
