"""Packaging of loongforge.  The extras live here and nowhere else; the version lives in ``loongforge/__init__.py``."""

import re
from pathlib import Path

from setuptools import find_packages, setup

EXTRAS = {
    # megatron-core 0.16.1 is the newest for Python 3.11, 0.17 and newer need 3.12; saving a checkpoint needs psutil.
    "megatron": ["megatron-core>=0.16.1,<0.20", "psutil>=5.9"],
    "triton": ["triton>=3.4; platform_system == 'Linux'"],
    "flydsl": ["flydsl>=0.5; platform_system == 'Linux' and platform_machine == 'x86_64'"],
    "te": ["transformer-engine[pytorch]>=2.0"],
    "train": ["pyyaml>=6.0", "tensorboard>=2.15", "tokenizers>=0.19", "tqdm>=4.65"],
    "plot": ["matplotlib>=3.8"],
    "transformers": ["accelerate>=1.0", "peft>=0.17", "transformers>=4.57"],
    "docs": ["latex2mathml>=3.77", "mkdocs-material>=9.5", "mkdocstrings[python]>=0.27"],
    "dev": [
        "build>=1.0",
        "hypothesis>=6.100",
        "mypy>=1.10",
        "pytest>=8.0",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.5",
        "ruff>=0.5",
    ],
}
EXTRAS["train"] += EXTRAS["megatron"]
# Transformer Engine builds from source and has to be asked for by name.
EXTRAS["all"] = [*EXTRAS["triton"], *EXTRAS["flydsl"], *EXTRAS["train"], *EXTRAS["plot"]]

root = Path(__file__).parent
# Read, not imported: building needs no torch.
(version,) = re.findall(r'^__version__ = "(.+)"$', (root / "loongforge/__init__.py").read_text("utf-8"), re.MULTILINE)
setup(
    name="loongforge",
    version=version,
    description="The fused output layer of language models: cross entropy of hidden @ weight.T without the logits",
    long_description=(root / "README.md").read_text("utf-8"),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["loongforge", "loongforge.*"]),
    package_data={"loongforge": ["py.typed"]},
    python_requires=">=3.10",
    install_requires=["torch>=2.6", "numpy>=1.24"],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["loongforge = loongforge.cli:main"]},
    classifiers=[
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Typing :: Typed",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
