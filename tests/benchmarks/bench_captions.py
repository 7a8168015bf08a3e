"""Captions end to end (files to shards, through Beam, all cores) against the same tokenizer calls in a plain loop.

Yardsticks: the plain loop over ready strings in one process, times the number of cores; and sacremoses's own normalizer and
tokenizer called in the same way, as a script without this package would do. Needs the Multi30K text.
"""

import sys
import tempfile

from measuring import rate_of, ratio, test_data
from processor import cores, machine
from sacremoses import MosesPunctNormalizer, MosesTokenizer
from targets import floor

from pipelines.inputs.captions.base import Selection
from pipelines.inputs.captions.opening import open_captions
from pipelines.running.execution import Execution
from pipelines.text.captions import CaptionsJob, prepare_captions
from pipelines.text.moses import load_recipe, prepare

EVERY = 8  # The loops run over every eighth caption; their rate does not depend on how many there are.


def main() -> None:
    """Print the ratios."""
    data = test_data("multi30k")
    if data is None:
        sys.exit("needs the Multi30K text: set IMAGEPIVOT_TEST_DATA")
    print(machine())
    source = open_captions("multi30k", data)
    captions = [(c.text, c.language) for part in source.parts(Selection()) for c in source.read(part, Selection())]
    sample, steps = captions[::EVERY], load_recipe("multi30k-lc")
    prepare("warm", "en", steps)

    def ours() -> float:
        with tempfile.TemporaryDirectory() as output:
            job = CaptionsJob(source=source, output=output)
            return rate_of(lambda: prepare_captions(job, Execution()), len(captions))

    def loop() -> float:
        return cores() * rate_of(lambda: [prepare(text, language, steps) for text, language in sample], len(sample))

    normalizers = {name: MosesPunctNormalizer(name) for name in ("cs", "de", "en", "fr")}
    tokenizers = {name: MosesTokenizer(name) for name in ("cs", "de", "en", "fr")}

    def tokenize(text: str, language: str) -> None:
        tokenizers[language].tokenize(normalizers[language].normalize(text.lower()), return_str=True)

    def plain_sacremoses() -> float:
        return cores() * rate_of(lambda: [tokenize(*caption) for caption in sample], len(sample))

    ratio(
        "captions end to end, against our own calls in a loop times the cores",
        ours,
        loop,
        unit="captions/s",
        at_least=floor("captions against our calls"),
    )
    ratio(
        "captions end to end, against sacremoses in a loop times the cores",
        ours,
        plain_sacremoses,
        unit="captions/s",
        at_least=floor("captions against sacremoses"),
    )


if __name__ == "__main__":
    main()
