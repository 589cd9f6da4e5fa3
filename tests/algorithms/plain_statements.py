"""Formulas of docs/algorithms.md in plain Python: nested lists of sequences and tokens, loops, one line or one function for one formula.

A token is (i, t): sequence i, place t. `logp` is the policy as it is and has a gradient; `sg` is a copy of it that has none, so that the
gradient of a statement is what moving `logp` alone does to it. `s` are settings of `algorithm`, all of them, as in YAML.
"""

import math
from fractions import Fraction


def clamp(x, low, high):
    x = x if low is None else max(x, low)
    return x if high is None else min(x, high)


def exp(x):
    return math.exp(clamp(x, -20, 20))


def mean(xs):
    """Exact, rounded once: equal numbers do not differ from their mean."""
    xs = list(xs)
    return float(sum(map(Fraction, xs)) / len(xs)) if xs else 0.0


def unbiased_variance(xs):
    m = mean(xs)
    return sum((x - m) ** 2 for x in xs) / (len(xs) - 1) if len(xs) > 1 else 0.0


def whitened(xs, counted=None):
    """Numbers of a dict, those with the keys `counted` (all) with mean 0 and variance 1."""
    known = [xs[key] for key in (xs if counted is None else counted)]
    m, variance = mean(known), unbiased_variance(known)
    return {key: (x - m) / math.sqrt(variance + 1e-8) if len(known) > 1 else 0.0 for key, x in xs.items()}


def response_tokens(mask):
    return [(i, t) for i, row in enumerate(mask) for t, is_response in enumerate(row) if is_response]


def of_sequence(i, tokens):
    return [token for token in tokens if token[0] == i]


class Columns:
    """What a step or a mini-batch brings, by the names below; None: not given. `owner` is the sample of each sequence."""

    STEP = ("mask", "owner", "rewards", "groups", "truncated", "max_response_tokens", "greedy", "old", "ref", "values", "process")
    BATCH = ("advantages", "mu", "entropy", "teacher", "rl_weights", "ce_weights", "kl_weights", "versions", "version")

    def __init__(self, **given):
        assert set(given) <= {*self.STEP, *self.BATCH}
        self.__dict__.update(dict.fromkeys((*self.STEP, *self.BATCH)) | given)

    def tokens_of(self, k):
        return [(i, t) for i, t in response_tokens(self.mask) if self.owner[i] == k]


# Estimates of the KL, and rewards before the advantages


def kl_value(kind, x, r):
    """Estimate from x = logp - ref."""
    k3 = min(exp(-x) + clamp(x, -20, 20) - 1, 10)
    return {"k1": x, "abs": abs(x), "k2": x**2 / 2, "k3": k3, "unbiased": k3 * r}[kind.rstrip("+")]


def kl_of_token(kind, x, sg_x, r):
    """The estimate with its gradient: with + that of k2."""
    return kl_value(kind, sg_x, r) + x**2 / 2 - sg_x**2 / 2 if kind.endswith("+") else kl_value(kind, x, r)


def kl_in_reward(s, step, i, t):
    """What is taken from the reward of a token: by old for logp, so r is 1."""
    return s["kl_coefficient"] * kl_value(s["kl_estimator"], step.old[i][t] - step.ref[i][t], 1.0) if s["kl_in"] == "reward" else 0.0


def overlong_penalty(s, step, k):
    length, begin = len(step.tokens_of(k)), step.max_response_tokens - s["overlong_buffer"]
    if step.truncated[k] or length >= step.max_response_tokens:
        return -1.0
    return 0.0 if length <= begin else -(length - begin) / s["overlong_buffer"]


def shaped_rewards(s, step):
    """Rewards of the samples that are trained on."""
    rewards = {k: reward for k, reward in enumerate(step.rewards) if not (s["overlong"] == "mask" and step.truncated[k])}
    if s["overlong"] == "penalty":
        rewards = {k: reward + overlong_penalty(s, step, k) for k, reward in rewards.items()}
    return whitened(rewards, [k for k in rewards if step.tokens_of(k)]) if s["whiten_rewards"] else rewards


def rewards_with_kl(s, step):
    """Rewards of samples, from which the sum of their tokens' KL is taken."""
    return {k: reward - sum(kl_in_reward(s, step, i, t) for i, t in step.tokens_of(k)) for k, reward in shaped_rewards(s, step).items()}


def token_rewards(s, step, k):
    """r of a sample: s at its last token, less the KL of every token."""
    tokens, reward = step.tokens_of(k), shaped_rewards(s, step)[k]
    return {(i, t): (reward if (i, t) == tokens[-1] else 0.0) - kl_in_reward(s, step, i, t) for i, t in tokens}


# Advantages


def group_of(step, rewards, k):
    return [j for j in rewards if step.groups[j] == step.groups[k]]


def centered(step, rewards, k):
    """s - mean_g"""
    group = group_of(step, rewards, k)
    return float(Fraction(rewards[k]) - sum(Fraction(rewards[j]) for j in group) / len(group))


def length_weighted_mean(step, rewards, group):
    T = {j: len(step.tokens_of(j)) for j in group}
    return sum(T[j] * rewards[j] for j in group) / sum(T.values()) if any(T.values()) else 0.0


def lead_of_best(rewards, group, k):
    best, second = sorted((rewards[j] for j in group), reverse=True)[:2]
    return best - second if rewards[k] == best else 0.0


def advantage_of_sample(a, step, rewards, k):
    """The kinds that give a sample one number. What compares samples of a group needs two."""
    group, c = group_of(step, rewards, k), centered(step, rewards, k)
    n, mean_g, std_g = len(group), mean(rewards[j] for j in group), math.sqrt(unbiased_variance([rewards[j] for j in group]))
    kinds = {
        "grpo": lambda: c / (std_g + 1e-6),
        "dr_grpo": lambda: c,
        "rloo": lambda: c * n / (n - 1),
        "opo": lambda: rewards[k] - length_weighted_mean(step, rewards, group),
        "gpg": lambda: gpg(step, rewards, c),
        "maxrl": lambda: c / mean_g if mean_g != 0 else 0.0,
        "passk": lambda: lead_of_best(rewards, group, k) / (std_g + 1e-6 if a["by_std"] else 1.0),
    }
    return kinds[a["kind"]]() if n > 1 else 0.0


def gpg(step, rewards, c):
    with_tokens = [j for j in rewards if step.tokens_of(j)]
    return c * len(with_tokens) / max(1, sum(centered(step, rewards, j) != 0 for j in with_tokens))


def by_token(kind, step, rewards):
    """An advantage of samples for their tokens."""
    return {token: advantage_of_sample(kind, step, rewards, k) for k in rewards for token in step.tokens_of(k)}


def rewards_to_come(gamma, s, step):
    """R_t = r_t + gamma R_(t+1)"""
    to_come = {}
    for k in shaped_rewards(s, step):
        after = 0.0
        for token, r in reversed(token_rewards(s, step, k).items()):
            after = to_come[token] = r + gamma * after
    return to_come


def gae(gamma, lam, s, step):
    """delta_t = r_t + gamma V_(t+1) - V_t, A_t = delta_t + gamma lam A_(t+1); not whitened."""
    A = {}
    for k in shaped_rewards(s, step):
        value_after, advantage_after = 0.0, 0.0
        for (i, t), r in reversed(token_rewards(s, step, k).items()):
            delta = r + gamma * value_after - step.values[i][t]
            A[i, t] = delta + gamma * lam * advantage_after
            value_after, advantage_after = step.values[i][t], A[i, t]
    return A


def process_to_come(beta, s, step):
    """x_t - mean over the others of g of their mean x, summed from t on. x is the token's reward, from which a KL is taken."""
    rewards, x, to_come = shaped_rewards(s, step), {}, {}
    for k in rewards:
        x[k] = {(i, t): beta * (step.process[i][t] - step.ref[i][t]) - kl_in_reward(s, step, i, t) for i, t in step.tokens_of(k)}
    for k in rewards:
        group, n, after = group_of(step, rewards, k), len(group_of(step, rewards, k)), 0.0
        for token in reversed(step.tokens_of(k)):
            if n > 1:
                after += x[k][token] - sum(mean(x[j].values()) for j in group if j != k) / (n - 1)
            to_come[token] = after
    return to_come


def advantages(s, step):
    """Advantage by token; return by token, which only gae has."""
    a = s["advantage"]
    if a["kind"] == "gae":
        A = gae(a["gamma"], a["lam"], s, step)
        return whitened(A), {(i, t): A[i, t] + step.values[i][t] for i, t in A}
    if a["kind"] == "reinforce_pp":
        return whitened(rewards_to_come(a["gamma"], s, step)), None
    if a["kind"] == "remax":
        return {(i, t): R - step.greedy[step.owner[i]] for (i, t), R in rewards_to_come(1.0, s, step).items()}, None
    if a["kind"] == "reinforce_pp_baseline":
        rewards = rewards_with_kl(s, step)
        A, present = whitened(by_token({"kind": "dr_grpo"}, step, rewards)), [step.groups[k] for k in rewards]
        return {(i, t): A[i, t] if present.count(step.groups[step.owner[i]]) > 1 else 0.0 for i, t in A}, None
    if a["kind"] == "prime":
        process, outcome = process_to_come(a["beta"], s, step), by_token({"kind": "rloo"}, step, shaped_rewards(s, step))
        return {token: process[token] + outcome[token] for token in process}, None
    return by_token(a, step, rewards_with_kl(s, step)), None


# Objectives


class Terms:
    """What objectives and corrections read, by token: of `tokens`, those that are in the mini-batch."""

    def __init__(self, b, tokens, logp, sg):
        self.tokens, self.A, self.logp, self.sg, self.old, self.mu = tokens, {}, {}, {}, {}, {}
        for i, t in tokens:
            self.A[i, t], self.logp[i, t], self.sg[i, t] = b.advantages[i][t], logp[i][t], sg[i][t]
            self.old[i, t] = sg[i][t] if b.old is None else b.old[i][t]
            if b.versions is not None:
                a = (b.version - b.versions[i][t]) / (b.version + 1 - b.versions[i][t])
                self.old[i, t] = b.mu[i][t] + a * (sg[i][t] - b.mu[i][t])
            self.mu[i, t] = self.old[i, t] if b.mu is None else b.mu[i][t]
        self.d = {k: self.logp[k] - self.old[k] for k in tokens}
        self.sg_d = {k: self.sg[k] - self.old[k] for k in tokens}
        self.log_rho = {k: self.old[k] - self.mu[k] for k in tokens}

    def sequence(self, column, k):
        return [column[other] for other in of_sequence(k[0], self.tokens)]


def clip(r, o):
    return clamp(r, None if o["clip_low"] is None else 1 - o["clip_low"], None if o["clip_high"] is None else 1 + o["clip_high"])


def ppo_clip(A, r, o):
    loss = max(-A * r, -A * clip(r, o))
    return min(-A * o["dual_clip"], loss) if o["dual_clip"] is not None and A < 0 else loss


def sequence_ratio(x, k):
    """exp(mean d) of the sequence; the gradient for a token is that of its own log-prob, as long as the mean is not clamped."""
    return exp(mean(x.sequence(x.sg_d, k)) + x.logp[k] - x.sg[k])


def clipped_d(A, d, o):
    """d' of gmpo."""
    sign, low = (A > 0) - (A < 0), None if o["clip_low"] is None else -o["clip_low"]
    return sign * min(sign * d, sign * clamp(d, low, o["clip_high"]))


def gmpo(o, x, k):
    """Loss of the token's sequence."""
    As, ds = x.sequence(x.A, k), x.sequence(x.d, k)
    return -mean(As) * exp(sum(clipped_d(A, d, o) for A, d in zip(As, ds, strict=True)) / (len(As) + 1e-8))


def sapo(A, r, tau):
    return -A / (1 + math.exp(-tau * (r - 1))) * 4 / tau


def chosen_tokens(o, x):
    """Tokens that a look at the whole mini-batch chooses."""
    if o["kind"] == "m2po":
        rest = sorted(x.tokens, key=lambda k: x.sg_d[k] ** 2)
        while rest and mean(x.sg_d[k] ** 2 for k in rest) > o["tau"]:
            rest.pop()
        return set(x.tokens) - set(rest)
    if o["kind"] not in ("clip_cov", "kl_cov"):
        return set()
    mean_logp, mean_A = mean(x.sg.values()), mean(x.A.values())
    ranked = sorted(x.tokens, key=lambda k: (x.sg[k] - mean_logp) * (x.A[k] - mean_A), reverse=True)
    return set(ranked[: max(1, math.floor(o["share"] * len(x.tokens)))])


def kl_term(a, b):
    """a log(a / b)"""
    return 0.0 if a == 0 else math.inf if b == 0 else a * math.log(a / b)


def is_inside(o, x, k):
    """Trust region of dppo and ipo."""
    A, p, q = x.A[k], exp(x.sg[k]), exp(x.mu[k])
    if o["kind"] == "ipo":
        return abs(p - q) <= o["divergence"]
    if o["kind"] == "dppo_kl":
        return kl_term(q, p) + kl_term(1 - q, 1 - p) <= (o["high"] if A > 0 else o["low"]) or (p <= q if A > 0 else p >= q)
    return p - q <= o["high"] if A > 0 else p - q >= -o["low"]


def objective(o, x, k, chosen):
    """Loss of token k."""
    A, logp, d, r, sg_r = x.A[k], x.logp[k], x.d[k], exp(x.d[k]), exp(x.sg_d[k])
    kinds = {
        "ppo_clip": lambda: ppo_clip(A, r, o),
        "gspo_token": lambda: ppo_clip(A, sequence_ratio(x, k), o),
        "gspo": lambda: ppo_clip(mean(x.sequence(x.A, k)), sequence_ratio(x, k), o),
        "cispo": lambda: -clip(sg_r, o) * A * logp,
        "sapo": lambda: sapo(A, r, o["tau_positive"] if A > 0 else o["tau_negative"]),
        "gmpo": lambda: gmpo(o, x, k),
        "clip_cov": lambda: 0.0 if k in chosen else ppo_clip(A, r, o),
        "kl_cov": lambda: -A * r + (o["coefficient"] * abs(d) if k in chosen else 0.0),
        "m2po": lambda: 0.0 if k in chosen else -A * r,
        "dppo_tv": lambda: -A * logp * min(sg_r, o["ratio_cap"]) if is_inside(o, x, k) else 0.0,
        "dppo_kl": lambda: -A * logp * min(sg_r, o["ratio_cap"]) if is_inside(o, x, k) else 0.0,
        "dppo_tv_prime": lambda: (-A * r if is_inside(o, x, k) else 0.0) + o["drift_penalty"] * d**2,
        "ipo": lambda: -A * r if is_inside(o, x, k) else 0.0,
        "reinforce": lambda: -A * logp * sg_r,
    }
    return kinds[o["kind"]]()


# Corrections


def off_policy(c, x, k):
    drift = mean(x.mu[other] - x.sg[other] for other in of_sequence(k[0], x.tokens))
    return mean(x.sequence(x.A, k)) < 0 and drift > c["delta"]


def weight(c, x, k):
    rho, product, geometric = exp(x.log_rho[k]), exp(sum(x.sequence(x.log_rho, k))), exp(mean(x.sequence(x.log_rho, k)))
    kinds = {
        "tis": lambda: min(rho if c["level"] == "token" else product, c["cap"]),
        "icepop": lambda: rho if c["low"] <= rho <= c["high"] else 0.0,
        "rejection": lambda: 1.0,
        "opsm": lambda: 0.0 if off_policy(c, x, k) else 1.0,
        "sequence_mask_tis": lambda: rho if c["low"] <= geometric <= c["high"] else 0.0,
    }
    return kinds[c["kind"]]()


def weights(c, x, before):
    """By token; normalized ones are those of the policy before the update."""
    if not c.get("normalized"):
        return {k: weight(c, x, k) for k in x.tokens}
    divisor = mean(weight(c, before, k) for k in before.tokens)
    return {k: weight(c, before, k) / divisor for k in before.tokens}


def stays(c, x, k):
    """Whether a rejection leaves the token in; the bounds of k1 are of exp of what log rho gives."""
    statistic = {"k1": lambda log_rho: log_rho, "k2": lambda log_rho: log_rho**2 / 2, "k3": lambda log_rho: exp(log_rho) - 1 - log_rho}
    over = {"token": max, "sum": sum, "mean": mean, "max": max}[c["level"]]
    value = over([statistic[c["statistic"]](each) for each in ([x.log_rho[k]] if c["level"] == "token" else x.sequence(x.log_rho, k))])
    value = exp(value) if c["statistic"] == "k1" else value
    return (c["low"] is None or value >= c["low"]) and (c["high"] is None or value <= c["high"])


# Loss of a mini-batch


def terms_of(s, b, logp, sg):
    """As the policy is and as it was before the update, of the tokens that have a weight and that no rejection takes out, one by one."""
    trainer = sg if b.old is None else b.old
    weighted = [(i, t) for i, t in response_tokens(b.mask) if b.rl_weights is None or b.rl_weights[i][t] != 0]
    before = Terms(b, weighted, trainer, trainer)
    for c in s["corrections"]:
        if c["kind"] == "rejection":
            before = Terms(b, [k for k in before.tokens if stays(c, before, k)], trainer, trainer)
    return Terms(b, before.tokens, logp, sg), before


def policy_losses(s, b, x, before):
    """By token: the objective's loss, times its weights, and what is added to it."""
    chosen, factors, losses = chosen_tokens(s["objective"], x), [weights(c, x, before) for c in s["corrections"]], {}
    for i, t in x.tokens:
        losses[i, t] = objective(s["objective"], x, (i, t), chosen) * math.prod(each[i, t] for each in factors)
        losses[i, t] += s["drift_penalty"] * x.d[i, t] ** 2 - (s["entropy_bonus"] * b.entropy[i][t] if s["entropy_bonus"] else 0.0)
        if s["kl_coefficient"] > 0 and s["kl_in"] == "loss":
            kl = kl_of_token(s["kl_estimator"], x.logp[i, t] - b.ref[i][t], x.sg[i, t] - b.ref[i][t], exp(x.d[i, t]))
            losses[i, t] += s["kl_coefficient"] * kl
    return losses


def normalized_sum(s, losses, tokens):
    """S / N and the like, of the tokens that count."""
    S = {i: sum(losses[k] for k in of_sequence(i, tokens)) for i, _ in tokens}
    kinds = {
        "token": lambda: sum(S.values()) / len(tokens),
        "sequence": lambda: sum(S[i] / len(of_sequence(i, tokens)) for i in S) / len(S),
        "sequence_sum": lambda: sum(S.values()) / len(S),
        "fixed_length": lambda: sum(S.values()) / (len(S) * s["fixed_length"]),
    }
    return kinds[s["normalize_by"]]() if tokens else 0.0


def weighted_mean(column, loss):
    """S / N of another stream, of the tokens whose weight is not 0."""
    tokens = [(i, t) for i, row in enumerate(column) for t, each in enumerate(row) if each != 0]
    return sum(column[i][t] * loss(i, t) for i, t in tokens) / len(tokens)


def minibatch_loss(s, b, logp, sg):
    """L = S_rl / N_rl + S_ce / N_ce + S_kl / N_kl"""
    x, before = terms_of(s, b, logp, sg)
    losses = policy_losses(s, b, x, before)
    if b.rl_weights is not None:
        losses = {(i, t): b.rl_weights[i][t] * loss for (i, t), loss in losses.items()}
    loss = normalized_sum(s, losses, x.tokens)
    if b.ce_weights is not None:
        loss += weighted_mean(b.ce_weights, lambda i, t: -logp[i][t])
    if b.kl_weights is not None:
        sampled = Terms(b, response_tokens(b.mask), logp, sg)
        loss += weighted_mean(b.kl_weights, lambda i, t: taught(b, sampled, (i, t), logp, sg))
    return loss


def taught(b, x, k, logp, sg):
    """(logp - teacher) r, the first factor without gradient; 0 where the probability has fallen; + 1e-3 d^2. r = 1 off the response."""
    i, t = k
    distance = sg[i][t] - b.teacher[i][t]
    if k not in x.d:
        return distance * (1 + logp[i][t] - sg[i][t])
    return (0.0 if exp(x.sg[k]) - exp(x.mu[k]) < -0.2 else distance * exp(x.d[k])) + 1e-3 * x.d[k] ** 2


# Losses of models beside the policy


def value_loss(clip_size, new, step, returns):
    """Half the squared distance from the returns, of the value or of the value as far as it may move: whichever is larger."""

    def distance(i, t):
        new_value, old_value, aim = new[i][t], step.values[i][t], returns[i, t]
        held = new_value if clip_size is None else clamp(new_value, old_value - clip_size, old_value + clip_size)
        return max((new_value - aim) ** 2, (held - aim) ** 2) / 2

    return mean_of(distance(i, t) for i, t in returns)


def mean_of(numbers):
    numbers = list(numbers)
    return sum(numbers) / max(len(numbers), 1)


def outcome_loss(beta, process, step, tokens, right_above):
    """-log of the probability that sigmoid(beta * sum of (log-prob - ref)) gives to what an answer is, by sequence."""
    losses = []
    for i in sorted({i for i, _ in tokens}):
        score = beta * sum(process[i][t] - step.ref[i][t] for _, t in of_sequence(i, tokens))
        is_right = step.rewards[step.owner[i]] > right_above
        losses.append(math.log1p(math.exp(-score if is_right else score)))
    return mean_of(losses)
