"""The requests of the golden fill-mask cases: every shape of input and parameter that the service takes.

All texts are original, written for this file. Long ones are put together from the sentence lists below, always the same
way. No text spells a special token other than "[MASK]", which the reference tokenizer would not read as text.
`make_fill_mask.py` turns these into `fill_mask.jsonl`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any

Inputs = str | list[str]
Request = dict[str, Any]

ROOM = 510  # text tokens in a full window
TOP_KS = (None, 1, 2, 5, 10, 100)

ONE = (
    "The capital of the country is the city of [MASK].",
    "She opened the door and walked into the [MASK].",
    "He was born in [MASK] and died ten years later.",
    "The [MASK] was built in the nineteenth century.",
    "Most of the island is covered by [MASK].",
    "The river flows [MASK] the sea.",
    "They were married in the spring [MASK] that year.",
    "The film was directed [MASK] her brother.",
    "A glass of [MASK] stood on the table.",
    "The team won the [MASK] in the final.",
    "My father worked as a [MASK] for thirty years.",
    "The president gave a [MASK] to the congress.",
    "It was a cold and [MASK] night.",
    "The church stands at the [MASK] of the village.",
    "Water boils at a lower [MASK] in the mountains.",
    "In the [MASK] of the war the bridge was destroyed.",
    "The book was [MASK] in three languages.",
    "Her mother told her [MASK] to be late.",
    "Two thirds of the voters said [MASK].",
    "The population of the town has [MASK] since the census.",
    "He plays the [MASK] in a small orchestra.",
    "The train from the north arrives at [MASK] o'clock.",
    "There is no [MASK] that the ship sank.",
    "The army marched to the [MASK] and made camp.",
    "Students at the university study [MASK] and law.",
    "The old king had three [MASK].",
    "Nobody knows who [MASK] the letter.",
    "The moon is smaller than the [MASK].",
    "The museum is closed on [MASK].",
    "The price of bread rose by ten [MASK].",
    "It is one of the [MASK] lakes in the world.",
    "The dog barked at the [MASK].",
)

FIRST_OR_LAST = (
    "[MASK] is the largest city in the region.",
    "[MASK], she said, is not the answer.",
    "[MASK] years later he returned home.",
    "[MASK] of the people lived in the valley.",
    "[MASK] was the first woman to cross the desert",
    "The storm came from the [MASK]",
    "At the end of the day we were all [MASK]",
    "What do you want, a house or a [MASK]",
    "Where did he put the [MASK]?",
    "[MASK]",
    "[MASK].",
    " [MASK] ",
    "the [MASK]",
    "[MASK] the",
)

SEVERAL = (
    "The [MASK] of the company is a [MASK].",
    "He took the [MASK] from the [MASK] and left.",
    "[MASK] and [MASK] are the two largest rivers.",
    "The [MASK] began in [MASK] and ended in [MASK].",
    "In [MASK] the [MASK] moved to [MASK] with his [MASK].",
    "She [MASK] a letter [MASK] her sister.",
    "From [MASK] to [MASK]",
    "[MASK] said that the [MASK] was too [MASK].",
    "Either the [MASK] or the [MASK], but not [MASK], will win the [MASK].",
    "The [MASK], the [MASK] and the [MASK].",
    "A [MASK] is a kind of [MASK].",
    "It was the best of [MASK], it was the worst of [MASK].",
)

TOUCHING = (
    "The [MASK] [MASK] was signed in the capital.",
    "She lives in [MASK] [MASK] [MASK] with her family.",
    "[MASK][MASK] is a word of two pieces.",
    "[MASK] [MASK]",
    "[MASK][MASK][MASK][MASK]",
    "He was play[MASK] in the garden.",
    "un[MASK]able and in[MASK]ible",
    "The [MASK]-year-old boy won.",
    "(see [MASK], page [MASK])",
    '"[MASK]!" he cried.',
    "the[MASK]",
    "[MASK]s and [MASK]ed",
    "It cost $[MASK].[MASK] in total.",
    "Do you like it?[MASK] I do.",
)

UNICODE = (
    "The café in the old town serves [MASK] and cake.",
    "Cafe\u0301 cre\u0300me and re\u0301sume\u0301: an accent is a [MASK] on a letter.",
    "I love this song 😍 and I want to [MASK] it again 🎉",
    "😀[MASK]😀",
    "👨‍👩‍👧‍👦 The [MASK] went to the beach 🏖️.",
    "1️⃣ The first [MASK] ⭐",
    "東京 is the capital of [MASK].",
    "北京是[MASK]国的首都。",
    "서울 is a [MASK] in Korea.",
    "القاهرة is the capital of [MASK].",
    "Москва is the [MASK] of Russia.",
    "Η Αθήνα is a city in [MASK].",
    "दिल्ली is a large [MASK].",
    "The film\r\nwas made\r\nin [MASK].\r\n",
    "tabs\tbetween\tthe\t[MASK]\tand\tthe end",
    "zero\u200bwidth spaces\u200c hide\u200d in the \u200b[MASK]\u200b here",
    "no\u00a0break\u00a0spaces around\u00a0[MASK]\u00a0in the text",
    "soft\u00adhyphens in the [MASK] of a sentence",
    "“Curly quotes” — and a [MASK] – ‘here’…",
    "Straße and Gießen are in [MASK].",
    "İstanbul is the largest [MASK] in Türkiye.",
    "ＦＵＬＬ width letters and 𝐛𝐨𝐥𝐝 ones are [MASK] to read",
    "ﬁne ½ № ™ ℃ in the [MASK]",
    "\ue000 private \ufffd and replaced \ufffc marks in the [MASK]",
    "next\u0085line\u2028and\u2029the [MASK] of it",
    "\x00The king\x07 of the \x1b[MASK]\x7f",
    "\u202eright to left\u202c in the \u200f[MASK]\u200e",
    "\ufeffThe mark at the start of the [MASK].",
    "Z\u0351\u0343\u036ba\u0315\u0321l\u0338\u0321g\u0334\u0328o\u0337\u0321 marks and a [MASK]",
    "𠮷野家 is a [MASK] of restaurants 𪚥",
    "😀 The [MASK] and the 🎻 were [MASK].",
    "日本 and 中国 are [MASK] in [MASK].",
)

ODD = (
    "the [mask] is lower case, the [MASK] is not",
    "[ MASK ] has spaces, [MASK] has none",
    "[[MASK]]",
    "[MASK]] [[MASK]",
    "<mask> and [MASK]",
    "don't can't won't [MASK]n't",
    "Mr. O'Neil isn't at home , but his [MASK] is !",
    "Do not [MASK], do n't stop , I 'm , you 've , they 're , it 's",
    "3.14 is less than [MASK] and 1,000 is more than 10%",
    "THE QUEEN OF [MASK] IS DEAD",
    "state-of-the-art [MASK]-based systems",
    "x" * 101 + " is not a [MASK].",
    "the the the the the the [MASK] the the the",
    "https://shop.example/[MASK]?id=42#top",
    "if (a == [MASK]) { return b; }",
    "...[MASK]...",
    "? ! . , [MASK] ? ! . ,",
    "antidisestablishmentarianism is a long [MASK]",
)

TARGETS = (
    ("The capital of the country is the city of [MASK].", ["paris"]),
    ("The capital of the country is the city of [MASK].", ["paris", "london", "rome", "berlin"]),
    ("The capital of the country is the city of [MASK].", ["Paris", "LONDON", "rome"]),
    ("He plays the [MASK] in a small orchestra.", ["piano", "violin", "piano", "piano"]),
    ("He plays the [MASK] in a small orchestra.", ["Piano", "piano", "PIANO", " piano"]),
    ("He was play[MASK] in the garden.", ["##ing", "##ed", "ing", "ed"]),
    ("He was play [MASK] in the garden.", ["##ing"]),
    ("[MASK] is the word at the start.", ["##ing", "##s", "this"]),
    ("The dog barked at the [MASK].", ["antidisestablishmentarianism"]),
    ("The dog barked at the [MASK].", ["antidisestablishmentarianism", "anti", "cat"]),
    ("The dog barked at the [MASK].", ["", "cat"]),
    ("The dog barked at the [MASK].", ["cat", "", " ", "\t", "postman"]),
    ("The dog barked at the [MASK].", ["old man", "old", "new man"]),
    ("The dog barked at the [MASK].", ["cat.", ".cat", "cat"]),
    ("It was a cold and [MASK] night.", ["😀", "stormy", "dark"]),
    ("It was a cold and [MASK] night.", ["夜", "暗", "ночь", "ليل"]),
    ("It was a cold and [MASK] night.", ["Café", "cafe", "cafe\u0301"]),
    ("It was a cold and [MASK] night.", [".", ",", "!", "?", "'", "-"]),
    ("It was a cold and [MASK] night.", ["7", "70", "700", "7000", "70000"]),
    ("It was a cold and [MASK] night.", ["rain\u200by", "rainy", "wind\u00ady"]),
    ("The [MASK] of the company is a [MASK].", ["man", "woman", "head", "bank"]),
    ("The [MASK] of the company is a [MASK].", ["Man", "woman", "woman", "zzyzx"]),
    ("From [MASK] to [MASK]", ["here", "there", "here"]),
    ("She lives in [MASK] [MASK] [MASK] with her family.", ["new", "york", "city", "##s"]),
    ("[MASK] [MASK]", ["a", "b", "c"]),
    ("Where did he put the [MASK]?", ["key", "keys", "keyboard", "keyhole"]),
    ("My father worked as a [MASK] for thirty years.", ["farmer", "teacher", "doctor", "lawyer", "nurse", "driver", "clerk"]),
    ("The old king had three [MASK].", ["sons", "daughters", "wives", "horses", "Sons", "grandsons", "step-sons"]),
    ("The moon is smaller than the [MASK].", ["[", "]", "sun", "#", "##"]),
    ("The moon is smaller than the [MASK].", ["x" * 101, "sun"]),
    ("😀 is what the [MASK] sent.", ["boy", "girl", "boss"]),
    ("The film\r\nwas made\r\nin [MASK].", ["france\r\n", "\titaly", "spain "]),
)

STORY = (
    "The village lies in a narrow valley between two mountains, and until the last war there was no road to it.",
    "People came and went on foot, or on the backs of mules, along a path that was closed by snow from December to March.",
    "In the middle of the village there is a church with a square tower, built of the same grey stone as the houses.",
    "Its bell was cast in the capital and carried up in two pieces by forty men, who were paid in wine.",
    "The school was opened in the year of the great flood and closed when only three children were left.",
    "After that the teacher stayed on as a keeper of bees, and her honey won a prize at the county fair.",
    "Most of the young people went to work in the factories by the lake and came back for weddings and funerals.",
    "Then a company from the north bought the old mill and turned it into a hotel with twenty rooms.",
    "The first guests were surprised to find neither a telephone nor a lock on the door.",
    "They wrote about it to their friends, and soon there were more guests than beds.",
    "The baker hired a boy, the boy married the daughter of the smith, and the school was opened again.",
    "Some of the old people complain about the noise, but they rent out their barns all the same.",
    "In winter the path is still closed, and the village is as quiet as it was a hundred years ago.",
    "On clear nights one can see the lights of the city far away to the south.",
)

HARBOR = (
    "The harbor was dug by hand over a period of eleven years, and many of the workers are buried on the hill above it.",
    "At first it was used for the export of coal, later for grain, and since the seventies mostly for cars.",
    "A railway connects it with the main line, which runs along the coast to the border.",
    "The lighthouse at the end of the pier was rebuilt after a fire and has been automatic for forty years.",
    "Every morning the pilots meet in a small office over the customs house to divide the ships among them.",
    "The largest vessel ever to enter was a tanker of three hundred meters, which had lost its rudder in a storm.",
    "It took six tugs and a whole day to bring her in, and the town council gave the captain a silver cup.",
    "Fishing has almost come to an end, although a few boats still go out at night for squid.",
    "Where the nets were once dried there is now a market for tourists, with a stage and a carousel.",
    "The union has its own band, which plays at the opening of the season and at the burial of its members.",
    "Plans for a second basin were given up when the price of steel doubled.",
    "In the archive there is a letter from an engineer who warned that the sea would take it all back.",
)

# Each of these is a single token of the uncased BERT vocabulary, so that a text can have an exact length.
TOKENS = "the old boat was slow but the men in it were happy and sang all day about the sea while we sat there with cold tea".split()


def cases() -> list[dict[str, Any]]:
    """Returns all cases, each with a unique `id` that starts with its kind, and a `request` body."""
    kinds: dict[str, Iterable[Request]] = {
        "one": map(_request, ONE),
        "edge": map(_request, FIRST_OR_LAST),
        "several": map(_request, SEVERAL),
        "touching": map(_request, TOUCHING),
        "unicode": map(_request, UNICODE),
        "odd": map(_request, ODD),
        "top-k": _top_k(),
        "targets": _targets(),
        "long": _long(),
        "full": _full(),
        "window": _windows(),
        "list": _lists(),
    }
    return [
        {"id": f"{kind}-{number:02d}", "request": request} for kind, requests in kinds.items() for number, request in enumerate(requests, 1)
    ]


def _request(inputs: Inputs, top_k: int | None = None, targets: Sequence[str] | None = None) -> Request:
    """Returns a request body, leaving out parameters that are None, and `parameters` where none is left."""
    given = {name: value for name, value in {"top_k": top_k, "targets": targets}.items() if value is not None}
    return {"inputs": inputs, "parameters": given} if given else {"inputs": inputs}


def _text(sentences: Sequence[str], count: int, start: int = 0) -> str:
    """Returns `count` sentences joined by spaces, from the one at `start`, beginning again after the last."""
    return " ".join(sentences[(start + i) % len(sentences)] for i in range(count))


def _masked(text: str, *words: int) -> str:
    """Returns a text with the words at some places, counted from 0 or from the end, replaced by masks."""
    parts = text.split(" ")
    for word in words:
        parts[word] = "[MASK]"
    return " ".join(parts)


def _tokens(count: int, *masks: int) -> str:
    """Returns a text of exactly `count` tokens, those at some places masks."""
    return _masked(_text(TOKENS, count), *masks)


def _top_k() -> Iterator[Request]:
    """Every `top_k` on texts of one and of several masks."""
    for number, top_k in enumerate(TOP_KS[1:]):
        for text in (ONE[3 * number], ONE[3 * number + 16], FIRST_OR_LAST[number], SEVERAL[number], TOUCHING[number], UNICODE[3 * number]):
            yield _request(text, top_k)
    yield _request("[MASK]", 100)


def _targets() -> Iterator[Request]:
    """All targets, then with a `top_k` below and above their number."""
    for text, targets in TARGETS:
        yield _request(text, None, targets)
    for number, (text, targets) in enumerate(TARGETS):
        yield _request(text, (1, 2, 3, 100)[number % 4], targets)


def _long() -> Iterator[Request]:
    """300 to 500 tokens each."""
    yield _request(_masked(_text(STORY, 14), 30))
    yield _request(_masked(_text(STORY, 16, 4), 0), 2)
    yield _request(_masked(_text(HARBOR, 13), -2), 1)
    yield _request(_masked(_text(HARBOR, 14, 5), 100, 101), 2)
    yield _request(_masked(_text(STORY + HARBOR, 17, 8), 5, 120, 240), 1)
    yield _request(_masked(_text(STORY + HARBOR, 18), 7, 8, 9, 200), 2)
    yield _request("\r\n\r\n".join([*STORY[:9], "The [MASK] is far away."]))
    yield _request(_masked(_text(STORY, 15), 60), None, ["road", "way", "Path", "railway"])
    yield _request(_masked(_text(HARBOR, 14), 60, 160), 2, ["ships", "men", "boats", "ferryboats"])
    yield _request("料理は美味しかったけれど、店は寒かった。" * 15 + " The [MASK] was cold.", 3)
    yield _request("😀 and 🎉 in the text, " * 40 + "then a [MASK].", 1)


def _full() -> Iterator[Request]:
    """Texts that just fit one window."""
    for count, mask in ((ROOM - 1, 3), (ROOM, 0), (ROOM, ROOM - 1), (ROOM, 255)):
        yield _request(_tokens(count, mask), 1)
    yield _request(_tokens(ROOM, 10, 500), 2)


def _windows() -> Iterator[Request]:
    """Texts of more than one window, each mask with the one around it."""
    yield _request(_masked(_text(STORY + HARBOR, 30), 200))
    yield _request(_masked(_text(HARBOR + STORY, 32, 3), 2), 2)
    yield _request(_masked(_text(STORY, 28), -3), 1)
    yield _request(_masked(_text(STORY + HARBOR, 50, 9), 20, 400, 401, 860), 2)
    yield _request(_masked(_text(HARBOR, 30), 15, 330), 2, ["hand", "Sea", "sea", "coalfields"])
    for mask in (254, 255, 256, 257):
        yield _request(_tokens(ROOM + 2, mask), 1)
    yield _request(_tokens(ROOM + 1, 0, ROOM), 1)
    yield _request(_tokens(1200, 600, 855, 856), 1)


def _lists() -> Iterator[Request]:
    yield _request([])
    yield _request([ONE[0]])
    yield _request([SEVERAL[0]])
    yield _request([ONE[1]], 1)
    yield _request([SEVERAL[1]], 1)
    yield _request(list(ONE[2:6]))
    yield _request([ONE[6], SEVERAL[2], TOUCHING[2], UNICODE[2]], 2)
    yield _request([ONE[7]] * 4, 3)
    yield _request([ONE[8], ONE[9]], None, ["water", "wine", "Cup", "cup"])
    yield _request([ONE[10], SEVERAL[3], FIRST_OR_LAST[0]], 2, ["man", "woman", "child"])
    yield _request([ONE[11], _masked(_text(STORY, 26), 300), SEVERAL[4]], 1)
    yield _request(list(UNICODE[:10]), 1)
    yield _request(list(ONE), 1)
    for number, (top_k, targets) in enumerate(product((1, 10), (None, ["it", "him"]))):
        yield _request([FIRST_OR_LAST[number], TOUCHING[number]], top_k, targets)
