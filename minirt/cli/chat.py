"""`minirt chat`: a conversation on the terminal, one message per line, and the commands that start with a slash."""

import json
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from minirt.cli import options as shared
from minirt.cli.help import command, option_in
from minirt.cli.output import completion_summary, counted, note, one_line, warn_incomplete, write
from minirt.cli.process import Terminated
from minirt.errors import InputError, MinirtError, TokenizerError

if TYPE_CHECKING:
    from minirt.generator import Generator
    from minirt.outputs import Completion
    from minirt.sampling_params import SamplingParams


@command()
@shared.model_argument
@shared.serving_options
@option_in("Prompts", "--system", help="The system message; an empty one replaces the template's default.")
@shared.template_option
@shared.sampling_options
@shared.general_options
def chat(system: str | None, variables: dict[str, Any] | None, quiet: bool, **options: Any) -> None:
    """Chat with the model, one message per line. /help lists the commands; /exit or Ctrl-D ends.

    The model needs a chat template, which the embedded one has not. /system TEXT sets the system message, /reset forgets the
    conversation, /save FILE writes it as a line for `minirt generate --prompts`, and /stats prints times and memory.
    Ctrl-C stops an answer, and at the prompt ends the program. A message that starts with a slash needs a space before it.
    Without a terminal, an error or an unknown command ends the program with exit code 1.
    """
    from minirt.loading.options import EMBEDDED

    if options["model"] in (None, EMBEDDED):
        hint = f"name a chat model, such as --model {shared.CHAT_MODEL}, or use minirt generate"
        raise TokenizerError("the embedded model tells stories and cannot chat: it has no chat template", hint=hint)
    params = shared.sampling_params(options)
    with shared.open_model(options, quiet, chat=True) as generator:
        conversation = _Conversation(generator, params, system, variables, quiet)
        with shared.named_by_option():  # without a template, or with a wrong grammar, fail before the user types
            generator.check(conversation.encode("?"), params)
        conversation.run()


class _Conversation:
    """The messages so far and the last answer. On a terminal, the user can continue after an error; a script ends."""

    def __init__(
        self, generator: "Generator", params: "SamplingParams", system: str | None, variables: dict[str, Any] | None, quiet: bool
    ) -> None:
        from minirt.text.reply_format import ReplyFormat

        self._tokenizer: Any = generator.tokenizer  # None: `encode` refuses every message
        self._form = ReplyFormat()
        if self._tokenizer is not None:
            self._form = ReplyFormat.choose(self._tokenizer.tool_template, self._tokenizer.response_template)
            if self._form.needs_special_tokens(self._tokenizer.special_tokens):
                params = replace(params, skip_special_tokens=False)
        self._generator, self._params, self._quiet = generator, params, quiet
        self._system, self._variables = system, variables
        self._turns: list[dict[str, str]] = []
        self._last: Completion | None = None

    def run(self) -> None:
        """Read and answer lines until the end of the input or /exit."""
        while (line := _ask()) is not None:
            try:
                if not line.startswith("/"):
                    self._answer(line)
                    continue
                name, _, argument = line.strip().partition(" ")
                if name == "/exit":
                    return
                if name not in _COMMANDS:
                    hint = "/help lists the commands; a message that starts with a slash needs a space before it"
                    raise InputError("unknown command", where=name, hint=hint)
                _COMMANDS[name][2](self, argument.strip())
            except (InputError, TokenizerError) as error:
                if not sys.stdin.isatty():
                    raise
                note(f"minirt: {one_line(str(error))}")

    def encode(self, text: str) -> list[int]:
        """Token ids of the conversation with one more user message."""
        messages = [*self._messages(), {"role": "user", "content": text}]
        return self._generator.encode_chat(messages, self._generator.max_len - 1, self._variables)

    def _message(self, prompt: list[int], answer: str) -> dict[str, str]:
        """An answer as a message of the conversation. Templates take reasoning apart from the content."""
        from minirt.text.reply import parse

        reply = parse(self._form.parser(self._tokenizer.decode(prompt, skip_special_tokens=False)), answer)
        return {"role": "assistant", "content": reply.content} | ({"reasoning": reply.reasoning} if reply.reasoning else {})

    def _messages(self) -> list[dict[str, str]]:
        return ([] if self._system is None else [{"role": "system", "content": self._system}]) + self._turns

    def _answer(self, text: str) -> None:
        """Print the answer while it is generated, and keep message and answer. After Ctrl-C, the answer so far is kept."""
        answer, completion, stopped, prompt = "", None, False, list[int]()
        try:
            prompt = self.encode(text)
            with closing(self._generator.stream_completion(prompt, self._params)) as pieces:
                for piece, completion in pieces:  # noqa: B007 (used after the loop)
                    answer += piece.text
                    write(piece.text)
        except KeyboardInterrupt as interrupt:
            if isinstance(interrupt, Terminated) or not sys.stdin.isatty():
                raise
            stopped = True
        except InputError as error:
            raise error.changed(hint="; ".join(filter(None, (error.hint, "/reset starts over")))) from error
        write("\n")
        if stopped:
            note("(stopped; Ctrl-C again ends the program)")
        if completion is None:  # stopped before the first token: as if the message had not been sent
            return
        if stopped:
            from minirt.device import peak_memory

            completion = replace(completion, finish_reason="abort", peak_memory_bytes=peak_memory(self._generator.device))
        self._turns += [{"role": "user", "content": text}, self._message(prompt, answer)]
        self._last = completion
        warn_incomplete([completion])
        if not self._quiet:
            count, rate = counted(len(completion.token_ids), "token"), completion.decode_tokens_per_s
            ends = {"stop": "", "length": f", cut at {count} (--max-tokens, or the end of the context)"}
            why = ends.get(str(completion.finish_reason), f", {completion.finish_reason}")
            note(count + (f", {rate:.1f} tokens/s" if rate else "") + why)

    def _help(self, _: str) -> None:
        rows = {f"{name} {argument}": what for name, (argument, what, _) in _COMMANDS.items()}
        rows |= {"/exit": "end; so does Ctrl-D", "Ctrl-C": "stop an answer; at the prompt, end"}
        note("\n".join(f"{name:<{max(map(len, rows))}}  {what}" for name, what in rows.items()))

    def _reset(self, _: str) -> None:
        self._turns.clear()

    def _save(self, name: str) -> None:
        if not name:
            raise InputError("no file is named", where="/save", expected="/save FILE")
        try:
            line = json.dumps({"messages": self._messages()}, ensure_ascii=False).encode("utf-8")
            with open(name, "xb") as file:  # never overwrite a file
                file.write(line + b"\n")
        except (OSError, ValueError) as error:  # ValueError: a null character in the name, or half a surrogate pair
            raise InputError(f"cannot be written: {getattr(error, 'strerror', None) or error}", where=name) from error
        note(f"{len(self._messages())} messages in {name}")

    def _set_system(self, text: str) -> None:
        if not text:
            note("no system message" if self._system is None else f"system message: {self._system}")
            return
        before, self._system = self._system, text
        try:
            self.encode("?")
        except MinirtError:  # the template takes no system message
            self._system = before
            raise

    def _stats(self, _: str) -> None:
        note("no answer yet" if self._last is None else completion_summary(self._generator, [self._last]))


# Name → (argument, help, method). /exit is not here, because it ends the loop.
_COMMANDS: dict[str, tuple[str, str, Callable[[_Conversation, str], None]]] = {
    "/help": ("", "list these commands", _Conversation._help),
    "/reset": ("", "forget the conversation; the system message stays", _Conversation._reset),
    "/system": ("[TEXT]", "set the system message from here on; without TEXT, show it", _Conversation._set_system),
    "/save": ("FILE", "write the conversation to a new file, as a line for `minirt generate --prompts`", _Conversation._save),
    "/stats": ("", "times, memory and sampling values of the last answer", _Conversation._stats),
}


def _ask() -> str | None:
    """The user's next non-empty line, or None at the end of the input."""
    prompt = "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""
    while True:
        try:
            line = input(prompt)
        except EOFError:
            return None
        except UnicodeDecodeError as error:
            raise InputError("not valid UTF-8", where="stdin", found=f"byte 0x{error.object[error.start]:02x}") from error
        if line.strip():
            return line
