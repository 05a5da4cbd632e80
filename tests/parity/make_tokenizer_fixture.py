"""Writes what Hugging Face's tokenizer makes of real and of awkward text, for the test of the C++ tokenizer.

    python make_tokenizer_fixture.py --model DIR --wordnet data.noun --output tests/testdata

DIR holds the tokenizer.json of all-MiniLM-L6-v2. Three files come out, all without [CLS] and [SEP]:
  tokenizer_wordnet.txt   line i: the ids of the whole gloss of synset 16 * i of data.noun, for 5,000 synsets
  tokenizer_table.json    pairs of text and ids: scripts, accents, symbols, whatever a tokenizer may trip over
  tokenizer_unicode.txt   lines `first last hash`: over every range of at most 256 characters of Unicode 3.2 (the older
                          of the two versions that Python brings) the hash of the ids of "a" + character + "b"
"""

import argparse
import json
import pathlib
import unicodedata

from tokenizers import Tokenizer

GLOSSES = 5000
GLOSS_STRIDE = 16

# Whose category Unicode changed since Hugging Face's tables were made; utf8proc has the new one.
CHANGED_CHARACTERS = {0x166D, 0x1734, 0x1885, 0x1886}

TABLE = [
    # Nothing, and almost nothing
    "", " ", "\t\r\n", "\u00a0\u2003\u3000", "\u0301", "\u200b",
    # Latin with accents, composed and decomposed
    "Ein Käse für Übergrößen in Straßenbahnen", "STRASSE und STRAẞE", "L'élève français naïf à Noël, cœur brisé",
    "El niño de la montaña ¿quién? ¡Sí!", "Đường phố Việt Nam tiếng Việt, phở bò", "İstanbul'da ılık IĞDIR şişesi",
    "Zażółć gęślą jaźń", "Příliš žluťoučký kůň", "Ærø, Ångström, þorn, Łódź", "cafe\u0301 nai\u0308ve A\u030a",
    "e\u0323\u0302 e\u0302\u0323 \u1ec7", "a\u0315\u0300\u05ae\u0062", "ﬁ ﬂ ﬃ ﬆ ligatures", "ǅ ǈ ǋ titlecase",
    "Ⅷ ⅷ roman", "ſ long s, K kelvin, Å angstrom sign",
    # Greek and Cyrillic
    "ΟΔΥΣΣΕΥΣ ὈΔΥΣΣΕΎΣ ὀδυσσεύς σίγμα ΣΑΣ", "ᾳ ᾼ ῷ \u1fef \u037e \u0387", "Съешь же ещё этих мягких французских булок",
    "Її ґанок, Ўладзь, Ђорђе", "ѐ й Й и\u0306",
    # Right to left
    "اللغة العربية هي لغة جميلة", "السَّلَامُ عَلَيْكُمْ، كيف؟ ٪", "שָׁלוֹם עוֹלָם", "עברית בלי ניקוד־מקף", "فارسی می\u200cخواهم ۱۲۳",
    # South and south-east Asia
    "हिन्दी में लिखा हुआ है।", "क़ ख़ ग़ \u0958", "বাংলা ভাষা ো", "தமிழ் மொழி கொ", "తెలుగు", "ภาษาไทยไม่มีเว้นวรรค", "ກຳ ພາສາລາວ", "မြန်မာဘာသာ",
    "བོད་སྐད་", "ខ្មែរ",
    # East Asia
    "我爱北京天安门。", "中文English混合text", "漢字とひらがなとカタカナ", "がぎぐ パピプ ゔ", "か\u3099 は\u309a", "ｶﾞｷﾞｸﾞ halfwidth",
    "한국어를 배우고 있어요", "각 각", "가\u11a8 ㄱㄴㄷ", "豈更車 \uf900\ufa70", "𠀀𪜀𫝀𫠠𫤠𬺰 extensions", "\U0002f800\U0002f9f4",
    # The borders of what counts as an ideograph, one after the other so that none hides behind its neighbour
    *("a" + chr(code_point) + "b" for border in (
        0x3400, 0x4DC0, 0x4E00, 0xA000, 0xF900, 0xFB00, 0x20000, 0x2A6E0, 0x2A700, 0x2B740, 0x2B820, 0x2B920, 0x2CEB0,
        0x2F800, 0x2FA20) for code_point in (border - 1, border)),
    "「引用」、『二重』。・", "㈱㍿㎏ ①②", "〇一二 〻",
    # Other scripts
    "ქართული ႠႡ", "Հայերեն ԱԲԳ", "አማርኛ ቋንቋ።", "ᏣᎳᎩ ꭰꭱ", "𐐀𐐁 𐐨𐐩", "ᠮᠣᠩᠭᠣᠯ", "߀߁ ߊߞߏ",
    # Symbols, emoji
    "😀 smile 👩‍👩‍👧‍👦 🇩🇪 👍🏽 ❤️", "☃★♥→⇒∀∃∞≠≤", "€5 £6 ¥7 ₹8 ¢9", "½ ¾ x² H₂O 10⁻³", "100°C ±5% ‰ №1 ™©®", "♪♫ 𝄞 𝅗𝅥",
    "ＦＵＬＬ　ＷＩＤＴＨ１２３！？", "𝐁𝐨𝐥𝐝 𝒮𝒸𝓇𝒾𝓅𝓉", "\u00b4 \u00a8 \u00b8 \u02c6 \u02dc",
    # Controls, invisible characters, spaces
    "a\x00b\x01c\x7fd", "a\x0bb\x0cc\x85d\x1ce", "a\tb\nc\rd\r\ne", "so\u00adft hy\u200bphen\u200d jo\u2060ined\ufeff",
    "\u202aleft\u202c \u202eright\u202c", "a\u00a0b\u1680c\u2009d\u2028e\u2029f\u202fg\u205fh\u3000i", "a\u180eb",
    "re\ufffdplaced", "\ue000 private \U000f0000", "\ufffe \uffff \U0010ffff", "\ufe0f\ufe0e variation", "tag\U000e0041s",
    # Punctuation
    "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~", "^ ` $ + < = > | ~", "it's 'quoted' \"double\" `back`",
    "“curly” ‘single’ „low“ «guillemets» ‹single›", "em—dash en–dash hyphen‐minus−", "wait… no․․․", "¡¿§¶·†‡•",
    "a.b.c. e.g. U.S.A. 3.14 1,000", "snake_case camelCase kebab-case", "http://example.com/?q=a&b=c#d", "user@example.com",
    "((nested [brackets] {here}))", "!!!???...", "C++ C# F# .NET", "\u2e3a\u3030\uff0d\ufe63",
    # Long words
    "a" * 99, "a" * 100, "a" * 101, "b" * 1000, "é" * 100, "é" * 101, "e\u0301" * 100, "中" * 150, "-" * 150,
    "pneumonoultramicroscopicsilicovolcanoconiosis", "antidisestablishmentarianism honorificabilitudinitatibus",
    "x" * 60 + "." + "x" * 60, "\U0001d400" * 101, "unaffable ##ing ## #", "zzqx 1234567890123 0x7fff 1e-5",
    # Special tokens in the text
    "[CLS] a [SEP] b [PAD]", "a[MASK]b", "[mask] [Sep] [ CLS ] [CLS", "[[UNK]] [unused0] [UNUSED1]", "[SEP][SEP]",
    "[SE\u0301P] [\u200bSEP]", "été[MASK]été",
]


def fnv1a(ids):
    """64-bit FNV-1a over the ids as pairs of bytes, low byte first."""
    value = 0xCBF29CE484222325
    for token in ids:
        for byte in token.to_bytes(2, "little"):
            value = ((value ^ byte) * 0x100000001B3) % 2**64
    return value


def ranges(code_points):
    """Maximal runs of adjacent code points, of at most 256 each."""
    first = last = None
    for code_point in code_points:
        if first is not None and code_point == last + 1 and code_point - first < 256:
            last = code_point
            continue
        if first is not None:
            yield first, last
        first = last = code_point
    yield first, last


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--wordnet", type=pathlib.Path, required=True)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    arguments = parser.parse_args()

    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()

    def encode(texts):
        return [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]

    lines = arguments.wordnet.read_text(encoding="utf-8").splitlines()
    glosses = [line.split(" | ", 1)[1] for line in lines if not line.startswith("  ")]
    sample = glosses[::GLOSS_STRIDE][:GLOSSES]
    assert len(sample) == GLOSSES
    with open(arguments.output / "tokenizer_wordnet.txt", "w", encoding="ascii") as file:
        for ids in encode(sample):
            print(*ids, file=file)

    with open(arguments.output / "tokenizer_table.json", "w", encoding="ascii") as file:
        rows = [json.dumps([text, ids], separators=(",", ":")) for text, ids in zip(TABLE, encode(TABLE))]
        file.write("[\n" + ",\n".join(rows) + "\n]\n")

    code_points = [
        code_point
        for code_point in range(0x110000)
        if unicodedata.ucd_3_2_0.category(chr(code_point)) not in ("Cn", "Cs") and code_point not in CHANGED_CHARACTERS
    ]
    with open(arguments.output / "tokenizer_unicode.txt", "w", encoding="ascii") as file:
        for first, last in ranges(code_points):
            texts = ["a" + chr(code_point) + "b" for code_point in range(first, last + 1)]
            print(f"{first:X} {last:X} {fnv1a(sum(encode(texts), [])):016x}", file=file)


if __name__ == "__main__":
    main()
