"""Small grammars of English, German, French and Czech, just large enough to describe a drawn scene.

A grammar consists of tables of full forms: nouns by number and case, adjectives by ending, articles and numerals by gender and
case. In a table ``_`` stands for a space inside a form and ``-`` for no word at all. Templates refer to parts: ``{a}`` is the
first group in the nominative, ``{a_dat}`` the same in the dative, ``{A}`` with a capital, ``{the_a}`` only its noun with the
definite article, ``{is_a}`` the verb that agrees with it, ``{place_a}`` its position; ``{b}`` likewise. ``{relation}`` gives
the position of the first group relative to the second, ``{reverse}`` the other way round; the ``{ground...}`` parts are forms
of the background colour.
"""

from dataclasses import dataclass

#: Templates below this number mention everything in the scene and say the same in each language.
FULL_TEMPLATES = 5

_Table = dict[str, dict[str, str]]


def _form(cell: str) -> str:
    return "" if cell == "-" else cell.replace("_", " ")


def _table(text: str) -> _Table:
    """Read a table: its first line names the columns, the first cell of each other line names the row."""
    header, *rows = [line.split() for line in text.strip().splitlines()]
    return {_form(name): dict(zip(header, map(_form, cells), strict=True)) for name, *cells in rows}


@dataclass(frozen=True)
class Language:
    """Tables and templates of one language.

    Attributes:
        nouns: shape to gender and forms: ``1_dat`` is the dative singular, ``2_dat`` the dative plural, ``1_the`` the singular
            with its article. A case without a column has the form of the nominative.
        adjectives: size or colour to its forms, by ending.
        agreement: gender and case to the endings of adjectives (``one``, ``many``) and to the words for 1, 2, 3 and 4.
        grounds: background colour to its forms.
        positions: position to the words for the place, for the relation to another group, and the case after that relation.
        verbs: "is" and "are".
        single: templates for scenes with one group, the full ones first.
        double: templates for scenes with two groups, likewise.
        colour_last: whether the colour follows the noun.
        articles: article and next word to the article that is written before that word instead.
    """

    nouns: _Table
    adjectives: _Table
    agreement: _Table
    grounds: _Table
    positions: _Table
    verbs: tuple[str, str]
    single: tuple[str, ...]
    double: tuple[str, ...]
    colour_last: bool = False
    articles: tuple[tuple[str, str, str], ...] = ()


_ENGLISH = Language(
    nouns=_table("""
                 gender  1_nom     2_nom      1_the         2_the
        circle   n       circle    circles    the_circle    the_circles
        square   n       square    squares    the_square    the_squares
        triangle n       triangle  triangles  the_triangle  the_triangles
        star     n       star      stars      the_star      the_stars
        cross    n       cross     crosses    the_cross     the_crosses
        diamond  n       diamond   diamonds   the_diamond   the_diamonds
        heart    n       heart     hearts     the_heart     the_hearts
        ring     n       ring      rings      the_ring      the_rings
    """),
    adjectives=_table("""
                 any
        small    small
        large    large
        red      red
        blue     blue
        green    green
        yellow   yellow
        orange   orange
        purple   purple
        brown    brown
        black    black
    """),
    agreement=_table("""
                 one  many  1  2    3      4
        n_nom    any  any   a  two  three  four
    """),
    grounds=_table("""
                     ground
        white        white
        grey         grey
        pink         pink
        light_blue   light_blue
        light_green  light_green
    """),
    positions=_table("""
                 place          relation         case
        left     on_the_left    to_the_left_of   nom
        right    on_the_right   to_the_right_of  nom
        top      at_the_top     above            nom
        bottom   at_the_bottom  below            nom
        centre   in_the_middle  -                nom
    """),
    verbs=("is", "are"),
    articles=(("a", "orange", "an"),),
    single=(
        "There {is_a} {a} {place_a}, on a {ground} background.",
        "The picture shows {a} {place_a}, and the background is {ground}.",
        "On a {ground} background you can see {a}; {the_a} {is_a} {place_a}.",
        "This is a {ground} picture with {a} {place_a}.",
        'We call this picture "{A} {place_a}, on a {ground} background".',
        "{a} {place_a}.",
        "It's a picture of {a}.",
        "Someone drew {a} on {ground} paper.",
        "{a}, nothing else.",
    ),
    double=(
        "There {is_a} {a} {relation}, on a {ground} background.",
        "The picture shows {a} {relation}, and the background is {ground}.",
        "{place_a} you can see {a}, and {place_b} {b}; the rest of the picture is {ground}.",
        "This is a {ground} picture with {a} {place_a} and {b} {place_b}.",
        'We call this picture "{A} {relation}, on a {ground} background".',
        "{a} {relation}.",
        "It's a picture of {a} and {b}.",
        "Someone drew {a} and {b} on {ground} paper.",
        "{b} {reverse}.",
    ),
)

_GERMAN = Language(
    nouns=_table("""
                 gender  1_nom    1_acc    1_dat    2_nom     2_acc     2_dat      1_the        2_the
        circle   m       Kreis    Kreis    Kreis    Kreise    Kreise    Kreisen    der_Kreis    die_Kreise
        square   n       Quadrat  Quadrat  Quadrat  Quadrate  Quadrate  Quadraten  das_Quadrat  die_Quadrate
        triangle n       Dreieck  Dreieck  Dreieck  Dreiecke  Dreiecke  Dreiecken  das_Dreieck  die_Dreiecke
        star     m       Stern    Stern    Stern    Sterne    Sterne    Sternen    der_Stern    die_Sterne
        cross    n       Kreuz    Kreuz    Kreuz    Kreuze    Kreuze    Kreuzen    das_Kreuz    die_Kreuze
        diamond  f       Raute    Raute    Raute    Rauten    Rauten    Rauten     die_Raute    die_Rauten
        heart    n       Herz     Herz     Herzen   Herzen    Herzen    Herzen     das_Herz     die_Herzen
        ring     m       Ring     Ring     Ring     Ringe     Ringe     Ringen     der_Ring     die_Ringe
    """),
    adjectives=_table("""
                 er              es              e              en
        small    kleiner         kleines         kleine         kleinen
        large    großer          großes          große          großen
        red      roter           rotes           rote           roten
        blue     blauer          blaues          blaue          blauen
        green    grüner          grünes          grüne          grünen
        yellow   gelber          gelbes          gelbe          gelben
        orange   orangefarbener  orangefarbenes  orangefarbene  orangefarbenen
        purple   violetter       violettes       violette       violetten
        brown    brauner         braunes         braune         braunen
        black    schwarzer       schwarzes       schwarze       schwarzen
    """),
    agreement=_table("""
                 one  many  1      2     3     4
        m_nom    er   e     ein    zwei  drei  vier
        m_acc    en   e     einen  zwei  drei  vier
        m_dat    en   en    einem  zwei  drei  vier
        f_nom    e    e     eine   zwei  drei  vier
        f_acc    e    e     eine   zwei  drei  vier
        f_dat    en   en    einer  zwei  drei  vier
        n_nom    es   e     ein    zwei  drei  vier
        n_acc    es   e     ein    zwei  drei  vier
        n_dat    en   en    einem  zwei  drei  vier
    """),
    grounds=_table("""
                     ground    ground_n        ground_dat
        white        weiß      weißes          weißem
        grey         grau      graues          grauem
        pink         rosa      rosafarbenes    rosafarbenem
        light_blue   hellblau  hellblaues      hellblauem
        light_green  hellgrün  hellgrünes      hellgrünem
    """),
    positions=_table("""
                 place         relation    case
        left     links         links_von   dat
        right    rechts        rechts_von  dat
        top      oben          über        dat
        bottom   unten         unter       dat
        centre   in_der_Mitte  -           dat
    """),
    verbs=("ist", "sind"),
    single=(
        "Auf {ground_dat} Hintergrund {is_a} {place_a} {a} zu sehen.",
        "Das Bild zeigt {place_a} {a_acc}, und der Hintergrund ist {ground}.",
        "Auf {ground_dat} Hintergrund sieht man {a_acc}; {the_a} {is_a} {place_a}.",
        "Dies ist ein {ground_n} Bild mit {a_dat} {place_a}.",
        "Wir nennen dieses Bild „{A} {place_a}, auf {ground_dat} Hintergrund“.",
        "{a} {place_a}.",
        "Es ist ein Bild mit {a_dat}.",
        "Jemand hat {a_acc} auf {ground_dat} Papier gezeichnet.",
        "{a}, sonst nichts.",
    ),
    double=(
        "Auf {ground_dat} Hintergrund {is_a} {a} {relation} zu sehen.",
        "Das Bild zeigt {a_acc} {relation}, und der Hintergrund ist {ground}.",
        "{place_a} sieht man {a_acc} und {place_b} {b_acc}; der Rest des Bildes ist {ground}.",
        "Dies ist ein {ground_n} Bild mit {a_dat} {place_a} und {b_dat} {place_b}.",
        "Wir nennen dieses Bild „{A} {relation}, auf {ground_dat} Hintergrund“.",
        "{a} {relation}.",
        "Es ist ein Bild mit {a_dat} und {b_dat}.",
        "Jemand hat {a_acc} und {b_acc} auf {ground_dat} Papier gezeichnet.",
        "{b} {reverse}.",
    ),
)

_FRENCH = Language(
    nouns=_table("""
                 gender  1_nom     2_nom      1_the        2_the
        circle   m       cercle    cercles    le_cercle    les_cercles
        square   m       carré     carrés     le_carré     les_carrés
        triangle m       triangle  triangles  le_triangle  les_triangles
        star     f       étoile    étoiles    l'étoile     les_étoiles
        cross    f       croix     croix      la_croix     les_croix
        diamond  m       losange   losanges   le_losange   les_losanges
        heart    m       cœur      cœurs      le_cœur      les_cœurs
        ring     m       anneau    anneaux    l'anneau     les_anneaux
    """),
    adjectives=_table("""
                 m       f        mp      fp
        small    petit   petite   petits  petites
        large    grand   grande   grands  grandes
        red      rouge   rouge    rouges  rouges
        blue     bleu    bleue    bleus   bleues
        green    vert    verte    verts   vertes
        yellow   jaune   jaune    jaunes  jaunes
        orange   orange  orange   orange  orange
        purple   violet  violette violets violettes
        brown    marron  marron   marron  marron
        black    noir    noire    noirs   noires
    """),
    agreement=_table("""
                 one  many  1      2        3         4
        m_nom    m    mp    un     deux     trois     quatre
        m_de     m    mp    d'un   de_deux  de_trois  de_quatre
        f_nom    f    fp    une    deux     trois     quatre
        f_de     f    fp    d'une  de_deux  de_trois  de_quatre
    """),
    grounds=_table("""
                     ground      ground_f
        white        blanc       blanche
        grey         gris        grise
        pink         rose        rose
        light_blue   bleu_clair  bleu_clair
        light_green  vert_clair  vert_clair
    """),
    positions=_table("""
                 place      relation    case
        left     à_gauche   à_gauche    de
        right    à_droite   à_droite    de
        top      en_haut    au-dessus   de
        bottom   en_bas     au-dessous  de
        centre   au_centre  -           de
    """),
    verbs=("est", "sont"),
    colour_last=True,
    single=(
        "Il y a {a} {place_a}, sur un fond {ground}.",
        "L'image montre {a} {place_a}, et le fond est {ground}.",
        "Sur un fond {ground}, on voit {a} ; {the_a} {is_a} {place_a}.",
        "C'est une image {ground_f} avec {a} {place_a}.",
        "Nous appelons cette image « {A} {place_a}, sur un fond {ground} ».",
    ),
    double=(
        "Il y a {a} {relation}, sur un fond {ground}.",
        "L'image montre {a} {relation}, et le fond est {ground}.",
        "{place_a}, on voit {a}, et {place_b}, {b} ; le reste de l'image est {ground}.",
        "C'est une image {ground_f} avec {a} {place_a} et {b} {place_b}.",
        "Nous appelons cette image « {A} {relation}, sur un fond {ground} ».",
    ),
)

_CZECH = Language(
    nouns=_table("""
                 gender  1_nom        1_acc        1_gen         1_ins          2_nom         2_gen          2_ins
        circle   m       kruh         kruh         kruhu         kruhem         kruhy         kruhů          kruhy
        square   m       čtverec      čtverec      čtverce       čtvercem       čtverce       čtverců        čtverci
        triangle m       trojúhelník  trojúhelník  trojúhelníku  trojúhelníkem  trojúhelníky  trojúhelníků   trojúhelníky
        star     f       hvězda       hvězdu       hvězdy        hvězdou        hvězdy        hvězd          hvězdami
        cross    m       kříž         kříž         kříže         křížem         kříže         křížů          kříži
        diamond  m       kosočtverec  kosočtverec  kosočtverce   kosočtvercem   kosočtverce   kosočtverců    kosočtverci
        heart    n       srdce        srdce        srdce         srdcem         srdce         srdcí          srdci
        ring     m       prstenec     prstenec     prstence      prstencem      prstence      prstenců       prstenci
    """),
    adjectives=_table("""
                 ý          á          é          ou          ého          ým          ých          ými
        small    malý       malá       malé       malou       malého       malým       malých       malými
        large    velký      velká      velké      velkou      velkého      velkým      velkých      velkými
        red      červený    červená    červené    červenou    červeného    červeným    červených    červenými
        blue     modrý      modrá      modré      modrou      modrého      modrým      modrých      modrými
        green    zelený     zelená     zelené     zelenou     zeleného     zeleným     zelených     zelenými
        yellow   žlutý      žlutá      žluté      žlutou      žlutého      žlutým      žlutých      žlutými
        orange   oranžový   oranžová   oranžové   oranžovou   oranžového   oranžovým   oranžových   oranžovými
        purple   fialový    fialová    fialové    fialovou    fialového    fialovým    fialových    fialovými
        brown    hnědý      hnědá      hnědé      hnědou      hnědého      hnědým      hnědých      hnědými
        black    černý      černá      černé      černou      černého      černým      černých      černými
    """),
    agreement=_table("""
                 one  many  1      2      3      4
        m_nom    ý    é     jeden  dva    tři    čtyři
        m_acc    ý    é     jeden  dva    tři    čtyři
        m_gen    ého  ých   -      dvou   tří    čtyř
        m_ins    ým   ými   -      dvěma  třemi  čtyřmi
        f_nom    á    é     jedna  dvě    tři    čtyři
        f_acc    ou   é     jednu  dvě    tři    čtyři
        f_gen    é    ých   -      dvou   tří    čtyř
        f_ins    ou   ými   -      dvěma  třemi  čtyřmi
        n_nom    é    á     jedno  dvě    tři    čtyři
        n_acc    é    á     jedno  dvě    tři    čtyři
        n_gen    ého  ých   -      dvou   tří    čtyř
        n_ins    ým   ými   -      dvěma  třemi  čtyřmi
    """),
    grounds=_table("""
                     ground         ground_n       ground_loc
        white        bílý           bílé           bílém
        grey         šedý           šedé           šedém
        pink         růžový         růžové         růžovém
        light_blue   světle_modrý   světle_modré   světle_modrém
        light_green  světle_zelený  světle_zelené  světle_zeleném
    """),
    positions=_table("""
                 place      relation   case
        left     vlevo      vlevo_od   gen
        right    vpravo     vpravo_od  gen
        top      nahoře     nad        ins
        bottom   dole       pod        ins
        centre   uprostřed  -          gen
    """),
    verbs=("je", "jsou"),
    single=(
        "{place_a} na {ground_loc} pozadí {is_a} {a}.",
        "Obrázek ukazuje {place_a} {a_acc} a pozadí je {ground_n}.",
        "Na {ground_loc} pozadí vidíme {a_acc}; {the_a} {is_a} {place_a}.",
        "Toto je {ground} obrázek a {place_a} na něm {is_a} {a}.",
        "Tomuto obrázku říkáme „{A} {place_a}, na {ground_loc} pozadí“.",
    ),
    double=(
        "Na {ground_loc} pozadí {is_a} {a} {relation}.",
        "Obrázek ukazuje {a_acc} {relation} a pozadí je {ground_n}.",
        "{place_a} vidíme {a_acc} a {place_b} {b_acc}; zbytek obrázku je {ground}.",
        "Toto je {ground} obrázek: {place_a} {is_a} {a} a {place_b} {is_b} {b}.",
        "Tomuto obrázku říkáme „{A} {relation}, na {ground_loc} pozadí“.",
    ),
)

#: Language code to language, in the order in which captions are made.
LANGUAGES = {"en": _ENGLISH, "de": _GERMAN, "fr": _FRENCH, "cs": _CZECH}
