"""Names of a model, which may hold anything, as identifiers, literals and comments of C++."""

from __future__ import annotations

import re
from collections.abc import Iterable

_KEYWORDS = """
alignas alignof and and_eq asm auto bitand bitor bool break case catch char char16_t char32_t
char8_t class co_await co_return co_yield compl concept const const_cast consteval constexpr
constinit continue decltype default delete do double dynamic_cast else enum explicit export extern
false float for friend goto if inline int long mutable namespace new noexcept not not_eq nullptr
operator or or_eq private protected public register reinterpret_cast requires return short signed
sizeof static static_assert static_cast struct switch template this thread_local throw true try
typedef typeid typename union unsigned using virtual void volatile wchar_t while xor xor_eq
"""
_MACROS = """
assert errno isfinite isinf isnan linux major makedev minor offsetof setjmp signbit stderr stdin
stdout unix va_arg va_copy va_end va_start
"""
"""Of the C library, in lower case."""
_DEVICES = "aux con nul prn com1 com2 com3 com4 lpt1 lpt2 lpt3"
"""Windows opens these in place of a file; identifiers are names of files too."""
RESERVED = frozenset(f"{_KEYWORDS} {_MACROS} {_DEVICES} ggml_tensor".split())
"""What no identifier may be."""
LONGEST = 60
"""Of an identifier and of a name in a comment: paths of modules are longer and say no more."""
_PLAIN = frozenset(map(chr, range(0x20, 0x7F))) - frozenset("\\?")


def identifier(name: str) -> str:
    """Returns a name that C++ and every file system take: "a/b.c" -> "a_b_c"."""
    text = re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")[-LONGEST:].strip("_")
    if not text or not text[0].isalpha():
        text = f"n{text}"
    # A name without small letters is likely to be a macro.
    is_taken = text.lower() in RESERVED or text.upper() == text
    return f"{text}_" if is_taken else text


def identifiers(names: Iterable[str]) -> dict[str, str]:
    """Returns name -> identifier, all different, also where case does not count."""
    found: dict[str, str] = {}
    taken: set[str] = set()
    for name in names:
        if name in found:
            continue
        text, number = identifier(name), 1
        while text.lower() in taken:
            number += 1
            text = f"{identifier(name)}_{number}"
        taken.add(text.lower())
        found[name] = text
    return found


def literal(text: str) -> str:
    """Returns a string literal: every byte that is not plain is written in octal."""
    written = "".join(
        chr(byte) if chr(byte) in _PLAIN and chr(byte) != '"' else f"\\{byte:03o}"
        for byte in text.encode("utf-8", "surrogatepass")
    )
    return f'"{written}"'


def comment(text: str) -> str:
    """Returns text that can end no comment, continue it on the next line, or look like code."""
    written = "".join(one if one in _PLAIN else "~" for one in text)
    written = written.replace("*/", "*~").replace("/*", "~*")
    return written if len(written) <= 2 * LONGEST else f"{written[: 2 * LONGEST - 3]}..."
