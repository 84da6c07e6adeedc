"""Token losses and divergences as functions of log-ratios.

A log-ratio is the log-prob under the policy being trained minus that under
whoever sampled the token. It is bounded before `exp` and never after: the
gradient of a clamped overflow is still infinity times zero. Callers set
log-ratios of tokens that do not count to 0 before they come here.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

BOUND = 20.0  # e^20 is 5e8: no policy update lives out there


def ratios(
  log_ratios: Float[Array, "*shape"], bound: float = BOUND
) -> Float[Array, "*shape"]:
  """exp(clip(log r, -bound, bound)); no gradient beyond the bound."""
  return jnp.exp(jnp.clip(log_ratios, -bound, bound))


def clipped(
  log_ratios: Float[Array, "B T"],
  advantages: Float[Array, "B T"],
  clip_low: Float[Array, "B"],
  clip_high: Float[Array, "B"],
  dual_clip: float | None = None,
  bound: float = BOUND,
) -> Float[Array, "B T"]:
  """PPO's clipped surrogate as a loss, with a window per row.

  l = -min(r A, clip(r, 1 - low, 1 + high) A);  where A < 0: l <= -c A, with
  c = `dual_clip`. Where both sides are equal the unclipped one has the
  gradient, so at r = 1 it is REINFORCE's for any window.

  Schulman et al. 2017, https://arxiv.org/abs/1707.06347, equation 7; Ye et
  al. 2020 (dual clip), https://arxiv.org/abs/1912.09729, equation 5; Yu et
  al. 2025 (asymmetric window), https://arxiv.org/abs/2503.14476.
  """
  r = ratios(log_ratios, bound)
  plain = r * advantages
  inside = jnp.clip(r, 1 - clip_low[:, None], 1 + clip_high[:, None])
  limited = inside * advantages
  # A comparison with nan is false: an unset window has to reach the loss.
  loss = -jnp.where(plain <= limited, plain, limited)
  if dual_clip is None:
    return loss
  most = -dual_clip * advantages
  return jnp.where((advantages < 0) & (loss > most), most, loss)


def sequence_log_ratios(
  log_ratios: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
  """The row's mean log-ratio at every token, with the token's own gradient.

  log s_t = sg(mean_{masked u} log r_u) + log r_t - sg(log r_t)

  Zheng et al. 2025 (GSPO-token), https://arxiv.org/abs/2507.18071,
  equations 7 and 14.
  """
  kept = jnp.where(mask, log_ratios, 0.0)
  counts = jnp.maximum(mask.sum(-1, keepdims=True), 1)
  means = jax.lax.stop_gradient(kept.sum(-1, keepdims=True) / counts)
  return means + kept - jax.lax.stop_gradient(kept)


def cispo(
  logprobs: Float[Array, "B T"],
  log_ratios: Float[Array, "B T"],
  advantages: Float[Array, "B T"],
  clip_low: Float[Array, "B"],
  clip_high: Float[Array, "B"],
) -> Float[Array, "B T"]:
  """Clips the importance weight and keeps every token's gradient.

  l = -sg(clip(r, 1 - low, 1 + high)) A log p

  MiniMax 2025, https://arxiv.org/abs/2506.13585, equation 4.
  """
  r = ratios(log_ratios)
  inside = jnp.clip(r, 1 - clip_low[:, None], 1 + clip_high[:, None])
  return -jax.lax.stop_gradient(inside) * advantages * logprobs


def reinforce(
  logprobs: Float[Array, "B T"], advantages: Float[Array, "B T"]
) -> Float[Array, "B T"]:
  """l = -A log p.

  Williams 1992, https://doi.org/10.1007/BF00992696.
  """
  return -advantages * logprobs


def k1(
  logprobs: Float[Array, "B T"], ref_logprobs: Float[Array, "B T"]
) -> Float[Array, "B T"]:
  """Log-ratio estimate of KL(policy || reference), with a usable gradient.

  value d = log p - log p_ref; gradient that of d^2 / 2. Differentiating d
  itself gives the score function, whose mean is 0 whatever the reference;
  d times the score function has the KL's gradient as its mean.

  Schulman 2020, http://joschu.net/blog/kl-approx.html.
  """
  d = _difference(logprobs, ref_logprobs)
  half = d * d / 2
  return jax.lax.stop_gradient(d - half) + half


def k2(
  logprobs: Float[Array, "B T"], ref_logprobs: Float[Array, "B T"]
) -> Float[Array, "B T"]:
  """Squared log-ratio estimate of KL(policy || reference): d^2 / 2.

  Schulman 2020, http://joschu.net/blog/kl-approx.html.
  """
  d = _difference(logprobs, ref_logprobs)
  return d * d / 2


def k3(
  logprobs: Float[Array, "B T"], ref_logprobs: Float[Array, "B T"]
) -> Float[Array, "B T"]:
  """Unbiased, non-negative estimate of KL(policy || reference).

  exp(-d) - 1 + d with d = log p - log p_ref, bounded before exp.

  Schulman 2020, http://joschu.net/blog/kl-approx.html.
  """
  d = _difference(logprobs, ref_logprobs)
  return jnp.expm1(-d) + d


def _difference(logprobs, ref_logprobs):
  return jnp.clip(logprobs - ref_logprobs, -BOUND, BOUND)
