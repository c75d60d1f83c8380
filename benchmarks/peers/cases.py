"""The list: what is compared with whom, and which differences are meant to be there."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.peers.comparison import Case, Explanation

MASKS = {"mask": "", "mask_with_holes": ", holes in the mask", "mask_late": ", mask begins late"}
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
RLINF_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
TRL_MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")

EQUAL_SCORES = (
    "All six of a group score 0.9. Their mean in float32 is not exactly 0.9, and what is left is divided by a std of "
    "next to 0, plus 1e-6. Ours forms means in float64 and gives exactly 0; given float64, the peer's is below 1e-7."
)
BIASED_STD = "The peer whitens with the std that divides by n, ours by n - 1; with unbiased_std off ours is the same."
LATE_MASK = (
    "The peer looks for the last valid token along the mirrored batch instead of the mirrored time. It finds where "
    "another sequence's mask begins; if that is late, the reward is paid too early, and the tokens behind get 0. With "
    "masks that begin at 0 nothing shows. Ours with the reward paid there is the same."
)
TRUNCATION = (
    "The function knows one kind of end and takes V = 0 behind it; ours bootstraps from the final observation of a "
    "truncated episode. With γ·V(final) added to the last reward, as the peer's env worker can, it gives the same."
)
AFTER_THE_END = (
    "At chunk level the peer sums all rewards of the chunk in which the episode ends, also those after the end; ours "
    "only up to it. With rewards of 0 there the two agree."
)
EMPTY_SUM = (
    "A sequence without a valid token is counted by the peer's mean over sequences and not by ours: 24 against 23. "
    "Ours times 23/24 is the same."
)
EMPTY_MEAN = "A sequence without a valid token is 0/0 in the peer's mean: NaN. Without that sequence the two agree."
NAN = (
    "NaN at a masked unit: the peer masks after the exponential or by a product, so the gradient is NaN. Ours masks "
    "before. With a number there the two agree."
)
HUNDRED = (
    "One unit with a log ratio of 100: the peer's ratio is infinite and its gradient 0 · inf = NaN. Ours cuts log "
    "ratios at ±20; the peer with such a cut (rlinf), or given a log ratio of 20 (trl), agrees."
)
FAR = "Log ratios beyond ±20: the peer cuts them only when clip_log_ratio_min and _max are set; set to ±20 it agrees."
CUT_K3 = (
    "The peer cuts k3 at 10, where its gradient ends. Ours grows up to a log ratio of 20. Cut at 10 it is the same."
)
K1 = "The peer logs the mean of -log r (k1), which can be negative; ours logs k3, which cannot."
VALUE_CLIP = (
    "The peer counts |V_clip - V_old| > value_clip, which a clipped value is only by rounding, masked or not: next to "
    "0. Ours (and verl) count where the clipped error is the larger."
)
GSPO = (
    "Advantages that differ within a sequence: the peer gives each token's log-probability its own advantage "
    "(GSPO-token), ours the sequence ratio's gradient. With one advantage a sequence the two agree."
)
CISPO = (
    "None of the packages has AIPO; CISPO is the nearest. Beyond ρ it goes on teaching with weight ρ, AIPO has no "
    "gradient there. Below ρ the two agree."
)
RLINF_MASK = (
    "The peer's mask has one element for {units}, and the sum over units is divided by the mask's count: {factor} "
    "times too large. Ours times {factor} is the same."
)
RLINF_CUT = (
    "With rewards at chunk level a chunk in which the episode ends counts whole with the peer; ours leaves out the "
    "steps after the end. With whole chunks{factor} the two agree."
)


def equal(function: str, peer: str, ours: str, theirs: str) -> Case:
    return Case(function=function, peer=peer, ours=ours, theirs=f"{peer}: {theirs}")


def explained(function: str, peer: str, ours: str, theirs: str, why: str, pair: tuple[str, str]) -> Case:
    explanation = Explanation(why=why, ours=pair[0], theirs=f"{peer}: {pair[1]}")
    return Case(function=function, peer=peer, ours=ours, theirs=f"{peer}: {theirs}", explained=explanation)


def advantage_cases() -> Iterator[Case]:
    for mask, label in MASKS.items():
        yield equal(f"gae, whitened{label}", "verl", f"gae: {mask}", f"gae: {mask}")
        yield equal(f"grpo{label}", "verl", f"grpo: {mask}", f"grpo: {mask}")
        yield equal(f"grpo, norm_std=false{label}", "verl", f"grpo, no std: {mask}", f"grpo, no std: {mask}")
        yield equal(f"rloo{label}", "verl", f"rloo: {mask}", f"rloo: {mask}")
        yield equal(f"reinforce_plus_plus{label}", "verl", f"reinforce++: {mask}", f"reinforce++: {mask}")
        yield equal(
            f"reinforce_plus_plus_baseline{label}",
            "verl",
            f"reinforce++ baseline, gamma 1: {mask}",
            f"reinforce++ baseline: {mask}",
        )
        yield equal(f"grpo{label}", "rlinf", f"grpo: {mask}", f"grpo: {mask}")
        yield equal(f"raw{label}", "rlinf", f"raw: {mask}", f"raw: {mask}")
    biased = "reinforce++, gamma 1, biased std: mask"
    yield equal("reinforce_plus_plus, unbiased_std=false", "rlinf", biased, "reinforce++: mask")
    yield explained(
        "reinforce_plus_plus",
        "rlinf",
        "reinforce++, gamma 1: mask",
        "reinforce++: mask",
        BIASED_STD,
        (biased, "reinforce++: mask"),
    )
    yield explained(
        "reinforce_plus_plus, mask begins late",
        "rlinf",
        "reinforce++, gamma 1, biased std: mask_late",
        "reinforce++: mask_late",
        LATE_MASK,
        ("reinforce++, as rlinf, paid by the mirrored row: mask_late", "reinforce++: mask_late"),
    )
    with_kl = "reinforce++, KL in the reward: mask"
    yield equal("reinforce_plus_plus, KL in the reward", "rlinf", with_kl, with_kl)
    yield Case(
        function="reinforce_plus_plus_baseline",
        peer="rlinf",
        ours="reinforce++ baseline, gamma 1: mask",
        theirs="rlinf: reinforce++ baseline: mask",
        raises="IndexError: Dimension out of range",
    )
    for peer in ("verl", "rlinf"):
        yield explained(
            "grpo, equal scores",
            peer,
            "grpo: equal scores",
            "grpo: equal scores",
            EQUAL_SCORES,
            ("grpo: equal scores", "grpo: equal scores, float64"),
        )
    for level in ("chunk_level", "action_level"):
        for what in ("gae, normalised", "gae, several episodes"):
            yield equal(f"{what}, {level}", "rlinf", f"{what}: {level}", f"{what}: {level}")
        truncated = f"gae, truncation: {level}"
        yield explained(
            f"gae, truncated, {level}",
            "rlinf",
            truncated,
            truncated,
            TRUNCATION,
            (truncated, f"gae, truncation in the rewards: {level}"),
        )
    yield equal("grpo, action_level", "rlinf", "grpo: action_level", "grpo: action_level")
    yield explained(
        "grpo, chunk_level",
        "rlinf",
        "grpo: chunk_level",
        "grpo: chunk_level",
        AFTER_THE_END,
        ("grpo: chunk_level", "grpo, no reward after the end: chunk_level"),
    )


def loss_cases() -> Iterator[Case]:
    for what in ("ppo", "ppo, dual clip"):
        for mode in MODES:
            for mask, label in (("mask", ""), ("mask_without_one", ", an empty sequence")):
                name = f"{what}: {mode}, {mask}"
                yield equal(f"{what}, {mode}{label}", "verl", name, name)
        for peer, modes in (("rlinf", RLINF_MODES), ("trl", TRL_MODES)):
            for mode in modes:
                name, empty = f"{what}: {mode}, mask", f"{what}: {mode}, mask_without_one"
                yield equal(f"{what}, {mode}", peer, name, name)
                function = f"{what}, {mode}, an empty sequence"
                if mode == "token-mean":
                    yield equal(function, peer, empty, empty)
                else:
                    is_nan = (peer, mode) == ("rlinf", "seq-mean-token-mean")
                    pair = (name, name) if is_nan else (f"{what}, as peers, all counted: {mode}", empty)
                    yield explained(function, peer, empty, empty, EMPTY_MEAN if is_nan else EMPTY_SUM, pair)
    for mode in TRL_MODES:
        yield equal(f"ppo with k3 in the loss, {mode}", "trl", f"ppo with KL: {mode}", f"ppo with KL: {mode}")
    for peer in ("verl", "trl"):
        yield equal(
            "ppo, importance_sampling_level=sequence", peer, "gspo: sequence_advantages", "gspo: sequence_advantages"
        )
    yield explained(
        "ppo, importance_sampling_level=sequence, an advantage a token",
        "verl",
        "gspo: advantages",
        "gspo: advantages",
        GSPO,
        ("gspo: sequence_advantages", "gspo: sequence_advantages"),
    )
    for name in ("decoupled ppo", "decoupled ppo, cap", "decoupled ppo, loglinear"):
        yield equal(name, "rlinf", name, name)
    yield explained(
        "aipo, gradient",
        "trl",
        "aipo: gradient",
        "cispo: gradient",
        CISPO,
        ("aipo: gradient below rho", "cispo: gradient below rho"),
    )
    yield equal("ppo, log ratios beyond 20", "verl", "ppo, far", "ppo, far")
    yield explained("ppo, log ratios beyond 20", "rlinf", "ppo, far", "ppo, far", FAR, ("ppo, far", "ppo, far, cut"))
    hundred = "ppo, log ratio 100"
    yield equal(hundred, "verl", hundred, hundred)
    yield explained(hundred, "rlinf", hundred, hundred, HUNDRED, (hundred, "ppo, log ratio 100, cut"))
    yield explained(hundred, "trl", hundred, hundred, HUNDRED, (hundred, "ppo, log ratio 20"))
    name = "ppo, NaN at a masked unit"
    yield equal(name, "verl", name, name)
    for peer in ("rlinf", "trl"):
        yield explained(name, peer, name, name, NAN, ("ppo, one unit masked", "ppo, one unit masked"))
    yield from level_cases()


def level_cases() -> Iterator[Case]:
    """PPO on action chunks, by (reward level, log-probability level)."""
    for (reward, logprob), (factor, units) in {
        ("chunk_level", "chunk_level"): (1, ""),
        ("action_level", "action_level"): (1, ""),
        ("chunk_level", "action_level"): (4, "the C = 4 steps of a chunk"),
        ("action_level", "token_level"): (7, "the A = 7 tokens of a step"),
        ("chunk_level", "token_level"): (28, "the C·A = 28 tokens of a chunk"),
    }.items():
        function = f"ppo, reward {reward}, logprob {logprob}"
        whole, cut = (f"{reward}, {logprob}, {kind} chunks" for kind in ("whole", "cut"))
        proof = (f"levels, as rlinf: {whole}", f"levels: {whole}")
        if factor == 1:
            yield equal(function, "rlinf", f"levels: {whole}", f"levels: {whole}")
        else:
            why = RLINF_MASK.format(units=units, factor=factor)
            yield explained(function, "rlinf", f"levels: {whole}", f"levels: {whole}", why, proof)
        ends = f"{function}, an end inside"
        if (reward, logprob) == ("action_level", "action_level"):
            yield equal(ends, "rlinf", f"levels: {cut}", f"levels: {cut}")
        elif reward == "action_level":
            why = RLINF_MASK.format(units=units, factor=factor)
            yield explained(
                ends, "rlinf", f"levels: {cut}", f"levels: {cut}", why, (f"levels, as rlinf: {cut}", f"levels: {cut}")
            )
        else:
            why = RLINF_CUT.format(factor=f" and the factor of {factor}" if factor > 1 else "")
            yield explained(ends, "rlinf", f"levels: {cut}", f"levels: {cut}", why, proof)


def other_cases() -> Iterator[Case]:
    yield equal("value_loss", "verl", "value loss", "value loss")
    yield equal("value_loss, huber", "rlinf", "value loss, huber", "value loss, huber")
    yield equal("value_clip_fraction", "verl", "value clip fraction", "value clip fraction")
    yield explained(
        "value_clip_fraction",
        "rlinf",
        "value clip fraction",
        "value clip fraction",
        VALUE_CLIP,
        ("value clip fraction, as rlinf", "value clip fraction"),
    )
    yield equal("explained_variance", "rlinf", "explained variance", "explained variance")
    for peer in ("verl", "rlinf"):
        yield equal("clip_fraction, low + high", peer, "clip fraction", "clip fraction")
        yield explained(
            "approx_kl",
            peer,
            "approximate KL",
            "approximate KL",
            K1,
            ("approximate KL, as peers, k1", "approximate KL"),
        )
        for kind in ("k1", "abs", "k2", "k3"):
            yield equal(f"kl_estimate, {kind}", peer, f"kl: {kind}", f"kl: {kind}")
        for kind in ("k1", "abs", "k2"):
            yield equal(f"kl_estimate, {kind}, far apart", peer, f"kl, far: {kind}", f"kl, far: {kind}")
        yield explained(
            "kl_estimate, k3, far apart",
            peer,
            "kl, far: k3",
            "kl, far: k3",
            CUT_K3,
            ("kl, far, as peers, at most 10: k3", "kl, far: k3"),
        )
    yield equal("clip_fraction_dual", "verl", "dual clip fraction", "dual clip fraction")
    yield equal("KLController, adaptive", "verl", "adaptive KL", "adaptive KL")


CASES: tuple[Case, ...] = (*advantage_cases(), *loss_cases(), *other_cases())
