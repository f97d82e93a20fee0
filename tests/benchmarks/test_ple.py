"""The tables of the PLE example's measurements: what a row says of its runs."""

import json

from benchmarks import ple


def results(income, never_married):
    return {"auc_income": income, "auc_never_married": never_married}


def test_a_mean_may_be_two_deviations_below_the_bar():
    found = [results(0.944, 0.9942), results(0.945, 0.9941), results(0.943, 0.9940)]
    row = ple.row_of("corrected", "in process", found)
    told = ["0.9440 (0.0010)", "0.9434", "0.9941 (0.0001)", "0.9939"]
    assert row == ["corrected", "in process", 3, *told, "holds"]
    below = ple.row_of("corrected", "in process", [results(0.9433, 0.9942)])
    assert below[3:] == ["0.9433", "0.9434", "0.9942", "0.9939", "below"]


def test_a_run_that_is_there_is_not_repeated(tmp_path):
    (tmp_path / "results.json").write_text(json.dumps(results(0.9, 0.99)))
    assert ple.run_once("nowhere", tmp_path, []) == results(0.9, 0.99)
