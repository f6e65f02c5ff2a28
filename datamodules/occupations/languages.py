"""Language names: ISO 639-1 codes, and the other ways in which tables name a language."""

import difflib
from typing import Literal

UNKNOWN = "unk"
UNKNOWN_NAMES = ("", "unk", "unknown", "und", "na", "n/a", "nan", "none", "null", "?", "-", "xx")

_ISO_639_1 = (
    "aa=Afar ab=Abkhazian ae=Avestan af=Afrikaans ak=Akan am=Amharic an=Aragonese ar=Arabic "
    "as=Assamese av=Avaric ay=Aymara az=Azerbaijani ba=Bashkir be=Belarusian bg=Bulgarian "
    "bi=Bislama bm=Bambara bn=Bengali bo=Tibetan br=Breton bs=Bosnian ca=Catalan ce=Chechen "
    "ch=Chamorro co=Corsican cr=Cree cs=Czech cu=Slavonic cv=Chuvash cy=Welsh da=Danish "
    "de=German dv=Divehi dz=Dzongkha ee=Ewe el=Greek en=English eo=Esperanto es=Spanish "
    "et=Estonian eu=Basque fa=Persian ff=Fulah fi=Finnish fj=Fijian fo=Faroese fr=French "
    "fy=Frisian ga=Irish gd=Gaelic gl=Galician gn=Guarani gu=Gujarati gv=Manx ha=Hausa "
    "he=Hebrew hi=Hindi ho=Motu hr=Croatian ht=Haitian hu=Hungarian hy=Armenian hz=Herero "
    "ia=Interlingua id=Indonesian ie=Interlingue ig=Igbo ii=Nuosu ik=Inupiaq io=Ido "
    "is=Icelandic it=Italian iu=Inuktitut ja=Japanese jv=Javanese ka=Georgian kg=Kongo "
    "ki=Kikuyu kj=Kwanyama kk=Kazakh kl=Greenlandic km=Khmer kn=Kannada ko=Korean kr=Kanuri "
    "ks=Kashmiri ku=Kurdish kv=Komi kw=Cornish ky=Kirghiz la=Latin lb=Luxembourgish lg=Ganda "
    "li=Limburgish ln=Lingala lo=Lao lt=Lithuanian lu=Luba lv=Latvian mg=Malagasy "
    "mh=Marshallese mi=Maori mk=Macedonian ml=Malayalam mn=Mongolian mr=Marathi ms=Malay "
    "mt=Maltese my=Burmese na=Nauru nb=Bokmal nd=Ndebele ne=Nepali ng=Ndonga nl=Dutch "
    "nn=Nynorsk no=Norwegian nv=Navajo ny=Chichewa oc=Occitan oj=Ojibwa om=Oromo or=Oriya "
    "os=Ossetian pa=Punjabi pi=Pali pl=Polish ps=Pashto pt=Portuguese qu=Quechua rm=Romansh "
    "rn=Rundi ro=Romanian ru=Russian rw=Kinyarwanda sa=Sanskrit sc=Sardinian sd=Sindhi "
    "sg=Sango si=Sinhala sk=Slovak sl=Slovenian sm=Samoan sn=Shona so=Somali sq=Albanian "
    "sr=Serbian ss=Swati st=Sotho su=Sundanese sv=Swedish sw=Swahili ta=Tamil te=Telugu "
    "tg=Tajik th=Thai ti=Tigrinya tk=Turkmen tl=Tagalog tn=Tswana to=Tonga tr=Turkish "
    "ts=Tsonga tt=Tatar tw=Twi ty=Tahitian ug=Uighur uk=Ukrainian ur=Urdu uz=Uzbek ve=Venda "
    "vi=Vietnamese vo=Volapuk wa=Walloon wo=Wolof xh=Xhosa yi=Yiddish yo=Yoruba za=Zhuang "
    "zh=Chinese zu=Zulu"
)
ISO_NAMES: dict[str, str] = {entry[:2]: entry[3:] for entry in _ISO_639_1.split()}

# What tables of historical occupations hold, and country codes used as languages. "se" is Northern
# Sami and "na" Nauru in the standard; in these tables they mean Swedish and "not available".
ALIASES: dict[str, str] = {
    **{"se": "sv", "swe": "sv", "svenska": "sv"},
    **{"dk": "da", "dan": "da", "dansk": "da"},
    **{"ge": "de", "ger": "de", "deu": "de", "deutsch": "de", "at": "de"},
    **{"nb": "no", "nn": "no", "nor": "no", "nob": "no", "nno": "no", "norsk": "no"},
    **{"eng": "en", "gb": "en", "us": "en"},
    **{"dut": "nl", "nld": "nl", "du": "nl", "nederlands": "nl", "flemish": "nl"},
    **{"fre": "fr", "fra": "fr", "français": "fr"},
    **{"spa": "es", "sp": "es", "español": "es", "castilian": "es"},
    **{"por": "pt", "português": "pt"},
    **{"ita": "it", "italiano": "it"},
    **{"cat": "ca", "català": "ca"},
    **{"gr": "el", "gre": "el", "ell": "el"},
    **{"ice": "is", "isl": "is"},
    **{"fin": "fi", "suomi": "fi"},
    **{"lat": "la", "pol": "pl", "cz": "cs", "cze": "cs", "ces": "cs", "hun": "hu", "rus": "ru"},
    **{"iw": "he", "in": "id", "ji": "yi", "jp": "ja", "cn": "zh"},
}
_NAMES = {name.lower(): code for code, name in ISO_NAMES.items()}


def language_code(raw: str, unknown: Literal["error", "unk"] = "error") -> str:
    """Return the ISO 639-1 code of a language, or "unk" where none is stated.

    Args:
        raw: a code, an alias (se, ge, dk, …), an English name, or a locale such as en-GB.
        unknown: what a name means that is none of these: an error, or "unk".

    Raises:
        ValueError: nobody knows this language; names the likely one.
    """
    name = raw.strip().lower()
    if name in UNKNOWN_NAMES:
        return UNKNOWN
    for candidate in (name, name.replace("_", "-").split("-")[0]):
        if candidate in ALIASES:
            return ALIASES[candidate]
        if candidate in ISO_NAMES:
            return candidate
        if candidate in _NAMES:
            return ALIASES.get(_NAMES[candidate], _NAMES[candidate])
    if unknown == "unk":
        return UNKNOWN
    near = difflib.get_close_matches(name, [*_NAMES, *ALIASES, *ISO_NAMES], n=1)
    hint = f' Did you mean "{near[0]}"?' if near else ""
    raise ValueError(
        f'language "{raw}" is no ISO 639-1 code (en, da, sv, …), alias or English name.{hint} '
        f'Write "{UNKNOWN}" where the language is not known.'
    )
