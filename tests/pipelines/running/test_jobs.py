import random
from collections import Counter

from pipelines.running.commits import SumCounters


def test_counters_add_up_in_any_grouping():
    generator = random.Random(4)
    counters = [Counter(generator.choices("abcdef", k=5)) for _ in range(30)]
    combine = SumCounters()
    accumulators = []
    for start in range(0, 30, 7):
        accumulator = combine.create_accumulator()
        for counter in counters[start : start + 7]:
            accumulator = combine.add_input(accumulator, counter)
        accumulators.append(accumulator)
    merged = combine.merge_accumulators(iter(accumulators))
    assert combine.extract_output(merged) == sum(counters, Counter())
    assert combine.create_accumulator() == Counter()
