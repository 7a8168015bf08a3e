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

# What the scripts did, as FIRST-LAST/STEP:SIGNS OFFSET. Characters that are not listed became tokens of their own.
#   w: stays in a word                     qXb     -> qXb
#   n: keeps a comma after a digit         1,X     -> 1,X
#   a: an apostrophe behind it opens 'b    X'b     -> X &apos;b
#   l: keeps the full stop before it       w. X    -> w. X
#   OFFSET: from the code point to that of lowercase.perl's character
BEHAVIOUR = """
AA:wal B5:wal BA:wal C0-D6:wa+32 D8-DE:wa+32 DF-F6:wal F8-FF:wal 100-12E/2:wa+1 101-137/2:wal 132-136/2:wa+1 138-148/2:wal
139-147/2:wa+1 149-177/2:wal 14A-176/2:wa+1 178:wa-121 179-17D/2:wa+1 17A-180/2:wal 17F:wal 181:wa+210 182-184/2:wa+1
183-185/2:wal 186:wa+206 187:wa+1 188:wal 189-18A:wa+205 18B:wa+1 18C-18D:wal 18E:wa+79 18F:wa+202 190:wa+203 191:wa+1
192:wal 193:wa+205 194:wa+207 195:wal 196:wa+211 197:wa+209 198:wa+1 199-19B:wal 19C:wa+211 19D:wa+213 19E:wal 19F:wa+214
1A0-1A4/2:wa+1 1A1-1A5/2:wal 1A6:wa+218 1A7:wa+1 1A8-1AA/2:wal 1A9:wa+218 1AB-1AD/2:wal 1AC:wa+1 1AE:wa+218 1AF:wa+1
1B0:wal 1B1-1B2:wa+217 1B3-1B5/2:wa+1 1B4-1B6/2:wal 1B7:wa+219 1B8:wa+1 1B9-1BA:wal 1BB:wa 1BC:wa+1 1BD-1BF:wal 1C0-1C3:wa
1C4:wa+2 1C5:wa+1 1C6:wal 1C7:wa+2 1C8:wa+1 1C9:wal 1CA:wa+2 1CB-1DB/2:wa+1 1CC-1DC/2:wal 1DD-1EF/2:wal 1DE-1EE/2:wa+1
1F0:wal 1F1:wa+2 1F2-1F4/2:wa+1 1F3-1F5/2:wal 1F6:wa-97 1F7:wa-56 1F8-21E/2:wa+1 1F9-239/2:wal 220:wa-130 222-232/2:wa+1
234-238/2:wal 23A:wa+10795 23B:wa+1 23C:wal 23D:wa-163 23E:wa+10792 23F-240:wal 241:wa+1 242:wal 243:wa-195 244:wa+69
245:wa+71 246-24E/2:wa+1 247-2B7/2:wal 250-292/2:wal 294:wa 296-2B8/2:wal 2B9-2BF:wa 2C0-2C1:wal 2C6-2D1:wa 2E0-2E4:wal
2EC-2EE/2:wa 345:wal 370-372/2:wa+1 371-373/2:wal 374:wa 376:wa+1 377:wal 37A-37D:wal 37F:wa+116 386:wa+38 388-38A:wa+37
38C:wa+64 38E-38F:wa+63 390:wal 391-3A1:wa+32 3A3-3AB:wa+32 3AC-3CE:wal 3CF:wa+8 3D0-3D1:wal 3D2-3D4:wa 3D5-3D7:wal
3D8-3EE/2:wa+1 3D9-3F5/2:wal 3F0-3F2/2:wal 3F4:wa-60 3F7:wa+1 3F8:wal 3F9:wa-7 3FA:wa+1 3FB-3FC:wal 3FD-3FF:wa-130
400-40F:wa+80 410-42F:wa+32 430-45F:wal 460-480/2:wa+1 461-481/2:wal 48A-4BE/2:wa+1 48B-4BF/2:wal 4C0:wa+15 4C1-4CD/2:wa+1
4C2-4CE/2:wal 4CF-52F/2:wal 4D0-52E/2:wa+1 1C80-1C88:wal 1ABF-1AC0:wa 1ACC-1ACE:wa 1D00-1DBF:wal 1E00-1E94/2:wa+1
1E01-1F07/2:wal 1E96-1E9C/2:wal 1E9E:wa-7615 1EA0-1EFE/2:wa+1 1F00-1F06/2:wal 1F08-1F0F:wa-8 1F10-1F15:wal 1F18-1F1D:wa-8
1F20-1F27:wal 1F28-1F2F:wa-8 1F30-1F37:wal 1F38-1F3F:wa-8 1F40-1F45:wal 1F48-1F4D:wa-8 1F50-1F57:wal 1F59-1F5F/2:wa-8
1F60-1F67:wal 1F68-1F6F:wa-8 1F70-1F7D:wal 1F80-1F87:wal 1F88-1F8F:wa-8 1F90-1F97:wal 1F98-1F9F:wa-8 1FA0-1FA7:wal
1FA8-1FAF:wa-8 1FB0-1FB4:wal 1FB6-1FB7:wal 1FB8-1FB9:wa-8 1FBA-1FBB:wa-74 1FBC:wa-9 1FBE:wal 1FC2-1FC4:wal 1FC6-1FC7:wal
1FC8-1FCB:wa-86 1FCC:wa-9 1FD0-1FD3:wal 1FD6-1FD7:wal 1FD8-1FD9:wa-8 1FDA-1FDB:wa-100 1FE0-1FE7:wal 1FE8-1FE9:wa-8
1FEA-1FEB:wa-112 1FEC:wa-7 1FF2-1FF4:wal 1FF6-1FF7:wal 1FF8-1FF9:wa-128 1FFA-1FFB:wa-126 1FFC:wa-9 2071:wal 207F:wal
2090-209C:wal 2102:wa 2107:wa 210A:wal 210B-210D:wa 210E-210F:wal 2110-2112:wa 2113:wal 2115:wa 2119-211D:wa 2124:wa
2126:wa-7517 2128:wa 212A:wa-8383 212B:wa-8262 212C-212D:wa 212F:wal 2130-2131:wa 2132:wa+28 2133-2137/2:wa 2134:wal
2136-2138/2:wa 2139:wal 213C-213D:wal 213E-213F:wa 2145:wa 2146-2149:wal 214E:wal 2160-216F:wna+16 2170-217F:wnal
2180-2182:wna 2183:wa+1 2184:wal 2185-2188:wna 24B6-24CF:wa+26 24D0-24E9:wal 2C60:wa+1 2C61:wal 2C62:wa-10743 2C63:wa-3814
2C64:wa-10727 2C65-2C66:wal 2C67-2C6B/2:wa+1 2C68-2C6C/2:wal 2C6D:wa-10780 2C6E:wa-10749 2C6F:wa-10783 2C70:wa-10782
2C71-2C73/2:wal 2C72:wa+1 2C74-2C7C/2:wal 2C75:wa+1 2C77-2C7D/2:wal 2C7E-2C7F:wa-10815 2DE0-2DFF:wa 2E2F:wa
A640-A66C/2:wa+1 A641-A66D/2:wal A66E:wa A674-A67B:wa A67F:wa A680-A69A/2:wa+1 A681-A69D/2:wal A69C:wal A69E-A69F:wa
A717-A71F:wa A722-A72E/2:wa+1 A723-A777/2:wal A730:wal A732-A76E/2:wa+1 A770-A77C/2:wal A779-A77B/2:wa+1 A77D:wa-35332
A77E-A786/2:wa+1 A77F-A787/2:wal A788:wa A78B:wa+1 A78C-A78E/2:wal A78D:wa-42280 A78F:wa A790-A792/2:wa+1 A791-A7A9/2:wal
A794:wal A796-A7A8/2:wa+1 A7AA:wa-42308 A7AB:wa-42319 A7AC:wa-42315 A7AD:wa-42305 A7AE:wa-42308 A7AF:wal A7B0:wa-42258
A7B1:wa-42282 A7B2:wa-42261 A7B3:wa+928 A7B4-A7C2/2:wa+1 A7B5-A7C3/2:wal A7C4:wa-48 A7C5:wa-42307 A7C6:wa-35384
A7C7-A7C9/2:wa+1 A7C8-A7CA/2:wal A7D0:wa+1 A7D1-A7D9/2:wal A7D6-A7D8/2:wa+1 A7F2-A7F4:wa A7F5:wa+1 A7F6-A7FA/2:wal A7F7:wa
A7F9:wal A7FB-A7FF:wa AB30-AB5A:wal AB5C-AB68:wal AB69:wa FB00-FB06:wal FF10-FF19:wn FF21-FF3A:wa+32 FF41-FF5A:wal
10140-10174:wna 10780:wal 10781-10782:wa 10783-10785:wal 10787-107B0:wal 107B2-107BA:wal 1D400-1D419:wa 1D41A-1D433:wal
1D434-1D44D:wa 1D44E-1D454:wal 1D456-1D467:wal 1D468-1D481:wa 1D482-1D49B:wal 1D49C-1D49E/2:wa 1D49F:wa 1D4A2:wa
1D4A5-1D4A6:wa 1D4A9-1D4AC:wa 1D4AE-1D4B5:wa 1D4B6-1D4B9:wal 1D4BB-1D4CF/2:wal 1D4BE-1D4C2/2:wal 1D4C6-1D4CE/2:wal
1D4D0-1D4E9:wa 1D4EA-1D503:wal 1D504-1D505:wa 1D507-1D50A:wa 1D50D-1D514:wa 1D516-1D51C:wa 1D51E-1D537:wal 1D538-1D539:wa
1D53B-1D53E:wa 1D540-1D544:wa 1D546:wa 1D54A-1D550:wa 1D552-1D56B:wal 1D56C-1D585:wa 1D586-1D59F:wal 1D5A0-1D5B9:wa
1D5BA-1D5D3:wal 1D5D4-1D5ED:wa 1D5EE-1D607:wal 1D608-1D621:wa 1D622-1D63B:wal 1D63C-1D655:wa 1D656-1D66F:wal
1D670-1D689:wa 1D68A-1D6A5:wal 1D6A8-1D6C0:wa 1D6C2-1D6DA:wal 1D6DC-1D6E1:wal 1D6E2-1D6FA:wa 1D6FC-1D714:wal
1D716-1D71B:wal 1D71C-1D734:wa 1D736-1D74E:wal 1D750-1D755:wal 1D756-1D76E:wa 1D770-1D788:wal 1D78A-1D78F:wal
1D790-1D7A8:wa 1D7AA-1D7C2:wal 1D7C4-1D7C9:wal 1D7CA:wa 1D7CB:wal 1D7CE-1D7FF:wn 1DF00-1DF09:wal 1DF0A:wa 1DF0B-1DF1E:wal
1F130-1F149:wa 1F150-1F169:wa 1F170-1F189:wa
"""

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
def test_table_equals_that_of_python() -> None:
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


@pytest.mark.parametrize("content", LETTERS.values(), ids=LETTERS)
def test_classes_need_no_escapes(content: str) -> None:
    assert re.search(r"[\\^\[\]]|--|&&|\|\||~~", content) is None


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


@pytest.mark.slow
@pytest.mark.skipif(PERL is None, reason="needs Perl")
def test_another_version_of_unicode_is_refused(tmp_path: Path) -> None:
    (tmp_path / "Unicode").mkdir()
    (tmp_path / "Unicode" / "UCD.pm").write_text('package Unicode::UCD; sub UnicodeVersion { "15.0.0" } 1;\n')
    done = _run(shutil.copy(SCRIPT, tmp_path), PERL5LIB=str(tmp_path))
    assert done.returncode != 0
    assert re.fullmatch(
        r"Perl \d+\.\d+\.\d+ has Unicode 15\.0\.0, expected 14\.0\.0: put Perl 5\.36 first in PATH\. Nothing was written\n",
        done.stderr,
    )
    assert not (tmp_path / "letters.toml").exists()
