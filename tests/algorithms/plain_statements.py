"""Formulas of docs/algorithms.md in plain Python, in its order: nested lists of sequences and tokens, loops, no arrays.

A token is (i, t): sequence i, place t. `logp` is the policy as it is and has a gradient; `sg` is a copy of it that has none, so that the
gradient of a statement is what moving `logp` alone does to it. `s` are settings of `algorithm`, all of them, as in YAML.
"""

import math
from dataclasses import dataclass
from fractions import Fraction


def clamp(x, low, high):
    x = x if low is None else max(x, low)
    return x if high is None else min(x, high)


def exp(x):
    return math.exp(clamp(x, -20, 20))


def mean(xs):
    """Exact, rounded once: what equals the mean of equal numbers has no difference from it."""
    xs = list(xs)
    return float(sum(map(Fraction, xs)) / len(xs)) if xs else 0.0


def unbiased_variance(xs):
    m = mean(xs)
    return sum((x - m) ** 2 for x in xs) / (len(xs) - 1) if len(xs) > 1 else 0.0


def whitened(xs):
    """Numbers of a dict with mean 0 and variance 1."""
    m, variance = mean(xs.values()), unbiased_variance(list(xs.values()))
    return {key: (x - m) / math.sqrt(variance + 1e-8) for key, x in xs.items()}


def response_tokens(mask):
    return [(i, t) for i, row in enumerate(mask) for t, is_response in enumerate(row) if is_response]


def of_sequence(i, tokens):
    return [token for token in tokens if token[0] == i]


@dataclass
class Step:
    """Samples and columns of their tokens, as `algorithm_loss` takes them; `owner` is the sample of each sequence."""

    mask: list
    owner: list
    rewards: list
    groups: list
    truncated: list
    max_response_tokens: int = 0
    greedy: list | None = None
    old: list | None = None
    ref: list | None = None
    values: list | None = None
    process: list | None = None

    def tokens_of(self, k):
        return [(i, t) for i, t in response_tokens(self.mask) if self.owner[i] == k]


def kl_value(kind, x, r):
    """Estimate of the KL from x = logp - ref."""
    k3 = min(exp(-x) + clamp(x, -20, 20) - 1, 10)
    return {"k1": x, "abs": abs(x), "k2": x**2 / 2, "k3": k3, "unbiased": k3 * r}[kind.rstrip("+")]


def kl_of_token(kind, x, sg_x, r):
    """The estimate with its gradient: with + that of k2."""
    return kl_value(kind, sg_x, r) + x**2 / 2 - sg_x**2 / 2 if kind.endswith("+") else kl_value(kind, x, r)


# Before the advantages


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
    return whitened(rewards) if s["whiten_rewards"] else rewards


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


def advantage_of_sample(a, step, rewards, k):
    """The kinds that give a sample one number; what compares samples of a group needs two."""
    group, c = group_of(step, rewards, k), centered(step, rewards, k)
    n, mean_g, std_g = len(group), mean(rewards[j] for j in group), math.sqrt(unbiased_variance([rewards[j] for j in group]))
    if n < 2:
        return 0.0
    match a["kind"]:
        case "grpo":
            return c / (std_g + 1e-6)
        case "dr_grpo" | "reinforce_pp_baseline":
            return c
        case "rloo" | "prime":
            return c * n / (n - 1)
        case "opo":
            T = {j: len(step.tokens_of(j)) for j in group}
            return rewards[k] - sum(T[j] * rewards[j] for j in group) / sum(T.values()) if sum(T.values()) else 0.0
        case "gpg":
            return c * len(rewards) / max(1, len([j for j in rewards if centered(step, rewards, j) != 0]))
        case "maxrl":
            return c / mean_g if mean_g != 0 else 0.0
        case "passk":
            best, second = sorted((rewards[j] for j in group), reverse=True)[:2]
            lead = best - second if rewards[k] == best else 0.0
            return lead / (std_g + 1e-6) if a["by_std"] else lead


def spread(step, by_sample):
    return {token: x for k, x in by_sample.items() for token in step.tokens_of(k)}


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
            value_after, advantage_after = step.values[i][t], delta + gamma * lam * advantage_after
            A[i, t] = advantage_after
    return A


def process_to_come(beta, s, step):
    """x_t n / (n - 1) - sum over g of the mean x / (n - 1), summed from t on; x is the token's reward, of which a KL is taken."""
    rewards, x, to_come = shaped_rewards(s, step), {}, {}
    for k in rewards:
        x[k] = {(i, t): beta * (step.process[i][t] - step.ref[i][t]) - kl_in_reward(s, step, i, t) for i, t in step.tokens_of(k)}
    for k in rewards:
        group, after = group_of(step, rewards, k), 0.0
        n = len(group)
        for token in reversed(step.tokens_of(k)):
            if n > 1:
                after += x[k][token] * n / (n - 1) - sum(mean(x[j].values()) for j in group) / (n - 1)
            to_come[token] = after
    return to_come


def advantages(s, step):
    """Advantage by token; return by token, which only gae has."""
    a, rewards = s["advantage"], rewards_with_kl(s, step)
    match a["kind"]:
        case "reinforce_pp":
            return whitened(rewards_to_come(a["gamma"], s, step)), None
        case "remax":
            return {(i, t): R - step.greedy[step.owner[i]] for (i, t), R in rewards_to_come(1.0, s, step).items()}, None
        case "gae":
            A = gae(a["gamma"], a["lam"], s, step)
            return whitened(A), {(i, t): A[i, t] + step.values[i][t] for i, t in A}
    of_samples = spread(step, {k: advantage_of_sample(a, step, rewards, k) for k in rewards})
    match a["kind"]:
        case "reinforce_pp_baseline":
            return whitened(of_samples), None
        case "prime":
            process, outcome = process_to_come(a["beta"], s, step), shaped_rewards(s, step)
            of_samples = spread(step, {k: advantage_of_sample(a, step, outcome, k) for k in outcome})
            return {token: process[token] + of_samples[token] for token in of_samples}, None
    return of_samples, None


# Objectives


@dataclass
class Batch:
    """Columns of the tokens of a mini-batch; None: not given."""

    mask: list
    advantages: list
    old: list | None = None
    mu: list | None = None
    ref: list | None = None
    entropy: list | None = None
    teacher: list | None = None
    rl_weights: list | None = None
    ce_weights: list | None = None
    kl_weights: list | None = None
    versions: list | None = None
    version: int = 0


def log_linear(mu, sg, v, v_t):
    return mu + (v - v_t) / (v + 1 - v_t) * (sg - mu)


def clipped(A, r, o):
    """Loss of ppo_clip."""
    bounds = None if o["clip_low"] is None else 1 - o["clip_low"], None if o["clip_high"] is None else 1 + o["clip_high"]
    loss = max(-A * r, -A * clamp(r, *bounds))
    return min(-A * o["dual_clip"], loss) if o["dual_clip"] is not None and A < 0 else loss


class Terms:
    """What objectives and corrections read: by token, of `tokens`, those that are in the mini-batch."""

    def __init__(self, b, tokens, logp, sg):
        self.tokens, self.A, self.logp, self.sg, self.old, self.mu = tokens, {}, {}, {}, {}, {}
        for i, t in tokens:
            self.A[i, t], self.logp[i, t], self.sg[i, t] = b.advantages[i][t], logp[i][t], sg[i][t]
            self.old[i, t] = sg[i][t] if b.old is None else b.old[i][t]
            if b.versions is not None:
                self.old[i, t] = log_linear(b.mu[i][t], sg[i][t], b.version, b.versions[i][t])
            self.mu[i, t] = self.old[i, t] if b.mu is None else b.mu[i][t]
        self.d = {k: self.logp[k] - self.old[k] for k in tokens}
        self.sg_d = {k: self.sg[k] - self.old[k] for k in tokens}
        self.log_rho = {k: self.old[k] - self.mu[k] for k in tokens}

    def sequence(self, column, token):
        return [column[other] for other in of_sequence(token[0], self.tokens)]


def sequence_ratio(x, k):
    """exp(mean d) of the sequence; the gradient for a token is that of its own log-prob."""
    return exp(mean(x.sequence(x.sg_d, k))) * math.exp(x.logp[k] - x.sg[k])


def geometric_mean_loss(o, x, k):
    """Loss of gmpo, of the token's whole sequence."""
    low, total = None if o["clip_low"] is None else -o["clip_low"], 0.0
    for A, d in zip(x.sequence(x.A, k), x.sequence(x.d, k), strict=True):
        sign = (A > 0) - (A < 0)
        total += sign * min(sign * d, sign * clamp(d, low, o["clip_high"]))
    return -mean(x.sequence(x.A, k)) * exp(total / (len(x.sequence(x.A, k)) + 1e-8))


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


def inside_region(o, x, k):
    """dppo's trust region."""
    A, p, q = x.A[k], exp(x.sg[k]), exp(x.mu[k])
    if o["kind"] == "dppo_kl":
        kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        return kl <= (o["high"] if A > 0 else o["low"]) or (p <= q if A > 0 else p >= q)
    return p - q <= o["high"] if A > 0 else p - q >= -o["low"]


def objective(o, x, k, chosen):
    """Loss of token k."""
    A, logp, r, sg_r = x.A[k], x.logp[k], exp(x.d[k]), exp(x.sg_d[k])
    match o["kind"]:
        case "ppo_clip":
            return clipped(A, r, o)
        case "gspo_token":
            return clipped(A, sequence_ratio(x, k), o)
        case "gspo":
            return clipped(mean(x.sequence(x.A, k)), sequence_ratio(x, k), o)
        case "cispo":
            low, high = None if o["clip_low"] is None else 1 - o["clip_low"], None if o["clip_high"] is None else 1 + o["clip_high"]
            return -clamp(sg_r, low, high) * A * logp
        case "sapo":
            tau = o["tau_positive"] if A > 0 else o["tau_negative"]
            return -A / (1 + math.exp(-tau * (r - 1))) * 4 / tau
        case "gmpo":
            return geometric_mean_loss(o, x, k)
        case "clip_cov":
            return 0.0 if k in chosen else clipped(A, r, o)
        case "kl_cov":
            return -A * r + (o["coefficient"] * abs(x.d[k]) if k in chosen else 0.0)
        case "m2po":
            return 0.0 if k in chosen else -A * r
        case "dppo_tv" | "dppo_kl":
            return -A * logp * min(sg_r, o["ratio_cap"]) if inside_region(o, x, k) else 0.0
        case "dppo_tv_prime":
            return (-A * r if inside_region(o, x, k) else 0.0) + o["drift_penalty"] * x.d[k] ** 2
        case "ipo":
            return -A * r if abs(exp(x.sg[k]) - exp(x.mu[k])) <= o["divergence"] else 0.0
        case "reinforce":
            return -A * logp * sg_r


# Corrections


def weight(c, x, k):
    rho = exp(x.log_rho[k])
    match c["kind"]:
        case "tis":
            return min(rho if c["level"] == "token" else exp(sum(x.sequence(x.log_rho, k))), c["cap"])
        case "icepop":
            return rho if c["low"] <= rho <= c["high"] else 0.0
        case "opsm":
            drift = mean(x.mu[other] - x.sg[other] for other in of_sequence(k[0], x.tokens))
            return 0.0 if mean(x.sequence(x.A, k)) < 0 and drift > c["delta"] else 1.0
        case "sequence_mask_tis":
            return rho if c["low"] <= exp(mean(x.sequence(x.log_rho, k))) <= c["high"] else 0.0
        case "rejection":
            return 1.0


def weights(c, x):
    by_token = {k: weight(c, x, k) for k in x.tokens}
    return {k: w / mean(by_token.values()) for k, w in by_token.items()} if c.get("normalized") else by_token


def stays(c, x, k):
    """Whether a rejection leaves the token in; the bounds of k1 are of exp of what log rho gives."""
    statistic = {"k1": lambda log_rho: log_rho, "k2": lambda log_rho: log_rho**2 / 2, "k3": lambda log_rho: exp(log_rho) - 1 - log_rho}
    over = {"token": max, "sum": sum, "mean": mean, "max": max}[c["level"]]
    value = over([statistic[c["statistic"]](each) for each in ([x.log_rho[k]] if c["level"] == "token" else x.sequence(x.log_rho, k))])
    value = exp(value) if c["statistic"] == "k1" else value
    return (c["low"] is None or value >= c["low"]) and (c["high"] is None or value <= c["high"])


# Loss of a mini-batch


def terms_of(s, b, logp, sg):
    """Of the tokens that no rejection takes out."""
    x = Terms(b, response_tokens(b.mask), logp, sg)
    left = [k for k in x.tokens if all(stays(c, x, k) for c in s["corrections"] if c["kind"] == "rejection")]
    return Terms(b, left, logp, sg)


def policy_losses(s, b, x):
    """By token: the objective's loss, times its weights, and what is added to it."""
    chosen, factors, losses = chosen_tokens(s["objective"], x), [weights(c, x) for c in s["corrections"]], {}
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
    match s["normalize_by"]:
        case "token":
            return sum(S.values()) / len(tokens)
        case "sequence":
            return sum(S[i] / len(of_sequence(i, tokens)) for i in S) / len(S)
        case "sequence_sum":
            return sum(S.values()) / len(S)
        case "fixed_length":
            return sum(S.values()) / (len(S) * s["fixed_length"])


def weighted_mean(column, losses):
    """S / N of another stream, of the tokens whose weight is not 0."""
    tokens = [(i, t) for i, row in enumerate(column) for t, each in enumerate(row) if each != 0]
    return sum(column[i][t] * losses(i, t) for i, t in tokens) / len(tokens)


def minibatch_loss(s, b, logp, sg):
    """L = S_rl / N_rl + S_ce / N_ce + S_kl / N_kl"""
    x = terms_of(s, b, logp, sg)
    losses, counted = policy_losses(s, b, x), x.tokens
    if b.rl_weights is not None:
        losses = {(i, t): b.rl_weights[i][t] * loss for (i, t), loss in losses.items()}
        counted = [(i, t) for i, t in x.tokens if b.rl_weights[i][t] != 0]
    loss = normalized_sum(s, losses, counted) if counted else 0.0
    if b.ce_weights is not None:
        loss += weighted_mean(b.ce_weights, lambda i, t: -logp[i][t])
    if b.kl_weights is not None:
        # The gradient of a policy loss: that of -A logp with the distance, which has none, for -A.
        loss += weighted_mean(b.kl_weights, lambda i, t: (sg[i][t] - b.teacher[i][t]) * (1 + logp[i][t] - sg[i][t]))
    return loss


# Always told


def mismatch(mask, trainer, server):
    """Over all tokens that servers sampled; d is trainer minus server."""
    tokens = response_tokens(mask)
    x, y = [trainer[i][t] for i, t in tokens], [server[i][t] for i, t in tokens]
    d, mean_x, mean_y = [a - b for a, b in zip(x, y, strict=True)], mean(x), mean(y)
    mean_rho = mean(exp(each) for each in d)
    deviation = math.sqrt(sum((a - mean_x) ** 2 for a in x) * sum((b - mean_y) ** 2 for b in y))
    return {
        "mean": mean(abs(each) for each in d),
        "max": max(abs(each) for each in d),
        "k1": mean(-each for each in d),
        "k3": mean(exp(each) - each - 1 for each in d),
        "chi2": mean(exp(each) ** 2 for each in d) - 1,
        "effective": 1 / mean((exp(each) / mean_rho) ** 2 for each in d),
        "trainer_perplexity": math.exp(-mean_x),
        "server_perplexity": math.exp(-mean_y),
        "correlation": sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / deviation if deviation else 1.0,
    }
