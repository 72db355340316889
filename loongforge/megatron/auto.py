"""``import loongforge.megatron.auto`` as the one added line of a Megatron script: installs the hook, or raises."""

from loongforge.megatron.hook import install

report = install()
