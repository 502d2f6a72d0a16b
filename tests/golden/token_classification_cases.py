"""The requests of the golden token-classification cases: every shape of input and parameter that the service takes.

All texts are original, written for this file; people, firms and events in them are invented, and only places are real.
Long ones are put together from the sentence lists below, always the same way. No text spells a special token ("[SEP]"
and the like), which the reference tokenizer would not read as text.
`make_token_classification.py` turns these into `token_classification.jsonl`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any

Inputs = str | list[str]
Request = dict[str, Any]

ROOM = 510  # text tokens in a full window
STRATEGIES = ("none", "simple", "first", "average", "max")
WORD_STRATEGIES = ("first", "average", "max")
IGNORE_LABELS: tuple[list[str] | None, ...] = (None, [], ["O"], ["O", "MISC"], ["B-PER"], ["PER"], ["O", "B-LOC", "ORG"])

SHORT = (
    "Angela Whitcombe flew from Oslo to Nairobi on Tuesday.",
    "The Halvorsen Group opened an office in Singapore last year.",
    "Rain stopped play in Colombo with Sri Lanka on 211 for four.",
    "Marta Oliveira scored twice as Portugal beat Norway 3-1 in Lisbon.",
    "United Nations officials met the Kenyan president in Geneva.",
    "Brentwick Steel will close its plant in Ohio, the company said.",
    "The German minister refused to comment on the French proposal.",
    "Dr. Samuel Okafor teaches medicine at the University of Lagos.",
    "She crossed the Atlantic in a boat named after her aunt Ingrid.",
    "Tokyo shares ended lower on Friday.",
    "The World Bank lent Peru 40 million dollars for roads in the Andes.",
    "Lindqvist, who was born in Malmo, moved to Chicago at nineteen.",
    "A spokesman for Radio Bergen said the Norwegian album had sold out.",
    "The Zurich court ruled against Falkner Chemicals on Monday.",
    "Pope Adrian spoke in Polish, then in Latin.",
    "Third seed Elena Marchetti of Italy beat Yuki Tanabe of Japan 6-4 6-2.",
    "London, Paris and Rome are crowded in August.",
    "The Red Cross sent two planes to Haiti.",
    "Manchester lost at home to Leeds.",
    "Cairo and Khartoum signed a treaty on the Nile.",
    "The novel The Salt Roads of Tuva won a prize in Stockholm.",
    "President Amara Diallo will visit New Delhi in March.",
    "Microscopes made by Otterbeck are used at Johns Hopkins University.",
    "Police in Buenos Aires arrested a Spanish tourist named Ramon Vidal.",
    "The Supreme Court in Brasilia heard the case of Teixeira against Banco Norte.",
    "Ministers of the European Union gathered in Brussels.",
    "Wellington airport reopened after a storm from Antarctica.",
    "The Boston Harriers traded pitcher Cole Whitaker to Seattle.",
    "Lake Victoria lies between Uganda, Kenya and Tanzania.",
    "He reads Tolstoy in Russian and Borges in Spanish.",
    "Greenpeace activists climbed a tower in Rotterdam.",
    "Senator Ruth Callahan of Vermont opposed the bill.",
    "Hurricane Petra hit Cuba and then turned towards Florida.",
    "The Olympic flame reached Athens.",
    "Kofi Mensah joined the board of Volta Energy in Accra.",
    "An Air India flight from Mumbai landed in Frankfurt with one engine.",
    "The Dutch central bank in Amsterdam kept its rate unchanged.",
    "Judge Harriet Stone read the verdict in a Glasgow courtroom.",
    "Texas and California want more water from the Colorado River.",
    "The Louvre lent a painting to the Prado.",
    "Captain Nils Aaberg sailed from Reykjavik to Greenland alone.",
    "Reuters reported that Syria and Turkey had reopened the border.",
    "Mount Kenya is lower than Kilimanjaro.",
    "The Hindu festival drew crowds to Kathmandu.",
)

# Names of many word pieces, whose pieces often disagree.
PIECES = (
    "Grzegorz Brzeczyszczykiewicz lives in Chrzaszczyzewoszyce.",
    "Thiruvananthapuram welcomed Venkatanarasimharajuvaripeta's mayor.",
    "Llanfairpwllgwyngyll is a village in Wales.",
    "Oluwaseyifunmi Adebayo-Ogunbanwo works for Schwarzwaldtechnik AG.",
    "The Ouagadougou office of Przedsiebiorstwo Handlowe closed.",
    "Hrafnhildur Gunnlaugsdottir beat Kristjansdottir in Hafnarfjordur.",
    "Antananarivo, Nouakchott and Ulaanbaatar signed the accord.",
    "Papadimitrakopoulos moved from Thessaloniki to Massachusetts.",
    "The Saskatchewanian team met Kyzylordans in Dnipropetrovsk.",
    "Wojciechowska-Szczepanska joined GlaxoWellbright Pharmaceuticals.",
)

# Entities that touch, with and without punctuation between them.
ADJACENT = (
    "Paris London Rome Berlin Madrid",
    "Paris, London, Rome, Berlin and Madrid",
    "Anna Kowalski Peter Brandt Maria Silva met in Vienna Austria.",
    "SOCCER - ITALY SPAIN FRANCE GERMANY RESULTS",
    "Oslo,Norway;Lima,Peru;Quito,Ecuador",
    "British Airways London Heathrow New York Kennedy",
    "Reuters Washington",
    "Anna/Maria/Peter from Volvo/Saab in Sweden/Finland",
    "(Tokyo)(Osaka)[Kyoto]{Nara}",
    "1. Ivan Petrov Russia 2. Juan Perez Spain 3. John Smith Britain",
)

OUTSIDE = (
    "the kettle boils and nobody hears it",
    "It rained all morning and the fields were full of puddles.",
    "Press the green button to start the machine.",
    "Prices rose by two percent after falling for a year.",
    "He opened the window, counted to ten and closed it again.",
    "7 8 9 10",
    "!!! ??? ...",
    "Nothing here has a name.",
    "a",
)

ODD = (
    "Jean-Baptiste O'Connor-Smith's mother-in-law, from Stratford-upon-Avon, isn't Irish.",
    "Write to press@halvorsen-group.example or visit https://halvorsen.example/oslo?lang=en",
    "ANGELA WHITCOMBE FLEW FROM OSLO TO NAIROBI",
    "angela whitcombe flew from oslo to nairobi",
    "AnGeLa wHiTcOmBe fLeW fRoM oSlO",
    "U.S. and U.K. troops left the U.N. base",
    "'Twas O'Brien's and D'Angelo's idea, y'all; rock 'n' roll in L'Aquila",
    "AT&T, P&O and Marks&Sparks",
    '"I am from Ghana," said Mensah. "And I," said Diallo, "from Mali."',
    "Mr.Smith,Mrs.Jones and Dr.Brown of St.Louis",
    "N E W  Y O R K   T I M E S",
    "#Berlin @AngelaW $VOLVO %Rome% *Oslo* _Lima_",
    "3M, 7-Eleven and 20th Century Films of L.A.",
    "x" * 101 + " Berlin " + "y" * 100,
    "  leading and trailing spaces around Vienna  ",
    "Vienna",
    "...Vienna...",
)

UNICODE = (
    "😀 Angela Whitcombe 🎉 landed in Oslo 🇳🇴!",
    "👩‍👩‍👧‍👦 The Tanabe family moved from Osaka to Kyoto 🏯.",
    "Oslo🎿Bergen⛴Tromso: three stops",
    "👍🏽 Kofi Mensah 👍🏿 of Accra",
    "Renée Lefèvre et François Müller vivent à Besançon.",
    "Ağrı, İzmir ve Diyarbakır; Ömer Şahin, İstanbul'da IĞDIR",
    "Łódź, Kraków and Gdańsk are cities in Poland, says Małgorzata Żółć.",
    "Straße in Gießen, Großbritannien und Österreich",
    "Søren Ångström met Þór Ægisson in Århus.",
    "東京 is the capital of 日本, and 山田太郎 lives in 大阪.",
    "王小明 works for 中国银行 in Beijing 北京 and Shanghai 上海.",
    "김철수 lives in 서울, South Korea.",
    "محمد علي lives in القاهرة near Cairo.",
    "Москва and Санкт-Петербург are in Russia, said Иван Петров.",
    "Η Αθήνα and Athens; ο Γιώργος Παππάς",
    "दिल्ली is Delhi; मुंबई is Mumbai",
    "תל אביב and Tel Aviv, said דוד כהן",
    "Angela Whitcombe\r\nOslo\r\n\r\nNairobi\r\n",
    "Angela\tWhitcombe\tOslo\tNairobi\tKenya",
    "\n\n\tVienna \n Austria\n",
    "no\u00a0break Angela\u00a0Whitcombe in New\u00a0York and New\u2009Delhi\u3000India",
    "“Angela Whitcombe” — of ‘Oslo’ – said: «Bergen»… „Wien“",
    "Ａｎｇｅｌａ of Ｏｓｌｏ and 𝐁𝐞𝐫𝐥𝐢𝐧",
    "\ufeffOslo starts with a mark and ends with one\ufeff",
    "\u202eOslo\u202c and \u200fHaifa\u200e",
    "Stratford\u2010upon\u2011Avon and Aix\u2012en\u2013Provence",
    "O\u2019Connor of Côte d\u2019Ivoire and Coeur d\u02bcAlene",
    "\ue000 Oslo \U000f0000 Bergen \ufffd Vienna \ufffc",
    "next\u0085line Oslo\u2028Bergen\u2029Vienna",
    "\x00Oslo\x07 \x1bBergen\x7f",
    "ﬁrst Ǆ and ŉ letters of Oﬃce Ⅷ in Oslo",
    "Nguyễn Văn Đức lives in Đà Nẵng and Hà Nội, Việt Nam.",
    "𠮷野家 opened in Oslo 𪚥",
    "ไทย is Thailand, กรุงเทพ is Bangkok",
    "საქართველო is Georgia, and Tbilisi თბილისი",
)

# Words that the tokenizer shortens: combining marks (NFD), zero-width and control characters within a name.
SHORTENED = (
    "Angela Rene\u0301e flew to Orle\u0301ans France",
    "Maria Lo\u0301pez Garci\u0301a met A\u0308nders A\u030angstrom",
    "He left Me\u0301xico Ber\u200blin Par\u00adis and Vi\u200cen\u200dna",
    "President Ange\u0301la Whit\u00adcombe of Nor\u2060way spoke",
    "Oslo Co\u0302te Bo\u0308rse Zu\u0308rich rose",
    "The minister Fran\u00adcois Hol\u00adlan\u00adde praised Ger\u00adma\u00adny",
)

# Words that end in a combining mark, which the tokenizer's offsets leave out.
MARKED = (
    "Jose\u0301 left Bogota\u0301 for Peru",
    "Rene\u0301 and Zoe\u0308 of Malmo\u0308, Sweden",
    "I saw Andre\u0301, from Parana\u0301.",
)

EMPTY = ("", " ", "\n\t", ".", "\u200b", "   \r\n  ", "\u3000", "\ufeff", "...", "\x00", "\u0301")

NEWS = (
    "Oslo was quiet on Sunday as delegates from forty countries arrived for the talks.",
    "Angela Whitcombe, who leads the Kenyan mission, told Radio Bergen that she expected little.",
    "Her deputy, Tomas Lindqvist, was more hopeful and spoke of a window that would not stay open.",
    "The Halvorsen Group, which pays for the meeting, has its seat in Rotterdam and mines in Zambia.",
    "Protesters from Greenpeace unrolled a banner on the opera house and were led away singing.",
    "A judge in Bergen had ruled on Friday that the march could go ahead.",
    "In Brussels, a spokesman for the European Union declined to comment on the Norwegian plan.",
    "The World Bank has offered to lend Malawi and Zambia 300 million dollars for the railway.",
    "That railway would run from Lusaka to the port of Beira in Mozambique.",
    "Critics such as Professor Ruth Callahan of the University of Cape Town call it a road to nowhere.",
    "Kofi Mensah of Volta Energy sees it differently and has bought land near Blantyre.",
    "The British delegation left early after a quarrel about fish.",
    "Nobody at the hotel could say where Ramon Vidal, the Spanish minister, had spent the night.",
    "Elena Marchetti and Yuki Tanabe opened the concert with an Italian song.",
    "By Monday the snow had closed the road to Trondheim and the airport at Gardermoen.",
    "Two planes of the Red Cross were sent back to Copenhagen.",
    "Reuters reported that the Chinese envoy, Wang Xiaoming, would stay until Thursday.",
    "Falkner Chemicals of Zurich denied that it had paid for his flight.",
    "The Guardian of Lagos printed the whole treaty on its front page.",
    "President Amara Diallo of Mali signed first, then handed her pen to a boy from Timbuktu.",
    "Texas and Alaska sent observers, and so did the Navajo Nation.",
    "The last word went to Nils Aaberg, an old captain from Tromso who had come by boat.",
)

SPORT = (
    "Portugal beat Norway 3-1 in Lisbon on Wednesday with two goals from Marta Oliveira.",
    "Leeds drew with Everton, and Manchester lost at home to a young side from Bristol.",
    "In Melbourne, third seed Jan Kovacs of Hungary retired with a sore wrist.",
    "The Boston Harriers won 5-4 against the Seattle Loons in the eleventh inning.",
    "Cole Whitaker threw nine strikes in a row and was cheered by fans from both cities.",
    "Sri Lanka reached 211 for four before rain stopped play in Colombo.",
    "The Dutch rider Pieter van der Meer keeps the yellow jersey after the stage to Grenoble.",
    "He leads the Colombian Oscar Restrepo by eleven seconds.",
    "At the Asian Games in Jakarta, the Indian relay team dropped the baton.",
    "Real Valdoro have signed Brazilian striker Thiago Moura from Santos.",
    "Moura, 19, said he had dreamed of Spain since he was a child in Recife.",
    "The Davis Cup tie between Chile and Croatia was moved to Zagreb.",
    "Grace Adeyemi ran the fastest 800 metres of the year in Rome.",
    "The Olympic committee in Lausanne will look at the photograph again.",
)

# Each word and each period is a single token of the uncased BERT vocabulary, so that a text can have an exact length.
TOKENS = (
    "the boats came back late and the men carried the nets up to the old wall . nobody spoke much because the wind had "
    "been cold all day and there was little fish to show for it . the women had put soup on the stove and bread on the "
    "table . after the meal they sat by the fire and told the children about the great storm . it took the roof of the "
    "church and left the bell in a field two miles away ."
).split()


def cases() -> list[dict[str, Any]]:
    """Returns all cases, each with a unique `id` that starts with its kind, and a `request` body."""
    kinds: dict[str, Iterable[Request]] = {
        "short": map(_request, SHORT),
        "pieces": _pieces(),
        "adjacent": _adjacent(),
        "outside": _outside(),
        "odd": _odd(),
        "unicode": _unicode(),
        "shortened": _shortened(),
        "marked": _marked(),
        "empty": _empty(),
        "parameters": _parameters(),
        "long": _long(),
        "window": _windows(),
        "window-edge": _window_edges(),
        "seam": _seams(),
        "list": _lists(),
    }
    return [
        {"id": f"{kind}-{number:02d}", "request": request} for kind, requests in kinds.items() for number, request in enumerate(requests, 1)
    ]


def _request(inputs: Inputs, strategy: str | None = None, ignore_labels: Sequence[str] | None = None, stride: int | None = None) -> Request:
    """Returns a request body, leaving out parameters that are None, and `parameters` where none is left."""
    parameters = {"aggregation_strategy": strategy, "ignore_labels": ignore_labels, "stride": stride}
    given = {name: value for name, value in parameters.items() if value is not None}
    return {"inputs": inputs, "parameters": given} if given else {"inputs": inputs}


def _text(sentences: Sequence[str], count: int, start: int = 0) -> str:
    """Returns `count` sentences joined by spaces, from the one at `start`, beginning again after the last."""
    return " ".join(sentences[(start + i) % len(sentences)] for i in range(count))


def _tokens(count: int, start: int = 0) -> str:
    """Returns a text of exactly `count` tokens."""
    return _text(TOKENS, count, start)


def _pieces() -> Iterator[Request]:
    for number, text in enumerate(PIECES):
        for strategy in STRATEGIES if number % 2 == 0 else WORD_STRATEGIES[:2]:
            yield _request(text, strategy)


def _adjacent() -> Iterator[Request]:
    for number, text in enumerate(ADJACENT):
        yield _request(text)
        yield _request(text, STRATEGIES[number % 5], [] if number % 3 == 0 else None)


def _outside() -> Iterator[Request]:
    for number, text in enumerate(OUTSIDE):
        yield _request(text, STRATEGIES[number % 5])
    yield _request(OUTSIDE[1], "simple", [])
    yield _request(OUTSIDE[2], "none", [])
    yield _request(OUTSIDE[3], "average", ["PER"])


def _odd() -> Iterator[Request]:
    for number, text in enumerate(ODD):
        yield _request(text, (None, *STRATEGIES)[number % 6])


def _unicode() -> Iterator[Request]:
    for number, text in enumerate(UNICODE):
        yield _request(text)
        if number % 3 == 0:
            yield _request(text, STRATEGIES[number // 3 % 5], [])


def _shortened() -> Iterator[Request]:
    for text in SHORTENED:
        for strategy in ("simple", *WORD_STRATEGIES):
            yield _request(text, strategy)
    yield _request(SHORTENED[0], "none", [])
    yield _request(SHORTENED[1], "average", [])


def _marked() -> Iterator[Request]:
    for number, text in enumerate(MARKED):
        yield _request(text)
        yield _request(text, STRATEGIES[2 * number], [])


def _empty() -> Iterator[Request]:
    for text in EMPTY:
        yield _request(text)
    yield _request("", "none", [], 0)
    yield _request(" ", "average", [])
    yield _request(".", "max", [], 64)


def _parameters() -> Iterator[Request]:
    """Every strategy with every list of labels, in turn with a stride that makes no difference to a short text."""
    texts = (SHORT[3], SHORT[7], SHORT[15], SHORT[23], PIECES[3], ADJACENT[2], ODD[0])
    for number, (strategy, ignore_labels) in enumerate(product(STRATEGIES, IGNORE_LABELS)):
        text = texts[(number + number // len(texts)) % len(texts)]
        yield _request(text, strategy, ignore_labels, (None, 0, 200)[number % 3])
    yield _request(SHORT[14], None, ["O", "PER"])
    yield _request(SHORT[12], None, ["O", "PER", "ORG", "LOC", "MISC"])
    yield _request(SHORT[11], None, ["no such label", "O"])
    yield _request(SHORT[10], None, None, 128)


def _long() -> Iterator[Request]:
    """300 to 500 tokens each."""
    yield _request(_text(NEWS, 18))
    yield _request(_text(NEWS, 22, 11), "average")
    yield _request(_text(SPORT, 17), "first")
    yield _request(_text(SPORT + NEWS, 22, 6), "max", ["O", "LOC"])
    yield _request("\r\n\r\n".join(NEWS[:16]), "simple", None, 32)
    yield _request("\n".join(SHORT[:28]), "none")
    yield _request(_text(UNICODE, 13, 4), "simple")
    yield _request(" ".join(PIECES + ADJACENT), "average")
    yield _request(_tokens(400), "simple", [])


def _windows() -> Iterator[Request]:
    """Texts of two to four windows, with every stride and strategy."""
    yield _request(_text(NEWS, 30))
    yield _request(_text(SPORT + NEWS, 36), "average", None, 64)
    yield _request(_text(NEWS + SPORT, 44, 9), "first", None, 200)
    yield _request(_text(NEWS, 32, 5), "none", None, 0)
    yield _request(_text(SPORT, 40), "max", ["O", "MISC"], 32)
    yield _request(_text(NEWS + SPORT, 96), "simple", None, 0)
    yield _request(_text(SPORT + NEWS, 56, 20), "simple")
    yield _request("东京和北京是亚洲的大城市" * 50 + " Oslo Vienna", "simple", [])


def _window_edges() -> Iterator[Request]:
    """Lengths at which a second window begins to be needed."""
    for count in (ROOM, ROOM + 1):
        yield _request(_tokens(count - 3) + " angela flew home", "simple", None, 100)


def _seams() -> Iterator[Request]:
    """Names laid over the place where a text's scores change from one window to the next."""
    sentence = "then {} came to the hall and spoke about {} for an hour ."
    person, place = "maria fernanda lopez silva", "south west new york city"  # tokens: 4 and 5
    for number, stride in enumerate((0, 1, 64, 128, 200)):
        change = (2 * ROOM - 1 - stride) // 2 + 1  # the first token whose scores are the second window's
        for before, strategy in ((3, STRATEGIES[number]), (14, None)):
            text = f"{_tokens(change - before, number)} {sentence.format(person, place)} {_tokens(40 + stride)}"
            yield _request(text, strategy, None, stride)


def _lists() -> Iterator[Request]:
    yield _request([])
    yield _request([], "none", [])
    yield _request([SHORT[0]])
    yield _request([""])
    yield _request([SHORT[1]], "none")
    yield _request(list(SHORT[:4]))
    yield _request([SHORT[4], "", PIECES[0], " ", UNICODE[0]], "average")
    yield _request([SHORT[5]] * 3, "max")
    yield _request([*OUTSIDE[:3], ADJACENT[0]], "first", ["PER"])
    yield _request(list(UNICODE[:8]), "simple")
    yield _request([SHORT[6], _text(NEWS, 31, 3), SHORT[8]], "simple", None, 128)
    yield _request([*EMPTY[:5], SHORT[9]], "none", [])
    yield _request(list(SHORT[10:42]))
