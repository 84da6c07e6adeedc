"""Recipes: every name the flags allow gives a finite, measured objective."""

import itertools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mrl_jax import compose, losses, recipes
from mrl_jax import config as config_lib
from mrl_jax.transforms import advantages, clipping, weights
from tests import factories

PAIRS = [
  *itertools.product(config_lib.LOSSES, config_lib.REDUCTIONS, ["none"]),
  *itertools.product(
    ["policy_gradient"], ["token_mean"], config_lib.CORRECTIONS
  ),
]


def made(**flags):
  config = config_lib.Config(workdir="w", policies=("p",), **flags)
  return recipes.from_config(config, 0)


def batch():
  rows = factories.batch(rows=8, steps=6, samples=4, seed=3)
  return rows._replace(
    rewards=jnp.asarray([1, 0, 0, 1, 0, 0, 0, 1], jnp.float32),
    old_logprobs=rows.behavior_logprobs + 0.1 * rows.weights,
    ref_logprobs=rows.behavior_logprobs - 0.1 * rows.weights,
  )


@pytest.mark.parametrize(("loss", "reduction", "correction"), PAIRS)
def test_every_named_combination_is_finite(loss, reduction, correction):
  recipe = made(loss=(loss,), reduction=reduction, correction=correction)
  rows = recipe.prepare(batch())
  scores = factories.scores(rows)
  value, grads = jax.value_and_grad(losses.objective(recipe.loss))(scores, rows)
  assert np.isfinite(value)
  assert np.isfinite(grads.logprobs).all()
  assert recipe.rescore == (correction != "none")
  if correction == "none" and reduction != "constant_mean":
    assert float(rows.weights.sum()) == pytest.approx(1, abs=1e-6)


def test_the_denominator_is_where_the_correction_stands():
  """Dropped tokens count in the mean (`original`) or do not (`kept`)."""
  rows = batch()
  ratios = jnp.where(rows.group[:, None] == 0, 5.0, 0.0) * rows.weights
  rows = rows._replace(old_logprobs=rows.behavior_logprobs + ratios)
  flags = {"correction": "mis_token", "correction_denominator": "kept"}
  kept = made(**flags).prepare(rows).weights.sum()
  original = made(correction="mis_token").prepare(rows).weights.sum()
  share = rows.weights[4:].sum() / rows.weights.sum()
  assert float(kept) == pytest.approx(1, abs=1e-6)
  assert float(original) == pytest.approx(float(share), abs=1e-6)


def test_dr_grpo_does_not_divide_by_the_deviation():
  found = made(recipe=("dr_grpo",)).prepare(batch()).advantages[:4]
  np.testing.assert_allclose(found, [0.5, -0.5, -0.5, 0.5], atol=1e-6)


def test_terms_add_with_their_coefficients():
  plain, rows = made(), batch()
  both = made(kl_coefficient=0.1, kl="k2", entropy_coefficient=0.01)
  rows = plain.prepare(rows)
  scores = factories.scores(rows)
  value = losses.objective(plain.loss)(scores, rows)
  mask = rows.weights != 0
  change = jnp.where(mask, scores.logprobs - rows.ref_logprobs, 0.0)
  extra = 0.1 * change**2 / 2 - 0.01 * scores.entropies
  wanted = value + jnp.where(mask, rows.weights * extra, 0.0).sum()
  found = losses.objective(both.loss)(scores, rows)
  assert float(found) == pytest.approx(float(wanted), abs=1e-5)


def test_rescoring_makes_the_trainers_log_probs_the_behaviors():
  rows = made(rescore=True).prepare(batch())
  np.testing.assert_array_equal(rows.behavior_logprobs, rows.old_logprobs)


def test_the_readmes_recipe_runs():
  text = (pathlib.Path(__file__).parent.parent / "README.md").read_text()
  code = re.search(r"```python\n(.*?)```", text, re.S).group(1)
  names = {
    "Recipe": recipes.Recipe,
    "chain": compose.chain,
    "advantages": advantages,
    "clipping": clipping,
    "weights": weights,
    "losses": losses,
  }
  exec(code, names)
  rows = names["grpo"].prepare(batch())
  value = losses.objective(names["grpo"].loss)(factories.scores(rows), rows)
  assert np.isfinite(value)
