import os
import re
import shutil
import subprocess
import unicodedata
from pathlib import Path

import pytest

from pipelines.text import moses
from pipelines.text.moses import LETTERS, lower, tokenize

# Latin, Greek, Cyrillic, mathematics and modifiers: all of these code points went through tokenizer.perl -l en and
# lowercase.perl of Moses at commit 3a0631a, under Perl 5.36.
BLOCKS = """
80-52F 1AB0-1AFF 1C80-1C8F 1D00-1DBF 1E00-1FFF 2070-209F 2100-218F 2200-22FF 2460-24FF 27C0-27EF 2980-29FF 2C60-2C7F
2DE0-2DFF 2E2F-2E2F A640-A69F A700-A7FF AB30-AB6F FB00-FB06 FF10-FF5A 10140-1018F 10780-107BF 1D400-1D7FF 1DF00-1DFFF
1E030-1E08F 1F100-1F1FF
"""

# Output of the scripts, as FIRST-LAST/STEP:SIGNS OFFSET. Characters that are not listed became tokens of their own.
#   w: stays in a word                     qXb     -> qXb
#   n: keeps a comma after a digit         1,X     -> 1,X
#   a: an apostrophe behind it opens 'b    X'b     -> X &apos;b
#   l: keeps the full stop before it       w. X    -> w. X
#   OFFSET: from the code point to that of lowercase.perl's character
BEHAVIOUR = Path(__file__).with_name("perl_letters.txt").read_text()

PERL = shutil.which("perl")
SCRIPT = Path(moses.__file__).with_name("letters.pl")


def _code_points(ranges: str) -> range:
    bounds, _, step = ranges.partition("/")
    first, _, last = bounds.partition("-")
    return range(int(first, 16), int(last or first, 16) + 1, int(step or 1))


@pytest.mark.slow
def test_every_letter_behaves_as_in_the_perl_scripts() -> None:
    behaviour = {}
    for entry in BEHAVIOUR.split():
        ranges, _, signs = entry.partition(":")
        word = re.fullmatch("([wnal]*)([+-][0-9]+)?", signs)
        assert word is not None, entry
        behaviour.update((code, (word[1], int(word[2] or 0))) for code in _code_points(ranges))
    checked = set()
    for code in (code for block in BLOCKS.split() for code in _code_points(block)):
        if code in (0x85, 0xA0, 0x130):  # White space, and the only lower case of two characters.
            continue
        checked.add(code)
        signs, offset = behaviour.get(code, ("", 0))
        x = chr(code)
        expected = (
            f"q{x}b" if "w" in signs else f"q {x} b",
            f"1,{x}" if "n" in signs else f"1 , {x}",
            f"{x} &apos;b" if "a" in signs else f"{x}&apos;b" if "n" in signs else f"{x} &apos; b",
            f"w. {x}" if "l" in signs else f"w . {x}",
        )
        assert tokenize(f"q{x}b Q 1,{x} Q {x}'b Q w. {x} Q", "en") == " Q ".join(expected) + " Q", f"U+{code:04X}"
        assert lower(x) == chr(code + offset), f"U+{code:04X}"
    assert checked >= behaviour.keys()
    assert len(checked) == 5120


@pytest.mark.parametrize("character", ["\ua7cb", "\ua7cc", "\ua7da", "\ua7dc", "\u1c89", "\U00010d50"])
def test_characters_newer_than_the_table_have_no_lower_case(character: str) -> None:
    assert lower(f"É{character}") == f"é{character}"
    assert tokenize(f"a{character}b", "en") == f"a {character} b"


@pytest.mark.slow
@pytest.mark.skipif(unicodedata.unidata_version != "14.0.0", reason="only Python 3.11 has Unicode 14.0")
def test_table_equals_unicodedata() -> None:
    classes = {name: re.compile(f"[{content}]") for name, content in LETTERS.items()}
    for code in (*range(0xD800), *range(0xE000, 0x110000)):
        x = chr(code)
        category = unicodedata.category(x)
        expected = {
            "CASED": category in ("Ll", "Lu", "Lt"),
            "DECIMAL": category == "Nd",
            "LOWER_CASE": x.islower(),
            "NUMERIC": category[0] == "N",
            "WHITE_SPACE": x.isspace() and x not in "\x1c\x1d\x1e\x1f",
        }
        members = {name: pattern.match(x) is not None for name, pattern in classes.items()}
        # Python does not know which marks and symbols are alphabetic.
        if members.pop("ALPHABETIC"):
            assert category in ("Lu", "Ll", "Lt", "Lm", "Lo", "Nl", "Mn", "Mc", "So"), f"U+{code:04X}"
        else:
            assert category not in ("Lu", "Ll", "Lt", "Lm", "Lo", "Nl"), f"U+{code:04X}"
        assert members == expected, f"U+{code:04X}"
        assert lower(x) == x.lower(), f"U+{code:04X}"


def _run(script: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    assert PERL is not None
    return subprocess.run([PERL, script], capture_output=True, text=True, env={**os.environ, **environment})


@pytest.mark.slow
@pytest.mark.skipif(PERL is None, reason="needs Perl 5.36")
def test_perl_writes_the_table_again(tmp_path: Path) -> None:
    done = _run(shutil.copy(SCRIPT, tmp_path))
    if "expected 14.0.0" in done.stderr:
        pytest.skip("this Perl has another version of Unicode")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "letters.toml").read_bytes() == SCRIPT.with_suffix(".toml").read_bytes()
