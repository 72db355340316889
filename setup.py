"""Packaging of loongforge; the version and the extras live here and nowhere else."""

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
    "dev": ["hypothesis>=6.100", "mypy>=1.10", "pytest>=8.0", "pytest-timeout>=2.3", "pytest-xdist>=3.5", "ruff>=0.5"],
}
EXTRAS["train"] += EXTRAS["megatron"]
# Transformer Engine builds from source and has to be asked for by name.
EXTRAS["all"] = [*EXTRAS["triton"], *EXTRAS["flydsl"], *EXTRAS["train"], *EXTRAS["plot"]]

readme = Path(__file__).with_name("README.md")
setup(
    name="loongforge",
    version="0.1.0",
    description="The fused output layer of language models: cross entropy of hidden @ weight.T without the logits",
    long_description=readme.read_text(encoding="utf-8") if readme.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["loongforge", "loongforge.*"]),
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
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
