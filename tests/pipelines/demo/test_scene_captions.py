"""Captions of drawn scenes: grammar against sentences written by hand, and the two portions."""

import string

import pytest

from pipelines.demo.scene_captions import FULL_TEMPLATES, LANGUAGES, caption, captions_of_scene, template_count
from pipelines.demo.scenes import Scene, ShapeGroup, make_scenes

# Frames of template 1: the position is left, the background white.
SINGLE_FRAMES = {
    "en": "The picture shows {} on the left, and the background is white.",
    "de": "Das Bild zeigt links {}, und der Hintergrund ist weiß.",
    "fr": "L'image montre {} à gauche, et le fond est blanc.",
    "cs": "Obrázek ukazuje vlevo {} a pozadí je bílé.",
}

# One and two large purple shapes as the object of "shows".
OBJECTS = {
    "en": {
        "circle": ("a large purple circle", "two large purple circles"),
        "cross": ("a large purple cross", "two large purple crosses"),
    },
    "de": {
        "circle": ("einen großen violetten Kreis", "zwei große violette Kreise"),
        "square": ("ein großes violettes Quadrat", "zwei große violette Quadrate"),
        "triangle": ("ein großes violettes Dreieck", "zwei große violette Dreiecke"),
        "star": ("einen großen violetten Stern", "zwei große violette Sterne"),
        "cross": ("ein großes violettes Kreuz", "zwei große violette Kreuze"),
        "diamond": ("eine große violette Raute", "zwei große violette Rauten"),
        "heart": ("ein großes violettes Herz", "zwei große violette Herzen"),
        "ring": ("einen großen violetten Ring", "zwei große violette Ringe"),
    },
    "fr": {
        "circle": ("un grand cercle violet", "deux grands cercles violets"),
        "square": ("un grand carré violet", "deux grands carrés violets"),
        "triangle": ("un grand triangle violet", "deux grands triangles violets"),
        "star": ("une grande étoile violette", "deux grandes étoiles violettes"),
        "cross": ("une grande croix violette", "deux grandes croix violettes"),
        "diamond": ("un grand losange violet", "deux grands losanges violets"),
        "heart": ("un grand cœur violet", "deux grands cœurs violets"),
        "ring": ("un grand anneau violet", "deux grands anneaux violets"),
    },
    "cs": {
        "circle": ("jeden velký fialový kruh", "dva velké fialové kruhy"),
        "square": ("jeden velký fialový čtverec", "dva velké fialové čtverce"),
        "triangle": ("jeden velký fialový trojúhelník", "dva velké fialové trojúhelníky"),
        "star": ("jednu velkou fialovou hvězdu", "dvě velké fialové hvězdy"),
        "cross": ("jeden velký fialový kříž", "dva velké fialové kříže"),
        "diamond": ("jeden velký fialový kosočtverec", "dva velké fialové kosočtverce"),
        "heart": ("jedno velké fialové srdce", "dvě velká fialová srdce"),
        "ring": ("jeden velký fialový prstenec", "dva velké fialové prstence"),
    },
}

# Frames of template 1 with two groups, and the words after them: the dative, "de", the genitive and the instrumental.
DOUBLE_FRAMES = {
    ("de", "left"): "Das Bild zeigt einen kleinen roten Kreis links von {}, und der Hintergrund ist weiß.",
    ("fr", "left"): "L'image montre un petit cercle rouge à gauche {}, et le fond est blanc.",
    ("cs", "left"): "Obrázek ukazuje jeden malý červený kruh vlevo od {} a pozadí je bílé.",
    ("cs", "top"): "Obrázek ukazuje jeden malý červený kruh nad {} a pozadí je bílé.",
}
RELATED = {
    ("de", "left"): {
        "circle": ("einem großen grünen Kreis", "zwei großen grünen Kreisen"),
        "square": ("einem großen grünen Quadrat", "zwei großen grünen Quadraten"),
        "diamond": ("einer großen grünen Raute", "zwei großen grünen Rauten"),
        "heart": ("einem großen grünen Herzen", "zwei großen grünen Herzen"),
    },
    ("fr", "left"): {
        "circle": ("d'un grand cercle vert", "de deux grands cercles verts"),
        "star": ("d'une grande étoile verte", "de deux grandes étoiles vertes"),
    },
    ("cs", "left"): {
        "circle": ("velkého zeleného kruhu", "dvou velkých zelených kruhů"),
        "square": ("velkého zeleného čtverce", "dvou velkých zelených čtverců"),
        "triangle": ("velkého zeleného trojúhelníku", "dvou velkých zelených trojúhelníků"),
        "star": ("velké zelené hvězdy", "dvou velkých zelených hvězd"),
        "cross": ("velkého zeleného kříže", "dvou velkých zelených křížů"),
        "diamond": ("velkého zeleného kosočtverce", "dvou velkých zelených kosočtverců"),
        "heart": ("velkého zeleného srdce", "dvou velkých zelených srdcí"),
        "ring": ("velkého zeleného prstence", "dvou velkých zelených prstenců"),
    },
    ("cs", "top"): {
        "circle": ("velkým zeleným kruhem", "dvěma velkými zelenými kruhy"),
        "square": ("velkým zeleným čtvercem", "dvěma velkými zelenými čtverci"),
        "triangle": ("velkým zeleným trojúhelníkem", "dvěma velkými zelenými trojúhelníky"),
        "star": ("velkou zelenou hvězdou", "dvěma velkými zelenými hvězdami"),
        "cross": ("velkým zeleným křížem", "dvěma velkými zelenými kříži"),
        "diamond": ("velkým zeleným kosočtvercem", "dvěma velkými zelenými kosočtverci"),
        "heart": ("velkým zeleným srdcem", "dvěma velkými zelenými srdci"),
        "ring": ("velkým zeleným prstencem", "dvěma velkými zelenými prstenci"),
    },
}


def single(shape, colour, size, count, position="left", background="white"):
    return Scene(background=background, groups=(ShapeGroup(shape, colour, size, count, position),))


@pytest.mark.parametrize(("language", "shape"), [(language, shape) for language, shapes in OBJECTS.items() for shape in shapes])
def test_shape_as_the_object(language, shape):
    said = [caption(single(shape, "purple", "large", count), language, 1) for count in (1, 2)]
    assert said == [SINGLE_FRAMES[language].format(phrase) for phrase in OBJECTS[language][shape]]


@pytest.mark.parametrize(
    ("language", "position", "shape"), [(*key, shape) for key, shapes in RELATED.items() for shape in shapes]
)
def test_shape_after_a_relation(language, position, shape):
    opposite = {"left": "right", "top": "bottom"}[position]
    here = ShapeGroup("circle", "red", "small", 1, position)
    said = [
        caption(Scene("white", (here, ShapeGroup(shape, "green", "large", count, opposite))), language, 1) for count in (1, 2)
    ]
    assert said == [DOUBLE_FRAMES[language, position].format(phrase) for phrase in RELATED[language, position][shape]]


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


def test_without_sizes():
    scene = single("star", "orange", "small", 1)
    assert caption(scene, "en", 6, with_size=False) == "It's a picture of an orange star."
    assert caption(scene, "de", 6, with_size=False) == "Es ist ein Bild mit einem orangefarbenen Stern."
    assert caption(scene, "fr", 0, with_size=False) == "Il y a une étoile orange à gauche, sur un fond blanc."
    assert caption(scene, "cs", 0, with_size=False) == "Vlevo na bílém pozadí je jedna oranžová hvězda."


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


@pytest.mark.slow
def test_translations_tell_scenes_apart():
    told = {
        sentence.text
        for _, scene in make_scenes(500)
        for sentence in captions_of_scene(scene)
        if sentence.portion == "translation"
    }
    assert len(told) == 4 * 500
