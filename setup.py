from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="torch_xla_ckpt",
    version="0.1.0",
    description="Checkpoints for PyTorch/XLA SPMD on top of torch.distributed.checkpoint",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="BSD-3-Clause",
    packages=find_packages(include=["torch_xla_ckpt", "torch_xla_ckpt.*"]),
    package_data={"torch_xla_ckpt": ["py.typed"]},
    python_requires=">=3.10",
    # Reading checkpoints works with any torch from 2.9 on. torch_xla declares no torch of its own but loads only
    # beside the torch it was built for, so the extra that brings it pins both.
    install_requires=["torch>=2.9", "numpy", "xxhash>=3.0", "fsspec>=2023.6"],
    extras_require={
        "xla": ["torch==2.9.*", "torch_xla==2.9.*"],
        "cli": ["click>=8.1", "rich>=13", "matplotlib>=3.8"],
        "lightning": ["lightning==2.6.*"],
        "progress": ["tqdm>=4.60"],
        "demo": ["transformers>=4.50,<5", "click>=8.1", "rich>=13", "matplotlib>=3.8"],
        "test": [
            *("pytest>=9", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "hypothesis>=6.100"),
            *("ruff==0.17.*", "mypy==2.4.*", "import-linter>=2.5"),
            *("click>=8.1", "rich>=13", "matplotlib>=3.8", "safetensors>=0.4", "lightning==2.6.*"),
            *("moto[server]>=5", "s3fs>=2024.6", "tqdm>=4.60", "torchdata>=0.11"),
        ],
    },
    entry_points={"console_scripts": ["xc = torch_xla_ckpt.cli:main"]},
    classifiers=[
        "License :: OSI Approved :: BSD License",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Typing :: Typed",
    ],
)
