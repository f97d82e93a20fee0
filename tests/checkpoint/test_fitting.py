"""What a load takes of saved tables that are not those of the model."""

import pytest

from persia_torchrec.checkpoint.catalog import LoadRules, SavedTable
from persia_torchrec.checkpoint.fitting import Drops, plan_tables, written_s
from persia_torchrec.checkpoint.row_file import IncrementHead
from persia_torchrec.embedding.optim import SGD, Adagrad
from persia_torchrec.errors import CheckpointError
from persia_torchrec.table import TableSpec


def table(name, **settings):
    return TableSpec(name=name, **{"dim": 4, "optimizer": SGD(0.1), **settings})


def saved(*specs):
    return [SavedTable(spec.to_json(), 1, False) for spec in specs]


def plan(specs, model, **rules):
    known = {spec.name: spec for spec in model}
    return plan_tables("here", saved(*specs), known, LoadRules(**rules))


def test_tables_that_are_alike_are_loaded_whole_without_a_word():
    plans, notes = plan([table("a")], [table("a")], missing="error")
    assert (plans["a"].has_rows, plans["a"].has_state) == (True, True)
    assert notes == []


def test_a_table_that_the_model_lacks_is_added_an_error_or_left_out():
    both, model = [table("a"), table("b")], [table("a")]
    assert plan(both, model)[0]["b"].has_rows
    with pytest.raises(CheckpointError, match=r"Received: \['b'\] besides"):
        plan(both, model, missing="error")
    plans, notes = plan(both, model, missing="skip")
    assert not plans["b"].has_rows
    assert notes == ["table 'b' is left out: the model does not have it"]


def test_a_table_that_was_renamed_is_named_in_the_error():
    with pytest.raises(CheckpointError, match=r"rename=\{'old': 'bags\.old'\}"):
        plan([table("old")], [table("bags.old")], missing="error")


def test_another_optimizer_keeps_the_weights_where_the_rules_say_so():
    adagrad, sgd = [table("a", optimizer=Adagrad(0.1))], [table("a")]
    with pytest.raises(CheckpointError, match='on_change="reset state" keeps'):
        plan(adagrad, sgd)
    plans, notes = plan(adagrad, sgd, on_change="reset state")
    assert (plans["a"].has_rows, plans["a"].has_state) == (True, False)
    assert "the optimizer state of table 'a' begins again" in notes[0]
    wider = [table("a", dim=8)]
    with pytest.raises(CheckpointError, match='"reset table" begins it again'):
        plan(wider, sgd, on_change="reset state")
    assert not plan(wider, sgd, on_change="reset table")[0]["a"].has_rows


def test_the_first_server_drops_a_table_and_the_others_rows_are_stale_until_they_do():
    def head(shard, *tables, dropped=()):
        described = saved(*map(table, tables))
        return IncrementHead(
            shard=shard,
            num_shards=2,
            tables=tuple(described),
            log="log",
            number=1,
            created_s=0.0,
            tick=0,
            was_cleared=False,
            dropped=dropped,
        )

    drops = Drops()
    assert drops.take(head(0, "a")) == ([], set())
    assert drops.take(head(0, "a", dropped=("a",))) == (["a"], set())
    assert drops.take(head(1, "a")) == ([], {"a"})  # of the table that is gone
    assert drops.take(head(1, "a", dropped=("a",))) == ([], set())


def test_a_date_is_a_second_and_what_is_none_is_0():
    assert written_s("1970-01-01T00:01:00+00:00") == 60.0
    assert written_s("yesterday") == 0.0
