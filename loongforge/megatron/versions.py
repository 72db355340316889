"""Which megatron-core this is, and whether the hook knows it."""

from __future__ import annotations

import re

OLDEST = (0, 16, 0)
NEWEST_EXCLUSIVE = (0, 20, 0)


def megatron_version() -> str:
    """Version text of the installed megatron-core; ``ImportError`` with cause and extra where that fails."""
    try:
        import megatron.core
    except ImportError as error:
        raise ImportError(
            f"loongforge.megatron needs megatron-core, which cannot be imported ({error}): "
            "pip install 'loongforge[megatron]' brings what is missing"
        ) from error
    return megatron.core.__version__


def check_supported(version: str) -> None:
    """Raise ``RuntimeError`` unless the hook was tested on this megatron-core."""
    numbers = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    if numbers is None or not OLDEST <= tuple(int(number or 0) for number in numbers.groups()) < NEWEST_EXCLUSIVE:
        oldest, newest = (".".join(map(str, numbers)) for numbers in (OLDEST, NEWEST_EXCLUSIVE))
        raise RuntimeError(
            f"loongforge.megatron knows megatron-core from {oldest} up to, but not including, {newest}; "
            f"this is {version}: install one of those, or leave cross_entropy_fusion_impl='linear' out"
        )
