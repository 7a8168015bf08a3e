from schemas.untrained import untrained_remark


def test_remark_names_each_feature_once():
    assert untrained_remark(iter(["a (random:0)", "b", "a (random:0)"])) == (
        "untrained: the weights of a (random:0), b are random, the features mean nothing"
    )


def test_remark_about_trained_features_is_empty():
    assert untrained_remark([]) == ""
