"""A slow float64 reference of distillation on k tokens, token by token, which imports nothing of the package."""

import math


def renormalised(logprobs):
    top = max(logprobs)
    total = top + math.log(math.fsum(math.exp(v - top) for v in logprobs))
    return [v - total for v in logprobs]


def topk_divergence(student, teacher, kind, mixed_kl_weight, whole_student=None):
    """Return the divergence at one token, from the log-probabilities of k tokens.

    `whole_student` is the student's distribution over the whole vocabulary; its probability outside the k tokens is
    compared with a teacher's probability of e^-100. If it is None, only the k tokens are compared."""
    q = renormalised(teacher)
    p = renormalised(student) if whole_student is None else student
    forward = math.fsum(math.exp(b) * (b - a) for a, b in zip(p, q, strict=True))
    reverse = math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))
    if whole_student is not None:
        inside = math.fsum(math.exp(a) for a in p)
        of_all = math.fsum(math.exp(a) * a for a in whole_student)
        of_inside = math.fsum(math.exp(a) * a for a in p)
        reverse += of_all - of_inside + 100.0 * (1 - inside)
    mixed = mixed_kl_weight * forward + (1 - mixed_kl_weight) * reverse
    return {"forward": forward, "reverse": reverse, "mixed": mixed}[kind]
