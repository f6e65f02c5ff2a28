"""Words that say something about the person, not about the work: deceased, retired, reserve.

By ISO language; the first of each language are the ones that augmentation adds.
"""

STATUS_WORDS: dict[str, tuple[str, ...]] = {
    "en": ("deceased", "retired", "reserve", "late", "former", "dead", "formerly", "pensioned"),
    "da": ("afdød", "pensioneret", "fhv", "død", "forhenværende", "reserve", "afskediget"),
    "no": ("avdød", "pensjonert", "fhv", "død", "forhenværende", "reserve"),
    "sv": ("avliden", "pensionerad", "fd", "död", "avlidne", "förre", "förra", "reserv"),
    "nl": ("overleden", "gepensioneerd", "gewezen", "wijlen", "voormalig", "voormalige", "rustend"),
    "de": (
        *("verstorben", "pensioniert", "ehemaliger", "weiland", "gewesener", "ehemalige", "ehem"),
        *("verstorbener", "verstorbene", "gewesen", "pensionierter", "emeritiert", "reserve"),
    ),
    "fr": (
        *("décédé", "retraité", "ancien", "feu", "défunt", "ancienne", "décédée", "défunte"),
        *("retraitée", "réserve"),
    ),
    "es": ("difunto", "jubilado", "fallecido", "difunta", "jubilada", "fallecida", "retirado"),
    "pt": ("falecido", "reformado", "falecida", "reformada", "aposentado"),
    "it": ("defunto", "pensionato", "defunta", "pensionata", "fu"),
    "ca": ("difunt", "jubilat", "difunta"),
    "fi": ("entinen", "kuollut", "vainaja"),
}
