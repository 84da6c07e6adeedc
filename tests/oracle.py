"""Slow, obviously right answers in NumPy float64, one loop at a time."""

import numpy as np


def adjust(logits, allowed, temperature=1.0, top_k=0, top_p=1.0):
  """Log-probs of the sampling distribution of one position, -inf outside."""
  x = np.where(allowed, np.asarray(logits, np.float64) / temperature, -np.inf)
  order = np.argsort(-x, kind="stable")
  keep = np.zeros(len(x), bool)
  mass, total = 0.0, None
  count = top_k if 0 < top_k < len(x) else len(x)
  masses = np.exp(x - x.max())
  total = masses[order[:count]].sum()
  for v in order[:count]:
    if top_p < 1 and mass >= top_p * total * (1 - 1e-6):
      break
    keep[v] = True
    mass += masses[v]
  x = np.where(keep, x, -np.inf)
  return x - np.log(np.exp(x[keep] - x.max()).sum()) - x.max()


def score(hidden, unembedding, tokens, allowed, distribution):
  """Log-probs and entropies, the given token always in the support."""
  hidden = np.asarray(hidden, np.float64)
  unembedding = np.asarray(unembedding, np.float64)
  logprobs = np.zeros(tokens.shape)
  entropies = np.zeros(tokens.shape)
  for b in range(tokens.shape[0]):
    for t in range(tokens.shape[1]):
      logits = unembedding @ hidden[b, t]
      logp = adjust(logits, allowed, *distribution)
      chosen = tokens[b, t]
      scaled = logits / distribution.temperature
      scaled[(logp == -np.inf) & (np.arange(len(logp)) != chosen)] = -np.inf
      scaled -= scaled.max()
      scaled -= np.log(np.exp(scaled).sum())
      p = np.exp(scaled)
      logprobs[b, t] = scaled[chosen]
      entropies[b, t] = -(p[p > 0] * scaled[p > 0]).sum()
  return logprobs, entropies
