"""Makes command lines: keys with hostile values, choices, fragments of Hydra's grammar, and words of every verb."""

from __future__ import annotations

import random
from collections.abc import Callable
from enum import Enum
from typing import Any, get_args, get_origin, get_type_hints

from quantexp.cli.verbs import all_verbs
from quantexp.config.choices import choice_files, groups
from quantexp.schema import Composition
from quantexp.schema.keys import keys, section_of

#: Where a run neither asks for memory nor writes: the quick test.
BASE = ["training=fast"]
KEYS = [key for key in keys() if not key.startswith("sweep.")]
NUMBERS = [
    *("0", "-1", "1", "2", "3", "7", "32", "1.5", "1.0", "1e3", "1e38", "1e300", "-1e300", "1e400"),
    *("1e-45", "1e-300", "-0.0", "nan", "inf", "-inf", "2147483647", "2147483648", "4294967296"),
    *("9223372036854775807", "9223372036854775808", "1000000000", "1000000000000000000", "1_000"),
    *("9" * 40, "9" * 299, "9" * 400, "9" * 5000, "0x1f", "010", "1.50", "00", "+5", ".5", "5."),
]
TEXTS = [
    *(
        "",
        "null",
        "NULL",
        "true",
        "True",
        "yes",
        "off",
        "???",
        "'???'",
        "abc",
        "a b",
        "''",
        "'null'",
    ),
    *("${training.lr}", "${nope}", "${oc.env:HOME}", "${", "${${training.name}}", "${oc.decode:x}"),
    *("[]", "{}", "[1,2]", "{a:1}", "[{}]", "[[]]", "{a:{b:1}}", "[null]", "[???]", "{a: ???}"),
    *("a,b", "1,2", "range(1,3)", "glob(*)", "choice(1,2)", "interval(0,1)", "sort(3,1)", "int(x)"),
    *(
        "range(1,10**9)",
        "range(1,1000000000000)",
        "str(1)",
        "float(1e400)",
        "int(1e400)",
        "bool(3)",
    ),
    *("../../etc/passwd", "/etc/passwd", "~", "a@b", "a:b", "größe", "日本", "\u202etxt", "\ufeff"),
    *(
        "%s",
        "{0}",
        "$(id)",
        "`id`",
        ";ls",
        "--help",
        "-m",
        "\\",
        "\\'",
        "'",
        '"',
        "(",
        ")",
        "[",
        "}",
    ),
]
FRAGMENTS = [
    *(
        "[",
        "]",
        "{",
        "}",
        "(",
        ")",
        "'",
        '"',
        ",",
        ":",
        "=",
        "\\",
        "$",
        "${",
        "@",
        "~",
        "+",
        "-",
        ".",
    ),
    *(
        " ",
        "\t",
        "a",
        "1",
        "1.5",
        "null",
        "true",
        "range",
        "glob(*)",
        "choice",
        "tag(",
        "extend_list(",
    ),
    *(
        "json_str(",
        "shuffle(",
        "*",
        "&",
        "#",
        "%",
        "|",
        "é",
        "key",
        "quant",
        "???",
        "/",
        "e5",
        "inf",
    ),
]


def hint_of(key: str) -> Any:
    """The declared type of a key."""
    owner: Any = Composition
    *parents, name = key.split(".")
    for parent in parents:
        owner = section_of(owner, parent)
    return get_type_hints(owner)[name]


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


def fitting(source: random.Random, key: str) -> str:
    """A value of the key's own type, as it may be typed."""
    hint = hint_of(key)
    kinds = get_args(hint) if get_origin(hint) not in (list, dict) else ()
    kind = source.choice(kinds or (hint,))
    if kind is type(None):
        return "null"
    if kind is bool:
        return source.choice(["true", "false"])
    if kind is int:
        return source.choice(["0", "1", "2", "3", "4", "8", "32", "64", "100", "128", "1_0"])
    if kind is float:
        return source.choice(["0", "0.5", "1e-3", "1", "1.0", "2e-4", "1E1", "0.001"])
    if _is_enum(kind):
        return source.choice([member.name for member in kind])
    if kind is str:
        return source.choice(
            ["x", "1.50", "1e3", "007", "true", "No", "1_000", "a-b", "'q'", "0x1"]
        )
    return source.choice(["[]", "{}", "[1]", "{a:1}", "null"])


def _value(source: random.Random) -> list[str]:
    prefix = source.choice(["", "", "", "+", "++", "~"])
    return [f"{prefix}{source.choice(KEYS)}={source.choice([*NUMBERS, *TEXTS])}"]


def _fitting(source: random.Random) -> list[str]:
    return [f"{key}={fitting(source, key)}" for key in source.sample(KEYS, source.randint(1, 3))]


def _size(source: random.Random) -> list[str]:
    sized = [k for k in KEYS if {int, float}.intersection([hint_of(k), *get_args(hint_of(k))])]
    return [f"{key}={source.choice(NUMBERS)}" for key in source.sample(sized, source.randint(1, 3))]


def _choice(source: random.Random) -> list[str]:
    group = source.choice([*groups(), "hydra/output", "model/cut", "nope", "quant/nope"])
    names = [*choice_files(group, None), *TEXTS, *NUMBERS, "a" * 300, "[a,b]", "x/y/z"]
    prefix = source.choice(["", "", "+", "++", "~"])
    package = source.choice(
        ["", "", "", "@model", "@", "@quant.qk", "@_global_", "@a.b", "@_here_"]
    )
    return [f"{prefix}{group}{package}={source.choice(names)}"]


def _grammar(source: random.Random) -> list[str]:
    value = "".join(source.choices(FRAGMENTS, k=source.randint(1, 12)))
    return [f"{source.choice(KEYS)}={value}"]


def _key(source: random.Random) -> list[str]:
    key = source.choice([*KEYS, *groups()])
    at = source.randint(0, len(key))
    mutations = [
        key[:at] + source.choice(FRAGMENTS) + key[at:],
        key[:at],
        key + ".x",
        key + "[0]",
        "." + key,
        key.upper(),
        key + "." + key,
        "a" * 6000,
        key + "a" * 6000,
        "",
        "@",
        "~",
        "++",
    ]
    return [f"{source.choice(mutations)}={source.choice([*TEXTS, *NUMBERS])}"]


def _of_hydra(source: random.Random) -> list[str]:
    names = ["hydra", "hydra.run", "hydra.run.dir", "hydra.mode", "hydra.job.name", "hydra.verbose"]
    names += ["hydra/launcher", "hydra/output", "hydra/sweeper", "hydra.searchpath", "hydra.job"]
    names += ["hydra.overrides.task", "hydra.sweeper.params", "hydra.runtime.choices", "hydra/env"]
    prefix = source.choice(["", "+", "++", "~"])
    return [f"{prefix}{source.choice(names)}={source.choice([*TEXTS, *NUMBERS])}"]


def _long(source: random.Random) -> list[str]:
    count = source.choice([31, 300, 3000, 60_000])
    part = source.choice(
        ["[", "{a:", "(", "9", "a", "'", "${", "a,", "[1,", "\\", "choice(", "-", "_1"]
    )
    closing = source.choice(["", {"[": "]", "{a:": "}", "(": ")", "${": "}"}.get(part, "")])
    return [f"{source.choice(KEYS)}={part * count}{closing * count}"]


def _control(source: random.Random) -> list[str]:
    kinds = ["\x01", "\x1b[31m", "\x7f", "\x9b", "\r", "\n", "\b", "\udce9", "\u2028", "\x00", "\t"]
    word = f"{source.choice(KEYS)}={source.choice(['a', '1', '[a]'])}"
    at = source.randint(0, len(word))
    return [word[:at] + source.choice(kinds) + word[at:]]


def _null_part(source: random.Random) -> list[str]:
    parts = ["model.mla", "model.mla.yarn", "model.moe"]
    deep = [
        "model.mla.yarn.factor",
        "model.mla.v_head_dim",
        "model.moe.top_k",
        "model.mla.yarn.a.b",
    ]
    prefix = source.choice(["", "+", "++", "~"])
    value = source.choice(["40", "{}", "null", "{factor: 40}", "{top_k: 1}", "[]", "x"])
    return [f"{prefix}{source.choice([*parts, *deep])}={value}"]


def _rules(source: random.Random) -> list[str]:
    fields = ["layers", "modules", "sites", "products", "operands", "iterations", "format", "block"]
    fields += ["level", "values", "tensors", "operations", "sample_count", "nope", "window"]
    values = [
        "[0]",
        "[99999999999]",
        "[x]",
        "3",
        "null",
        "[null]",
        "[[0]]",
        "{}",
        "bf16",
        "'*'",
        "[-1]",
    ]
    rule = ",".join(f"{source.choice(fields)}:{source.choice(values)}" for _ in range(2))
    rules = f"{source.choice(['quant', 'capture'])}.rules"
    return [f"{rules}=[{','.join(['{' + rule + '}'] * source.choice([1, 1, 2, 300]))}]"]


def _sweep(source: random.Random) -> list[str]:
    options = ["seeds", "zip", "exclude", "first", "points"]
    values = [
        "1000000000",
        "0",
        "[1,1]",
        "{quant: x}",
        "[[a,b]]",
        "/nope",
        "null",
        "3",
        "x",
        "{}",
        "[]",
    ]
    words = [f"sweep.{source.choice(options)}={source.choice(values)}"] * source.randint(0, 1)
    key = source.choice(KEYS)
    ranges = [
        "range(1,1000000000000)",
        "range(0,3)",
        "range(1,2,1e-300)",
        "range(3,0)",
        "range(1,2,0)",
    ]
    ranges += [
        "range(1,5000),7",
        "1,2",
        "glob(*)",
        "glob(x)",
        "sort(range(1,1000000000))",
        "a,'b,c'",
    ]
    other = f"training.seed={source.choice(['range(1,9)', '1,2', 'range(1,99999)'])}"
    return ["-m", *words, f"{key}={source.choice(ranges)}", *[other] * source.randint(0, 1)]


#: Class of cases -> makes the words after `plan`.
MAKERS: dict[str, Callable[[random.Random], list[str]]] = {
    "hostile value": _value,
    "fitting value": _fitting,
    "size": _size,
    "choice": _choice,
    "grammar": _grammar,
    "key": _key,
    "of hydra": _of_hydra,
    "long": _long,
    "control": _control,
    "null part": _null_part,
    "rules": _rules,
    "sweep": _sweep,
}
#: Verbs that read no configuration; doctor and verify measure the machine, watch serves a page until it is interrupted,
#: so they get misuse alone.
OTHER_VERBS = sorted(set(all_verbs()) - {"plan", "train", "doctor", "verify"})


def of_a_verb(source: random.Random) -> list[str]:
    """A command line of another verb, in a folder without runs."""
    verb = source.choice([*OTHER_VERBS, "doctor", "verify"])
    flags = [
        "--json",
        "--list",
        "--rank",
        "--formats",
        "--device",
        "--export",
        "--to",
        "--sqnr",
        "-f",
    ]
    flags += [
        "--rank=99999999999999999999",
        "--rank=" + "9" * 5000,
        *("--port", "--port=-1", "--by=nope", "--from", "--from=-1", "--steps=0", "--gradient"),
        *("--margin=nan", "--measure=x", "--no-wait"),
        "--only",
        "--nope",
        "-m",
        "-cd",
    ]
    words = [
        *(
            "nope",
            "/nope",
            "a" * 6000,
            "paths.root=/nope",
            "paths.root=",
            "out=/dev/null/x",
        ),
        *(
            "layer=0-99999999999",
            "layer=x",
            "iteration=1e9",
            "=",
            "a=b",
            "format=hf",
            "format=x",
            "*",
        ),
        *(
            "[" * 3000,
            "\x1b[31m",
            "\udce9",
            "runs",
            "launcher.time_min=x",
            "dataset.source=/nope",
            ".",
        ),
        *(
            "launcher.time_min=" + "9" * 400,
            "memory=maybe",
            "dataset=null",
            "quant=null",
            "schemes",
            "",
        ),
    ]
    chosen = [source.choice([*words, *words, *flags]) for _ in range(source.randint(0, 3))]
    if verb in ("doctor", "verify", "watch"):
        chosen.append("--nope")
    return [verb, *(word for word in chosen if word not in ("--watch", "--follow"))]
