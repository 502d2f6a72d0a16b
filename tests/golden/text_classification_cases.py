"""The requests of the golden text-classification cases: every shape of input and parameter that the service takes.

All texts are original, written for this file. Long ones are put together from the sentence lists below, always the same
way. No text spells a special token ("[SEP]" and the like), which the reference tokenizer would not read as text.
`make_text_classification.py` turns these into `text_classification.jsonl`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any

Inputs = str | dict[str, str] | list[str | dict[str, str]]
Request = dict[str, Any]

STRIDES = (0, 32, 64, 128, 200)
FUNCTIONS = (None, "softmax", "sigmoid", "none")
TOP_KS = (None, 1, 2, 5)

SHORT = (
    "I would watch this again tomorrow.",
    "Two hours of my life that nobody can give back.",
    "The lead actress carries every scene she walks into.",
    "What begins as a thriller ends as a lecture.",
    "My kids laughed until they had to lie down on the carpet.",
    "Not bad, not good, just there.",
    "It isn't the disaster people told me it would be.",
    "The dialogue sounds as if it was assembled by a committee of robots.",
    "A quiet little picture about bread, grief and brothers, and I adored it.",
    "Never has an explosion been so dull.",
    "The ending redeems a muddled middle hour.",
    "I fell asleep twice and missed nothing.",
    "Gorgeous to look at, impossible to care about.",
    "He sings badly, she dances worse, and somehow it is pure joy!",
    "Who asked for a fourth one of these?",
    "The score swells whenever the script has run out of ideas.",
    "Sharp, strange and very, very funny.",
    "You could do worse on a rainy Sunday.",
    "The kettle boils fast and pours without dripping.",
    "Stopped charging after nine days.",
    "These boots survived a winter of salt and slush.",
    "The zipper broke before I left the shop.",
    "Battery life is fine, the screen is not.",
    "Best forty dollars I have spent this year.",
    "The manual is written in a language close to English.",
    "It does what it says on the box.",
    "Returned it, got a second one, returned that too.",
    "The chair squeaks, wobbles and hurts my back.",
    "My mother figured out this phone in five minutes, which is a miracle.",
    "Cheap plastic pretending to be steel.",
    "The soup arrived cold and the waiter shrugged.",
    "Order the dumplings, then order them again.",
    "Lovely terrace, dreadful coffee.",
    "We waited an hour for a salad made of stems.",
    "The chef came out to ask whether we were happy, and we were.",
    "Overpriced, underseasoned, overlit.",
    "Honest food at an honest price.",
    "I found a hair in my pasta and a second one in my wine.",
    "The bread alone is worth the drive.",
    "Portions for mice, bills for lions.",
    "The train leaves at a quarter past six.",
    "There are eleven chairs in the meeting room.",
    "She put the letter on the table and closed the door.",
    "The museum is closed on Mondays.",
    "Water boils at a lower temperature in the mountains.",
    "The film runs for ninety-four minutes.",
    "Turn left at the bakery and walk to the bridge.",
    "The parcel weighs three kilograms.",
    "It was released in autumn and is shown in twelve cities.",
    "Press the green button to start the machine.",
)

WORDS = (
    "wonderful",
    "awful",
    "boring",
    "delightful!",
    "meh",
    "Table",
    "no",
    "YES",
    "unforgettable",
    "underwhelmingly",
    "7",
    "I",
    "refund?",
    "antidisestablishmentarianism",
)

FILM = (
    "The camera follows an old ferry pilot through his last week on the river, and for once it has the patience to wait.",
    "Nothing much happens in the first half hour, unless you count the weather, the gossip and a stolen goose.",
    "Then his daughter comes home with a husband nobody has heard of, and the house fills up with careful silence.",
    "The young actor who plays the husband has one expression, and he wears it like a borrowed coat.",
    "She, on the other hand, can turn a shopping list into a confession, and every scene without her feels thin.",
    "I laughed at the funeral, which I believe was intended, and winced at the wedding, which probably was not.",
    "The music is a mistake: syrupy strings pour over moments that had already said what they needed to say.",
    "Still, there is a shot of the empty boat at dawn that I have not been able to shake off for a week.",
    "The writers clearly love these people, and it shows in the small lies they allow them to keep.",
    "A subplot about a land sale goes nowhere, slowly, and could have been cut with nobody noticing.",
    "By the time the river floods, the film has earned its tears, although it asks for a few too many.",
    "My companion hated it and called it a postcard with a cough, and we argued all the way to the station.",
    "I would rather see an honest failure like this than another polished product with no blood in it.",
)

DINNER = (
    "We booked a table for six on a Thursday and were seated beside the kitchen door, which never stopped swinging.",
    "The waitress apologised, found us a corner by the window and brought olives that tasted of lemon and smoke.",
    "After that promising start the evening went downhill with remarkable speed.",
    "The lamb was grey, the beans were squeaky, and the sauce had formed a skin thick enough to write on.",
    "My brother's fish, however, was the best thing any of us had eaten since the summer by the lake.",
    "Someone in that kitchen knows how to cook, and someone else in that kitchen should be stopped.",
    "The wine list is short, clever and fairly priced, with a white from the islands that we ordered twice.",
    "Dessert took forty minutes and came without the ice cream, and then with the ice cream but without the cake.",
    "The manager took both off the bill before we had even thought of complaining.",
    "Our neighbours were celebrating a birthday and sang so well that the whole room applauded.",
    "It is loud, it is uneven, it is far from cheap, and I cannot quite decide whether to forgive it.",
    "The coffee decided the matter: burnt, bitter and served in a cup with lipstick on the rim.",
)

GADGET = (
    "The speaker comes in a box twice the size it needs, padded with enough foam to ship a vase.",
    "Setting it up took three minutes, and that includes the time I spent looking for my glasses.",
    "Voices sound warm and close, and old recordings lose the tinny edge they had on my previous one.",
    "Turn it up, though, and the bass begins to buzz like a wasp trapped in a tin.",
    "The application wants an account, an address, a birthday and permission to look at my photographs.",
    "I refused, and it still plays, which I count as a victory of common sense over marketing.",
    "The battery lasted eleven hours in the garden, one more than the maker promises.",
    "After a software update in March it began to switch itself on at night and announce the weather in Lisbon.",
    "I do not live in Lisbon, and neither did the polite person at the help desk who could not help.",
    "They sent a replacement within two days and did not want the broken one back.",
    "The new unit has behaved so far, and my daughter has covered it with stickers of horses.",
    "For the price I expected less, and for the trouble I expected more, so let us call it even.",
)

PLAIN = (
    "The library opens at nine in the morning and closes at seven in the evening, except on public holidays.",
    "Visitors leave their coats on the ground floor and take a numbered tag from the clerk.",
    "The reading room has forty desks, each with a lamp, a socket and a small drawer.",
    "Maps are kept on the second floor, next to the stairs, in flat cabinets sorted by region and year.",
    "A request for a book from the archive takes about twenty minutes during the week.",
    "Copies can be made on the machine in the hall, which accepts coins and cards.",
    "The building was put up in three parts over a period of thirty years.",
    "Its oldest wall faces the harbor and is made of yellow brick.",
    "Every second year the roof is inspected, and the report is placed in the public record.",
    "The catalog lists one title per line, followed by the author, the shelf and the number of pages.",
    "A bus stops in front of the main entrance four times an hour.",
)

# Every one of these is a single token of the uncased BERT vocabulary, so that a text can have an exact length.
TOKENS = "the old film was slow but warm and every actor in it looked happy or bored while we sat there with cold tea".split()

UNICODE = (
    "Loved it 😍😍 best night ever 🎉",
    "😡",
    "🤷‍♀️ whatever, it works 👍🏽",
    "Family outing 👨‍👩‍👧‍👦 to the cinema: 🍿 good, 🎬 bad.",
    "Made in 🇩🇪, sold in 🇯🇵, broken in 🇫🇷.",
    "1️⃣ star, and that is generous ⭐",
    "Un café délicieux, une soirée gâchée par le bruit à côté.",
    "Die Übersetzung ist großartig, nur die Straße war zu laut.",
    "¡Qué película tan preciosa! ¿Dónde está la segunda parte?",
    "Cafe\u0301 re\u0301sume\u0301 nai\u0308ve: accents as combining marks",
    "ż́ǫ̈ stacked a\u0301\u0302\u0303\u0304\u0305\u0306 marks on one letter",
    "这部电影非常好看,我想再看一遍。",
    "料理は美味しかったけれど、サービスは最悪でした。",
    "배송이 빨라서 정말 만족합니다.",
    "\u1112\u1161\u11ab\u1100\u1173\u11af written as separate jamo",
    "great 映画 with a 悪い ending",
    "الفيلم رائع والموسيقى جميلة جدا",
    "الطَّعَامُ لَذِيذٌ but the tea was not",
    "האוכל היה טעים, השירות איטי",
    "Отличный фильм, но конец разочаровал.",
    "Їжа смачна, ґанок холодний, під'їзд темний.",
    "Η ταινία ΗΤΑΝ ΥΠΕΡΟΧΗ, ο ήχος όχι.",
    "खाना अच्छा था, पर बहुत देर से आया",
    "อาหารอร่อยมากแต่แพงไปหน่อย",
    "გემრიელი პური და ცუდი ღვინო",
    "İstanbul'da ILIK bir çorba içtim, ığdır ve İzmir",
    "line one is fine\r\nline two is awful\r\nline three is lunch",
    "tabs\tbetween\tgood\twords\tand\ta\nnewline",
    "zero\u200bwidth\u200cspaces\u200dhide\u2060in\ufeffhere",
    "soft\u00adhyphen\u00adated praise for a won\u00adder\u00adful meal",
    "no\u00a0break\u2007and\u202fnarrow\u3000spaces in a dull review",
    "\u202eright to left override\u202c and \u200fmarks\u200e around a great idea",
    "ＦＵＬＬＷＩＤＴＨ ｐｒａｉｓｅ ａｎｄ 𝐛𝐨𝐥𝐝 𝓼𝓬𝓻𝓲𝓹𝓽 𝔡𝔢𝔩𝔦𝔤𝔥𝔱",
    "ﬁne ﬂavors, ½ the price, chapter Ⅷ, 10² times better, № 1 ™",
    "“Curly quotes” — an em dash… and ‘that’ is all – good",
    "𐌲𐍉𐌸 𒀀𒁀𒂠 𓀀𓂀 𐤀𐤁 ancient letters, modern boredom",
    "𠀀𠮷野家 𪚥 a bowl of rice worth writing home about",
    "\ue000 private \U000f0000 use \U0010fffd marks in a nice text",
    "\ufffd replaced \ufffc object \ufffe nothing \U0010ffff left",
    "\x00null\x07bell\x1bescape\x7fdelete: a broken keyboard, a bad day",
    "next\u0085line and\u2028line separator and\u2029paragraph of joy",
    "Z\u0351\u0343\u036ba\u0315\u0321l\u0338\u0321g\u0334\u0328o\u0337\u0321 poster, pleasant film",
    "ẞ ß ſ ĳ Ǆ ŉ Ω Å ﬃ odd letters, even temper",
    "\U000e0041\U000e0042 tags and \u2764\ufe0f versus \u2764\ufe0e hearts",
)

ODD = (
    "a" * 100,
    "a" * 101,
    "so" + "o" * 60 + " good",
    "https://shop.example/item?id=42&ref=mail#reviews is where I bought this junk",
    "<p>Great <b>product</b>, &amp; a terrible box</p>",
    "if (happy) { return stars[4]; } else { throw new Refund(); }",
    "3.14159 2,718.28 1e-9 -40 100% 24/7 $19.99",
    "GOOD good GoOd gOOD",
    "don't can't won't shouldn't've y'all'd",
    "well-made, half-hearted, state-of-the-art, one-of-a-kind",
    "!!!???!!!",
    "@someone #worst #neveragain :( :-) ;P",
    '{"stars": 5, "text": "fine"}',
    "good " * 40,
)

EMPTY = ("", " ", "\n\t", ".", "\u200b", "   \r\n  ", "\u00a0", "\u3000", "\ufeff", "...", "\x00")

PAIRS = (
    ("Is the pool open in winter?", "The pool is heated and open all year."),
    ("The food was great.", "The food was terrible."),
    ("How was the film?", "Long, loud and lifeless."),
    ("wonderful", "dreadful"),
    ("The hotel is next to the station.", "You can walk from the train to your bed in two minutes, and we loved it."),
    ("Would you buy this lamp again?", "No."),
    ("The plot is thin", "but the jokes are thick on the ground"),
    ("A man repairs a clock.", "Somebody is fixing a timepiece."),
    ("😀", "😭"),
    ("映画はどうでしたか", "すごく良かったです"),
    ("tabs\tand\r\nlines", "\u200bzero width\u200b"),
    ("Nobody liked the sequel.", "Nobody disliked the sequel."),
    (" leading and trailing spaces ", "  twice  "),
    ("Same sentence on both sides.", "Same sentence on both sides."),
)

EMPTY_PAIRS = (
    ("", "The second half is full of charm."),
    ("The first half is a chore.", ""),
    ("", ""),
    (" ", "\n"),
    ("The first half is a chore.", " "),
    ("\u200b", "Only this one says anything."),
    (".", "."),
)


def cases() -> list[dict[str, Any]]:
    """Returns all cases, each with a unique `id` that starts with its kind, and a `request` body."""
    kinds: dict[str, Iterable[Request]] = {
        "short": map(_request, SHORT),
        "word": map(_request, WORDS),
        "unicode": map(_request, UNICODE),
        "odd": map(_request, ODD),
        "empty": _empty(),
        "long": _long(),
        "truncated": _truncated(),
        "window": _windows(),
        "window-edge": _window_edges(),
        "pair": (_request(_pair(*pair)) for pair in PAIRS),
        "pair-empty": (_request(_pair(*pair)) for pair in EMPTY_PAIRS),
        "pair-truncated": _truncated_pairs(),
        "pair-window": _pair_windows(),
        "list": _lists(),
        "parameters": _parameters(),
    }
    return [
        {"id": f"{kind}-{number:02d}", "request": request} for kind, requests in kinds.items() for number, request in enumerate(requests, 1)
    ]


def _request(inputs: Inputs, **parameters: Any) -> Request:
    """Returns a request body, leaving out parameters that are None, and `parameters` where none is left."""
    given = {name: value for name, value in parameters.items() if value is not None}
    return {"inputs": inputs, "parameters": given} if given else {"inputs": inputs}


def _pair(text: str, text_pair: str) -> dict[str, str]:
    return {"text": text, "text_pair": text_pair}


def _text(sentences: Sequence[str], count: int, start: int = 0) -> str:
    """Returns `count` sentences joined by spaces, from the one at `start`, beginning again after the last."""
    return " ".join(sentences[(start + i) % len(sentences)] for i in range(count))


def _tokens(count: int, start: int = 0) -> str:
    """Returns a text of exactly `count` tokens."""
    return _text(TOKENS, count, start)


def _empty() -> Iterator[Request]:
    for text in EMPTY:
        yield _request(text)
    yield _request("", window="mean")
    yield _request(" ", window="max", stride=0)
    yield _request("", function_to_apply="none", top_k=1)


def _long() -> Iterator[Request]:
    """About 300 tokens each."""
    for start in (0, 5):
        for sentences in (FILM, DINNER, GADGET, PLAIN):
            yield _request(_text(sentences, 13, start))
    yield _request(_text(FILM + DINNER, 13, 7))
    yield _request(_text(GADGET + PLAIN, 14, 6))
    yield _request("\n\n".join(SHORT[:30]))
    yield _request(_text(UNICODE, 12))


def _truncated() -> Iterator[Request]:
    """Over 512 tokens, then lengths around the 510 that fit beside the special tokens."""
    for start, sentences in enumerate((FILM, DINNER, GADGET, PLAIN)):
        yield _request(_text(sentences, 30, 3 * start))
    yield _request(_text(PLAIN + FILM, 30))
    yield _request(_text(FILM + PLAIN, 40), function_to_apply="sigmoid")
    yield _request(_text(GADGET + DINNER, 60, 4), top_k=1)
    yield _request(_text(SHORT, 50), function_to_apply="none", top_k=2)
    yield _request("这家店的面条很好吃但是服务太慢了" * 40)
    yield _request("😍 good 🎉 " * 200)
    for count in (509, 510, 511, 512):
        yield _request(_tokens(count))


def _windows() -> Iterator[Request]:
    """Texts of 600 to 1,500 tokens, with every mode and stride, and texts that need one window only."""
    for start, (mode, stride) in enumerate(product(("mean", "max"), (None, *STRIDES))):
        yield _request(_text(FILM + DINNER, 29 + start % 6, start), window=mode, stride=stride)
        yield _request(_text(GADGET + PLAIN + FILM, 40 + 3 * start, 2 * start), window=mode, stride=stride)
    for start, (mode, function, top_k) in enumerate(product(("mean", "max"), FUNCTIONS[1:], (1, 5))):
        text = _text(DINNER + GADGET, 30 + start, start)
        yield _request(text, window=mode, stride=STRIDES[start % 5], function_to_apply=function, top_k=top_k)
    yield _request(SHORT[0], window="mean")
    yield _request(SHORT[1], window="max", stride=200)
    yield _request(_text(FILM, 13), window="max", stride=64)
    yield _request("料理は美味しかったけれど、店は寒かった。" * 40, window="mean", stride=32)
    yield _request(_text(UNICODE, 44), window="max", stride=32)


def _window_edges() -> Iterator[Request]:
    """Lengths at which the count of windows changes: `room` is 510, and a further window adds 510 less the stride."""
    for mode, stride in (("mean", 128), ("max", 0), ("mean", 200)):
        step = 510 - stride
        for count in (510, 511, 510 + step, 510 + step + 1):
            yield _request(_tokens(count, stride), window=mode, stride=stride)


def _truncated_pairs() -> Iterator[Request]:
    """Pairs over 512 tokens, the longer text cut first, then lengths around the 509 that fit."""
    for function, (film, dinner) in zip((None, None, "none"), ((28, 1), (24, 4), (26, 10)), strict=True):
        long, short = _text(FILM, film), _text(DINNER, dinner)
        yield _request(_pair(long, short), function_to_apply=function)
        yield _request(_pair(short, long), function_to_apply=function)
    yield _request(_pair(_text(GADGET, 26), _text(PLAIN, 28)))
    yield _request(_pair(_text(PLAIN, 30), _text(GADGET, 25)), top_k=1)
    yield _request(_pair("", _text(FILM, 26)))
    yield _request(_pair(_text(FILM, 26), ""))
    yield _request(_pair(_text(DINNER, 26), " "))
    for a, b in ((254, 255), (255, 255), (255, 254), (254, 256), (300, 300), (301, 300), (300, 301), (254, 400), (400, 255)):
        yield _request(_pair(_tokens(a), _tokens(b, 5)))


def _pair_windows() -> Iterator[Request]:
    """A text of at most 60 tokens beside windows of the second one."""
    for start, (mode, stride) in enumerate(product(("mean", "max"), (None, *STRIDES))):
        first, second = _text(SHORT, 1 + start % 3, start), _text(FILM + PLAIN, 28 + 2 * start, start)
        yield _request(_pair(first, second), window=mode, stride=stride)
    for start, (function, top_k) in enumerate(product(FUNCTIONS[1:], (1, 5))):
        pair = _pair(SHORT[start], _text(GADGET + DINNER, 30, start))
        yield _request(pair, window=("mean", "max")[start % 2], function_to_apply=function, top_k=top_k)
    yield _request(_pair(*PAIRS[0]), window="mean")
    yield _request(_pair("", _text(DINNER, 30)), window="max", stride=64)
    yield _request(_pair(SHORT[5], ""), window="mean")
    # 509 tokens fit: exactly one window, one token more, and two full ones.
    for count in (469, 470, 469 + 341, 469 + 341 + 1):
        yield _request(_pair(_tokens(40), _tokens(count, 7)), window="mean", stride=128)


def _lists() -> Iterator[Request]:
    pairs = [_pair(*pair) for pair in PAIRS]
    yield _request([])
    yield _request([], top_k=1)
    yield _request([SHORT[3]])
    yield _request([pairs[1]])
    yield _request([""])
    yield _request(list(SHORT[:4]))
    yield _request([SHORT[4], pairs[2], "", pairs[6], _text(FILM, 13)])
    yield _request([*pairs[:3]], function_to_apply="sigmoid")
    yield _request([SHORT[8]] * 5, top_k=1)
    yield _request(list(WORDS), top_k=1, function_to_apply="softmax")
    yield _request([*UNICODE[:6], *EMPTY[:4]], top_k=2)
    yield _request([SHORT[20], _text(GADGET, 28), _pair(SHORT[30], _text(DINNER, 28))])
    yield _request([_text(PLAIN, 32), SHORT[9], pairs[3], _pair(SHORT[10], _text(FILM, 28))], window="mean", stride=64)
    yield _request([SHORT[11], _text(DINNER, 28)], window="max", function_to_apply="none")
    yield _request(list(SHORT[10:42]))
    yield _request([_text(FILM, count, count) for count in (1, 9, 2, 7)], function_to_apply="none")


def _parameters() -> Iterator[Request]:
    """Every `top_k` with every `function_to_apply`, on a text, a list and a pair."""
    for i, (top_k, function) in enumerate(product(TOP_KS, FUNCTIONS)):
        yield _request(SHORT[3 * i], top_k=top_k, function_to_apply=function)
        second: Inputs = [SHORT[i], SHORT[49 - i]] if i % 2 else _pair(*PAIRS[i % len(PAIRS)])
        yield _request(second, top_k=top_k, function_to_apply=function)
