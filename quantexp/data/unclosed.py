"""Makes markup plain text where it would cost the parser of wikitext more than linear time.

mwparserfromhell tries every opening mark as the start of a construct. If the construct has no end, the parser reads the
rest of the page in vain and goes on after the mark, so n marks without an end cost n pages. Tables in cells and links
to addresses in double brackets cost twice the time for each level that they are nested, and the parser recurses at each
equal sign of a heading until its stack overflows.

One pass with a stack, linear in the page, finds the marks without an end and the characters that they cost. The text is
unchanged unless these are more than a hundred times the page's own: then such marks become text.
"""

import re
from collections import defaultdict
from dataclasses import dataclass, replace

#: Characters that the parser may read in vain: for each character of a page, and in every page.
_MAX_READS, _MIN_READS = 100, 100_000
#: Levels of nested constructs that double the time.
_MAX_DOUBLINGS = 6
#: Equal signs of a page up to which its headings cannot overflow the stack (it holds 60,000).
_MAX_EQUAL_SIGNS = 10_000

#: Stand-ins for the first characters of marks: halves of surrogate pairs, which no XML contains.
_STANDINS = str.maketrans("{[<'=", "\ud800\ud801\ud802\ud803\ud804")
#: Restores them.
_MARKS = {standin: code for code, standin in _STANDINS.items()}
#: A mark that becomes text may uncover others. After so many rounds every mark becomes text.
_MAX_ROUNDS = 6

_NAME = r"[^\s{}\[\]<>|=&'#*:;/!-]+"
_ADDRESS = r"(?=//|[A-Za-z0-9+.-]{1,10}:)"
_TOKEN = re.compile(
    rf"\{{\{{+|\}}\}}+|\[\[(?P<doubles>{_ADDRESS})?|\[{_ADDRESS}|\]+|<!--|</[^<>]*>?|<{_NAME}|/?>|''+"
    r"|(?:(?<=\n)|(?<=\n\s))(?:\{\||\|\})|(?:(?<=\n)|\A)=+"
)
_HEADING = re.compile(r"^=.*", re.MULTILINE)
#: Tags whose content the parser takes as text; those without an end; those whose end may be omitted.
_RAW = frozenset(
    {
        *("categorytree", "ce", "chem", "gallery", "graph", "hiero", "imagemap", "inputbox"),
        *("math", "nowiki", "pre", "score", "section", "source", "syntaxhighlight"),
        *("templatedata", "timeline"),
    }
)
_EMPTY = frozenset({"br", "wbr", "hr", "meta", "link", "img"})
_OPTIONAL_END = frozenset({"li", "dt", "dd", "th", "td", "tr"})

#: Kinds of constructs, with their ranks: an end closes open constructs of its rank and below that it encloses.
#: A tag is of the kind `attributes` until its `>`.
_RANKS = {
    "quotes": 0, "address": 1, "heading": 1, "attributes": 2, "tag": 2, "link": 2, "table": 3, "template": 4
}  # fmt: skip
_NUM_RANKS = 5


@dataclass(frozen=True)
class _Mark:
    """An opening mark, at `start`."""

    kind: str
    start: int
    size: int
    #: Of a tag; for quotes, their number.
    name: str = ""
    #: Whether the construct doubles the time.
    doubles: bool = False


def without_costly_marks(text: str) -> str:
    """Returns the text with stand-ins for costly marks; `restored` is the inverse."""
    for _ in range(_MAX_ROUNDS):
        places = sorted({(mark.start, mark.start + mark.size) for mark in _costly(text)})
        if not places:
            return text
        pieces, begin = [], 0
        for first, end in places:
            start = max(first, begin)  # marks may overlap
            if start >= end:
                continue
            pieces += [text[begin:start], text[start:end].translate(_STANDINS)]
            begin = end
        text = "".join([*pieces, text[begin:]])
    return text.translate(_STANDINS)


def restored(text: str) -> str:
    """Returns the text with the marks themselves."""
    return text.translate(_MARKS)


def _costly(text: str) -> list[_Mark]:
    """Returns the marks that must become text."""
    page = _Page(text)
    marks = page.too_deep + _long_headings(text)
    return marks + page.unclosed if page.num_reads > _MIN_READS + _MAX_READS * len(text) else marks


def _long_headings(text: str) -> list[_Mark]:
    """Returns the headings with too many equal signs, and those that might go on in another line."""
    if text.count("=") <= _MAX_EQUAL_SIGNS:
        return []
    return [
        _Mark("heading", match.start(), len(match[0]) - len(match[0].lstrip("=")))
        for match in _HEADING.finditer(text)
        if match[0].count("=") > _MAX_EQUAL_SIGNS or any(mark in match[0] for mark in "{[<'")
    ]


class _Page:
    """The constructs of a page, found in one pass."""

    def __init__(self, text: str) -> None:
        self._text = text
        #: Marks without an end.
        self.unclosed: list[_Mark] = []
        #: Marks of constructs that are nested too deeply.
        self.too_deep: list[_Mark] = []
        #: Characters that the parser reads in vain.
        self.num_reads = 0
        self._stack: list[_Mark] = []
        #: Indices in the stack, by kind and name, and by rank.
        self._indices: dict[tuple[str, str], list[int]] = defaultdict(list)
        self._by_rank: list[list[int]] = [[] for _ in range(_NUM_RANKS)]
        self._num_doublings = 0
        #: Ends that do not occur again, and the characters that the parser reads in search of one.
        self._missing: dict[str, int] = {}
        self._read()

    def _read(self) -> None:
        position = 0
        while match := _TOKEN.search(self._text, position):
            begin, (start, position) = position, match.span()
            self._end_line(begin, start)
            position = self._handle(match[0], start, position, match["doubles"] is not None)
        while self._stack:
            if self._stack[-1].kind == "tag" and self._stack[-1].name in _OPTIONAL_END:
                self._pop()
            else:
                self._fail()

    def _handle(self, token: str, start: int, end: int, doubles: bool) -> int:
        """Handles a mark; returns where the next may begin."""
        match token[:2]:
            case "{|":
                self._push(_Mark("table", start, 1, doubles=True))
            case "{{":
                self._push(_Mark("template", start, len(token)))
            case "[[":
                self._push(_Mark("link", start, 2, doubles=doubles))
            case "[":
                self._push(_Mark("address", start, 1))
            case "=" | "==":
                self._push(_Mark("heading", start, len(token)))
            case "''":
                self._quotes(start, len(token))
            case "|}":
                self._close("table")
            case "}}":
                self._close_braces(len(token))
            case "]" | "]]":
                self._close_brackets(len(token))
            case "<!":
                return self._skip(_Mark("comment", start, 1), end, "-->")
            case "</":
                return end if self._close_tag(token, end) else start + 2
            case ">" | "/>":
                return self._end_attributes(token, end)
            case _:
                self._push(_Mark("attributes", start, 1, token[1:].lower()))
        return end

    def _push(self, mark: _Mark) -> None:
        if mark.doubles and self._num_doublings == _MAX_DOUBLINGS:
            self.too_deep.append(mark)
            return
        self._num_doublings += mark.doubles
        for indices in self._lists(mark):
            indices.append(len(self._stack))
        self._stack.append(mark)

    def _pop(self) -> _Mark:
        mark = self._stack.pop()
        self._num_doublings -= mark.doubles
        for indices in self._lists(mark):
            indices.pop()
        return mark

    def _lists(self, mark: _Mark) -> tuple[list[int], list[int]]:
        name = "" if mark.kind == "attributes" else mark.name
        return self._indices[mark.kind, name], self._by_rank[_RANKS[mark.kind]]

    def _fail(self, end: int | None = None) -> None:
        """Closes the innermost construct as one without an end, which the parser notices at `end`."""
        mark = self._pop()
        self.unclosed.append(mark)
        self.num_reads += (len(self._text) if end is None else end) - mark.start

    def _index(self, kind: str, name: str = "") -> int:
        """Returns the index of the innermost open construct that an end closes, or -1."""
        indices = self._indices.get((kind, name))
        if not indices:
            return -1
        outer = max((rank[-1] for rank in self._by_rank[_RANKS[kind] + 1 :] if rank), default=-1)
        return indices[-1] if indices[-1] > outer else -1

    def _close(self, kind: str, name: str = "") -> bool:
        """Closes the innermost construct of a kind, and fails those open within; returns whether there is one."""
        index = self._index(kind, name)
        if index < 0:
            return False
        while len(self._stack) > index + 1:
            self._fail()
        self._pop()
        return True

    def _close_braces(self, size: int) -> None:
        while size >= 2 and (index := self._index("template")) >= 0:
            mark = self._stack[index]
            self._close("template")
            if size == 2 < mark.size:  # the parser looks for three braces first
                self.unclosed.append(replace(mark, size=mark.size - 2))
                self.num_reads += len(self._text) - mark.start
            size -= mark.size
            if size <= -2:  # braces before these are still open
                self._push(replace(mark, size=-size))

    def _close_brackets(self, size: int) -> None:
        while size:
            address, link = self._index("address"), self._index("link")
            if address > link:
                self._close("address")
                size -= 1
            elif link >= 0 and size >= 2:
                self._close("link")
                size -= 2
            else:
                return

    def _quotes(self, start: int, size: int) -> None:
        """Two quotes begin or end italics, three bold, five both; of more, the last five count."""
        end = start + size
        size = min(size, 5) if size != 4 else 3
        places = {"2": end - 2} if size == 2 else {"3": end - size}
        if size == 5:
            places["2"] = end - 2
        for name in sorted(places, key=lambda name: -self._index("quotes", name)):
            if not self._close("quotes", name):
                self._push(_Mark("quotes", places[name], int(name), name))

    def _end_line(self, begin: int, end: int) -> None:
        """Ends a heading, and fails a link to an address, if a line ends in this text."""
        if self._stack and self._stack[-1].kind in ("address", "heading"):
            line_end = self._text.find("\n", begin, end)
            if line_end >= 0:
                self._fail(line_end) if self._stack[-1].kind == "address" else self._pop()

    def _close_tag(self, token: str, end: int) -> bool:
        """Closes a tag, and returns whether it is open; another tag's end fails the innermost tags."""
        name = token[2:-1].rstrip().lower() if token.endswith(">") else ""
        index = self._index("tag", name)
        while self._stack and len(self._stack) - 1 != index and self._stack[-1].kind == "tag":
            self._fail(end)
        return index >= 0 and self._close("tag", name)

    def _end_attributes(self, token: str, end: int) -> int:
        if (index := self._index("attributes")) < 0:
            return end
        mark = self._stack[index]
        self._close("attributes")
        if token == "/>" or mark.name in _EMPTY:
            return end
        if mark.name in _RAW:
            return self._skip(mark, end, f"</{mark.name}>")
        self._push(replace(mark, kind="tag"))
        return end

    def _skip(self, mark: _Mark, position: int, end: str) -> int:
        """Returns the position after a construct whose content is text, or `position` if it has no end."""
        if end not in self._missing:
            name = re.escape(end.removesuffix(">"))
            match = re.compile(rf"{name}\s*>", re.IGNORECASE).search(self._text, position)
            last = len(self._text) if match is None else match.start()
            num_reads = self._read_ends(position, last) if mark.kind == "attributes" else 0
            if match is not None:
                self.num_reads += num_reads
                return match.end()
            self._missing[end] = num_reads + last
        self.unclosed.append(mark)
        self.num_reads += self._missing[end]
        return position

    def _read_ends(self, begin: int, end: int) -> int:
        """Returns the characters from each `</` in such a content to the next `>`: the parser compares that far."""
        num_reads, bracket, position = 0, -1, begin
        while (position := self._text.find("</", position, end)) >= 0:
            if bracket < position:
                bracket = self._text.find(">", position) % (len(self._text) + 1)
            if bracket - position > _MAX_READS:
                num_reads += bracket - position
                self.unclosed.append(_Mark("end", position, 1))
            position += 2
        return num_reads
