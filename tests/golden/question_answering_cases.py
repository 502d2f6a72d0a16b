"""The requests of the golden question-answering cases: every shape of passage and every parameter that the service takes.

All texts are original, written for this file; no name, place or figure in them is real. Long passages are put together
from the ones below, always the same way. No text spells a special token ("[SEP]" and the like), which the reference
tokenizer would not read as text, and no question or passage is empty or without any token, which the service refuses.
Many windows come from a small `max_seq_len` rather than from very long passages: that keeps the golden file small.
`make_question_answering.py` turns these into `question_answering.jsonl`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

Pair = dict[str, str]
Request = dict[str, Any]

# Each passage with questions about it.
PASSAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "lighthouse": (
        "The lighthouse at Corran Point was finished in 1871 by the builder Agnes Tulloch, who had never seen the sea before. "
        "It stands 43 metres high on a shelf of black rock and can be reached on foot for two hours on either side of low tide. "
        "Until 1962 the lamp burned whale oil, then paraffin; since then it has run on electricity from a cable laid by the "
        "harbour board of Velsund. The last keeper, Tom Arbuckle, left the tower in March 1988 with his wife and eleven hens. "
        "Today a painter rents the keeper's cottage, and every summer about four thousand visitors climb the 199 steps.",
        (
            "Who built the lighthouse at Corran Point?",
            "When was the lighthouse finished?",
            "How high is the lighthouse?",
            "What did the lamp burn until 1962?",
            "Who was the last keeper?",
            "How many steps are there?",
            "Who laid the cable?",
            "When did Tom Arbuckle leave?",
        ),
    ),
    "bakery": (
        "Every morning at half past three Mirela Novak lights the oven of the bakery on Tanner Street. Her grandfather opened the "
        "shop in 1934 with a loan from a cousin who dealt in horses. The bakery sells nine kinds of bread, but most customers come "
        "for the walnut loaf, which needs a dough that rests for thirty hours. Flour arrives by cart from the mill at Ostrova, "
        "because Mirela believes that lorries shake the life out of it. On Sundays the shop is closed, and the oven is lent to the "
        "neighbours, who roast their geese and peppers in it. Last year a newspaper called the walnut loaf the best in the country.",
        (
            "What does Mirela light every morning?",
            "Who opened the shop?",
            "When did the bakery open?",
            "How long does the dough rest?",
            "Where does the flour come from?",
            "Why does the flour arrive by cart?",
            "What do most customers come for?",
            "What happens on Sundays?",
        ),
    ),
    "expedition": (
        "In the autumn of 1907 a party of six geologists led by Dr. Henrik Aalto set out to map the Sorrel glacier. They carried "
        "food for ninety days, two sledges, a brass theodolite and a parrot named Admiral. A storm on the fourteenth day tore one "
        "sledge loose and buried most of the flour. Aalto wanted to turn back, but the cook, Ingrid Falk, showed that the lichen "
        "on the rocks could be boiled into soup. They reached the far moraine on 2 December and measured the ice at 312 metres "
        "deep. The map was printed in Tarnby in 1911, and the parrot outlived every member of the party.",
        (
            "Who led the expedition?",
            "What was the parrot called?",
            "How deep was the ice?",
            "Who made soup from lichen?",
            "When did they reach the far moraine?",
            "Where was the map printed?",
            "How many geologists were in the party?",
            "What did the storm bury?",
        ),
    ),
    "machine": (
        "The sorting machine in the Lindqvist paper mill weighs 27 tonnes and has 1,204 moving parts. A belt carries the wet pulp "
        "under a row of cameras, which look for bark, sand and staples. When a camera finds a speck larger than 0.3 millimetres, a "
        "jet of air blows it into a side channel. The machine was designed by Oluwaseun Bright in eleven weeks and cost 2.6 million "
        "crowns. Its software restarts itself every night at 02:15, which takes 40 seconds. The workers call it the Duchess, since "
        "it hums whenever it is given good pulp and complains loudly about anything else.",
        (
            "How much does the sorting machine weigh?",
            "Who designed the machine?",
            "What do the workers call the machine?",
            "How much did it cost?",
            "What do the cameras look for?",
            "When does the software restart?",
            "How many moving parts does it have?",
            "What blows the speck away?",
        ),
    ),
    "garden": (
        "Behind the old customs house lies a garden that the town of Merrowby has kept since the flood of 1953. Its beds are laid "
        "out in the shape of a compass, with lavender to the north, sage to the east, marigolds to the south and thyme to the west. "
        "The head gardener is Farida Osei; she works with two apprentices and a donkey. Bees from forty hives pollinate the "
        "orchard, whose pears are pressed into a dry cider sold only in December. A stone bench in the middle bears the names of "
        "the nineteen families who lost their homes in the flood.",
        (
            "Who is the head gardener?",
            "What grows to the south?",
            "What grows in the west of the garden?",
            "When was the flood?",
            "How many hives are there?",
            "What is made from the pears?",
            "What shape are the beds?",
            "How many families lost their homes?",
        ),
    ),
    "match": (
        "The final of the Harbour Cup was played in heavy rain before 8,312 spectators. Dunmore scored first, when Lucia Pradel "
        "headed in a corner after nine minutes. Redcliff equalised just before the break through a penalty by Samuel Okoro. In the "
        "second half both goalkeepers were replaced: Dunmore's Hana Weiss had hurt her wrist, and Redcliff's Owen Tait had been "
        "sent off. The winning goal came in the 88th minute, when Pradel's shot hit the post, struck the referee and rolled over "
        "the line. Dunmore won by two goals to one, their first title since 1999.",
        (
            "Who won the match?",
            "Who scored the first goal?",
            "How many spectators watched the final?",
            "Who was sent off?",
            "When did the winning goal come?",
            "Who had hurt her wrist?",
            "Who scored a penalty?",
            "When had Dunmore last won the title?",
        ),
    ),
    "river": (
        "The river Ashel rises in the Grey Hills, 1,140 metres above the sea, and flows east for 268 kilometres. Near the village "
        "of Pell it drops over a ledge of limestone and forms the Widow's Leap, a fall of 31 metres. Below the fall the water is "
        "green with copper, and no fish live in it until the river meets the Tamsin at Orrin Bridge. Barges carried slate down the "
        "Ashel until the railway came in 1889. The delta is a marsh of reeds where cranes rest in October; it was made a reserve "
        "after a campaign by the schoolteacher Nadia Brandt.",
        (
            "Where does the river Ashel rise?",
            "How long is the river?",
            "How high is the Widow's Leap?",
            "Why is the water green?",
            "What did the barges carry?",
            "When did the railway come?",
            "Who campaigned for the reserve?",
            "Where does the Ashel meet the Tamsin?",
        ),
    ),
    "clock": (
        "The town clock of Hollin has been seven minutes fast since the night of the great frost. The watchmaker Piet Sandoval "
        "offered to correct it for nothing, but the council voted against him by twelve to three. People in Hollin like to arrive "
        "early, said the mayor, and the trains have been scheduled accordingly. The clock has a single hand and a bell cast from "
        "church spoons. Each spring a child is chosen to wind it, which takes 360 turns of an iron crank. In 2016 the child was "
        "Beatriz Lund, who counted 361 turns and has been arguing about it ever since.",
        (
            "How fast is the town clock?",
            "Who offered to correct the clock?",
            "What was the bell cast from?",
            "How many turns does winding the clock take?",
            "Who wound the clock in 2016?",
            "How did the council vote?",
            "Who is chosen to wind the clock?",
            "What do people in Hollin like?",
        ),
    ),
}

SHORT = (
    ("Where does Ana live?", "Ana lives in a yellow house by the canal."),
    ("What color is the house?", "Ana lives in a yellow house by the canal."),
    ("Who ate the plums?", "The plums were eaten by the twins."),
    ("When is the meeting?", "The meeting has been moved to Thursday at noon."),
    ("How many eggs are left?", "There are seven eggs left in the basket."),
    ("What is the cat called?", "My sister's cat, Biscuit, sleeps in the piano."),
    ("Where does the cat sleep?", "My sister's cat, Biscuit, sleeps in the piano."),
    ("Who wrote the letter?", "The letter was written by Captain Moss and delivered by his son."),
    ("Who delivered the letter?", "The letter was written by Captain Moss and delivered by his son."),
    ("Why was the road closed?", "The road was closed because a barn had collapsed onto it."),
    ("How old is the oak?", "The oak by the gate is about four hundred years old."),
    ("What does Yusuf play?", "Yusuf plays the bassoon, though he would rather play the drums."),
    ("Which train goes to Karsk?", "The green train goes to Velm, the red train goes to Karsk."),
    ("Who is taller?", "Marta is taller than Jonas, but shorter than Lena."),
    ("What did she buy?", "She bought nothing at all."),
    ("What happened on Monday?", "On Monday the ferry ran aground, on Tuesday it was towed away."),
    ("How do you open the box?", "To open the box, press both corners and slide the lid to the left."),
    ("Is the shop open?", "The shop is closed until further notice."),
    ("What is the capital of Ordonia?", "Belmarsh, the capital of Ordonia, has four universities."),
    ("What do otters eat?", "In winter the otters here eat crabs; in summer they prefer eels."),
)

WORDS = (
    ("Who?", "Rosalind"),
    ("What is it?", "Electroencephalographically"),
    ("How many?", "42"),
    ("Where?", "Unterwasserstadt"),
    ("Yes or no?", "Yes."),
    ("?", "!"),
    ("Which letter?", "q"),
    ("What is the answer to the very long question that somebody asked at the end of the lecture?", "Patience"),
    ("Name?", "O'Malley"),
    ("a", "a"),
    ("Which emoji?", "🙂😀🙂"),
    ("ใครมา", "สมชายมาเมื่อวานนี้"),
)

TREES = "The oak is tall. The Oak is old. The OAK is hollow. Children climb the oak every day, and owls nest in the Oak."
ROSES = (
    "Rosa Klein founded the club. Two years later Rosa Klein wrote its rules. When the roof fell in, ROSA KLEIN paid for a new "
    "one, and at the end of the story it was rosa klein, once more, who sold the building."
)
COLORS = "The first door is red. The second door is blue. The third door is red. The fourth door is Red. The last door is RED."
TIMES = "The boat leaves at 9:40. On Sundays the boat leaves at 9:40 too. In winter the boat leaves at 10:40, never at 9:40."
REPEATS = (
    ("What is tall?", TREES),
    ("Where do owls nest?", TREES),
    ("Who founded the club?", ROSES),
    ("Who sold the building?", ROSES),
    ("What color is the door?", COLORS),
    ("When does the boat leave?", TIMES),
    ("Who is it?", "Ben. ben. BEN. Ben. bEn."),
    ("What is said?", "no No nO NO no No"),
)

TIES = (
    ("Who came?", "Anna came. Hanna came. Joanna came. Susanna came."),
    ("What is the number?", "one two three four five six seven eight nine ten"),
    ("What?", "a b c d e f g h i j k l m n o p"),
    ("Which city?", "Paris or London or Berlin or Madrid or Vienna or Rome"),
    ("Who won?", "Dara beat Milo and Milo beat Dara and Dara beat Milo and Milo beat Dara."),
    ("How much is it?", "It is 10 or 20 or 30 or 40 or 50 crowns."),
    ("When?", "On Monday, on Tuesday, on Wednesday, on Thursday, on Friday."),
    ("What is the code?", "7 7 7 7 7 7 7 7 7 7 7 7"),
)

UNICODE = (
    ("Who opened the café?", "Zoë Müller-Šimić opened the café on the Rue d'Été in Besançon."),
    ("Where is the café?", "Zoe\u0308 Mu\u0308ller opened the cafe\u0301 on the Rue d'E\u0301te\u0301 in Besanc\u0327on."),
    ("What did the fox bring?", "The 🦊 brought 🍞 and 🧀, the 🐻 brought 🍯!"),
    ("Who likes cake?", "🎉🎉 Lena 😀 likes cake 🎂, Tom 😡 does not."),
    ("Who waved?", "The family 👨\u200d👩\u200d👧\u200d👦 waved, and so did the pirate 🏴\u200d☠️ Jim 👋🏽."),
    ("東京はどこですか", "東京は日本の首都です。大阪は西にあります。"),
    ("Where was she born?", "王小明出生于杭州，后来搬到了成都。"),
    ("What is the capital?", "The capital 首都 is 東京 (Tokyo) and not 大阪 (Osaka)."),
    ("서울은 어디에 있습니까?", "서울은 한국에 있습니다. 부산은 남쪽에 있습니다."),
    ("من كتب الرسالة؟", "كتب يوسف الرسالة في القاهرة سنة ١٩٥٢."),
    ("Who wrote the letter?", "The letter was written by يُوسُف in القاهرة, not by عمر."),
    ("Где живёт Нина?", "Нина живёт в Твери, а её брат — в Казани."),
    ("Ποιος είδε το πλοίο;", "Ο Νίκος είδε το πλοίο στον Πειραιά."),
    ("मीरा कहाँ रहती है?", "मीरा दिल्ली में रहती है।"),
    ("ใครมา", "สมชาย มา เมื่อวานนี้"),
    ("Where is Straße 9?", "Die Straße 9 liegt in Groß-Gießen; STRASSE 10 liegt in Köln."),
    ("Who lives in İzmir?", "Işıl lives in İzmir, İlker in Iğdır."),
    ("What is ﬁne?", "The ﬁne oﬃce of ﬂour is ﬁne; Ⅻ of ½ are ㎏."),
    ("Who said it?", 'A\r\nB said:\r\n"It was Clara."\r\nThen\r\nDoris\r\nleft.'),
    ("What is in column two?", "name\tcolumn two\tcolumn three\nEmil\tviolin\t1903\nGreta\tcello\t1911"),
    ("Who came?", "Ja\u200bcob and \u200bEs\u200bther\u200b came \ufeffwith Ruth\ufeff."),
    ("Where is it?", "It is\u00a0in\u2003the\u2009north\u202fwing\u3000of the hall."),
    ("Who is loud?", "Z̸͎̈́a̴̳͝l̵̙̀g̷͓̾ó̴͈ is loud, Tim is not."),
    ("Who signed?", "Signed: 𝓔𝓵𝓼𝓪 𝕸𝖚𝖊𝖑𝖑𝖊𝖗, witnessed by Ｏｔｔｏ."),
    ("What is her name?", "Her name is Nguyễn Thị Ánh, his is Đặng Văn Ổn."),
    ("What is his name?", "Her name is Nguye\u0302\u0303n Thi\u0323 A\u0301nh, his is Đa\u0323\u0306ng Va\u0306n O\u0302\u0309n."),
    ("Who is \u202ereversed\u202c?", "The word \u202ereversed\u202c belongs to \u2067דוד\u2069 and to Ada."),
    ("Who\u0000 is it?", "It\u0000 is Co\u00adra\u0007, not Fi\u00adona."),
    ("What ends the line?", "First line\u2028second line by Ida\u2029third line\u0085fourth line by Hugo"),
    ("What did he eat?", "Er aß 3 Brötchen – süß & fettig – für 4,50 €."),
    ("Who is 李?", "李 是 老师。Li is the teacher; 王 is the baker."),
    ("Which emoji?", "🙂 😀 🙂 😎"),
    ("What is flagged?", "🇫🇷 is France, 🇩🇪 is Germany and 🇯🇵 is Japan."),
    ("Who sings?", "e\u0301e\u0301e\u0301 sings Åsa; Åsa sings A\u030asa."),
)

ODD = (
    ("How much?", "It costs $1,299.99 (plus 7.5% tax), i.e. about $1,397.49."),
    ("What is the phone number?", "Call +44 (0)20 7946-0018, ext. 5; fax: 020-7946-0019."),
    ("What is the address?", "Write to info@example.org or see https://example.org/a/b?c=d&e=f#g for more."),
    ("When is it?", "It is on 2024-02-29 at 23:59:59.999Z, not on 29/02/24."),
    ("Who said hello?", '"Hello," said Bo; \'hello\', said Cy -- "HELLO!!!" cried Di...'),
    ("What is x?", 'x=3.14*(y+2)/z^2; if(x>0){return"ok";}'),
    ("   Where   is   it   ?   ", "   It    is\n\n\n   under      the     stairs   .   "),
    ("Where is the key?", "\n\t The key is under the mat.\t \n"),
    ("WHO IS IT", "IT IS MRS. LOPEZ, M.D., PH.D."),
    ("What is the part?", "Part no. AX-9/B_77.1 replaces AX-9/A_77.0."),
    ("Who?", "..., ---, !!!, ???, (Mina), ..."),
    ("What is the score?", "3:2, 3-2 or 3–2?"),
    ("Where is the dog", "thedogisinthegarden andthecatisinthekitchen"),
    ("Who is it?", "x" * 120 + " is Nora"),
    ("What is known?", "Pneumonoultramicroscopicsilicovolcanoconiosis and antidisestablishmentarianism are known words."),
    ("Which year?", "1900190119021903190419051906 is not a year but 1907 is."),
    ("What's the dog's name?", "The dog's name isn't Rex's; it's Max, y'all'd've known."),
    ("How tall is Bo?", "Bo: 6'2\", Cy: 5'11\", Di: 170cm."),
    ("Who is the author? And who is the editor?", "Author: Kim Rao. Editor: Lee Fox."),
    ("The lamp was bought by whom?", "whom? by? bought? was? lamp? the? By Gus."),
)

LONG_WORDS = (
    "The counterrevolutionary electroencephalographers of Llanfairpwllgwyn misunderstood the hydrochlorothiazide "
    "overcompartmentalization. Unquestionably, the photolithographers of Zwischenwasserburg disproportionately "
    "underrepresented immunoelectrophoretically characterized microspectrophotometers, and Przybyszewska deinstitutionalized "
    "the telecommunications subcommittee of Krasnoyarskvillebergheim uncharacteristically."
)


def cases() -> list[dict[str, Any]]:
    """Returns all cases, each with a unique `id` that starts with its kind, and a `request` body."""
    kinds: dict[str, Iterable[Request]] = {
        "short": (_request(_pair(*pair)) for pair in SHORT),
        "word": _words(),
        "passage": _passages(),
        "window": _windows(),
        "window-edge": _window_edges(),
        "word-seam": _word_seams(),
        "long": _long(),
        "repeat": _repeats(),
        "tie": _ties(),
        "equal": _equal(),
        "unicode": _unicode(),
        "odd": _odd(),
        "top-k": _top_k(),
        "filler": _fillers(),
        "answer-length": _answer_lengths(),
        "question-length": _question_lengths(),
        "impossible": _impossible(),
        "align": _align(),
        "list": _lists(),
    }
    return [
        {"id": f"{kind}-{number:02d}", "request": request} for kind, requests in kinds.items() for number, request in enumerate(requests, 1)
    ]


def _request(inputs: Pair | list[Pair], **parameters: Any) -> Request:
    """Returns a request body, leaving out parameters that are None, and `parameters` where none is left."""
    given = {name: value for name, value in parameters.items() if value is not None}
    return {"inputs": inputs, "parameters": given} if given else {"inputs": inputs}


def _pair(question: str, context: str) -> Pair:
    return {"question": question, "context": context}


def _ask(name: str, number: int) -> Pair:
    """Returns question `number` about a passage, beginning again after the last."""
    passage, questions = PASSAGES[name]
    return _pair(questions[number % len(questions)], passage)


def _joined(first: int, count: int, separator: str = " ") -> str:
    """Returns `count` passages joined, from the one at `first`, beginning again after the last."""
    passages = [passage for passage, _ in PASSAGES.values()]
    return separator.join(passages[(first + i) % len(passages)] for i in range(count))


def _words() -> Iterator[Request]:
    """Passages of one word, of which some have several tokens."""
    for pair in WORDS:
        yield _request(_pair(*pair))
    yield _request(_pair(*WORDS[0]), handle_impossible_answer=True)
    yield _request(_pair(*WORDS[1]), align_to_words=False)
    yield _request(_pair(*WORDS[3]), align_to_words=False, max_answer_len=1)


def _passages() -> Iterator[Request]:
    """Passages of one window, plain and with the three best answers."""
    for i, name in enumerate(PASSAGES):
        yield _request(_ask(name, i))
        yield _request(_ask(name, i + 3), top_k=3)


def _windows() -> Iterator[Request]:
    """Passages of 2 to about 20 windows, with every small length and stride."""
    names = list(PASSAGES)
    sizes = [(64, None), (64, 16), (64, 32), (96, None), (96, 16), (96, 32), (96, 48), (128, None), (128, 16), (128, 32), (128, 48)]
    for i, (length, stride) in enumerate(sizes):
        yield _request(_ask(names[i % 8], i), max_seq_len=length, doc_stride=stride)
        yield _request(_ask(names[(i + 3) % 8], i + 1), max_seq_len=length, doc_stride=stride, top_k=1 + i % 5)
        yield _request(
            _ask(names[(i + 5) % 8], i + 2),
            max_seq_len=length,
            doc_stride=stride,
            top_k=4,
            align_to_words=False,
            handle_impossible_answer=True,
        )
    yield _request(_ask("river", 6), max_seq_len=64, doc_stride=48)
    yield _request(_ask("clock", 4), max_seq_len=48, doc_stride=0, top_k=3)
    yield _request(_ask("match", 0), max_seq_len=40, doc_stride=8, top_k=2)
    yield _request(_ask("garden", 0), max_seq_len=512)
    yield _request(_ask("bakery", 1), max_seq_len=200, doc_stride=100)


def _window_edges() -> Iterator[Request]:
    """Lengths at which the count of windows changes: 64 less the question's 7 tokens and 3 special ones leaves room for 54."""
    question = "Who is in the room now?"
    for stride, counts in ((0, (53, 54, 55, 108, 109)), (16, (54, 55, 92, 93)), (32, (76, 77))):
        for count in counts:
            words = ["Ida" if i == 50 else "and" if i % 2 else "Tom" for i in range(count)]
            yield _request(_pair(question, " ".join(words)), max_seq_len=64, doc_stride=stride)


def _word_seams() -> Iterator[Request]:
    """Words of many tokens that window seams cut: a cut word is aligned to its part in the window."""
    for stride, align in product((0, 4, 9), (True, False)):
        yield _request(
            _pair("Who misunderstood?", LONG_WORDS), max_seq_len=28, doc_stride=stride, align_to_words=align, top_k=3 if stride else 1
        )
    yield _request(_pair("Which subcommittee was it?", LONG_WORDS), max_seq_len=32, doc_stride=8, top_k=5)
    yield _request(_pair("Who deinstitutionalized it?", LONG_WORDS), max_seq_len=32, doc_stride=8, handle_impossible_answer=True)


def _long() -> Iterator[Request]:
    """Two to six windows, most of the default length."""
    questions = [questions for _, questions in PASSAGES.values()]
    yield _request(_pair(questions[0][4], _joined(0, 3)))
    yield _request(_pair(questions[3][1], _joined(2, 4)), top_k=3)
    yield _request(_pair(questions[6][6], _joined(3, 6, "\n\n")), handle_impossible_answer=True, top_k=2)
    yield _request(_pair(questions[7][4], _joined(0, 8)), doc_stride=32)
    yield _request(_pair(questions[2][0], _joined(5, 8, "\r\n")), max_seq_len=512, doc_stride=0, top_k=2)
    yield _request(_pair(questions[1][1], _joined(6, 12)))


def _repeats() -> Iterator[Request]:
    """The same answer several times, in several cases, in one window and in many."""
    for i, pair in enumerate(REPEATS):
        yield _request(_pair(*pair))
        yield _request(_pair(*pair), top_k=2 + i % 6)
        yield _request(_pair(*pair), max_seq_len=32, doc_stride=8, top_k=1 + i % 3, align_to_words=bool(i % 2))
    yield _request(_pair("Who sold the building?", f"{ROSES} {TREES} {ROSES}"), max_seq_len=64, doc_stride=16)
    yield _request(_pair("What color is the last door?", " ".join([COLORS] * 4)), max_seq_len=64, doc_stride=32, top_k=3)


def _ties() -> Iterator[Request]:
    """Answers of nearly the same score."""
    for i, pair in enumerate(TIES):
        yield _request(_pair(*pair))
        yield _request(_pair(*pair), top_k=(3, 4, 5, 6, 7, 8, 4, 2)[i], max_answer_len=(1, 2, 15)[i % 3])


def _equal() -> Iterator[Request]:
    """Answers of exactly the same score: windows of equal tokens, but of texts that differ in what the tokenizer drops.

    Both questions leave room for 12 tokens; the sentences have 12 each, or 8 where windows overlap by 4.
    """
    question = "Who is in the room now?"
    names = ("Zoe", "Zoë", "Zoé", "Zo\u0308e")
    twelve = " ".join(f"{name} met all her old friends in the hall and laughed." for name in names)
    yield _request(_pair(question, twelve), max_seq_len=22, doc_stride=0, top_k=4)
    yield _request(_pair(question, twelve), max_seq_len=22, doc_stride=0, top_k=2)
    yield _request(_pair(question, twelve), max_seq_len=22, doc_stride=0)
    yield _request(_pair(question, twelve), max_seq_len=22, doc_stride=0, top_k=6, align_to_words=False, max_answer_len=1)
    yield _request(_pair("Which battery lasts longest?", twelve), max_seq_len=20, doc_stride=0, top_k=5, handle_impossible_answer=True)
    cases = " ".join(f"{name} met all her old friends in the hall and laughed." for name in ("Zoe", "Zoë", "ZOE", "ZOË"))
    yield _request(_pair(question, cases), max_seq_len=22, doc_stride=0, top_k=2)
    spaces = " ".join(f"Tom{' ' * i}and{' ' * i}Ida met all her old friends in the hall." for i in range(1, 5))
    yield _request(_pair(question, spaces), max_seq_len=22, doc_stride=0, top_k=4)
    eight = " ".join(f"There sat {name}, quite alone now." for name in names) + " There sat Zòe,"
    yield _request(_pair(question, eight), max_seq_len=22, doc_stride=4, top_k=6, max_answer_len=2)


def _unicode() -> Iterator[Request]:
    for i, pair in enumerate(UNICODE):
        yield _request(_pair(*pair), top_k=(None, 2, 3)[i % 3], align_to_words=False if i % 4 == 1 else None)
    for i in (1, 4, 9, 18, 20, 22, 25):
        yield _request(_pair(UNICODE[i][0], " ".join([UNICODE[i][1], UNICODE[5][1]] * 2)), max_seq_len=64, doc_stride=16, top_k=2)
    yield _request(_pair("Who came?", "\n".join(context for _, context in UNICODE)), top_k=4)


def _odd() -> Iterator[Request]:
    for i, pair in enumerate(ODD):
        yield _request(_pair(*pair), top_k=(None, 3)[i % 2])
    yield _request(_pair("Who is Nora?", "  \n ".join(context for _, context in ODD)), max_seq_len=128, doc_stride=48)


def _top_k() -> Iterator[Request]:
    """Every `top_k` from 1 to 10, then larger ones, on passages that have more candidates."""
    for top_k, name in zip(range(1, 11), [*PASSAGES, "match", "river"], strict=True):
        yield _request(_ask(name, top_k), top_k=top_k)
    yield _request(_ask("clock", 2), top_k=25)
    yield _request(_ask("garden", 3), top_k=40, align_to_words=False)
    yield _request(_ask("machine", 6), top_k=12, max_seq_len=96, doc_stride=32)


def _fillers() -> Iterator[Request]:
    """A `top_k` larger than the number of candidates, where the reference fills up with spans of score 0."""
    yield _request(_pair(*WORDS[0]), top_k=2)
    yield _request(_pair(*WORDS[1]), top_k=5)
    yield _request(_pair(*WORDS[4]), top_k=10, handle_impossible_answer=True)
    yield _request(_pair(*SHORT[0]), top_k=40)
    yield _request(_pair(*SHORT[2]), top_k=60, align_to_words=False)
    yield _request(_pair(*SHORT[4]), top_k=20, max_answer_len=1, handle_impossible_answer=True)
    yield _request(_pair(*SHORT[14]), top_k=200)
    yield _request(_pair(*WORDS[6]), top_k=50, align_to_words=False)


def _answer_lengths() -> Iterator[Request]:
    """Every `max_answer_len`, on one window and on several."""
    for i, length in enumerate((1, 2, 5, 15, 30, 100)):
        yield _request(_ask("bakery", 5 + 2 * (i % 2)), max_answer_len=length, top_k=(None, 3)[i % 2])
        yield _request(_ask("expedition", i), max_answer_len=length, max_seq_len=96, doc_stride=32, top_k=2)
    yield _request(_ask("clock", 7), max_answer_len=100, align_to_words=False, top_k=2)
    yield _request(_ask("river", 3), max_answer_len=1, align_to_words=False, top_k=5)


def _question_lengths() -> Iterator[Request]:
    """`max_question_len`, which has no effect, on short questions and on one of more than 64 tokens."""
    yield _request(_ask("garden", 1), max_question_len=1)
    yield _request(_ask("match", 5), max_question_len=8, top_k=2)
    yield _request(_ask("match", 5), max_question_len=200, max_seq_len=96)
    long = (
        "In the passage about the lighthouse, which was built, as somebody told me on the ferry, by a person who had never seen "
        "the sea before, and which is visited every summer by thousands of people who climb all of its many steps although their "
        "knees hurt, what is, if you please, and as briefly as you can manage, the name of the very last keeper of the tower?"
    )
    yield _request(_pair(long, PASSAGES["lighthouse"][0]))
    yield _request(_pair(long, PASSAGES["lighthouse"][0]), max_question_len=16, max_seq_len=128, doc_stride=16, top_k=2)


def _impossible() -> Iterator[Request]:
    """Questions without an answer and with one, with the empty answer allowed."""
    unanswerable = (
        ("What is the president's dog called?", "lighthouse"),
        ("How many moons does Saturn have?", "bakery"),
        ("Who painted the ceiling?", "machine"),
        ("?", "clock"),
        ("purple", "river"),
    )
    for i, (question, name) in enumerate(unanswerable):
        pair = _pair(question, PASSAGES[name][0])
        yield _request(pair, handle_impossible_answer=True)
        yield _request(pair, handle_impossible_answer=False)
        yield _request(pair, handle_impossible_answer=True, top_k=2 + i, max_seq_len=64, doc_stride=16)
    for i, name in enumerate(("garden", "match", "expedition")):
        yield _request(_ask(name, i), handle_impossible_answer=True, top_k=3)
    for question, context in (
        ("Who is the king of Spain?", "It rained."),
        ("How many goals did she score?", "Please close the door behind you."),
        ("Which battery lasts longest?", "Nothing happened, and then nothing happened again."),
        ("How far is the moon?", "Bread and butter."),
        ("purple", "No."),
    ):
        yield _request(_pair(question, context), handle_impossible_answer=True)
        yield _request(_pair(question, context), handle_impossible_answer=True, top_k=3)
    for question, context in (("Which battery lasts longest?", "and or but"), ("Who is the king of Spain?", ". - !"), ("?", "and or but")):
        yield _request(_pair(question, " ".join([context] * 30)), handle_impossible_answer=True, top_k=3, max_seq_len=48, doc_stride=8)
    yield _request(_pair("Who?", "zzz qqq xxx"), handle_impossible_answer=True)
    yield _request(_pair("Who sings?", ", . ; : - !"), handle_impossible_answer=True, top_k=2)
    yield _request(_pair("When did the war end?", "Bread."), handle_impossible_answer=True, align_to_words=False)


def _align() -> Iterator[Request]:
    """Answers inside words, as whole words and as tokens."""
    pairs = (
        _pair("What is unbelievable?", "The unbelievableness of Krzysztof's misunderstandings was overrepresented."),
        _pair("Who misunderstands?", "Krzysztofowicz misunderstands Wojciechowska."),
        _pair("What is the code?", "The code is 48151623, not 42108151."),
        _pair("Who?", "über-Zwischenhändler Grzegorz Brzęczyszczykiewicz"),
        _ask("machine", 1),
        _ask("match", 3),
    )
    for i, pair in enumerate(pairs):
        for align in (True, False):
            yield _request(pair, align_to_words=align, top_k=1 + i % 4)
            yield _request(pair, align_to_words=align, max_answer_len=2, top_k=4)


def _lists() -> Iterator[Request]:
    short = [_pair(*pair) for pair in SHORT]
    yield _request([short[0]])
    yield _request([short[1]], top_k=3)
    yield _request(short[2:6])
    yield _request([short[6], _pair(*UNICODE[0]), _ask("river", 0), _pair(*WORDS[0])])
    yield _request([short[7]] * 3)
    yield _request([_pair(question, PASSAGES["garden"][0]) for question in PASSAGES["garden"][1][:3]], max_seq_len=96, top_k=2)
    yield _request([_pair(*pair) for pair in REPEATS[:5]], top_k=2)
    yield _request([_pair("Who was it?", PASSAGES["match"][0]), _pair("Who?", "Uma")], handle_impossible_answer=True, max_seq_len=128)
    yield _request([_ask("bakery", 2), _pair(*ODD[0])], align_to_words=False, max_answer_len=5, doc_stride=32, max_question_len=32)
    yield _request([_ask("clock", 0), _ask("match", 1)], top_k=3, doc_stride=32, max_seq_len=96, max_answer_len=30, max_question_len=16)
