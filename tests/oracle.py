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


def advantages(
  rewards, group, valid, ddof=1, eps=1e-6, normalize=True, degenerate=1e-6
):
  """GRPO's advantages, group by group."""
  out = np.zeros(len(rewards))
  for g in set(group):
    index = [i for i in range(len(rewards)) if group[i] == g and valid[i]]
    x = np.asarray([rewards[i] for i in index], np.float64)
    if len(x) == 0 or x.max() - x.min() <= degenerate:
      continue
    centered = x - x.mean()
    if normalize:
      centered = centered / (
        np.sqrt((centered**2).sum() / (len(x) - ddof)) + eps
      )
    out[index] = centered
  return out


def clipped(log_ratios, advantages_, low, high, dual_clip=None):
  """The clipped surrogate, token by token."""
  out = np.zeros(log_ratios.shape)
  for b, t in np.ndindex(*out.shape):
    r, a = np.exp(np.float64(log_ratios[b, t])), np.float64(advantages_[b, t])
    inside = min(max(r, 1 - low[b]), 1 + high[b])
    out[b, t] = -min(r * a, inside * a)
    if dual_clip is not None and a < 0:
      out[b, t] = min(out[b, t], -dual_clip * a)
  return out


def m2po(log_ratios, mask, limit):
  """Drops the largest squares one by one until the mean is in the limit."""
  squares = np.asarray(log_ratios, np.float64) ** 2
  keep = np.array(mask)
  while keep.any() and squares[keep].mean() > limit:
    keep &= squares < squares[keep].max()
  return keep


def mixed_advantages(own, peers, mix=None, ddof=1, eps=1e-6):
  """XGRPO's advantages of one group, each peer's reward counted k times."""
  own, peers = np.asarray(own, np.float64), np.asarray(peers, np.float64)
  if len(peers) == 0:
    mix = 0.0
  elif mix is None:
    mix = len(peers) / (len(own) + len(peers))
  every = np.concatenate([own, peers]) if mix else own
  if every.max() - every.min() <= 1e-6:
    return np.zeros(len(own))
  shares = [np.full(len(own), (1 - mix) / len(own))]
  if len(peers):
    shares.append(np.full(len(peers), mix / len(peers)))
  values, shares = np.concatenate([own, peers]), np.concatenate(shares)
  baseline = (shares * values).sum()
  variance = (shares * (values - baseline) ** 2).sum()
  if mix < 1:
    n = len(own) / (1 - mix)
    variance *= n / (n - ddof)
  return (own - baseline) / (np.sqrt(variance) + eps)


def novelty(rows, pool, memory, warm):
  """Distances to the nearest of memory and pooled siblings, one by one."""
  rows = [np.asarray(row, np.float64) for row in rows]
  if len(memory) < warm:
    return [0.0] * len(rows)
  found = []
  for i, row in enumerate(rows):
    others = [r for j, r in enumerate(rows) if j != i and pool[j]]
    near = [float(row @ np.asarray(o, np.float64)) for o in (*others, *memory)]
    found.append(max(0.0, 1.0 - max(near)) if near else 0.0)
  return found


def smooth(rows, values, temperature):
  """A softmax-weighted mean of values for each row, term by term."""
  found = []
  for row in np.asarray(rows, np.float64):
    weights = [
      np.exp(float(row @ np.asarray(o, np.float64)) / temperature) for o in rows
    ]
    total = sum(w * float(v) for w, v in zip(weights, values, strict=True))
    found.append(total / sum(weights))
  return found


def return_to_go(
  rewards,
  earned,
  lengths,
  group,
  ddof=1,
  eps=1e-6,
  normalize=True,
  against="return",
):
  """What is still to come at each token, against the group, row by row."""
  out = np.zeros(np.shape(earned))
  earned = np.asarray(earned, np.float64)
  for g in set(group):
    index = [
      i
      for i in range(len(rewards))
      if group[i] == g and np.isfinite(rewards[i])
    ]
    x = np.asarray([rewards[i] for i in index], np.float64)
    if len(x) == 0 or x.max() - x.min() <= 1e-6:
      continue
    scale = np.sqrt(((x - x.mean()) ** 2).sum() / (len(x) - ddof)) + eps
    for i in index:
      for t in range(lengths[i]):
        to_go = rewards[i] - sum(earned[i, :t])
        rest = [rewards[j] for j in index]
        if against == "to_go":
          rest = [
            rewards[j] - sum(earned[j, : min(t, lengths[j] - 1)]) for j in index
          ]
        out[i, t] = (to_go - np.mean(rest)) / (scale if normalize else 1)
  return out
