"""Captions of drawn scenes: grammar against sentences written by hand, and the two portions."""

import string

import pytest

from pipelines.demo.scene_captions import FULL_TEMPLATES, LANGUAGES, caption, captions_of_scene, template_count
from pipelines.demo.scenes import Scene, ShapeGroup, make_scenes


def single(shape, colour, size, count, position="left", background="white"):
    return Scene(background=background, groups=(ShapeGroup(shape, colour, size, count, position),))


@pytest.mark.parametrize(
    ("language", "template", "scene", "text"),
    [
        ("en", 0, single("star", "orange", "small", 1), "There is a small orange star on the left, on a white background."),
        ("en", 2, single("star", "blue", "small", 3, "top", "light blue"),
         "On a light blue background you can see three small blue stars; the stars are at the top."),
        ("de", 0, single("diamond", "orange", "small", 1, "centre", "pink"),
         "Auf rosafarbenem Hintergrund ist in der Mitte eine kleine orangefarbene Raute zu sehen."),
        ("de", 2, single("circle", "black", "small", 1, "bottom", "grey"),
         "Auf grauem Hintergrund sieht man einen kleinen schwarzen Kreis; der Kreis ist unten."),
        ("de", 3, single("heart", "red", "small", 1, "right", "light green"),
         "Dies ist ein hellgrünes Bild mit einem kleinen roten Herzen rechts."),
        ("fr", 0, single("star", "brown", "large", 2), "Il y a deux grandes étoiles marron à gauche, sur un fond blanc."),
        ("fr", 0, single("cross", "orange", "small", 4, "right"),
         "Il y a quatre petites croix orange à droite, sur un fond blanc."),
        ("fr", 2, single("star", "black", "small", 1, "centre", "light green"),
         "Sur un fond vert clair, on voit une petite étoile noire ; l'étoile est au centre."),
        ("fr", 3, single("ring", "blue", "small", 3, "top"),
         "C'est une image blanche avec trois petits anneaux bleus en haut."),
        ("cs", 0, single("heart", "yellow", "small", 4, "top", "light blue"),
         "Nahoře na světle modrém pozadí jsou čtyři malá žlutá srdce."),
        ("cs", 2, single("star", "red", "small", 1, "centre", "pink"),
         "Na růžovém pozadí vidíme jednu malou červenou hvězdu; hvězda je uprostřed."),
        ("cs", 4, single("circle", "red", "small", 1, "right", "grey"),
         "Tomuto obrázku říkáme „Jeden malý červený kruh vpravo, na šedém pozadí“."),
    ],
)  # fmt: skip
def test_literal_sentences(language, template, scene, text):
    assert caption(scene, language, template) == text


def test_two_groups_in_each_direction():
    scene = Scene("grey", (ShapeGroup("ring", "red", "small", 2, "bottom"), ShapeGroup("cross", "blue", "large", 1, "top")))
    assert caption(scene, "en", 5) == "Two small red rings below a large blue cross."
    assert caption(scene, "en", 8) == "A large blue cross above two small red rings."
    assert caption(scene, "de", 8) == "Ein großes blaues Kreuz über zwei kleinen roten Ringen."
    assert caption(scene, "fr", 2) == (
        "En bas, on voit deux petits anneaux rouges, et en haut, une grande croix bleue ; le reste de l'image est gris."
    )
    assert caption(scene, "cs", 3) == (
        "Toto je šedý obrázek: dole jsou dva malé červené prstence a nahoře je jeden velký modrý kříž."
    )


@pytest.mark.parametrize("language", list(LANGUAGES))
def test_templates_give_clean_sentences(language):
    sentences = set()
    for _, scene in make_scenes(60, seed=4):
        templates = range(template_count(language, scene))
        assert len(templates) >= FULL_TEMPLATES
        said = [caption(scene, language, template, with_size=size) for template in templates for size in (True, False)]
        assert len(set(said)) == len(said)
        sentences.update(said)
    for text in sentences:
        assert not set(text) & set("{}_\t\n"), text
        assert "  " not in text, text
        assert text == text.strip(), text
        assert text[0].isupper(), text
        assert text[-1] == ".", text
        assert not set(text) & set(string.digits), text
        assert text.count("„") == text.count("“"), text
        assert text.count('"') in (0, 2), text


def test_portions():
    for _, scene in make_scenes(40, seed=1):
        made = captions_of_scene(scene)
        assert made == captions_of_scene(scene)
        keys = [(sentence.language, sentence.portion, sentence.index) for sentence in made]
        comparable = [(language, "comparable", index) for language in ("en", "de") for index in range(5)]
        assert keys == comparable + [(language, "translation", 0) for language in ("en", "de", "fr", "cs")]
        for language in ("en", "de"):
            assert (
                len({sentence.text for sentence in made if sentence.language == language and sentence.portion == "comparable"})
                == 5
            )
        translations = [sentence.text for sentence in made if sentence.portion == "translation"]
        assert translations in [
            [caption(scene, language, template) for language in LANGUAGES] for template in range(FULL_TEMPLATES)
        ]
