import numpy as np
import polars as pl

from agent_sat.analyze.points import BINS_PER_DECADE, NUM_BINS, histogram, sample
from agent_sat.analyze.sums import prepare
from agent_sat.log.tokens import token_frame
from tests.analyze.planted import Token, columns


def prepared(tokens: list[Token]) -> pl.DataFrame:
    return prepare(token_frame(columns(tokens)))


def test_a_histogram_counts_each_token_in_the_bin_of_its_size():
    """|d| = 0.0015 lies in bin floor((log10(0.0015) + 5) * 8) = 17; 0 is below all bins, 20 above."""
    tokens = [
        Token(mu=0.1, pi=0.1 * np.exp(0.0015)),
        Token(mu=0.1, pi=0.1),
        Token(mu=1e-12, pi=1e-12 * np.exp(20)),
    ]
    found = histogram(prepared([*tokens, tokens[0], Token(mu=float("nan"), pi=0.1)])).sort("bin")
    assert found["bin"].to_list() == [0, 17, NUM_BINS - 1] and found["count"].to_list() == [1, 2, 1]
    assert 10 ** (17 / BINS_PER_DECADE - 5) <= 0.0015 < 10 ** (18 / BINS_PER_DECADE - 5)


def test_a_sample_is_the_same_for_any_order_and_cut():
    tokens = [Token(mu=0.5, pi=0.4, step=1 + i % 3, group=i // 7, turn=i % 4, offset=i) for i in range(300)]
    whole = sample(prepared(tokens), ["turn"], 20)
    mixed = [tokens[i] for i in np.random.default_rng(0).permutation(300)]
    parts = [sample(prepared(part), ["turn"], 20) for part in (mixed[:50], mixed[50:210], mixed[210:])]
    assert sample(pl.concat(parts), ["turn"], 20).equals(whole)
    assert whole.group_by("turn").len()["len"].to_list() == [20] * 4


def test_a_sample_is_spread_over_what_it_is_taken_from():
    tokens = [Token(mu=0.5, pi=0.4, group=i) for i in range(2000)]
    groups = sample(prepared(tokens), ["turn"], 200)["group"].to_numpy()
    assert abs(groups.mean() - 1000) < 150 and len(set(groups.tolist())) == 200
