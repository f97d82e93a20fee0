"""Optimizers to test with: one of every sort, and what Hypothesis draws."""

from hypothesis import strategies as st

from persia_torchrec.embedding.optim import (
    FTRL,
    LAMB,
    LARS,
    SGD,
    Adagrad,
    AdagradDecay,
    Adam,
    AdamAsync,
    AdamW,
    RowwiseAdam,
    RowwiseLAMB,
)

EVERY_OPTIMIZER = {
    "sgd": SGD(0.1),
    "sgd, momentum": SGD(0.1, momentum=0.9, weight_decay=0.1),
    "adagrad": Adagrad(0.1, 0.5, weight_decay=0.1),
    "adagrad, shared": Adagrad(0.1, 0.5, weight_decay=0.1, vectorwise_shared=True),
    "adagrad decay": AdagradDecay(0.1, decay_step=2, decay_rate=0.5),
    "lars": LARS(0.1, weight_decay=0.1),
    "lars, no momentum": LARS(0.1, eta=0.1, momentum=0),
    "ftrl": FTRL(0.1, l1=0.1, l2=0.1, beta=0.1),
    "ftrl, power": FTRL(0.1, lr_power=-0.3, l1=0.1),
    "adam": Adam(0.1, weight_decay=0.1),
    "adamw": AdamW(0.1, weight_decay=0.1),
    "rowwise adam": RowwiseAdam(0.1, weight_decay=0.1),
    "lamb": LAMB(0.1, weight_decay=0.1),
    "rowwise lamb": RowwiseLAMB(0.1, weight_decay=0.1),
    "adam async": AdamAsync(0.1, eps=1e-3),
    "adam async, nesterov": AdamAsync(0.1, eps=1e-3, use_nesterov=True),
    "adam async, rmsprop": AdamAsync(0.1, eps=1e-3, apply_sparse_rmsprop=True),
}


def optimizers_by_kind(
    not_negative: st.SearchStrategy[float], positive: st.SearchStrategy[float]
) -> dict[str, st.SearchStrategy]:
    """Return what draws the optimizers of each kind.

    Args:
        not_negative: what rates, decays and penalties are drawn from.
        positive: what the arguments that may not be 0 are drawn from.
    """
    below_one = st.just(0.0) | st.floats(1e-3, 0.9999)
    inside_one = st.floats(0.01, 0.9999)
    betas = st.tuples(below_one, below_one)
    means = {"betas": betas, "eps": positive, "weight_decay": not_negative}
    one_or_none = st.sampled_from(
        [{}, {"apply_sparse_rmsprop": True}, {"use_nesterov": True}]
    )
    return {
        "sgd": st.builds(SGD, not_negative, below_one, not_negative),
        "adagrad": st.builds(
            Adagrad,
            *(not_negative, not_negative, not_negative, inside_one, positive),
            st.booleans(),
        ),
        "adagrad_decay": st.builds(
            AdagradDecay,
            not_negative,
            initial_accumulator_value=positive,
            decay_step=st.integers(1, 40),
            decay_rate=inside_one,
        ),
        "lars": st.builds(
            LARS,
            not_negative,
            eta=positive,
            momentum=below_one,
            weight_decay=not_negative,
        ),
        "ftrl": st.builds(
            FTRL,
            positive,
            lr_power=st.just(-0.5) | st.floats(-1, 0),
            l1=not_negative,
            l2=not_negative,
            initial_accumulator_value=not_negative,
            beta=not_negative,
        ),
        "adam": st.builds(Adam, not_negative, betas, not_negative, positive),
        "adamw": st.builds(AdamW, not_negative, **means),
        "rowwise_adam": st.builds(RowwiseAdam, not_negative, **means),
        "lamb": st.builds(LAMB, not_negative, **means),
        "rowwise_lamb": st.builds(RowwiseLAMB, not_negative, **means),
        "adam_async": st.builds(
            lambda lr, betas, eps, option: AdamAsync(
                lr, betas=betas, eps=eps, **option
            ),
            *(not_negative, betas, positive, one_or_none),
        ),
    }
