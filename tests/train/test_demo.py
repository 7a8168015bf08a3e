from pipelines.demo.run import split_of
from train.demo import MIN_SCENES


def test_min_scenes_fill_each_split():
    assert {split_of(number) for number in range(MIN_SCENES)} == {"train", "val", "test"}
    assert {split_of(number) for number in range(MIN_SCENES - 1)} == {"train", "val"}
