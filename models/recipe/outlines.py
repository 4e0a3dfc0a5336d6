"""Story outlines: plots with names filled in, as fixed sentences and slots, and the rules for text that fills a slot.

The plots are in plots.txt; the names, places and things are in words.txt.
"""

import random
import re
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

SLOT = ">"
SLOT_SHARE = 0.9  # share of a plot's slots that are kept; the others are left out, for variety
ATTEMPTS = 2  # to fill a slot; then it is left out
MAX_WORDS = 24  # of a continuation
PRONOUNS = {"he": ("he", "him", "his", "himself"), "she": ("she", "her", "her", "herself")}
# Words of unwanted text: talk about the story, new characters, things that are not for small children.
UNWANTED = re.compile(
    r"\b(story|stories|paragraph|character|example|title|chapter|moral|special|named|called|kids?|child|adults?|fur|skin|"
    r"died?|dead|death|kill(ed)?|blood|guns?|drunk|beer|wine|sexy?|naked|belly|butt|stupid|hated?|devil|god|jesus|war)\b",
    re.IGNORECASE,
)
ALLOWED = re.compile(r"[A-Za-z ,.!?'\"-]+")


@dataclass
class Outline:
    """A story in progress: its request, its sentences and slots in order, its characters, and the text so far."""

    plot: str
    request: str
    parts: list[str]  # a sentence, "\n\n", or a stem that ends with SLOT
    names: frozenset[str]
    absent: frozenset[str]  # pronouns of no character in the story
    text: str = ""
    written: int = 0  # words of the text that the model wrote
    position: int = 0
    attempts: int = 0  # to fill the open slot

    def advance(self) -> str | None:
        """Append the sentences up to the next slot. Returns the text to continue there, or None at the story's end."""
        while self.position < len(self.parts) and not self.parts[self.position].endswith(SLOT):
            self.text = self._with(self.parts[self.position])
            self.position += 1
        return self._with(self._stem) if self.position < len(self.parts) else None

    def fill(self, continuation: str) -> bool:
        """Put a continuation into the open slot. Returns False if it is rejected; after ATTEMPTS the slot is left out."""
        stem = self._stem
        sentence = accepted(continuation, stem, self)
        self.attempts += 1
        if sentence is not None:
            self.written += len(sentence.split())
            self.text = self._with(stem + ("" if stem.endswith('"') or sentence.startswith("'") else " ") + sentence)
        if sentence is not None or self.attempts == ATTEMPTS:
            self.position, self.attempts = self.position + 1, 0
        return sentence is not None

    @property
    def _stem(self) -> str:
        return self.parts[self.position].removesuffix(SLOT).rstrip()

    def _with(self, part: str) -> str:
        gap = "" if part == "\n\n" or not self.text or self.text.endswith("\n") else " "
        return self.text + gap + part


@cache
def plots() -> dict[str, list[str]]:
    """The lines of each section of plots.txt."""
    sections: dict[str, list[str]] = {}
    for line in _lines("plots.txt"):
        if line.startswith("["):
            section = sections.setdefault(line.strip("[]"), [])
        else:
            section.append(line)
    return sections


@cache
def words() -> dict[str, list[str]]:
    """The lists of words.txt by name."""
    named = (line.partition(": ") for line in _lines("words.txt"))
    return {name: entries.split("; ") for name, _, entries in named}


def _lines(name: str) -> list[str]:
    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def draw(rng: random.Random) -> Outline:
    """A random outline."""
    plot = rng.choice([name for name in plots() if name.startswith("plot ")])
    request, *lines = plots()[plot]
    values = _values(rng)
    opening = rng.choice(plots()["openings"])
    chosen = [opening, rng.choice([s for s in plots()["settings"] if "{home}" not in s or "{home}" not in opening])]
    for line in lines:
        choice = rng.choice(plots()["endings"] if line == "{END}" else line.split(" / "))
        if not choice.endswith(SLOT) or rng.random() < SLOT_SHARE:
            chosen.append(choice)
    parts = ["\n\n" if line == "~" else _capitalized(line.format(**values)) for line in chosen]
    heard = set(re.findall(r"[a-z]+", " ".join(parts).lower()))
    absent = [form for forms in PRONOUNS.values() if heard.isdisjoint(forms) for form in forms]
    names = frozenset((values["a"], values["b"]))
    return Outline(plot.removeprefix("plot "), request.format(**values), parts, names, frozenset(absent))


def accepted(continuation: str, stem: str, outline: Outline) -> str | None:
    """The first sentence of `continuation`, as a continuation of `stem`; None if there is none or it is rejected.

    The sentence must be short and plain, name only characters who are already in the story, and repeat neither itself nor the
    text.
    """
    plain = continuation.replace("’", "'").replace("“", '"').replace("”", '"')
    sentence = first_sentence(plain, quoted=stem.count('"') % 2 == 1)
    if sentence is None or not ALLOWED.fullmatch(sentence) or UNWANTED.search(sentence):
        return None
    tokens = re.findall(r"[A-Za-z']+", sentence)
    lower = [token.lower() for token in tokens]
    before = outline.text + " " + stem
    if not 1 <= len(tokens) <= MAX_WORDS or not outline.absent.isdisjoint(lower):
        return None
    capitals = {t.removesuffix("'s") for t in re.findall(r"(?<![.!?\"] )(?<!^)(?<!\")\b[A-Z][a-z']*", sentence)}
    if not capitals <= {n for n in outline.names if n in before} | {"I", "I'm", "I'll", "I've", "I'd"}:
        return None
    content = [word for word in lower if word not in words()["common"] and word.capitalize() not in outline.names]
    in_stem = set(re.findall(r"[a-z']+", stem.lower()))
    if len(set(content)) < len(content) or sum(word in in_stem for word in content) * 2 > len(content):
        return None
    return None if _echoes(lower, before) else sentence


def first_sentence(text: str, quoted: bool) -> str | None:
    """The first sentence of `text`, with its closing quotation mark; None if it is incomplete.

    `quoted`: whether the text begins inside a quotation. A quotation may hold up to two sentences.
    """
    text = text.split("\n")[0].strip()
    ends = 0
    for i, char in enumerate(text):
        if char == '"':
            if quoted and i and text[i - 1] in ".!?":
                return text[: i + 1]
            quoted = not quoted
        elif char in ".!?" and text[i + 1 : i + 2] not in ('"', ".", "!", "?"):
            ends += 1
            if not quoted:
                return text[: i + 1]
            if ends == 2:
                return None
    return None


def _echoes(tokens: list[str], before: str) -> bool:
    """Whether most of the sentence's word pairs occur in the text before it, so the sentence repeats the text."""
    earlier = re.findall(r"[a-z']+", before.lower())
    known = set(pairwise(earlier))
    pairs = list(pairwise(tokens))
    return sum(pair in known for pair in pairs) > 0.6 * max(len(pairs), 1)


def _values(rng: random.Random) -> dict[str, str]:
    """Values of the names in braces: {a} is the hero's name, {A} introduces the hero, {b} is the friend's name, and so on."""
    v: dict[str, str] = {}
    kinds = rng.sample(words()["animals"], 2)
    for key, prefix in (("a", ""), ("b", "b")):
        he = rng.choice(("he", "she"))
        human = rng.random() < (0.4 if key == "a" else 0.25)
        kind = ("boy" if he == "he" else "girl") if human else kinds.pop()
        name = rng.choice([n for n in words()["boys" if he == "he" else "girls"] if n != v.get("a")])
        v[key], v[key + "kind"] = name, kind
        introduced = _with_article(f"{rng.choice(words()['traits'])} {kind}")
        v[key.upper()] = f"{introduced} named {name}"
        for form, word in zip(("he", "him", "his", "self"), PRONOUNS[he], strict=True):
            v[prefix + form] = word

    def pick(*names: str, of: str) -> None:
        v.update(zip(names, rng.choice(words()[of]).split(" | "), strict=True))

    pick("elder", "ehe", of="family")
    pick("color", of="colors")
    pick("place", "inplace", of="places")
    pick("food", "food0", of="foods")
    pick("needy", "stuck", "wrong", of="troubles")
    single = "home", "land", "weather", "mood", "fear", "skill", "fragile", "plant", "sound", "wish", "magic", "gift", "show"
    for name in single:
        pick(name, of=name)
    v["toy"] = f"{v['color']} {rng.choice(words()['toys'])}"
    v["ehim"] = PRONOUNS[v["ehe"]][1]
    v |= {f"{name}A": _with_article(v[name]) for name in ("color", "toy", "magic")}
    v["foodwas"] = "were" if v["food0"].endswith("s") else "was"
    v["needy0"] = "the " + v["needy"].split(" ", 1)[1]
    return v | {name.capitalize(): _capitalized(v[name]) for name in ("he", "his", "ehe", "needy0", "wrong", "sound")}


def _with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]
