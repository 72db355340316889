"""``import loongforge.megatron.auto`` as the one added line of a Megatron script: hooks and says so, or raises."""

from loongforge.megatron.start import install_and_say

report = install_and_say()
