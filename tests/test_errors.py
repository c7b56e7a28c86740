"""Errors: what each one is, where it says that it happened, and the error of a batch that cannot be read."""

import ast
import pickle
import re
from pathlib import Path

import pytest

import lit_async_data
from lit_async_data.errors import ConfigError, CorruptError, ReadError, batch_error, redact

MODULES = Path(lit_async_data.__file__).parent.rglob("*.py")


def test_an_option_that_is_part_of_another_one_keeps_its_place():
    error = ConfigError("no", "null", file="t.csv", row=3).within("fields.y.")
    for each in (error, pickle.loads(pickle.dumps(error))):
        assert (str(each), each.option, each.file, each.row) == ("fields.y.null: no", "fields.y.null", "t.csv", 3)
    assert ConfigError("no").within("fields.y.").option is None


def test_the_key_of_an_option_is_an_attribute_not_only_a_word_of_the_message():
    calls = [call for path in MODULES for call in ast.walk(ast.parse(path.read_text())) if isinstance(call, ast.Call)]
    errors = [call for call in calls if ast.unparse(call.func) in ("ConfigError", "MemoryBudgetError")]
    assert len(errors) > 200
    assert [text for error in errors if re.match(r"f?['\"][\w.]+: ", text := ast.unparse(error.args[0]))] == []


@pytest.mark.parametrize(("known", "worker"), [(None, 2), (0, 0)])
def test_an_error_of_ours_is_that_of_its_batch_and_says_which(known, worker):
    cause = CorruptError("x.h5: damaged", worker=known)
    error = batch_error(cause, 1, 7, [3, 4, 5, 6], 2)
    assert (error, error.stage, error.worker) == (cause, "read", worker)
    assert error.__notes__ == ["in batch 7 of epoch 1, samples 3, 4, 5, … (4 in all)"]


@pytest.mark.parametrize(
    ("samples", "which"), [([3, 4], "batch 7 of epoch 1 (samples 3, 4)"), ([], "batch 7 of epoch 1")]
)
def test_any_other_error_becomes_a_read_error_with_its_cause(samples, which):
    cause = OSError("bad sector")
    error = batch_error(cause, 1, 7, samples, 2)
    assert (type(error), str(error)) == (ReadError, f"{which} could not be read: OSError: bad sector")
    assert (error.__cause__, error.stage, error.worker, error.sample_id) == (cause, "read", 2, [*samples, None][0])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://h/0.png?sig=A%2FB", "https://h/0.png?…"),
        ("HTTPS://h/x?TOKEN", "HTTPS://h/x?…"),
        ("see (https://h/x?a=1). No", "see (https://h/x?…). No"),
        ("['https://a?s=1', \"https://b?s='2\"]", "['https://a?…', \"https://b?…\"]"),
        ('["https://a?s=1","https://b?s=2"]', '["https://a?…"]'),
        ("az://c/k?sv=1&sig=ab: no", "az://c/k?…: no"),
        ("postgres://u:p@ss@h/x, https://tok@h/x", "postgres://…@h/x, https://…@h/x"),
        ("s3://b/x?.h5: no such object?", "s3://b/x?.h5: no such object?"),  # a wildcard
        ("abfss://c@acc.dfs/x is at http://h:80/x@2", "abfss://c@acc.dfs/x is at http://h:80/x@2"),
        ("https://h/x?…: what follows", "https://h/x?…: what follows"),
    ],
)
def test_no_message_has_the_secrets_of_an_address(text, shown):
    assert redact(text) == shown
    error = ReadError(text, place="https://u:pw@host/t.csv?x")
    assert str(error) == f"https://…@host/t.csv?…: {shown}"
    assert error.message == str(pickle.loads(pickle.dumps(ReadError(text)))) == shown
