"""What text is in a wiki: the names of its namespaces and the languages of Wikipedia decide which links are none.

A dump begins with `<siteinfo>`, which has the names of its namespaces in its own language (`Datei`, `Kategorie`). The
English names hold in every wiki. Dumps do not contain aliases. Therefore a link to a file of sound, pictures or film in
a namespace without a name (`Bild:Eule.jpg`) is one to a file, and a few aliases of categories are listed here.
"""

import re
import xml.etree.ElementTree as ET
from dataclasses import dataclass

_FILE, _CATEGORY = "6", "14"
#: The names that hold in every wiki, by number.
_ENGLISH = {
    "-2": ("media",),
    "-1": ("special",),
    _FILE: ("file", "image"),
    # Aliases: Chinese, Japanese; Serbian, Kazakh and others that are written in two scripts.
    _CATEGORY: (
        *(
            "category",
            "分类",
            "分類",
            "カテゴリ",
            "kategorija",
            "категорија",
            "категория",
            "sanat",
            "санат",
        ),
        "kategoriya",
    ),
}
#: Wikipedia's language codes, and older ones that still are prefixes of links (meta.wikimedia.org, Special:SiteMatrix).
_CODES = """
    aa ab ace ady af ak als alt am ami an ang ann anp ar arc ary arz as ast atj av avk awa ay az azb ba ban
    bar bat-smg bbc bcl bdr be be-tarask be-x-old bew bg bh bho bi bjn blk bm bn bo bol bpy br bs btm bug bxr
    ca cbk-zam cdo ce ceb ch cho chr chy ckb co cr crh cs csb cu cv cy da dag de dga din diq dsb dtp dty dv dz
    ee el eml en eo es et eu ext fa fat ff fi fiu-vro fj fo fon fr frp frr fur fy ga gag gan gcr gd gl glk gn
    gom gor got gpe gsw gu guc gur guw gv ha hak haw he hi hif ho hr hsb ht hu hy hyw hz ia iba id ie ig igl
    ii ik ilo inh io is isv it iu ja jam jbo jv ka kaa kab kai kaj kbd kbp kcg kg kge ki kj kk kl km kn knc ko
    koi kr krc ks ksh ku kus kv kw ky la lad lb lbe lez lfn lg li lij lld lmo ln lo lrc lt ltg lv lzh mad mag
    mai map-bms mdf mg mh mhr mi min mk ml mn mni mnw mo mos mr mrj ms mt mus mwl my myv mzn na nah nan nap nb
    nds nds-nl ne new ng nia nl nn no nov nqo nr nrm nso nup nv ny oc olo om or os pa pag pam pap pcd pcm pdc
    pfl pi pih pl pms pnb pnt ppl ps pt pwn qu rki rm rmy rn ro roa-rup roa-tara rsk ru rue rup rw sa sah sat
    sc scn sco sd se sg sgs sh shi shn shy si simple sk skr sl sm smn sn so sq sr srn ss st stq su sv sw syl
    szl szy ta tay tcy tdd te tet tg th ti tig tk tl tly tn to tok tpi tr trv ts tt tum tw ty tyv udm ug uk ur
    uz ve vec vep vi vls vo vro wa war wo wuu xal xh xmf yi yo yue za zea zgh zh zh-classical zh-cn zh-min-nan
    zh-tw zh-yue zu
"""
_LANGUAGES = frozenset(_CODES.split())
#: The language of a dump; the first part of the codes of those that MediaWiki converts between scripts.
_LANGUAGE = re.compile(rb'<mediawiki\b[^>]*\sxml:lang="([A-Za-z]+)')
_WITH_VARIANTS = frozenset(
    ("zh", "gan", "wuu", "sr", "sh", "kk", "ku", "tg", "uz", "crh", "iu", "shi", "zgh", "ban")
)
#: Marks of the direction of writing, which MediaWiki drops from titles; the Turkish capital, which `casefold` makes two
#: characters of.
_UNLIKE_CASEFOLD = str.maketrans("\u0130", "i", "\u200e\u200f\u202a\u202b\u202c\u202d\u202e")
_GAPS = re.compile(r"[\s_]+")
_MEDIA = re.compile(
    r"\.(jpe?g|png|gif|svg|tiff?|webp|xcf|djvu|pdf|og[gav]|opus|flac|mp3|wav|midi?|webm|mp4|mpe?g|stl)\s*$",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Wiki:
    """The names of a wiki's namespaces, `folded`, and whether it is written in variants."""

    files: frozenset[str]
    categories: frozenset[str]
    #: These and all others.
    known: frozenset[str]
    #: Whether its pages have words in several variants, `-{zh-hans:计算机; zh-hant:電腦}-`.
    has_variants: bool = False

    def hides(self, target: str) -> bool:
        """Returns whether a link to this target is no text of its article.

        So are links to files, to categories, and to the same article in another language. A link that begins with a
        colon is text.
        """
        prefix, colon, rest = target.partition(":")
        name = folded(prefix)
        if not colon or not name:
            return False
        if name in self.files or name in self.categories:
            return True
        if name in self.known:
            return False
        return name in _LANGUAGES or (_MEDIA.search(rest) is not None and ":" not in rest)


def folded(name: str) -> str:
    """Returns the form in which MediaWiki compares names of namespaces."""
    return _GAPS.sub(" ", name.translate(_UNLIKE_CASEFOLD)).strip().casefold()


def wiki_of(head: bytes = b"") -> Wiki:
    """Returns the wiki of a dump, from the dump's head; one in English without a `<siteinfo>`.

    Raises:
        ValueError: `<siteinfo>` is malformed.
    """
    begin, end = head.find(b"<siteinfo>"), head.find(b"</siteinfo>")
    own: list[tuple[str, str]] = []
    if 0 <= begin < end:
        try:
            site = ET.fromstring(head[begin : end + len(b"</siteinfo>")])
        except ET.ParseError as error:
            raise ValueError(f"malformed <siteinfo>: {error}") from error
        own = [(each.get("key", ""), each.text or "") for each in site.iter("namespace")]

    def names(*keys: str) -> frozenset[str]:
        english = [name for key in keys or _ENGLISH for name in _ENGLISH[key]]
        named = [name for key, name in own if name and (key in keys or not keys)]
        return frozenset(map(folded, [*english, *named]))

    language = _LANGUAGE.search(head[:begin] if begin >= 0 else b"")
    has_variants = language is not None and language[1].decode().lower() in _WITH_VARIANTS
    return Wiki(names(_FILE), names(_CATEGORY), names(), has_variants)


ENGLISH = wiki_of()
