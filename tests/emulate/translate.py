"""Translates the PTX of one kernel to a C++ program on `block.h`.

An instruction becomes a statement for all 32 lanes of a warp; a label becomes a label. If the lanes of a warp diverge, which no
kernel here needs, the program ends with an error. Unknown instructions are errors, too.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

BITS = (8, 16, 32, 64)
SHARED = 232448  # bytes of shared memory, as in block.h
TYPES = {"pred": "u8", "f32": "float"} | {f"{kind}{n}": f"{'s' if kind == 's' else 'u'}{n}" for kind in "bus" for n in BITS}
FLOATS = {"f16": "from_f16", "bf16": "from_bf16"}  # 16-bit floats
SIZES = {name: 4 if name == "f32" else int(name[1:]) // 8 for name in TYPES if name != "pred"} | dict.fromkeys(FLOATS, 2)
COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
OPERATIONS = {  # on operands of the instruction's type
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}", "rem": "{0} % {1}", "and": "{0} & {1}",
    "or": "{0} | {1}", "xor": "{0} ^ {1}", "not": "~{0}", "neg": "-{0}", "abs": "std::abs({0})", "fma": "fmaf({0}, {1}, {2})",
    "rcp": "1.f / {0}", "ex2": "exp2f({0})", "lg2": "log2f({0})", "sqrt": "sqrtf({0})", "rsqrt": "1.f / sqrtf({0})",
    "popc": "__builtin_popcount({0})", "copysign": "copysignf({1}, {0})",
}  # fmt: skip
NOTHING = ("setmaxnreg", "griddepcontrol", "wgmma.fence", "mbarrier.inval", "cp.async.bulk.commit_group",
           "cp.async.bulk.wait_group", "createpolicy", "prefetch", ".pragma")  # fmt: skip
SPECIAL = {"%tid.x": "thread(l)", "%laneid": "l", "%warpid": "warp->id", "%tid.y": "0", "%tid.z": "0"}
for _i, _axis in enumerate("xyz"):
    SPECIAL |= {f"%ctaid.{_axis}": f"block[{_i}]", f"%nctaid.{_axis}": f"blocks[{_i}]"}
KINDS = {"f16": "F16", "bf16": "BF16", "e4m3": "E4M3", "tf32": "TF32"}


class UnknownPTXError(Exception):
    """An instruction or operand that this file does not know."""


def split(text: str) -> list[str]:
    """The operands in `text`: split at commas outside of brackets."""
    depth, operands = 0, [""]
    for character in text:
        depth += (character in "{[") - (character in "}]")
        if character == "," and depth == 0:
            operands.append("")
        else:
            operands[-1] += character
    return [operand.strip() for operand in operands] if text else []


def parts(operand: str) -> list[str]:
    """The registers of a vector {a, b}, or the single register."""
    return split(operand[1:-1]) if operand.startswith("{") else [operand]


class Kernel:
    """A translated kernel: its C++ `source`, the `threads` of a block, and its `parameters` as (offset, bytes).

    `without`: prefixes of instructions to leave out.
    """

    def __init__(self, ptx: str, without: tuple[str, ...] = ()) -> None:
        match = re.search(r"\.visible \.entry (\w+)\((.*?)\)(.*?)\n\{", ptx, re.DOTALL)
        if match is None:
            raise UnknownPTXError("no kernel in the PTX")
        self.threads = int(re.search(r"\.reqntid (\d+)", match[3])[1])
        self._offsets: dict[str, int] = {}
        self.parameters: list[tuple[int, int]] = []
        for declared in split(match[2]):
            name, count = re.search(r"(\w+)(?:\[(\d+)\])?$", declared.strip()).groups()
            size = SIZES[re.search(r"\.([busf]\d+)\b", declared)[1]]
            align, size = (int(re.search(r"\.align (\d+)", declared)[1]), int(count)) if count else (size, size)
            end = sum(self.parameters[-1]) if self.parameters else 0
            self._offsets[name] = -(-end // align) * align
            self.parameters.append((self._offsets[name], size))
        self._nothing = (*NOTHING, *without)
        self._registers: dict[str, str] = {}  # name in C++ → type
        self._scopes: list[dict[str, str]] = [{}]  # PTX name → name in C++
        self._tables: dict[str, list[str]] = {}
        self._variables: dict[str, int] = {}  # variables in shared memory → addresses, at its end
        self._num_scopes, self._line = 0, ptx[: match.end()].count("\n") + 1
        self._lines: list[str] = []
        for statement in self._statements(ptx[match.end() :]):
            try:
                self._translate(statement)
            except (UnknownPTXError, AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
                raise UnknownPTXError(f"PTX line {self._line}: {statement}: {error!r}") from error
        registers = "\n".join(f"{TYPES[kind]} {name}[32];" for name, kind in self._registers.items())
        body = "\n".join(self._lines)
        part = 'if (x[l] != x[0]) { fprintf(stderr, "lanes diverge, PTX line %d\\n", line); abort(); }'
        self.source = f"""#include "{Path(__file__).with_name("block.h")}"
#define LANES for (int l = 0; l < 32; l++)
struct Registers_ {{
{registers}
}};
template <class T> static T uniform(const T* x, int line) {{ LANES {part} return x[0]; }}
static bool set_size = (registers_size = sizeof(Registers_), true);
static void kernel() {{
Registers_& r = *(Registers_*)warp->registers.data();
{body}
}}
"""

    def _statements(self, body: str) -> Iterator[str]:
        """Yields instructions, labels (with a colon) and declarations. Braces open and close scopes of names."""
        body = re.sub(r"//.*|^[ \t]*\.loc\b.*", "", body, flags=re.MULTILINE)
        token = re.compile(r"\s*(?:(?P<label>[$\w]+):(?!:)|(?P<brace>[{}])|(?P<text>[^;{}][^;]*);)")
        at = 0
        while self._scopes and (match := token.match(body, at)):
            kind = str(match.lastgroup)
            self._line += body.count("\n", at, match.start(kind))
            if kind == "text":
                yield " ".join(match["text"].split())
            elif kind == "label":
                yield match["label"] + ":"
            elif match["brace"] == "}":
                self._scopes.pop()
            else:
                self._num_scopes += 1
                self._scopes.append({"": f"_{self._num_scopes}"})
            self._line += body.count("\n", match.start(kind), match.end())
            at = match.end()
        if self._scopes:
            raise UnknownPTXError(f"cannot read the PTX after line {self._line}")

    # Names and operands

    def _label(self, name: str) -> str:
        return f"label{name.replace('$', '_')}" if name.startswith("$") else f"label_{name}{self._scopes[-1].get('', '')}"

    def _declare(self, kind: str, names: str) -> None:
        for name in split(names):
            stem, count = re.fullmatch(r"%?(\w+)(?:<(\d+)>)?", name).groups()
            for one in [f"%{stem}{i}" for i in range(int(count))] if count else [name]:
                unique = f"{one.strip('%')}_{self._scopes[-1].get('', '')}"
                self._scopes[-1][one], self._registers[unique] = unique, kind

    def _register(self, name: str) -> str | None:
        return next((scope[name] for scope in reversed(self._scopes) if name in scope), None)

    def _value(self, operand: str, kind: str) -> str:
        """A C++ expression for an operand of one lane, as a PTX type."""
        wanted = TYPES.get(kind, "u16")
        if register := self._register(operand):
            return self._read_as(f"r.{register}[l]", kind)
        if operand in SPECIAL:
            return f"({wanted}){SPECIAL[operand]}"
        if operand in self._offsets:
            return str(self._offsets[operand])
        if operand == "global_smem":
            return "0u"
        if operand in self._variables:
            return f"{self._variables[operand]}u"
        if operand.startswith("0f"):
            return f"real(0x{operand[2:]}u)" if kind == "f32" else f"0x{operand[2:]}u"
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", operand):
            return self._read_as(f"(u{8 * SIZES.get(kind, 1)}){operand.strip('U')}ll", kind) if kind != "pred" else operand
        raise UnknownPTXError(f"operand {operand}")

    def _read_as(self, text: str, kind: str) -> str:
        return f"real({text})" if kind == "f32" else f"{FLOATS[kind]}({text})" if kind in FLOATS else f"({TYPES[kind]}){text}"

    def _assign(self, register: str, expression: str, kind: str) -> str:
        if register == "_":
            return ""
        name = self._register(register)
        if name is None:
            raise UnknownPTXError(f"register {register}")
        if kind == "f32":
            return f"r.{name}[l] = bits<u32>((float)({expression}));"
        return f"r.{name}[l] = ({expression}) != 0;" if kind == "pred" else f"r.{name}[l] = ({TYPES[kind]})({expression});"

    def _address(self, operand: str) -> str:
        base, plus = re.fullmatch(r"\[\s*(\S+?)\s*(?:\+\s*(-?\w+)\s*)?\]", operand).groups()
        register = self._register(base)
        wide = register is not None and SIZES[self._registers[register]] == 8
        return f"({self._value(base, 'u64' if wide else 'u32')} + {plus or 0})"

    def _array(self, name: str, operand: str) -> str:
        return f"u32* const {name}[] = {{{', '.join(f'(u32*)r.{self._register(x)}' for x in parts(operand))}}};"

    # Instructions

    def _translate(self, statement: str) -> None:
        if statement.endswith(":"):
            self._lines.append(f"{self._label(statement[:-1])}:;")
            return
        if match := re.match(r"\.reg \.(\w+) (.*)", statement):
            self._declare(*match.groups())
            return
        if match := re.match(r"\.shared \.align (\d+) \.b8 (\w+)\[(\d+)\]", statement):
            align, name, size = int(match[1]), match[2], int(match[3])
            if name in self._variables:
                raise UnknownPTXError("two variables in shared memory with the same name")
            end = min(self._variables.values(), default=SHARED)
            self._variables[name] = (end - size) // align * align
            return
        guard, name, rest = re.match(r"(?:@(!?[%\w]+) )?(\S+) ?(.*)", statement).groups()
        operands = split(rest)
        if name == ".branchtargets":  # of the label before it
            self._tables[self._lines.pop().removesuffix(":;")] = operands
        elif name.startswith(("bra", "ret", "brx")):
            self._branch(name, operands, guard)
        elif not name.startswith(self._nothing):
            condition = f"if ({'!' * guard.startswith('!')}r.{self._register(guard.strip('!'))}[l]) " if guard else ""
            for start, translate in self._FAMILIES:
                if name.startswith(start):
                    text = translate(self, name.split("."), operands)
                    break
            else:
                text = self._compute(name.split("."), operands)
            if text.startswith("warp:"):
                if guard:
                    raise UnknownPTXError("an instruction of the whole warp under a condition")
                self._lines.append(text.removeprefix("warp:"))
            else:
                self._lines.append(f"LANES {condition}{{ {text} }}")
                if "shared_at" in text or "fetch(" in text:
                    self._lines.append("maybe_give_way();")

    def _branch(self, name: str, operands: list[str], guard: str | None) -> None:
        jump = "return;" if name == "ret" else f"goto {self._label(operands[0])};"
        if name.startswith("brx"):
            cases = enumerate(self._tables[self._label(operands[1])])
            jump = "".join(f"case {i}: goto {self._label(target)}; " for i, target in cases)
            jump = f"switch (uniform(r.{self._register(operands[0])}, {self._line})) {{ {jump}}}"
        if guard:
            condition = f"uniform(r.{self._register(guard.strip('!'))}, {self._line})"
            jump = f"if ({'!' * guard.startswith('!')}{condition}) {jump}"
        self._lines.append(jump)

    def _compute(self, words: list[str], operands: list[str]) -> str:
        """Instructions with one result and no access to memory."""
        name, kind = words[0], words[-1]
        if kind in ("f16x2", "bf16x2"):
            return self._packed(name, kind[:-2], operands)
        if kind in FLOATS:  # exact in fp32, then rounded
            values = (self._value(operand, kind) for operand in operands[1:])
            return self._assign(operands[0], f"to_{kind}({OPERATIONS[name].format(*values)})", "u16")
        if name in ("max", "min"):
            x, y = (self._value(operand, kind) for operand in operands[1:])
            text = f"f{name}f({x}, {y})" if kind == "f32" else f"std::{name}<{TYPES[kind]}>({x}, {y})"
            text = f"std::isnan({x}) || std::isnan({y}) ? NAN : {text}" if "NaN" in words else text
            return self._assign(operands[0], f"std::max<{TYPES[kind]}>(0, {text})" if "relu" in words else text, kind)
        if name in ("mul", "mad") and kind != "f32":
            return self._multiply(words, operands)
        if name in OPERATIONS:
            pattern = {("not", "pred"): "!{0}", ("abs", "f32"): "fabsf({0})"}.get((name, kind), OPERATIONS[name])
            return self._assign(operands[0], pattern.format(*(self._value(operand, kind) for operand in operands[1:])), kind)
        if name in ("shl", "shr"):
            return self._assign(operands[0], f"{name}({self._value(operands[1], kind)}, {self._value(operands[2], 'u32')})", kind)
        raise UnknownPTXError("unknown instruction")

    def _packed(self, name: str, kind: str, operands: list[str]) -> str:
        """Arithmetic on pairs of 16-bit floats."""
        pairs = [self._value(operand, "u32") for operand in operands[1:]]
        low, high = (
            f"to_{kind}({OPERATIONS[name].format(*(f'{FLOATS[kind]}((u16)({pair} >> {shift}))' for pair in pairs))})"
            for shift in (0, 16)
        )
        return self._assign(operands[0], f"(u32){high} << 16 | {low}", "u32")

    def _multiply(self, words: list[str], operands: list[str]) -> str:
        kind, bits = words[-1], 8 * SIZES[words[-1]]
        double = f"{kind[0]}{2 * bits}"
        result = {"lo": kind, "wide": double, "hi": kind}[words[1]]
        cast = TYPES[kind if words[1] == "lo" else double]
        x, y = (f"({cast})({self._value(operand, kind)})" for operand in operands[1:3])
        text = f"({x} * {y}) >> {bits}" if words[1] == "hi" else f"{x} * {y}"
        return self._assign(operands[0], text + (f" + {self._value(operands[3], result)}" if words[0] == "mad" else ""), result)

    def _move(self, words: list[str], operands: list[str]) -> str:
        kind = words[-1]
        if words[:2] == ["cvta", "param"]:
            return self._assign(operands[0], f"(u64)parameters + {self._value(operands[1], kind)}", kind)
        if not any(operand.startswith("{") for operand in operands):
            return self._assign(operands[0], self._value(operands[1], kind), kind)
        packs = operands[1].startswith("{")
        members = parts(operands[packs])
        bits = 8 * SIZES[kind] // len(members)
        if packs:
            fields = (f"(u{8 * SIZES[kind]})({self._value(x, f'u{bits}')}) << {bits * i}" for i, x in enumerate(members))
            return self._assign(operands[0], " | ".join(fields), kind)
        whole = self._value(operands[1], kind)
        return "".join(self._assign(x, f"{whole} >> {bits * i}", f"u{bits}") for i, x in enumerate(members))

    def _choose(self, words: list[str], operands: list[str]) -> str:
        x, y = (self._value(operand, words[-1]) for operand in operands[1:3])
        return self._assign(operands[0], f"{self._value(operands[3], 'pred')} ? {x} : {y}", words[-1])

    def _compare(self, words: list[str], operands: list[str]) -> str:
        x, y = (self._value(operand, words[-1]) for operand in operands[1:3])
        name, real = words[1], words[-1] in (*FLOATS, "f32")
        nan = f"(std::isnan({x}) || std::isnan({y}))"
        if name in ("nan", "num"):
            return self._assign(operands[0], nan if name == "nan" else f"!{nan}", "pred")
        text = f"({x}) {COMPARISONS[name[:2]]} ({y})"
        if real and (name == "ne" or name[2:] == "u"):  # a comparison with NaN is false, unless it is "unordered"
            text = f"{nan} ? {int(name != 'ne')} : {text}"
        return self._assign(operands[0], text, "pred")

    def _convert(self, words: list[str], operands: list[str]) -> str:
        kinds = [word for word in words if re.fullmatch(r"[busf]\d+|bf16|tf32|\w+x2", word)]
        to, of = kinds
        if to == "tf32":
            return self._assign(operands[0], f"to_tf32({self._value(operands[1], 'u32')})", "u32")
        if to in ("f16x2", "bf16x2", "e4m3x2") and of == "f32":
            low, high = (f"to_{to[:-2]}({self._value(x, 'f32')})" for x in reversed(operands[1:]))
            size = 8 if to == "e4m3x2" else 16
            return self._assign(operands[0], f"(u{2 * size}){high} << {size} | {low}", f"u{2 * size}")
        if (to, of) == ("f16x2", "e4m3x2"):
            pair = self._value(operands[1], "u16")
            return self._assign(operands[0], f"(u32)to_f16(from_e4m3({pair} >> 8)) << 16 | to_f16(from_e4m3({pair}))", "u32")
        value = self._value(operands[1], of)
        if "rpi" in words:  # to an integer, upwards
            value = f"ceilf({value})"
        if to in FLOATS:
            return self._assign(operands[0], f"to_{to}({value})", "u16")
        if to != "f32" and (of == "f32" or of in FLOATS):
            raise UnknownPTXError("conversion of a float to an integer")
        return self._assign(operands[0], value, to)

    def _logic(self, words: list[str], operands: list[str]) -> str:
        """lop3: its last operand is the table of results, which a, b and c would have if they were 0xf0, 0xcc and 0xaa."""
        values, table = [self._value(operand, "u32") for operand in operands[1:4]], int(operands[4], 0)
        terms = [
            " & ".join(f"{'' if i >> shift & 1 else '~'}({value})" for value, shift in zip(values, (2, 1, 0), strict=True))
            for i in range(8) if table >> i & 1
        ]  # fmt: skip
        return self._assign(operands[0], " | ".join(terms) or "0", "u32")

    def _bits(self, words: list[str], operands: list[str]) -> str:
        how = {"prmt": "permute", "bfe": "field"}[words[0]]
        kinds = [words[-1] if words[0] == "bfe" else "u32", "u32", "u32"]
        return self._assign(operands[0], f"{how}({', '.join(map(self._value, operands[1:], kinds))})", kinds[0])

    def _memory(self, words: list[str], operands: list[str]) -> str:
        loads, kind = words[0] == "ld", words[-1]
        place, values = (operands[1], parts(operands[0])) if loads else (operands[0], parts(operands[1]))
        n, shared = SIZES[kind] * len(values), any(word.partition("::")[0] == "shared" for word in words)
        if "param" in words:
            address = f"parameters + {self._offsets[place.strip('[] ').partition('+')[0]]}"
        elif shared and place.startswith("[global_smem") and not loads:
            address = f"shared + {self._address(place)}"  # the warps' partitions: all threads store the same values
        elif shared:
            address = f"shared_at(l, {self._address(place)}, {n}, {str(not loads).lower()}, {self._line})"
        elif "global" in words:
            address = f"global_at({self._address(place)}, {n}, {self._line})"
        else:
            raise UnknownPTXError("unknown kind of memory")
        bits = f"u{8 * SIZES[kind]}"
        each = f"{bits}* at = ({bits}*)({address}); "
        if loads:
            return each + "".join(self._assign(x, self._read_as(f"at[{i}]", kind), kind) for i, x in enumerate(values))
        return each + " ".join(f"at[{i}] = {self._value(x, bits)};" for i, x in enumerate(values))

    def _atomic(self, words: list[str], operands: list[str]) -> str:
        """Blocks run one after the other, so an addition is atomic."""
        if words[1] != "global" or words[-2:] != ["add", "u32"]:
            raise UnknownPTXError("unknown atomic operation")
        at = f"u32* at = (u32*)(global_at({self._address(operands[1])}, 4, {self._line})); "
        return at + self._assign(operands[0], "at[0]", "u32") + f" at[0] += {self._value(operands[2], 'u32')};"

    def _across(self, words: list[str], operands: list[str]) -> str:
        """shfl and redux."""
        if words[0] == "shfl":
            to = {"bfly": "l ^ k", "idx": "k", "up": "l - k", "down": "l + k"}[words[2]]
            value, by = self._value(operands[1], "u32"), self._value(operands[2], "s32")
            text = self._assign(operands[0], "j >= 0 && j < 32 ? x[j] : x[l]", "u32")
            return f"warp:{{ u32 x[32]; LANES x[l] = {value}; LANES {{ int k = {by}, j = {to}; {text} }} }}"
        kind = words[-1]
        join = {"add": "s += x", "max": "s = l ? std::max(s, x) : x", "min": "s = l ? std::min(s, x) : x"}[words[2]]
        inner = f"{TYPES[kind]} s = 0; LANES {{ {TYPES[kind]} x = {self._value(operands[1], kind)}; {join}; }}"
        return f"warp:{{ {inner} LANES {{ {self._assign(operands[0], 's', kind)} }} }}"

    def _elect(self, words: list[str], operands: list[str]) -> str:
        return self._assign(operands[0].partition("|")[2], "l == 0", "pred")

    def _barrier(self, words: list[str], operands: list[str]) -> str:
        if "warp" in words:
            return f"warp:sync_warp({operands[0]});"
        return f"warp:sync_block({operands[0]}, {operands[1] if len(operands) > 1 else 'threads'}, {self._line});"

    def _mbarrier(self, words: list[str], operands: list[str]) -> str:
        if words[1] == "init":
            return f"init_mbarrier({self._address(operands[0])}, {operands[1]});"
        if words[1] == "try_wait":
            waits = f"wait(a, {self._value(operands[2], 'u32').replace('[l]', '[0]')}, {self._line});"
            address = self._address(operands[1]).replace("[l]", "[0]")
            return f"warp:{{ u32 a = {address}; {waits} LANES {{ {self._assign(operands[0], '1', 'pred')} }} }}"
        place = operands[1]
        if "expect_tx" in words:
            count = self._value(operands[2], "u32")
            expect = f"mbarrier({self._address(place)}, {self._line}).bytes += {count}; "
            return expect + f"arrive({self._address(place)}, thread(l), 1, {self._line});"
        return f"arrive({self._address(place)}, thread(l), {operands[2] if len(operands) > 2 else 1}, {self._line});"

    def _copy(self, words: list[str], operands: list[str]) -> str:
        if "mbarrier" in words:
            return f"arrive_when_copied(thread(l), {self._address(operands[0])}, {self._line});"
        if "commit_group" in words:
            return "commit_copies(thread(l));"
        if "wait_group" in words or "wait_all" in words:
            return f"wait_for_copies(thread(l), {operands[0] if operands else -1});"
        given = self._value(operands[3], "u32") if len(operands) > 3 else operands[2]
        places = ", ".join(map(self._address, operands[:2]))
        return f"copy(thread(l), {places}, {operands[2]}, {given}, {self._line});"

    def _fetch(self, words: list[str], operands: list[str]) -> str:
        stores = words[-1] == "bulk_group"
        if "2d" not in words or not (stores or words[-1] == "mbarrier::complete_tx::bytes"):
            raise UnknownPTXError("unknown kind of TMA")
        descriptor, place = re.fullmatch(r"\[(\S+), \{(.*)\}\]", operands[0 if stores else 1]).groups()
        at = ", ".join((self._value(descriptor, "u64"), *(self._value(x, "s32") for x in split(place))))
        if stores:
            return f"store_tile(thread(l), {self._address(operands[1])}, {at}, {self._line});"
        to, bar = self._address(operands[0]), self._address(operands[2])
        return f"fetch(thread(l), {to}, {at}, {bar}, {self._line});"

    def _matrices(self, words: list[str], operands: list[str]) -> str:
        registers, place = operands if words[0] == "ldmatrix" else reversed(operands)
        n, flags = len(parts(registers)), f"{int('trans' in words)}, {int(words[0] == 'stmatrix')}"
        rows = f"u32 rows[32]; LANES rows[l] = {self._address(place)};"
        return f"warp:{{ {rows} {self._array('m', registers)} move_matrices(m, rows, {n}, {flags}, {self._line}); }}"

    def _mma(self, words: list[str], operands: list[str]) -> str:
        if words[-1] != "f32" or ("m16n8k8" if words[-2] == "tf32" else "m16n8k16") not in words:
            raise UnknownPTXError("unknown shape of MMA")
        arrays = " ".join(map(self._array, "dabc", operands))
        return f"warp:{{ {arrays} mma({KINDS[words[-2]]}, d, a, b, c); }}"

    def _wgmma(self, words: list[str], operands: list[str]) -> str:
        if "commit_group" in words:
            return "warp:commit_group();"
        if "wait_group" in words:
            return f"warp:wait_for_groups({operands[0]});"
        n = int(re.search(r"m64n(\d+)k", ".".join(words))[1])
        if operands[4:6] != ["1", "1"]:
            raise UnknownPTXError("negated operand")
        in_registers = operands[1].startswith("{")
        turned = (["0"] * in_registers + operands[6:] + ["0", "0"])[:2]  # whether rows, not K, are contiguous in memory
        a = self._array("a", operands[1]) if in_registers else "u32* const* a = nullptr;"
        kinds = zip(["0" if in_registers else operands[1], *operands[2:4]], ("u64", "u64", "pred"), strict=True)
        from_a, from_b, adds = (self._value(operand, kind).replace("[l]", "[0]") for operand, kind in kinds)
        call = f"wgmma({KINDS[words[-1]]}, d, {n}, {from_a}, a, {from_b}, {adds}, {', '.join(turned)}, {self._line});"
        return f"warp:{{ {self._array('d', operands[0])} {a} {call} }}"

    def _fence(self, words: list[str], operands: list[str]) -> str:
        return "fence(thread(l));" if "proxy" in words else ""

    _FAMILIES: tuple[tuple[tuple[str, ...], Callable[..., str]], ...] = (
        (("mov.", "cvta"), _move), (("selp",), _choose), (("setp",), _compare), (("cvt.",), _convert), (("prmt", "bfe"), _bits),
        (("ld.", "st."), _memory), (("atom.",), _atomic), (("shfl.sync", "redux.sync"), _across), (("elect",), _elect),
        (("bar.", "barrier."), _barrier), (("mbarrier.",), _mbarrier), (("cp.async.bulk.tensor",), _fetch),
        (("cp.async.c", "cp.async.mbarrier", "cp.async.wait"), _copy), (("ldmatrix", "stmatrix"), _matrices),
        (("mma.sync",), _mma), (("lop3",), _logic), (("wgmma.",), _wgmma), (("fence",), _fence),
    )  # fmt: skip
