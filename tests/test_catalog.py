"""Named models have the numbers of parameters that were published."""

import math

import jax
import pytest

from mrl_jax.model import catalog, transformer

# In millions, from the models' own cards, to the digits that they give.
PUBLISHED = {
  "qwen3-0.6b": (596.0, 0.1),
  "qwen3-1.7b": (1720.6, 0.1),
  "qwen3-4b": (4022, 1),
  "qwen3-8b": (8191, 1),
  "qwen3-14b": (14768, 1),
  "qwen3-32b": (32762, 1),
  "qwen2.5-0.5b": (494.0, 0.1),
  "qwen2.5-1.5b": (1543.7, 0.1),
  "qwen2.5-3b": (3086, 1),
  "qwen2.5-7b": (7616, 1),
  "qwen2.5-14b": (14770, 1),
  "qwen2.5-32b": (32764, 1),
  "qwen2.5-72b": (72706, 1),
  "llama-3.2-1b": (1235.8, 0.1),
  "llama-3.2-3b": (3212.7, 0.1),
  "llama-3.1-8b": (8030, 1),
  "llama-3.1-70b": (70554, 1),
  "llama-3.3-70b": (70554, 1),
  "smollm2-135m": (134.5, 0.1),
  "smollm2-360m": (361.8, 0.1),
  "smollm2-1.7b": (1711.4, 0.1),
  "mistral-7b-v0.1": (7242, 1),
  "mistral-7b-v0.3": (7248, 1),
}


def test_every_model_is_checked():
  assert set(PUBLISHED) == set(catalog.names())


@pytest.mark.parametrize("name", catalog.names())
def test_parameters_are_as_published(name):
  model = transformer.make(catalog.get(name))
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  count = sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))
  millions, digits = PUBLISHED[name]
  assert abs(count / 1e6 - millions) <= digits


def test_an_unknown_name_is_told_with_the_known_ones():
  with pytest.raises(ValueError, match=r"'qwen9'; allowed: qwen3-0\.6b"):
    catalog.get("qwen9")
