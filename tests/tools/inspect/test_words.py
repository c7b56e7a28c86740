"""Names are read as words, whatever their spelling."""

from lit_async_data.tools.inspect.words import LABELS, has_word, of_training


def test_a_word_of_the_last_component_counts():
    names = ["y_train", "testLabels_1", "CLASS", "obs/cell.type", "labels/x", "glasses"]
    assert [name for name in names if has_word(name, LABELS)] == names[:4]


def test_other_stages_go_if_one_is_of_training():
    assert of_training(["X_train", "X_test", "z"]) == ["X_train", "z"]
    assert of_training(["train/a", "train/test"]) == ["train/a", "train/test"]
    assert of_training(["a/val/x", "b/val/x"]) == ["a/val/x", "b/val/x"]
