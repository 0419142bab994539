"""One slot with a thinking budget, as a plain loop over its tokens."""


def play(rule, budget, policy_tokens):
  """Plays a rollout; returns its tokens as (token, is_forced) and its end.

  Args:
    rule: The `Interruption`.
    budget: The thinking budget that was drawn.
    policy_tokens: What the policy would sample, in order.

  Returns:
    (tokens, whether the answer budget ran out).
  """
  end_ids = rule.end_ids or (rule.phrase_ids[-1:],)
  samples = iter(policy_tokens)
  out, thinking = [], 0
  while thinking < budget:
    token = next(samples, None)
    if token is None:
      return out, False
    out.append((token, False))
    thinking += 1
    latest = [t for t, _ in out[-len(end_ids) :]]
    if len(latest) == len(end_ids) and all(
      t in ids for t, ids in zip(latest, end_ids, strict=True)
    ):
      break
  else:
    out += [(token, True) for token in rule.phrase_ids]
  for _ in range(rule.answer_tokens):
    token = next(samples, None)
    if token is None:
      return out, False
    out.append((token, False))
  return out, True
